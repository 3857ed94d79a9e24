"""The list of mutants stays applicable; `python -m tests.mutants` runs them."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_line_to_break_is_there_once(mutant):
    source = (ROOT / "cluster" / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old


def test_there_are_enough():
    assert len(MUTANTS) >= 30
