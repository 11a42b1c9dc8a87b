from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.extras.mindspore import strategy_file
from launcher.extras.mindspore.ckpt import file_bytes, open_ckpt
from launcher.extras.mindspore.encryption import CipherMode
from launcher.extras.mindspore.to_ours import full_specs, to_strategy
from launcher.plan.values.tensor_spec import TensorSpec
from tests.extras.mindspore.truth import FIXTURES

LIMIT = 2 << 20  # bytes that a reader may use for an input of a few KB
FORMATS, REAL = FIXTURES / "formats", FIXTURES / "real_strategy"
SEEDS = {path.name: path.read_bytes() for folder in (FORMATS, REAL) for path in sorted(folder.glob("*.[cj]*"))}
KEYS: dict[str, tuple[bytes, CipherMode]] = {
    "enc_AES-GCM_256.ckpt": (bytes(range(32)), "AES-GCM"),
    "enc_AES-CBC_128.ckpt": (bytes(range(16)), "AES-CBC"),
    "enc_SM4-CBC_128.ckpt": (bytes(range(16)), "SM4-CBC"),
}
HUGE = [b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\x80" * 12, b"\xff\xff\xff\x7f"]


@st.composite
def damaged(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[str, bytes]:
    """Draw a real file with some bytes replaced, removed, inserted or repeated."""
    name = draw(st.sampled_from(names))
    data = SEEDS[name]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(at + draw(st.sampled_from([0, 1, 1, 2, 8, 100])), len(data))
        new = draw(st.one_of(st.binary(max_size=3), st.sampled_from([*HUGE, data[at:end] * 2])))
        data = data[:at] + new + data[end:]
    return name, data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


@contextmanager
def small() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()


def named(call: Callable[[], object], *origin: str) -> None:
    """Check that the call works, or fails as documented."""
    with small():
        try:
            call()
        except ValueError as error:
            text = str(error)
        else:
            return
    assert text.startswith(origin), text


TENSORS = ("dtypes.ckpt", "crc_append.ckpt", "chunked_1KiB.ckpt", *KEYS)


@settings(deadline=None, max_examples=400)
@given(damaged(TENSORS))
def test_no_bytes_break_the_reader_of_checkpoints(
    tmp_path_factory: pytest.TempPathFactory, found: tuple[str, bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.ckpt"
    path.write_bytes(found[1])
    named(lambda: everything(path, *KEYS.get(found[0], (None, "AES-GCM"))), f"{path}: ")


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
@example(b"crc_num" + bytes(10))
@example(b"\x0a" + b"\xff" * 9 + b"\x01")
def test_no_noise_breaks_any_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.ckpt"
    path.write_bytes(data)
    named(lambda: everything(path, None, "AES-GCM"), f"{path}: ")
    named(lambda: strategy_file.parse(data, "f"), "f: not a MindSpore strategy file (")
    named(lambda: strategy_file.parse_groups(data, "f"), "f: not a MindSpore group file: ")


def everything(path: Path, key: bytes | None, mode: CipherMode) -> None:
    file = open_ckpt(path, key, mode)
    for name, stored in file.entries.items():
        assert len(file.read(name)) == file_bytes(stored.spec)


STRATEGIES = tuple(name for name in SEEDS if "strategy" in name or "merged" in name)


@settings(deadline=None, max_examples=400)
@given(damaged(STRATEGIES))
def test_no_bytes_break_the_reader_of_strategies(found: tuple[str, bytes]) -> None:
    def convert() -> None:
        file = strategy_file.parse(found[1], "f")
        try:
            names = {n for layouts in file.stages().values() for n in layouts}
            slices = {n: TensorSpec((4,) * max(len(s.dims) for s in file.layouts.values()), "int8") for n in names}
            to_strategy(file, full_specs(file, slices))
        except ValueError as error:
            raise ValueError(f"f: {error}") from error

    named(convert, "f: ")


@settings(deadline=None, max_examples=200)
@given(damaged(tuple(name for name in SEEDS if "group" in name)))
def test_no_bytes_break_the_reader_of_groups(found: tuple[str, bytes]) -> None:
    named(lambda: strategy_file.parse_groups(found[1], "f"), "f: not a MindSpore group file: ")
