"""The gradients that level1 reduce-scatters together, once a step, in the order in which they are ready."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.plan.cost.cut_model import CutModel
from launcher.plan.cost.fusion import Bucket, Group
from launcher.plan.partition.params import Placed
from launcher.plan.values.facts import ITEMSIZE
from launcher.plan.values.precision import Precision


def reduced(p: Placed, dtypes: Precision) -> int:
    """Returns the bytes of one element of the gradient of ``p`` while it is sent."""
    return ITEMSIZE[dtypes.reduce if dtypes.mixed else p.spec.dtype]


def scatters(model: CutModel, limit: int | None) -> tuple[Bucket, ...]:
    """Returns the buckets of each stage in turn; bytes are those of the full, padded gradients.

    ``limit``: bytes of a bucket; ``None``: what was gathered together. Empty at other levels than level1.
    """
    if model.hsdp is None or model.hsdp.optimizer_level != "level1":
        return ()
    return tuple(b for s in range(len(model.stages)) for b in _of_stage(model, s, limit))


def _of_stage(model: CutModel, stage: int, limit: int | None) -> Iterator[Bucket]:
    """Yields the buckets of one stage.

    A group that fits ``limit`` is not divided: a bucket waits for all of its groups.
    """
    together, nbytes = list[Placed](), 0
    for group in _done(model, stage):
        sizes = {p: p.padded * reduced(p, model.dtypes) for p in _learning(model, group)}
        pieces = [list(sizes)] if limit is None or sum(sizes.values()) <= limit else [[p] for p in sizes]
        for piece in filter(None, pieces):
            size = sum(sizes[p] for p in piece)
            other = bool(together) and together[-1].spec.dtype != piece[0].spec.dtype
            if together and (limit is None or other or nbytes + size > limit):
                yield Bucket(stage, tuple(p.name for p in together), nbytes)
                together, nbytes = [], 0
            together += piece
            nbytes += size
    if together:
        yield Bucket(stage, tuple(p.name for p in together), nbytes)


def _learning(model: CutModel, group: Group) -> list[Placed]:
    return [model.named[n] for n in group.names if n not in group.idle]


def _done(model: CutModel, stage: int) -> list[Group]:
    """Returns the groups as their gradients are ready: autograd reverses the order of the forward."""
    first = {v.group: n for n, v in reversed([*enumerate(model.visits[stage])]) if v.begins}
    back = sorted(first, key=lambda i: -first[i])
    rest = [i for i, g in enumerate(model.groups) if g.stage == stage and i not in first]
    return [model.groups[i] for i in (*back, *rest)]
