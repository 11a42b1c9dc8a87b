"""A queue of layouts to plan, ordered by lower bounds that tighten as others are planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from launcher.job.schema.search import AUTO
from launcher.plan.schedule.schedules import RULES
from launcher.planner.search import candidates
from launcher.planner.search.bounds import FAR, NEAR, UNSEEN, Bound, Effect, Policies, Uneven, Whole, bound
from launcher.planner.search.evaluate import Predicted, Question, Slower, Trial
from launcher.planner.search.layout import Cut, Layout

ROOMY = 0.85
"""A layout certainly fits if its bound is below this share of the memory."""

Shape = tuple[str, int, int, int]
Family = tuple[Cut, Shape]
"""Layouts that differ only in how weights and optimizer states are sharded."""


@dataclass(frozen=True)
class Seen:
    """What the plans of a family have shown."""

    uneven: Uneven
    policies: Policies


@dataclass
class Waiting:
    """Layouts that may be the best, the one with the smallest lower bound first.

    A plan shows how uneven its pipeline is, and what recomputation frees and costs in it. The layouts of its
    family have the same values, and pipelines with more stages are at least as uneven.
    """

    asked: Question
    wholes: Mapping[Cut, Whole | str]
    heap: list[tuple[float, tuple[Any, ...], Layout]] = field(default_factory=list)
    least: dict[Layout, Bound] = field(default_factory=dict)
    families: dict[Family, Seen] = field(default_factory=dict)
    kinds: dict[tuple[str, bool, Cut], Policies] = field(default_factory=dict)

    @property
    def free(self) -> bool:
        """Whether the search decides the number of stages."""
        over = self.asked.job.search.over
        return AUTO in (over.get(candidates.STAGES), over.get(candidates.CHUNKS))

    def add(self, layout: Layout) -> Bound | str:
        """Queues a layout unless it cannot fit; returns its bound, or why it cannot be planned."""
        of = self.wholes[layout.cut]
        if isinstance(of, str):
            return of
        virtual = layout.stages * (2 if RULES[layout.scheduler].v and layout.stages > 1 else layout.chunks)
        if of.blocks and virtual > of.blocks and self.free:
            return "more virtual stages than blocks"
        least = bound(layout, of, self.asked.speeds, self.asked.job)
        if self.asked.room is None or least.nbytes <= self.asked.room:
            self.least[layout] = least
            heappush(self.heap, (self.seconds(layout), layout.order, layout))
        return least

    def take(self, most: int, below: float) -> list[Layout]:
        """Up to ``most`` layouts that may take less than ``below`` seconds, all with different pipelines."""
        out: list[Layout] = []
        put_back = []
        while self.heap and len(out) < most and self.heap[0][0] < below:
            seconds, order, layout = heappop(self.heap)
            known = self.seconds(layout)
            if known > seconds:
                heappush(self.heap, (known, order, layout))
            elif any(layout.shape == other.shape for other in out):
                put_back.append((seconds, order, layout))
            else:
                out.append(layout)
        for one in put_back:
            heappush(self.heap, one)
        return out

    def plain(self) -> list[Layout]:
        """The first simple layout of each cut that certainly fits without recomputation: likely good ones."""
        found: dict[Cut, Layout] = {}
        room = self.asked.room
        for _, _, layout in sorted(self.heap):
            least = self.least[layout]
            simple = layout.scheduler == "1f1b" and layout.chunks == 1
            if simple and (room is None or least.states + least.kept < ROOMY * room):
                found.setdefault(layout.cut, layout)
        taken = set(found.values())
        self.heap = [one for one in self.heap if one[-1] not in taken]
        heapify(self.heap)
        return list(found.values())

    def seconds(self, layout: Layout) -> float:
        """The lower bound of the seconds, as known so far; ``inf`` if the layout does not fit."""
        least, seen = self.least[layout], self.families.get(_family(layout))
        if seen is not None:
            return least.seconds(seen.uneven, self._surely(layout), NEAR)
        return least.seconds(self._uneven(layout), self._surely(layout), FAR)

    def trial(self, layout: Layout, below: float) -> Trial:
        """The layout with its bound and the expected effects of policies."""
        return Trial(layout, self.least[layout], self._likely(layout), self._surely(layout), below)

    def _surely(self, layout: Layout) -> Policies:
        """Effects for bounds: of its family, else of its kind, else of all schedulers with such backwards."""
        seen = self.families.get(_family(layout))
        if seen is not None and seen.policies:
            return {**UNSEEN, **seen.policies}
        kind = _kind(layout)
        split = RULES[kind[0]].split
        alike = (of for other, of in self.kinds.items() if RULES[other[0]].split == split)
        return {**UNSEEN, **(self.kinds.get(kind) or _together(alike))}

    def _likely(self, layout: Layout) -> Policies:
        """Likely effects: those of its family, else of its kind, else of the nearest kind."""
        seen = self.families.get(_family(layout))
        if seen is not None and seen.policies:
            return seen.policies
        scheduler, interleaved, cut = _kind(layout)
        nearest = min(
            self.kinds,
            key=lambda kind: ((kind[0], kind[1]) != (scheduler, interleaved), kind[2] != cut),
            default=None,
        )
        return {} if nearest is None else self.kinds[nearest]

    def _uneven(self, layout: Layout) -> Uneven:
        """The imbalance that similar pipelines with at most as many stages have shown."""
        scheduler, stages, chunks, _ = layout.shape
        exact = [seen.uneven for (_, shape), seen in self.families.items() if shape == layout.shape]
        if exact:
            return Uneven(min(one.seconds for one in exact), min(one.bytes for one in exact))

        every = [(shape, seen.uneven) for (_, shape), seen in self.families.items()]
        fewer = [
            uneven
            for (name, n, each, _), uneven in every
            if (name, each > 1) == (scheduler, chunks > 1) and n <= stages
        ]
        tight = [uneven.bytes for _, uneven in every if uneven.bytes > 1]
        return Uneven(
            seconds=max((one.seconds for one in fewer), default=1.0),
            bytes=min(tight, default=1.0),
        )

    def learn(self, found: Predicted | Slower) -> None:
        """Records what a plan has shown; the least uneven pipeline of a family counts."""
        least, family, kind = self.least[found.layout], _family(found.layout), _kind(found.layout)
        uneven = least.uneven(found.pipeline, found.plain)
        policies = {} if isinstance(found, Slower) else _effects(found, least, uneven)
        before = self.families.get(family, Seen(uneven, {}))
        both = Uneven(min(uneven.seconds, before.uneven.seconds), min(uneven.bytes, before.uneven.bytes))
        self.families[family] = Seen(both, _together((before.policies, policies)))
        if policies:
            self.kinds[kind] = _together((self.kinds.get(kind, {}), policies))


def _family(layout: Layout) -> Family:
    return layout.cut, layout.shape


def _kind(layout: Layout) -> tuple[str, bool, Cut]:
    """Layouts with the same kind have about the same effects of recomputation."""
    return layout.scheduler, layout.chunks > 1, layout.cut


def _effects(found: Predicted, least: Bound, uneven: Uneven) -> Policies:
    """The effect of each policy that was tried."""
    frees = max(least.kept * uneven.bytes - least.handed, 1.0)
    forward = uneven.seconds * least.forward
    return {policy: (((found.plain - left) / frees, more / forward),) for policy, left, more in found.tried}


def _together(several: Iterable[Policies]) -> Policies:
    out: dict[str, tuple[Effect, ...]] = {}
    for one in several:
        for policy, seen in one.items():
            out[policy] = (*out.get(policy, ()), *seen)
    return out
