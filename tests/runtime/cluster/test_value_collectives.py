"""Values and tensors between ranks arrive as they were sent, and nothing that arrives is unpickled."""

from __future__ import annotations

import ast
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import RunError
from launcher.parallel import byte_collectives
from launcher.plan.values.layout import Box
from launcher.runtime.cluster import messages as collectives
from launcher.runtime.cluster.messages import Unsuitable
from launcher.runtime.cluster.world import World
from tests.ranks import on_ranks

PACKAGE = Path(__file__).parents[3] / "launcher"
OBJECTS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
OWN_CHILDREN = {"runtime/processes/worker.py", "process_pool.py"}
"""Unnamed pipes between one of our processes and its own children."""


def sent(world: World) -> tuple[Any, ...]:
    rank = world.rank
    boxes = [(f"w{n}", rank, Box((0, n), (2, n + 1))) for n in range(rank)]
    return (
        byte_collectives.all_gather(b"x" * rank),
        byte_collectives.all_gather(b""),
        collectives.all_gather(boxes, list[tuple[str, int, Box]]),
        collectives.gather({"nan": math.nan, "e": 0.1 + rank}, dict[str, float]),
        collectives.broadcast(None if rank else ("is", 3), tuple[str, int] | None),
        passed_on(rank),
    )


def passed_on(rank: int) -> str:
    """The value that rank 2 receives from rank 0."""
    if rank == 0:
        collectives.send("from 0", str, 2)
    return str(collectives.recv(str, 0)) if rank == 2 else ""


def test_each_rank_gets_what_the_others_have_sent_whatever_its_length() -> None:
    first, second, third = on_ranks(3, sent)
    for got in (first, second, third):
        assert got[0] == [b"", b"x", b"xx"]
        assert got[1] == [b""] * 3
        assert got[2][2] == [("w0", 2, Box((0, 0), (2, 1))), ("w1", 2, Box((0, 1), (2, 2)))]
        assert got[4] == ("is", 3)
    assert [first[5], second[5], third[5]] == ["", "", "from 0"]
    assert [row["e"] for row in first[3]] == [0.1, 1.1, 2.1]
    assert all(math.isnan(row["nan"]) for row in first[3])
    assert second[3] is third[3] is None


def made(rank: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind that a model may have; each rank has a different number of them."""
    base = torch.arange(6).reshape(2, 3) + rank
    every = {
        "strided": base.double().T, "bf16": base.bfloat16(), "fp8": base.to(torch.float8_e4m3fn), "bool": base > 2,
        "wide": base.to(torch.uint16), "conj": torch.complex(base.float(), -base.float()).conj(),
        "number": torch.tensor(-0.0), "empty": torch.empty(0, 3),
    }  # fmt: skip
    return {name: t for n, (name, t) in enumerate(every.items()) if n >= rank}


Seen = tuple[str, str, tuple[int, ...], list[int]]


def seen(tensors: dict[str, torch.Tensor]) -> list[Seen]:
    """Names, dtypes, shapes and bytes."""
    flat = {name: t.resolve_conj().contiguous().reshape(-1) for name, t in tensors.items()}
    raw = {name: t.view(torch.uint8).tolist() if t.numel() else [] for name, t in flat.items()}
    return [(name, str(t.dtype), tuple(t.shape), raw[name]) for name, t in tensors.items()]


def gathered(world: World) -> list[list[Seen]] | None:
    every = collectives.gather_tensors(made(world.rank))
    return None if every is None else [seen(one) for one in every]


def test_tensors_of_every_dtype_arrive_bit_by_bit() -> None:
    first, second = on_ranks(2, gathered)
    assert second is None
    assert first == [seen(made(0)), seen(made(1))]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


@pytest.mark.parametrize(
    "body",
    [pickle.dumps(Evil()), b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", (9).to_bytes(8, "little") + b"[[1,2,3]]"],
    ids=["a pickle", "nothing", "noise", "cut", "another type"],
)
def test_bytes_that_no_rank_sends_are_refused_and_not_run(
    body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unsuitable):
        collectives.decode(body, dict[str, float])
    if body[8:10] != b"[]":
        with pytest.raises(RunError):
            collectives._unpacked(body)
    assert not (tmp_path / "touched").exists()


def test_tensors_of_a_dtype_that_there_is_not_or_cut_short_are_refused() -> None:
    for header in ([("a", "load", [1])], [("a", "float32", [-1])], [("a", "float32", [1 << 20])]):
        text = collectives.encode(header, collectives._Header)
        with pytest.raises(RunError, match="not a message between ranks"):
            collectives._unpacked(len(text).to_bytes(8, "little") + text)


def called(tree: ast.AST) -> set[str]:
    """The names of functions and attributes that a module mentions, including imports."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}


def unpickles(tree: ast.AST) -> bool:
    """Whether a module calls something that unpickles without a limit."""
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    pairs = {(n.value.id, n.attr) for n in attributes if isinstance(n.value, ast.Name)}
    imported = {
        a.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "pickle"
        for a in node.names
    }
    loaders = {("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler")}
    return bool(pairs & loaders or imported & {"load", "loads", "Unpickler"})


def test_no_module_calls_an_object_collective_or_unpickles_what_another_user_may_have_written() -> None:
    trees = {str(p.relative_to(PACKAGE)): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))}
    assert {name: found for name, tree in trees.items() if (found := called(tree) & OBJECTS)} == {}
    assert {name for name, tree in trees.items() if unpickles(tree)} == OWN_CHILDREN
