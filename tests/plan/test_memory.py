from __future__ import annotations

import pytest

from launcher.job.models import SGD, AdamW, Momentum, Optim, Target
from launcher.job.parallel import Hsdp
from launcher.plan.fusion import groups
from launcher.plan.memory import Memory, bytes_text, copies, memory
from tests.plan.made import chain, skeleton
from tests.plan.test_params import ALONE, laid, sizes

MODEL = skeleton(
    {"a.weight": (256,), "a.big": (512,), "a.small": (1,), "b.weight": (255,), "b.mean": (8,)}, buffers=["b.mean"]
)
GLUE = chain("a", "b")


def rows(level: str | None, shard: int = 2) -> tuple[Memory, ...]:
    hsdp = None if level is None else Hsdp.model_validate({"threshold": 1, "optimizer_level": level})
    sz = sizes(shard=shard)
    params, made = laid(MODEL, GLUE, {"a": 0, "b": 1}, sz, hsdp)
    return memory(params, groups(params, made, MODEL, GLUE, ALONE), sz, hsdp, 2, (70, 30))


def test_without_sharding_each_rank_holds_its_stage_whole() -> None:
    assert rows(None, shard=1) == (Memory(0, 3076, 3076, 6152, 0, 70), Memory(1, 1052, 1020, 2040, 0, 30))


@pytest.mark.parametrize(("level", "gathered"), [("level1", 2 * 3072), ("level2", 2 * 3072), ("level3", 3 * 3072)])
def test_with_sharding_each_rank_holds_its_box_and_what_is_gathered(level: str, gathered: int) -> None:
    first, second, third, fourth = rows(level)
    assert first == Memory(0, 1540, 1540, 3080, gathered, 70)
    assert (second.rank, third.rank, fourth.rank) == (1, 2, 3)
    assert (third.params, third.gathered, third.activations) == (1052, 0, 30)


def test_level1_keeps_every_gradient_whole_level3_only_what_is_in_use() -> None:
    model = skeleton({"a.weight": (256,), "b.weight": (512,), "c.weight": (256,)})
    glue = chain("a", "b", "c")

    def gathered(level: str) -> int:
        hsdp, sz = Hsdp.model_validate({"threshold": 1, "optimizer_level": level}), sizes(pp=1)
        params, made = laid(model, glue, dict.fromkeys("abc", 0), sz, hsdp)
        return memory(params, groups(params, made, model, glue, ALONE), sz, hsdp, 2, (0,))[0].gathered

    assert [gathered(f"level{n}") for n in (1, 2, 3)] == [2 * 4096, 4096 + 2048, 3 * 2048]


@pytest.mark.parametrize(("hsdp", "first"), [(None, 1024), (Hsdp(threshold=1), 2 * 512)], ids=["whole", "sharded"])
def test_two_virtual_stages_of_one_rank_share_a_whole_tensor_and_have_each_a_copy_of_a_sharded_one(hsdp, first) -> None:
    model = skeleton({f"{m}.weight": (256,) for m in "abcd"}, same={"c.weight": "a.weight"})
    sz = sizes(shard=2 if hsdp else 1, chunks=2)
    told = dict(zip("abcd", range(4), strict=True))
    params, _ = laid(model, chain(*"abcd"), told, sz, hsdp)
    found = [m.params for m in memory(params, (), sz, hsdp, 0, (0, 0))]
    assert found == ([first] * 2 + [1024] * 2 if hsdp else [first, 2048])


def test_the_total_is_the_sum() -> None:
    assert Memory(0, 1, 2, 4, 8, 16).total == 31


@pytest.mark.parametrize(("optim", "kept"), [
    (AdamW(name="adamw"), 2),
    (SGD(name="sgd"), 0),
    (SGD(name="sgd", momentum=0.5), 1),
    (Momentum(name="momentum"), 1),
    (Momentum(name="momentum", momentum=0.0), 0),
    (Target.model_validate({"_target_": "mine.Lion"}), 2),
], ids=str)  # fmt: skip
def test_an_optimizer_keeps_so_many_tensors_a_parameter(optim: Optim, kept: int) -> None:
    assert copies(optim) == kept


@pytest.mark.parametrize(("n", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (1 << 20, "1.0 MB"), (3 << 30, "3.0 GB"), (5 << 40, "5.0 TB"),
    (5 << 50, "5120.0 TB"),
])  # fmt: skip
def test_bytes_are_written_for_people(n: int, text: str) -> None:
    assert bytes_text(n) == text
