"""Compares the copies of weights on several ranks: they must be equal after every step."""

from __future__ import annotations

from collections import Counter

import torch
import xxhash
from torch import Tensor

from launcher.errors import RunError
from launcher.parallel.digests import digests
from launcher.parallel.local_tensors import local
from launcher.plan.values.layout import Layout
from launcher.plan.values.module_names import listed
from launcher.runtime.cluster.messages import all_gather
from launcher.runtime.training.session import Session

AXES = ("dp_replicate", "dp_shard")
"""The axes whose ranks get the same gradients, bit for bit.

Ranks of ``tp`` each compute the gradient of a common weight, and some kernels of accelerators add in an order
that changes from call to call.
"""


@torch.no_grad()
def check_replicas(s: Session) -> None:
    """Raises ``RunError`` if the copies of a weight or buffer differ, over replicas or tied stages.

    Every rank calls this, between two steps.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for placed, t in s.model.named():
        if copies := _copies(placed.layout, s.world.rank):
            groups.setdefault(copies, {})[placed.name] = local(t.detach())
    common = [t for tensors in groups.values() for t in tensors.values()]
    numbers = iter(digests(common).tolist() if common else [])
    own = {copies: {name: next(numbers) for name in tensors} for copies, tensors in groups.items()}

    # compare one number for each group of ranks: they are nearly always equal
    mine = {copies: xxhash.xxh3_64_intdigest(repr(each).encode()) for copies, each in own.items()}
    every = all_gather(mine, dict[str, int])
    pairs = {pair for theirs in every for pair in theirs.items()}
    odd = {copies for copies, n in Counter(copies for copies, _ in pairs).items() if n > 1}
    if not odd:
        return

    # for each weight, find the ranks that have each of its digests
    shown = {copies: each for copies, each in own.items() if copies in odd}
    holders: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rank, theirs in enumerate(all_gather(shown, dict[str, dict[str, int]])):
        for copies, each in theirs.items():
            for name, digest in each.items():
                holders.setdefault((copies, name), {}).setdefault(digest, []).append(rank)

    wrong, ranks = dict[str, None](), set[int]()
    for (_, name), by_digest in holders.items():
        if len(by_digest) > 1:
            wrong[name] = None
            ranks.update(*by_digest.values())
    between = ", ".join(map(str, sorted(ranks)))
    text = f"after step {s.step} {listed([*wrong])} differs between the ranks {between}"
    why = "a forward, a hook, a callback or the optimizer changed it with values that only some ranks have"
    cure = "use values that all ranks have, or train with one data-parallel rank"
    raise RunError(
        f"{text}, whose copies must be equal: {why}. No checkpoint of this step was written; {cure}"
    )


def _copies(layout: Layout, rank: int) -> str:
    """Returns a name for the ranks that have the same piece of a tensor as ``rank``.

    Returns "" if only ``rank`` has it.
    """
    at = layout.grid.coords(rank)
    if not {*AXES} <= at.keys():
        return ""
    stages = dict(layout.at).get("pp", (at["pp"],))
    free = [a for a in AXES if a not in layout.axes and layout.grid[a] > 1]
    if not free and len(stages) == 1:
        return ""
    first = layout.grid.rank(**at | dict.fromkeys(free, 0) | {"pp": stages[0]})
    return f"{first} {stages}"
