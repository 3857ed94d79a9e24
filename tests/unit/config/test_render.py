"""The sample file and the page are made from the table, load, and say what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.config.load import load_settings
from cluster.config.options import OPTIONS
from cluster.config.render import markdown, sample_toml, toml_value

ROOT = Path(__file__).parents[3]
AGAIN = "run `headway config show > deploy/headway.toml` and "
AGAIN += "`headway config show --format markdown > docs/configuration.md`"


def test_the_committed_files_are_what_the_table_makes():
    assert (ROOT / "deploy/headway.toml").read_text() == sample_toml(), AGAIN
    assert (ROOT / "docs/configuration.md").read_text() == markdown(), AGAIN


def test_the_sample_loads_and_sets_nothing(tmp_path):
    path = tmp_path / "headway.toml"
    path.write_text(sample_toml())
    configured = load_settings(path, {}, {})
    assert {setting.source for setting in configured.values.values()} == {"default"}


def test_every_line_of_the_sample_means_the_default_when_it_is_taken_in(tmp_path):
    """And those without a default have an example that is allowed."""
    text = re.sub(r"^# (\w+ = )", r"\1", sample_toml(), flags=re.MULTILINE)
    path = tmp_path / "headway.toml"
    path.write_text(text)
    configured = load_settings(path, {}, {})
    for option in OPTIONS:
        setting = configured.values[option.name]
        if option.secret:
            assert setting.source == "default"
            continue
        assert setting.source == f"{path} [{option.section}]"
        if option.default is not None:
            assert setting.value == option.default
    # Lines of prose that merely look like a value would have been refused above.
    taken = sum(setting.source != "default" for setting in configured.values.values())
    assert taken == sum(not option.secret for option in OPTIONS)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_the_page_has_every_option(option):
    page = markdown()
    assert f"`{option.variable}`" in page
    assert option.secret or f"| `{option.key}` | `{option.flag}` |" in page


def test_strings_are_quoted():
    assert toml_value('a"b\\c') == '"a\\"b\\\\c"'
    assert toml_value(True) == "true"
    assert toml_value(0.5) == "0.5"
