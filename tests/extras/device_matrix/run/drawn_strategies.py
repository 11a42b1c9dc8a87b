"""Random strategies for the operators of a network."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import torch

from launcher.extras.device_matrix.layout import primes
from launcher.extras.device_matrix.op_rule import OpRule
from launcher.extras.device_matrix.rules.table import rule_of
from launcher.extras.device_matrix.run.record import record
from launcher.job.schema.job import Job
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.trace.tensor_specs import meta
from launcher.planner.plan_job import builder, inputs

SHARE = 0.7
"""The share of operators that get a strategy."""


def strategies(job: Job, ranks: int, seed: int) -> dict[str, dict[str, Any]]:
    """Draw a device matrix and axes for the input dims of some of the modules that are one operator."""
    draw = random.Random(seed)
    with default_dtype(torch.float64), torch.device("meta"):
        model = builder(job)()
        graph = record(model, meta(inputs(job, job.train.batch_size)))
    found = {}
    params = {v for _, v in graph.params}
    for node in graph.nodes:
        rule = rule_of(node, graph)
        own = params.intersection(node.ins) or node.module.rpartition(".")[2].startswith(("relu", "act", "pool"))
        if rule is None or not node.module or not own or node.module in found or draw.random() > SHARE:
            continue
        if not graph.shapes(node)[0]:  # a count of batches
            continue
        found[node.module] = strategy(rule, ranks, draw)
    return found


def strategy(rule: OpRule, ranks: int, draw: random.Random) -> dict[str, Any]:
    """Draw a matrix whose axes split letters: several axes one letter, or none."""
    factors = primes(ranks)
    draw.shuffle(factors)
    matrix: list[int] = []
    for n in factors:
        if matrix and draw.random() < 0.3:
            matrix[-1] *= n
        else:
            matrix.append(n)
    cuts: dict[str, list[int]] = {}
    places = list(range(len(matrix)))
    draw.shuffle(places)
    for a in places:
        fits = [x for x, n in rule.sizes if n % (prod(matrix[b] for b in cuts.get(x, ())) * matrix[a]) == 0]
        letter = draw.choice([*fits, ""])
        if letter:
            cuts.setdefault(letter, []).append(a)
    names = [f"a{i}" for i in range(len(matrix))]
    tensors = [[[names[a] for a in cuts.get(x, [])] or None for x in letters] for letters in rule.ins]
    return {"matrix": matrix, "axes": names, "in": tensors}
