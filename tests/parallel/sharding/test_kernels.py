"""Every operator that has a rule, cut in every way that its rule allows, is the operator on whole tensors."""

from __future__ import annotations

import pytest

from launcher.plan.sharding.rules.table import RULES, functional, rule_of
from tests.parallel.sharding.operator_cases import CASES, WITHOUT_RULE, Calls, Case
from tests.parallel.sharding.operator_laws import MATRICES, Law, Recorded, recorded, strategies
from tests.tiers import some

RANDOM = {"rand", "randn", "randint", "randperm"}


def laws(case: Case) -> list[Law]:
    """One for each different node."""
    run: Recorded = recorded(Calls(case), case.inputs)
    found = []
    for node in run.graph.nodes:
        rule = rule_of(node, run.graph)
        assert rule is not None, node
        found.append(Law(run.graph, node, rule, run.inputs(node), run.trains(node)))
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_operator_on_parts_is_the_operator(name: str) -> None:
    for law in laws(CASES[name]):
        for matrix in MATRICES:
            for strategy in some(strategies(law.rule, matrix), 3):
                law.check(strategy)
