from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from launcher.data import train_byte_pairs
from tests.data.chat.chats import SPECIAL


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Byte pairs with the special tokens of all templates, in ``tokenizer.json``."""
    made = train_byte_pairs.train_on(["Hi there, you. Hello! More? No. user assistant system " * 9], 400, SPECIAL)
    made.save(str(tmp_path / "tokenizer.json"))
    return made
