"""Serve's own configuration file, as `headway deploy` reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.servefile import IMPORT_PATH, ServeFile, is_serve_file, read_serve_file
from cluster.core.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "deploy/serve.yaml"


def test_the_shipped_file_is_one_that_serve_takes_and_names_the_builder():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(SHIPPED.read_text()))
    (application,) = schema.applications
    assert (application.name, application.import_path) == ("headway", IMPORT_PATH)
    module, _, function = IMPORT_PATH.partition(":")
    source = SHIPPED.parents[1] / (module.replace(".", "/") + ".py")
    assert f"def {function}(" in source.read_text()
    assert read_serve_file(SHIPPED) == ServeFile(Path("/etc/headway/headway.toml"), "1")


def test_what_is_one_is_told_by_its_name():
    assert is_serve_file(Path("a/serve.yaml"))
    assert is_serve_file(Path("serve.yml"))
    assert not is_serve_file(Path("headway.toml"))
    assert not is_serve_file(None)


def test_an_application_without_arguments_has_the_defaults(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(f"applications:\n- import_path: other:app\n- import_path: {IMPORT_PATH}\n")
    assert read_serve_file(path) == ServeFile()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: []", "must have one application with import_path .* it has 0"),
        ("- 1", "it has 0"),
        ("a: [", "is not YAML"),
        (f"applications: [{{import_path: '{IMPORT_PATH}', args: 3}}]", "args must be a mapping"),
        (
            f"applications: [{{import_path: '{IMPORT_PATH}', args: {{model: x}}}}]",
            "args may be config and generation, got model",
        ),
        (
            f"applications: [{{import_path: '{IMPORT_PATH}', args: {{generation: 2}}}}]",
            "generation must be a string, got 2",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_serve_file(path)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"/nowhere/serve.yaml: No such file"):
        read_serve_file(Path("/nowhere/serve.yaml"))
