from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from launcher.job.schema.components import Optim
from launcher.job.schema.optim import SGD, Adafactor, AdamW, Lion, Momentum, Muon
from launcher.job.schema.parallel import Hsdp
from launcher.job.schema.user_class import Target
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.memory.rank_memory import Memory, memory
from launcher.plan.memory.walk import MemoryInUse
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.model_graph import Role
from launcher.plan.values.text import bytes_text
from tests.optim.grouped import tensor
from tests.plan.cut.test_tensor_placement import laid, sizes
from tests.plan.made import chain, skeleton

MODEL = skeleton(
    {"a.weight": (256,), "a.big": (512,), "a.small": (1,), "b.weight": (255,), "b.mean": (8,)}, buffers=["b.mean"]
)
GLUE = chain("a", "b")
AT = (MemoryInUse(7, 5, 70), MemoryInUse(3, 0, 30))


def rows(hsdp: Hsdp | None, shard: int) -> tuple[Memory, ...]:
    params, _ = laid(MODEL, GLUE, {"a": 0, "b": 1}, sizes(shard=shard), hsdp)
    return memory(params, sizes(shard=shard), StateSize(AdamW(name="adamw")), AT)


def test_without_sharding_each_rank_holds_its_stage_whole() -> None:
    assert rows(None, shard=1) == (Memory(0, 3076, 7, 6152, 5, 70), Memory(1, 1052, 3, 2040, 0, 30))


def test_with_sharding_each_rank_holds_its_box() -> None:
    first, second, third, fourth = rows(Hsdp(threshold=1), shard=2)
    assert first == Memory(0, 1540, 7, 3080, 5, 70)
    assert second == Memory(1, 1540, 7, 3080, 5, 70)
    assert (third.rank, third.params, fourth.rank) == (2, 1052, 3)


@pytest.mark.parametrize(("hsdp", "first"), [(None, 1024), (Hsdp(threshold=1), 2 * 512)], ids=["whole", "sharded"])
def test_two_virtual_stages_of_one_rank_share_a_whole_tensor_and_have_each_a_copy_of_a_sharded_one(hsdp, first) -> None:
    model = skeleton({f"{m}.weight": (256,) for m in "abcd"}, same={"c.weight": "a.weight"})
    sz = sizes(shard=2 if hsdp else 1, chunks=2)
    told = dict(zip("abcd", range(4), strict=True))
    params, _ = laid(model, chain(*"abcd"), told, sz, hsdp)
    found = [m.params for m in memory(params, sz, StateSize(SGD(name="sgd")), (MemoryInUse(0, 0, 0),) * 2)]
    assert found == ([first] * 2 + [1024] * 2 if hsdp else [first, 2048])


@pytest.mark.parametrize("shard", [1, 2, 3, 4])
def test_every_rank_is_said_to_hold_its_own_boxes(shard: int) -> None:
    hsdp = Hsdp(threshold=0, uneven="pad")
    params, _ = laid(MODEL, GLUE, {"a": 0, "b": 1}, sizes(shard=shard), hsdp)
    own = [(p, rank, p.layout.box(rank)) for p in params for rank in range(2 * shard)]
    wanted = dict.fromkeys(range(2 * shard), 0)
    for p, rank, box in own:
        wanted[rank] += 0 if box is None else prod(box.shape) * ITEMSIZE[p.spec.dtype]
    assert {m.rank: m.params for m in rows(hsdp, shard)} == wanted


def test_the_total_is_the_sum() -> None:
    assert Memory(0, 1, 2, 4, 8, 16).total == 31


@pytest.mark.parametrize(("optim", "kept"), [
    (AdamW(name="adamw"), 2),
    (SGD(name="sgd"), 0),
    (SGD(name="sgd", momentum=0.5), 1),
    (Momentum(name="momentum"), 1),
    (Lion(name="lion"), 1),
    (Momentum(name="momentum", momentum=0.0), 0),
    (Target.model_validate({"_target_": "mine.Lion"}), 2),
], ids=str)  # fmt: skip
def test_an_optimizer_keeps_so_many_tensors_a_parameter(optim: Optim, kept: int) -> None:
    here = tensor("a.weight", shape=(3, 5))
    assert StateSize(optim).nbytes(here, (2, 5)) == kept * 4 * 2 * 5
    assert StateSize(optim, averaged=True).nbytes(here, (2, 5)) == (kept + 1) * 4 * 2 * 5


@pytest.mark.parametrize(("optim", "role", "shape", "numbers"), [
    (Adafactor(name="adafactor"), "", (6, 8), 3 + 8),
    (Adafactor(name="adafactor"), "head", (6, 2, 4, 8), 3 * 2 * 4 + 3 * 2 * 8),
    (Adafactor(name="adafactor"), "", (6,), 3),
    (Muon(name="muon"), "", (6, 8), 3 * 8),
    (Muon(name="muon"), "embedding", (6, 8), 2 * 3 * 8),
    (Muon(name="muon"), "head", (6, 8), 2 * 3 * 8),
    (Muon(name="muon", groups={"a": {"use": "muon"}}), "head", (6, 8), 3 * 8),
    (Muon(name="muon", groups={"a": {"use": "adamw"}}), "", (6, 8), 2 * 3 * 8),
    (Muon(name="muon", groups={"a": {"use": "muon"}}), "", (6,), 2 * 3),
], ids=str)  # fmt: skip
def test_the_optimizer_state_of_half_the_rows_has_the_expected_size(
    optim: Optim, role: Role, shape: tuple[int, ...], numbers: int
) -> None:
    p = replace(tensor("a.weight", shape=shape), role=role)
    assert StateSize(optim).nbytes(p, (3, *shape[1:])) == 4 * numbers
    assert StateSize(optim).nbytes(replace(p, trainable=False), (3, *shape[1:])) == 0


@pytest.mark.parametrize(("n", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (1 << 20, "1.0 MB"), (3 << 30, "3.0 GB"), (5 << 40, "5.0 TB"),
    (5 << 50, "5120.0 TB"),
])  # fmt: skip
def test_bytes_are_written_for_people(n: int, text: str) -> None:
    assert bytes_text(n) == text
