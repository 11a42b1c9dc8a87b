"""Every operator with a rule, split in every way that its rule allows, equals the operator on full tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_rule import OpStrategy
from launcher.extras.device_matrix.rules.table import RULES, rule_of, uncut_rule
from launcher.runtime.cluster.world import World
from tests.extras.device_matrix.run.cases.case import Calls
from tests.extras.device_matrix.run.cases.every import CASES, WITHOUT_RULE
from tests.extras.device_matrix.run.operator_laws import MATRICES, Law, Made, Recorded, recorded, strategies
from tests.ranks import on_ranks
from tests.tiers import ALL, some

MANY = 30
"""Cases with this many operators are tried over one device matrix only."""
MEETING = ("softmax", "logsumexp", "layer norm", "rms norm", "batch norm", "cross entropy")


@cache
def run(name: str) -> Recorded:
    case = {**CASES, **WITHOUT_RULE}[name]
    return recorded(Calls(case), case.inputs)


def laws(name: str) -> list[Law]:
    """Return one law for each different call."""
    found = {}
    for node in run(name).graph.nodes:
        rule = rule_of(node, run(name).graph)
        assert rule is not None, node
        law = Law(run(name).graph, node, rule, run(name).inputs(node), run(name).trains(node))
        found[node.op, repr(node.args[len(node.ins) :]), node.kwargs, rule] = law
    return list(found.values())


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # kl_div warns, but its mean has a rule
@pytest.mark.parametrize("name", CASES)
def test_an_operator_on_parts_is_the_operator(name: str) -> None:
    every = laws(name)
    matrices = MATRICES if len(every) < MANY or ALL else MATRICES[-1:]
    for law in every:
        for matrix in matrices:
            for strategy in some(strategies(law.rule, matrix), 20):
                law.check(strategy)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_the_cases_cover_every_rule() -> None:
    seen = {node.kind for name in CASES for node in run(name).graph.nodes}
    assert set(RULES) - seen == set()


def test_an_operator_without_a_rule_is_computed_on_full_tensors() -> None:
    without = []
    for name in WITHOUT_RULE:
        graph = run(name).graph
        for node in graph.nodes:
            if rule_of(node, graph) is None:
                without.append(node.op)
                law = Law(graph, node, uncut_rule(node, graph), run(name).inputs(node), run(name).trains(node))
                law.check(OpStrategy((2,)))
    assert without == ["bernoulli", "alpha_dropout", "multinomial", "scaled_dot_product_attention"]


@pytest.mark.parametrize("name", ["softmax", "layer norm", "rms norm", "cross entropy"])
def test_halves_are_computed_in_float32_inside(name: str) -> None:
    """The error is at most the rounding at the end, so epsilon is that of float32."""
    case = CASES[name]
    halves = [x.detach().bfloat16() if x.is_floating_point() else x for x in case.inputs]
    low = recorded(Calls(replace(case, modules=[copy.deepcopy(m).bfloat16() for m in case.modules])), halves)
    for node in low.graph.nodes:
        rule = rule_of(node, low.graph)
        assert rule is not None
        law = Law(low.graph, node, rule, low.inputs(node), [False] * len(node.ins))
        for strategy in meetings(law):
            law.check(strategy, tolerance=2**-6)


OUTSIDE = {
    "embedding": ("an index is beyond the 12 rows of the embedding", "v"),
    "nll": ("a target is beyond the 12 classes", "c"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_no_rank_has_is_an_error(name: str) -> None:
    text, letter = OUTSIDE[name]
    law = laws(name)[0]
    beyond = replace(law, inputs=[x if x.is_floating_point() else x + 12 for x in law.inputs])
    with pytest.raises(RuntimeError, match=text):
        beyond.on_rank(OpStrategy((2,), ((letter, (0,)),)), 1, Nobody(), law.cotangents())


class Nobody:
    """Collectives that must not be called."""

    def sum(self, x: torch.Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError

    max = sum


class Gloo:
    """Collectives between forked ranks."""

    def __init__(self, matrix: tuple[int, ...]) -> None:
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        layout = TensorLayout(matrix, ())
        for axes in ((0,), (1,), (0, 1)):
            others = [a for a in range(len(matrix)) if a not in axes]
            sets: dict[tuple[int, ...], list[int]] = {}
            for rank in range(layout.ranks):
                sets.setdefault(tuple(layout.coords(rank)[a] for a in others), []).append(rank)
            self.groups[axes], _ = dist.new_subgroups_by_enumeration(list(sets.values()))

    def sum(self, x: torch.Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> torch.Tensor:
        return self._reduced(x, axes, dist.ReduceOp.SUM)

    def max(self, x: torch.Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> torch.Tensor:
        return self._reduced(x, axes, dist.ReduceOp.MAX)

    def _reduced(self, x: torch.Tensor, axes: tuple[int, ...], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, op, group=self.groups[axes])
        return out


def _made(world: World, name: str) -> list[tuple[int, OpStrategy, Made]]:
    here = Gloo((2, 2))
    return [
        (i, strategy, law.on_rank(strategy, world.rank, here, law.cotangents()).detached())
        for i, law in enumerate(laws(name))
        for strategy in meetings(law)
    ]


def meetings(law: Law) -> list[OpStrategy]:
    """Return strategies with collectives inside the operator, one of each kind."""
    found = [s for s in strategies(law.rule, (2, 2)) if any(s.of.get(letter) for letter in law.rule.inside)]
    return some(found, 6)


@pytest.mark.parametrize("name", MEETING)
def test_forked_ranks_meet_inside_of_an_operator(name: str) -> None:
    every = on_ranks(4, _made, name)
    assert every[0]
    for made in zip(*every, strict=True):
        law, strategy = laws(name)[made[0][0]], made[0][1]
        law.compare(strategy, [m for _, _, m in made])
