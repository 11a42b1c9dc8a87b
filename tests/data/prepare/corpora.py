"""Small corpora of every kind, and the tokens that `tokenizers` alone makes from their documents."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from launcher.data import text_files, train_byte_pairs
from launcher.data.prepare.prepare import PreparedTokens, prepare
from launcher.data.prepare.progress import ProgressReporter
from launcher.data.tokens.formats import check_digest, mapped, token_file
from launcher.job.schema.steps import Prepare

END = "<|end|>"
TEXT = text_files.SHIPPED.read_text(encoding="utf-8")
ODD = [
    "",
    "déjà vu, naïve ſharp ² ½ Ⅷ",
    "日本語の文 🙂 𝔘𝔫𝔦",
    "  two  spaces\n\n\n",
    "a\r\nb\tc\x1cd\x85e\u2028f",
    "don't WE'LL it's 's",
]


def documents(count: int) -> list[str]:
    """``count`` documents: odd texts, and then paragraphs of real text."""
    return [*ODD, *TEXT.split("\n\n")[: count - len(ODD)]]


def tokenizer(folder: Path, end: str = END) -> Path:
    """Write a tokenizer.json of byte pairs, and a tokenizer_config.json that names the token ``end``."""
    path = folder / "tokenizer.json"
    path.write_text(
        train_byte_pairs.train_on([f"{part}\n\n" for part in TEXT[:100_000].split("\n\n")], 600, [END]).to_str()
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
    return path


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def gzipped(path: Path) -> Path:
    out = path.with_name(f"{path.name}.gz")
    out.write_bytes(gzip.compress(path.read_bytes()))
    return out


def expected(file: Path, texts: list[str]) -> list[int]:
    """The tokens of each document, encoded by itself and in one piece, followed by the end token."""
    alone = Tokenizer.from_file(str(file))
    end = alone.token_to_id(END)
    return [i for text in texts if text for i in (*alone.encode(text, add_special_tokens=False).ids, end)]


def prepared(**settings) -> PreparedTokens:
    return quiet(Prepare(**settings), [])


def quiet(settings: Prepare, lines: list[str]) -> PreparedTokens:
    return prepare(settings, "steps.prepare", lines.append, ProgressReporter("off", lines.append))


def tokens(folder: Path) -> list[int]:
    """The tokens in all files of a folder; raises if a digest is wrong."""
    files = [token_file(path, dtype="uint16") for path in sorted(folder.glob("*.tokens"))]
    for file in files:
        check_digest(file)
    return np.concatenate([mapped(file) for file in files]).tolist()
