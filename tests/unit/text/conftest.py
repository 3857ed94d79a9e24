from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.text.tokenizer import Tokenizer
from tests.unit.text import text_folders

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "byte_level": text_folders.byte_level_folder,
    "byte_fallback": text_folders.byte_fallback_folder,
    "word_piece": text_folders.word_piece_folder,
    "metaspace": text_folders.metaspace_folder,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: make(root / name) for name, make in FAMILIES.items()}


@pytest.fixture(scope="session")
def families(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_folder(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def byte_level(families: dict[str, Tokenizer]) -> Tokenizer:
    return families["byte_level"]
