from __future__ import annotations

import pytest

from cluster.text.tokenizer import Tokenizer
from tests.unit.text.text_folders import byte_level_folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("byte_level")))
