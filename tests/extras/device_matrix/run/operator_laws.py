"""An operator on the parts of several ranks, compared with the same operator on full tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph, OpNode
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.run.kernels import prepare
from launcher.extras.device_matrix.run.local_operators import Collectives, LocalCall, bound, torch_op
from launcher.extras.device_matrix.run.record import record
from launcher.parallel.model_state.deep_copy import copied
from tests.extras.device_matrix.run.simulated_ranks import Thread, Threads, assembled, part

CPU = torch.device("cpu")
MATRICES = ((2,), (2, 2), (2, 3))
SEED = 7


def seed() -> None:
    """Seed the default generator; ``torch.manual_seed`` would format a traceback each time, for CUDA."""
    torch.default_generator.manual_seed(SEED)


@dataclass(frozen=True)
class Recorded:
    """A graph, and the full tensors of its values in one run."""

    graph: OpGraph
    values: tuple[Tensor, ...]

    def inputs(self, node: OpNode) -> list[Tensor]:
        return [self.values[v] for v in node.ins]

    def trains(self, node: OpNode) -> list[bool]:
        return [self.graph.values[v].trains for v in node.ins]


def recorded(module: nn.Module, inputs: Sequence[Tensor]) -> Recorded:
    """Record a module, and run every operator on full tensors, one by one."""
    on_meta = [x.detach().to("meta").requires_grad_(x.requires_grad) for x in inputs]
    graph = record(copied(module).to("meta"), on_meta, ours=True)
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    values: dict[int, Tensor] = {v: state[name].detach().clone() for name, v in graph.params}
    values |= {v: x.detach() for v, x in zip(graph.inputs, inputs, strict=True)}
    for node in graph.nodes:
        made = run_whole(node, [values[v] for v in node.ins])
        values |= dict(zip(node.outs, (x.detach() for x in made), strict=True))
    return Recorded(graph, tuple(values[v] for v in range(len(graph.values))))


def run_whole(node: OpNode, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run torch's operator as it was recorded, on copies."""
    seed()
    out = bound(torch_op(node.op), node.args, dict(node.kwargs), CPU)(*[x.clone() for x in tensors])
    return (out,) if isinstance(out, Tensor) else tuple(out)


def strategies(rule: OpRule, matrix: tuple[int, ...]) -> Iterator[OpStrategy]:
    """Yield every way to assign axes to letters, in every order, whose slices divide evenly."""
    for uses in itertools.product(("", *rule.letters), repeat=len(matrix)):
        of: dict[str, list[int]] = {}
        for axis, letter in enumerate(uses):
            if letter:
                of.setdefault(letter, []).append(axis)
        for orders in itertools.product(*(itertools.permutations(axes) for axes in of.values())):
            strategy = OpStrategy(matrix, tuple(zip(of, orders, strict=True)))
            if strategy.fits(rule):
                yield strategy


@dataclass(frozen=True)
class Made:
    """The results of one rank: outputs, gradients of inputs, and its inputs after the call."""

    outs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    after: tuple[Tensor, ...]

    def detached(self) -> Made:
        outs, after = (tuple(x.detach() for x in xs) for xs in (self.outs, self.after))
        return Made(outs, self.gradients, after)


@dataclass(frozen=True)
class Law:
    """One operator, its rule, and values for it."""

    graph: OpGraph
    node: OpNode
    rule: OpRule
    inputs: Sequence[Tensor]
    trains: Sequence[bool]

    def whole(self, cotangents: Sequence[Tensor]) -> Made:
        leaves = [x.clone().requires_grad_(t) for x, t in zip(self.inputs, self.trains, strict=True)]
        copies = [x.clone() for x in leaves]
        seed()
        if self.node.op == "copy":  # torch's copy has no gradient
            out = copies[0].clone().copy_(copies[1])
        else:
            with torch.set_grad_enabled(self.node.op != "bernoulli.p"):  # bernoulli has no gradient either
                out = bound(torch_op(self.node.op), self.node.args, dict(self.node.kwargs), CPU)(*copies)
        outs = (out,) if isinstance(out, Tensor) else tuple(out)
        return Made(self.defined(outs), gradients(outs, leaves, cotangents), tuple(copies))

    def on_rank(self, strategy: OpStrategy, rank: int, here: Collectives, cotangents: Sequence[Tensor]) -> Made:
        call = LocalCall.from_node(self.node, self.graph, self.rule, strategy, rank)
        kernel = prepare(call, here, CPU)
        leaves = [
            part(x, strategy.takes(self.rule, i), rank).requires_grad_(t)
            for i, (x, t) in enumerate(zip(self.inputs, self.trains, strict=True))
        ]
        copies = [x.clone() for x in leaves]
        seed()
        outs = kernel(*copies)
        mine = [part(c, strategy.cut(self.rule.outs[i]), rank) for i, c in enumerate(cotangents)]
        return Made(self.defined(outs), gradients(outs, leaves, mine), tuple(copies))

    def defined(self, outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return zeros for operators whose outputs are uninitialized memory."""
        return tuple(map(torch.zeros_like, outs)) if "empty" in self.node.kind else outs

    def cotangents(self) -> list[Tensor]:
        random = torch.Generator().manual_seed(SEED)
        made = [self.graph.values[v] for v in self.node.outs]
        return [torch.rand(v.shape, dtype=torch.float64, generator=random) for v in made]

    def check(self, strategy: OpStrategy, tolerance: float = 1e-12) -> None:
        """Check that the parts and terms of all ranks together are the full outputs and gradients."""
        with torch.random.fork_rng(devices=()):
            made = self._on_all(strategy, self.cotangents())
        self.compare(strategy, made, tolerance)

    def compare(self, strategy: OpStrategy, made: Sequence[Made], tolerance: float = 1e-12) -> None:
        """Compare the results of all ranks, in rank order, with the full ones."""
        with torch.random.fork_rng(devices=()):
            want = self.whole(self.cotangents())
        rule, node = self.rule, self.node
        for i, expected in enumerate(want.outs):
            layout = strategy.makes(rule, i)
            _same([m.outs[i] for m in made], layout, expected, f"{node.op} {strategy} output {i}", tolerance)
        for i, expected_gradient in enumerate(want.gradients):
            what = f"{node.op} {strategy} gradient {i}"
            takes = strategy.takes(rule, i)
            found = [m.gradients[i] for m in made]
            assert len({g is None for g in found}) == 1, f"{what}: on some ranks only"
            if expected_gradient is None or found[0] is None:
                assert expected_gradient is None or not expected_gradient.any(), what
                assert found[0] is None or not any(g.any() for g in found if g is not None), what
                continue
            layout = TensorLayout(takes.matrix, takes.dims, strategy.gradient_terms(rule, i))
            _same([g for g in found if g is not None], layout, expected_gradient, what, tolerance)
        for i, expected in enumerate(want.after):
            takes = strategy.takes(rule, i)
            _same([m.after[i] for m in made], takes, expected, f"{node.op} {strategy} input {i}", tolerance)

    def _on_all(self, strategy: OpStrategy, cotangents: Sequence[Tensor]) -> list[Made]:
        ranks = prod(strategy.matrix)
        threads = Threads(ranks)

        def work(rank: int) -> Made:
            return self.on_rank(strategy, rank, Thread(threads, rank), cotangents)

        if any(strategy.of.get(letter) for letter in self.rule.inside):
            return threads.run(work)
        return [work(rank) for rank in range(ranks)]


def gradients(
    outs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the leaves that train, and ``None`` for the others."""
    pairs = [(out, c.to(out.dtype)) for out, c in zip(outs, cotangents, strict=True) if out.requires_grad]
    trained = [x for x in leaves if x.requires_grad]
    if not pairs or not trained:
        return (None,) * len(leaves)
    found: Any = torch.autograd.grad([out for out, _ in pairs], trained, [c for _, c in pairs], allow_unused=True)
    rest = iter(found)
    return tuple(next(rest) if x.requires_grad else None for x in leaves)


def _same(parts: Sequence[Tensor], layout: TensorLayout, expected: Tensor, what: str, tolerance: float) -> None:
    for whole in assembled(parts, layout, tuple(expected.shape)):
        assert whole.dtype == expected.dtype, what
        torch.testing.assert_close(
            whole, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}\n{m}"
        )
