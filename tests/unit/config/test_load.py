"""One precedence, and every wrong value named with its limit and where it came from."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config.flags import add_config_flags, flags_of
from cluster.config.load import Configured, load_settings
from cluster.config.option import Kind, Option, Value
from cluster.config.options import OPTIONS, SECTIONS
from cluster.core.errors import ConfigError
from cluster.gateway.config import TlsFiles

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "headway.toml"
        path.write_text(text)
        return path

    return write


def typed(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return flags_of(parser.parse_args(list(words)))


def on_cpu(configured: Configured):
    return configured.settings(Path("/models/m"), gpus_per_rank=0)


def test_a_flag_goes_before_the_environment_that_before_the_file_that_before_the_default(file):
    path = file("[engine]\nblock_size = 4\nthreads = 5\nmax_num_seqs = 6\n")
    environ = {"HEADWAY_ENGINE_BLOCK_SIZE": "8", "HEADWAY_ENGINE_THREADS": "9"}
    configured = load_settings(path, typed("--block-size", "32"), environ)
    got = {
        key: (configured[f"engine.{key}"], configured.values[f"engine.{key}"].source)
        for key in ("block_size", "threads", "max_num_seqs", "watermark")
    }
    assert got == {
        "block_size": (32, "--block-size"),
        "threads": (9, "HEADWAY_ENGINE_THREADS"),
        "max_num_seqs": (6, f"{path} [engine]"),
        "watermark": (0.02, "default"),
    }
    worker = on_cpu(configured).worker
    assert (worker.block_size, worker.threads, worker.max_num_seqs) == (32, 9, 6)


def test_the_environment_may_name_the_file_and_a_flag_goes_before_it(file, tmp_path):
    path = file("[fleet]\nengines = 3\n")
    assert load_settings(None, {}, {"HEADWAY_CONFIG": str(path)})["fleet.engines"] == 3
    other = tmp_path / "other.toml"
    other.write_text("")
    assert load_settings(other, {}, {"HEADWAY_CONFIG": str(path)})["fleet.engines"] == 1


def other_value(option: Option) -> Value:
    """One that is allowed and is not the default."""
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    if option.example is not None:
        return option.example
    if isinstance(option.default, int):
        return option.default + 1
    if isinstance(option.default, float):
        larger = option.default * 1.5
        fits = option.limits is None or option.limits.allow(larger)
        return larger if fits else option.default / 2
    return {"front_door.address": "127.0.0.1:6000", "engine.attention_backend": "torch"}.get(
        option.name, "something-that-is-long-enough"
    )


COMPANIONS = {
    "tls_key": {"front_door.tls_certificate": "/tls"},
    "tls_certificate": {"front_door.tls_key": "/tls"},
    "preemption": {"scheduling.host_blocks": "4"},
    "host_blocks": {"scheduling.preemption": "swap"},
}
"""What an option is refused without."""
TURNED_ON_BY = {"autoscaling": {"autoscaling.max_engines": "9"}}
"""What a section does nothing without."""
ASKED_BEFORE = {"model.path", "engine.device"}
"""They decide the arguments of Configured.settings()."""


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_every_option_can_be_set_each_way(option, file):
    value = str(other_value(option))
    ways = [load_settings(None, {}, {option.variable: value})]
    if option.flag:
        ways.append(load_settings(None, typed(option.flag, value), {}))
        quoted = value if option.kind in (Kind.INTEGER, Kind.NUMBER) else f'"{value}"'
        ways.append(load_settings(file(f"[{option.section}]\n{option.key} = {quoted}\n"), {}, {}))
    assert len({way[option.name] for way in ways}) == 1
    assert all(way.values[option.name].source != "default" for way in ways)
    assert ways[0][option.name] != option.default


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_every_option_reaches_the_settings(option, tmp_path):
    """Nothing in the table is for show: another value makes other settings."""
    environ = {"HEADWAY_FLEET_HOP_SECRET": "x" * 32}
    needed = TURNED_ON_BY.get(option.section, {})
    if option.name in needed:
        needed = {}
    before = on_cpu(load_settings(None, needed, environ))
    value = str(other_value(option))
    if option.key.startswith("hop_secret"):
        environ = {}
    if option.key == "hop_secret_file":
        value = str(tmp_path / "secret")
        Path(value).write_text("0123456789abcdef-secret")
    environ |= {option.variable: value}
    after = on_cpu(load_settings(None, needed | COMPANIONS.get(option.key, {}), environ))
    assert (after != before) == (option.name not in ASKED_BEFORE)


def test_options_that_go_in_pairs_arrive_both():
    flags = typed("--preemption", "swap", "--host-blocks", "7")
    flags |= typed("--tls-key", "/k", "--tls-certificate", "/c")
    settings = on_cpu(load_settings(None, flags, {}))
    assert (settings.policies.preemption, settings.policies.host_blocks) == ("swap", 7)
    assert settings.gateway.tls == TlsFiles(Path("/c"), Path("/k"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engin]\n", "[engin] is no section; did you mean engine?"),
        ("engines = 2\n", "engines is no section"),
        (
            "[engine]\nblock_sise = 2\n",
            "[engine] has no key 'block_sise'; did you mean block_size?",
        ),
        ("[engine]\nengines = 2\n", "[engine] has no key 'engines'; it belongs in [fleet]"),
        ("engine = 3\n", "engine must be a section, [engine], got 3"),
        ("[engine]\nblock_size = 'x'\n", "block_size must be an integer at least 1, got 'x'"),
        ("[engine]\nblock_size = 16.0\n", "block_size must be an integer at least 1, got 16.0"),
        ("[engine]\nblock_size = true\n", "block_size must be an integer at least 1, got True"),
        ("[engine]\nblock_size = 0\n", "block_size must be at least 1, got 0"),
        ("[engine]\nwatermark = nan\n", "watermark must be in [0, 1), got nan"),
        ("[engine]\nwatermark = 1\n", "watermark must be in [0, 1), got 1"),
        ("[engine]\ndevice = 'tpu'\n", "device must be one of auto, cpu, cuda, got 'tpu'"),
        ("[front_door]\ntls_key = 3\n", "tls_key must be a path, got 3"),
        ("[front_door]\ntls_key = ''\n", "tls_key must be a path, got ''"),
        ("[fleet]\nhop_secret = 'abc'\n", "must not stand in a file in clear; use hop_secret_file"),
        ("[engine\n", "is not TOML"),
        ("[router]\nqueue_timeout = 0\n", "queue_timeout must be above 0, got 0"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_the_file(file, text, message):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {}, {})
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"HEADWAY_ENGINE_BLOCK_SIZE": "many"},
            "block_size must be an integer at least 1, got 'many' (from HEADWAY_ENGINE_BLOCK_SIZE)",
        ),
        (
            {"HEADWAY_ENGINE_BLOCKSIZE": "16"},
            "HEADWAY_ENGINE_BLOCKSIZE is no variable of Headway; "
            "did you mean HEADWAY_ENGINE_BLOCK_SIZE?",
        ),
        ({"HEADWAY_CONFIG": "/nonexistent/x.toml"}, "/nonexistent/x.toml: No such file"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named_with_the_variable(environ, message):
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {}, environ)
    assert message in str(caught.value)


def test_variables_of_others_are_left_alone():
    """The client's, the cache's, and those that Kubernetes makes for a service named headway-..."""
    environ = {
        "HEADWAY_ADDRESS": "elsewhere:1",
        "HEADWAY_CACHE": "/cache",
        "HEADWAY_NATIVE_LEVEL": "avx2",
        "HEADWAY_ROUTER_SERVICE_HOST": "10.0.0.1",
        "HEADWAY_ROUTER_PORT": "tcp://10.0.0.1:50051",
        "HEADWAY_ROUTER_PORT_50051_TCP_ADDR": "10.0.0.1",
        "HEADWAY_ROUTER_SERVICE_PORT_GRPC": "50051",
    }
    configured = load_settings(None, {}, environ)
    assert {setting.source for setting in configured.values.values()} == {"default"}


def test_everything_wrong_is_told_at_once(file):
    path = file("[engine]\nthreads = 0\n[fleet]\nrouters = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(path, typed("--block-size", "0"), {})
    for problem in (
        "threads must",
        "routers must",
        "block_size must be at least 1, got 0 (from --",
    ):
        assert problem in str(caught.value)


def test_values_that_do_not_go_together_are_named_with_their_sources(file):
    path = file("[scheduling]\nbudget = 'itl'\n")
    with pytest.raises(ConfigError) as caught:
        on_cpu(load_settings(path, typed("--policy", "static"), {}))
    assert f"budget from {path} [scheduling]" in str(caught.value)
    with pytest.raises(ConfigError, match=r"address must be host:port.*address from --address"):
        on_cpu(load_settings(None, typed("--address", "nowhere"), {}))


def test_paths_in_a_file_start_at_the_file_and_typed_ones_where_one_is(file, tmp_path):
    path = file("[front_door]\napi_keys_file = 'keys'\n")
    assert load_settings(path, {}, {})["front_door.api_keys_file"] == tmp_path / "keys"
    given = load_settings(path, typed("--api-keys-file", "keys"), {})
    assert given["front_door.api_keys_file"] == Path("keys")


def test_the_hop_secret_comes_from_the_environment_or_a_file_and_is_never_repeated(tmp_path):
    secret = "hush-hush-hush-hush"
    assert on_cpu(load_settings(None, {}, {"HEADWAY_FLEET_HOP_SECRET": secret})).secret == secret
    path = tmp_path / "secret"
    path.write_text(secret + "\n")
    flags = typed("--hop-secret-file", str(path))
    assert on_cpu(load_settings(None, flags, {})).secret == secret
    one, other = (on_cpu(load_settings(None, {}, {})).secret for _ in range(2))
    assert len(one) == 64
    assert one != other
    for environ, given in (
        ({"HEADWAY_FLEET_HOP_SECRET": "hush"}, {}),
        ({"HEADWAY_FLEET_HOP_SECRET": secret}, flags),
    ):
        with pytest.raises(ConfigError) as caught:
            on_cpu(load_settings(None, given, environ))
        assert "hush" not in str(caught.value).replace(str(path), "")


def test_defaults_depend_on_the_device():
    configured = load_settings(None, typed("--engines", "2"), {})
    cpu = configured.settings(Path("/m"), gpus_per_rank=0).worker
    gpu = configured.settings(Path("/m"), gpus_per_rank=1).worker
    assert (cpu.device, cpu.max_num_batched_tokens, cpu.max_num_seqs) == ("cpu", 256, 32)
    assert (gpu.device, gpu.max_num_batched_tokens, gpu.max_num_seqs) == ("cuda", 2048, 256)
    assert (cpu.kv_memory_share, gpu.kv_memory_share) == (0.05, 0.85)


def test_switches_are_flags_with_a_no():
    option = Option("engine", "some_switch", Kind.SWITCH, False, "for options to come")
    assert option.from_value(True) is True
    assert option.from_text("off") is False
    with pytest.raises(ValueError, match="must be true or false, got 'maybe'"):
        option.from_text("maybe")
    with pytest.raises(ValueError, match="must be true or false, got 1"):
        option.from_value(1)


def test_the_table_is_sound():
    assert {option.section for option in OPTIONS} == set(SECTIONS)
    flags = [option.flag for option in OPTIONS if option.flag]
    assert len(set(flags)) == len(flags)
    assert len({option.variable for option in OPTIONS}) == len(OPTIONS)
    for option in OPTIONS:
        assert option.help
        if option.default is None:
            assert option.unset, option.name
            assert option.secret or option.example is not None, option.name
        else:
            assert option.from_value(option.default) == option.default


def test_reading_the_configuration_imports_neither_ray_nor_torch():
    code = (
        "import sys; from pathlib import Path; from cluster.config.load import load_settings; "
        "load_settings(None, {}, {}).settings(Path('/m'), 0); "
        "assert not {'torch', 'ray', 'grpc', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
