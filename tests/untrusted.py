"""Every reader of files from outside, and the limits that every reader must keep."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import store
from launcher.checkpoint.foreign.hugging_face import read_hf
from launcher.checkpoint.foreign.import_checkpoint import outline
from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.layout.strategy_file import load
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.tensorfile.disk import copy
from launcher.checkpoint.tensorfile.encryption import load_key
from launcher.data import text_tokenizer
from launcher.data.checks import absent, check
from launcher.errors import error_text
from launcher.extras.images.cifar_pickles import read_pickle
from launcher.extras.mindspore import strategy_file
from launcher.extras.mindspore.merge_strategies import read_stages
from launcher.extras.mindspore.strategy_file import read_strategy
from launcher.extras.sweep import folder as sweep_folder
from launcher.job.schema.data import Cifar10, Idx, Text, Tokens
from launcher.planner import request_files
from launcher.runtime import run_folder
from tests.checkpoint.saving import filled, save, small
from tests.data.sample_files import write_cifar, write_idx

S = 20.0  # CPU seconds: a reader takes less than one, or several on a busy core; what this stops would take hours
MEMORY = 64 << 20


def _checkpoint(home: Path) -> None:
    save(home / "step-000001", small(), filled(small()), {"step": 1})


def _problems(found: list[Any]) -> None:
    if found:
        raise ValueError("\n".join(p.text for p in found))


def _text(home: Path, **more: Any) -> Text:
    return Text.model_validate({"name": "text", "vocab_size": 300, "seq_len": 8, "val_fraction": 0.1, **more})


def _cifar(home: Path) -> Cifar10:
    return Cifar10.model_validate({"name": "cifar10", "root": str(home)})


def _tokens(path: Path) -> Tokens:
    return Tokens.model_validate({"name": "tokens", "path": [str(path)], "vocab_size": 300})


def _idx(home: Path) -> Idx:
    return Idx.model_validate({"name": "idx", "root": str(home), "size": 32, "channels": 1})


# The file, a function that fills the folder around it, and a function that reads it.
READERS: dict[str, tuple[str, Callable[[Path], object], Callable[[Path], object]]] = {
    "safetensors": ("f.safetensors", lambda f: None, lambda f: outline(f / "f.safetensors")),
    "safetensors in a folder": ("model.safetensors", lambda f: None, lambda f: read_hf(f / "model.safetensors")),
    "index": ("model.safetensors.index.json", lambda f: None, lambda f: read_hf(f)),
    "ckpt": ("f.ckpt", lambda f: None, lambda f: outline(f / "f.ckpt")),
    "dcp metadata": (".metadata", lambda f: None, lambda f: outline(f)),
    "strategy": ("s.json", lambda f: None, lambda f: load(f / "s.json")),
    "strategy of any form": ("s", lambda f: None, lambda f: open_strategy("strategy", f / "s")),
    "MindSpore strategy": ("s.ckpt", lambda f: None, lambda f: read_strategy(f / "s.ckpt")),
    "strategies of stages": ("s.ckpt", lambda f: None, lambda f: read_stages([f / "s.ckpt"])),
    "groups": ("g", lambda f: None, lambda f: strategy_file.read_groups(f / "g")),
    "state": ("step-000001/state.json", _checkpoint, lambda f: open_checkpoint(f / "step-000001")),
    "layouts": ("step-000001/strategy/stage0.json", _checkpoint, lambda f: open_checkpoint(f / "step-000001")),
    "latest": ("latest", _checkpoint, store.latest),
    "key": ("key", lambda f: None, lambda f: load_key(f"file:{f / 'key'}")),
    "copied along": ("tokenizer.json", lambda f: None, lambda f: copy(f / "tokenizer.json", f / "new")),
    "operators": ("o.json", lambda f: None, lambda f: _problems([request_files._operators(str(f / "o.json"))])),
    "switches": ("p.json", lambda f: None, lambda f: _problems(request_files._switches(str(f / "p.json"))[1])),
    "status": ("status.json", lambda f: None, lambda f: run_folder.read_status(f)),
    "sweep": ("sweep.json", lambda f: None, sweep_folder.known_cells),
    "tokenizer": ("t.json", lambda f: None, lambda f: text_tokenizer.load(f / "t.json")),
    "tokenizer that is asked for": (
        "t.json",
        lambda f: None,
        lambda f: _problems(absent(_text(f, tokenizer="file", tokenizer_file=str(f / "t.json")))),
    ),
    "corpus": ("c.txt", lambda f: None, lambda f: _problems(check(_text(f, path=str(f / "c.txt"), tokenizer="bpe")))),
    "tokens": ("t.tokens", lambda f: None, lambda f: _problems(check(_tokens(f / "t.tokens")))),
    "index of tokens": (
        "c.idx",
        lambda f: (f / "c.bin").write_bytes(bytes(9)),
        lambda f: _problems(check(_tokens(f / "c.bin"))),
    ),
    "cifar": ("data_batch_1", lambda f: write_cifar(f, "python"), lambda f: _problems(check(_cifar(f)))),
    "cifar, binary": ("data_batch_1.bin", lambda f: write_cifar(f, "binary"), lambda f: _problems(check(_cifar(f)))),
    "cifar batch": ("data_batch_1", lambda f: None, lambda f: read_pickle(f / "data_batch_1")),
    "idx": ("train-images-idx3-ubyte", lambda f: write_idx(f, ""), lambda f: _problems(check(_idx(f)))),
    "idx.gz": ("train-images-idx3-ubyte.gz", lambda f: write_idx(f, ".gz"), lambda f: _problems(check(_idx(f)))),
}
PIPE, SOCKET, DEVICE = (f"{kind}, not a regular file" for kind in ("a named pipe", "a socket", "a device"))


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as it:
        it.bind(str(path))


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, PIPE),
    "socket": (bind, SOCKET),
    "device": (lambda path: path.symlink_to("/dev/zero"), DEVICE),
    "link to a pipe": (lambda path: (os.mkfifo(path.with_name("p")), path.symlink_to("p")), PIPE),
}


@contextmanager
def bounded(seconds: float = S, memory: int = MEMORY) -> Iterator[None]:
    """Fail after ``seconds`` of this process's time, and also if anything waits for two minutes."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - began < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < memory >> 10


def refusal(read: Callable[[], object]) -> str:
    with bounded(), pytest.raises((OSError, ValueError)) as caught:
        read()
    assert not isinstance(caught.value, TimeoutError)
    return error_text(caught.value)


def planted(tmp_path: Path, reader: str) -> tuple[Path, Callable[[], object]]:
    """Fill the folder, and return the place of the file and the reader."""
    file, furnish, read = READERS[reader]
    furnish(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    return tmp_path / file, lambda: read(tmp_path)
