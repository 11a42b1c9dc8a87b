"""Reads and writes MindSpore strategy files in either format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.checkpoint.mindspore.formats import json_form, protobuf
from launcher.checkpoint.mindspore.formats.strategy import StrategyFile, StrategyForm, merge
from launcher.checkpoint.tensorfile.durable import write_bytes
from launcher.untrusted.files import read_bytes


def form_of(data: bytes) -> StrategyForm:
    """Returns the format of a file, by its content: no protobuf message here starts with a brace."""
    return "json" if data.lstrip()[:1] == b"{" else "protobuf"


def parse(data: bytes, origin: str) -> StrategyFile:
    """Parses a strategy file. Raises ``ValueError`` naming ``origin`` if it is of neither format."""
    form = form_of(data)
    try:
        return json_form.parse(data) if form == "json" else protobuf.parse(data)
    except ValueError as error:
        raise ValueError(f"{origin}: not a MindSpore strategy file ({form}): {error}") from error


def read_strategy(path: Path) -> StrategyFile:
    return parse(read_bytes(path), str(path))


def text(file: StrategyFile, form: StrategyForm) -> bytes:
    return json_form.text(file) if form == "json" else protobuf.text(file)


def write_strategy(path: Path, file: StrategyFile, form: StrategyForm) -> None:
    """Writes or replaces the file; it is synced to disk on return."""
    write_bytes(path, text(file, form))


def read_stages(paths: Sequence[Path]) -> tuple[StrategyFile, StrategyForm]:
    """Reads the files of all stages as one merged file. Raises ``ValueError`` if they have two formats."""
    data = {path: read_bytes(path) for path in paths}
    if not data:
        raise ValueError("no strategy file to merge")
    forms = {path: form_of(text) for path, text in data.items()}
    if len({*forms.values()}) > 1:
        told = ", ".join(f"{path} is {form}" for path, form in forms.items())
        raise ValueError(f"two forms in one merge: {told}; merge files of one form")
    return merge([(str(path), parse(text, str(path))) for path, text in data.items()]), forms[paths[0]]
