"""Sequences that pass a stage in chunks.

A module that mixes positions can run a sequence in pieces if it has a method

    piece(self, *inputs, start: int, past: Sequence[tuple[Tensor, ...]]) -> tuple[output, tuple[Tensor, ...]]

``inputs`` are those of ``forward``, for the positions from ``start`` on. ``past`` has one tuple per earlier
piece, in order: the second value that ``piece`` returned for it (such as keys and values). A single piece
without past equals ``forward``. A module that treats every position alike needs no ``piece``; if the launcher
does not recognize it, it sets ``positionwise = True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.position_mixing import KEY, Kept, Pieced, mixing
from launcher.parallel.trace import build_graph
from launcher.plan.cut.sequence_chunks import SequencePieces, balanced, equal, shortened
from launcher.plan.cut.stages import covers
from launcher.plan.values.model_graph import Graph, Node
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import many


class Carry:
    """The state of one stage: the current piece and micro batch, and what each piece keeps for later ones.

    ``lengths`` are the lengths of the pieces. Outside of ``running``, modules run full sequences.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.starts = tuple(sum(lengths[:q]) for q in range(len(lengths)))
        self.now: tuple[int, int] | None = None
        self.repeats = False
        self.states: dict[int, dict[str, list[Kept]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Carry:
        """Returns ``self``: a copied model, as tracing makes, shares the state."""
        return self

    @contextmanager
    def running(self, micro: int, piece: int) -> Iterator[None]:
        """Runs modules on this piece; piece 0 first drops the states of an earlier run of the micro batch."""
        if piece == 0:
            self.forget(micro)
        self.now = micro, piece
        try:
            yield
        finally:
            self.now = None

    @contextmanager
    def again(self, micro: int, piece: int) -> Iterator[None]:
        """Runs modules on this piece once more, in its backward: the states that they keep exist already."""
        before = self.now, self.repeats
        self.now, self.repeats = (micro, piece), True
        try:
            yield
        finally:
            self.now, self.repeats = before

    def forget(self, micro: int, piece: int = 0) -> None:
        """Drops the states that a piece keeps, after its backward; later pieces run their backward first."""
        for kept in self.states.get(micro, {}).values():
            del kept[piece:]
        if not piece:
            self.states.pop(micro, None)


def attach(model: nn.Module, carry: Carry) -> None:
    """Makes every module that has ``piece`` run the piece that ``carry`` names.

    Wrappers of its forward stay around it. A wrapper has the forward in its field ``plain``; if it also has a
    field ``carry``, that is set.
    """
    for name, module in model.named_modules():
        if isinstance(module, Pieced) or "forward" in vars(module):
            vars(module)["forward"] = _attached(module.forward, module, name, carry)


def _attached(forward: Any, module: nn.Module, name: str, carry: Carry) -> Any:
    if not hasattr(forward, "plain"):
        return partial(_forward, module, forward, name, carry) if isinstance(module, Pieced) else forward
    extra = {"carry": carry} if hasattr(forward, "carry") else {}
    return replace(forward, plain=_attached(forward.plain, module, name, carry), **extra)


def _forward(
    module: Any, plain: Callable[..., Any], name: str, carry: Carry, *inputs: Any, **named: Any
) -> Any:
    if carry.now is None:
        return plain(*inputs, **named)
    micro, piece = carry.now
    piece_states = carry.states.setdefault(micro, {}).setdefault(name, [])
    if not carry.repeats:
        del piece_states[piece:]  # the same piece runs again

    # this piece, with the states of the pieces before it
    out, kept = module.piece(*inputs, **named, start=carry.starts[piece], past=tuple(piece_states[:piece]))
    if piece == len(carry.starts) - 1:
        return out
    if not carry.repeats:
        piece_states.append(tuple(t.detach().requires_grad_(t.requires_grad) for t in kept))

    # gradients of later pieces flow back through the states that are kept for them
    if not any(t.requires_grad for t in kept):
        return out
    return _Later.apply(out, piece_states[piece], *kept)  # type: ignore[no-untyped-call]


class _Later(torch.autograd.Function):
    """Returns ``out``; the backward gives each kept tensor the gradient that later pieces added to its leaf.

    Later pieces run their backward first, so the gradient is complete by then.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, leaves: Kept, *kept: Tensor) -> Tensor:
        ctx.leaves = leaves
        ctx.save_for_backward(*kept)  # they live until the backward, so meters of saved tensors must see them
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = [t.grad for t in ctx.leaves]
        for t in ctx.leaves:
            t.grad = None
        return (grad, None, *grads)


def problems(model: nn.Module, specs: Sequence[TensorSpec], count: int) -> list[Problem]:
    """Returns why ``model`` cannot run the sequences of ``specs`` (their dim 1) in ``count`` pieces."""
    lengths = {s.shape[1] if len(s.shape) > 1 else 0 for s in specs}
    shapes = ", ".join(str(s.shape) for s in specs)
    if len(lengths) > 1:
        text = f"{count}: the inputs {shapes} differ in dim 1, the sequence, so they cannot be cut together"
        return [Problem(KEY, text, f"{KEY}=1")]
    if min(lengths) == 0:
        return [Problem(KEY, f"{count}: inputs of shape {shapes} have no dim 1 to cut", f"{KEY}=1")]
    if min(lengths) < count:
        text = f"{count}: dim 1 of {shapes} has {many(min(lengths), 'position')}, fewer than {count}"
        return [Problem(KEY, text, f"{KEY}=1")]
    return mixing(model, specs)


def cut(
    model: nn.Module, leaves: frozenset[str], specs: Sequence[TensorSpec], count: int, split: str, step: int
) -> tuple[int, ...]:
    """Returns the lengths of ``count`` pieces of ``specs``, each a multiple of ``step``.

    Raises ``RequestError``.
    """
    parts = specs[0].shape[1] // step
    if parts < count:
        text = f"{count}: operators cut each piece over tp={step}, so its length is a multiple of {step}"
        most = f"{specs[0].shape[1]} positions make at most {many(parts, 'piece')}"
        raise RequestError((Problem(KEY, f"{text}; {most}", f"{KEY}={parts}"),))
    if split == "equal":
        return tuple(n * step for n in equal(parts, count))

    # balanced: the cost of a position grows with its place, measured on two halves
    half, rest = parts // 2, parts - parts // 2
    lengths = (half * step, rest * step)
    model, carry = _carrying(model, lengths)
    first, second = (build_graph.flops(model, leaves, some) for some in _each(specs, lengths, carry))
    quadratic = max(0.0, (second / rest - first / half) / rest)
    linear = max(first / half - quadratic * half, 0.0) or 1.0
    return tuple(n * step for n in balanced(parts, count, linear, quadratic))


def graphs(
    model: nn.Module,
    leaves: frozenset[str],
    specs: Sequence[TensorSpec],
    full_graph: Graph,
    lengths: tuple[int, ...],
) -> SequencePieces:
    """Traces the pieces.

    Raises ``RequestError`` if their calls or shapes do not match ``full_graph``, that of full sequences.
    """
    return SequencePieces(lengths, _same(full_graph, _traced(model, leaves, specs, lengths), lengths))


def _traced(
    model: nn.Module, leaves: frozenset[str], specs: Sequence[TensorSpec], lengths: Sequence[int]
) -> tuple[Graph, ...]:
    """Returns the graph of each piece; the pieces run in order."""
    model, carry = _carrying(model, lengths)
    out = []
    for piece, some in enumerate(_each(specs, lengths, carry)):
        traced = build_graph.piece(model, leaves, some)
        states = {name: kept[piece] for name, kept in carry.states.get(0, {}).items() if piece < len(kept)}
        out.append(replace(traced, nodes=tuple(_leaving(n, states) for n in traced.nodes)))
    return tuple(out)


def _carrying(model: nn.Module, lengths: Sequence[int]) -> tuple[nn.Module, Carry]:
    """Returns a copy of the model whose modules keep the states that later pieces need."""
    model, carry = copied(model), Carry(lengths)
    attach(model, carry)
    return model, carry


def _each(specs: Sequence[TensorSpec], lengths: Sequence[int], carry: Carry) -> Iterator[list[TensorSpec]]:
    """Yields the inputs of each piece, while ``carry`` runs it."""
    for piece, length in enumerate(lengths):
        with carry.running(0, piece):
            yield [shortened(s, length, sum(lengths)) for s in specs]


def _leaving(node: Node, states: Mapping[str, Kept]) -> Node:
    """Returns ``node`` plus the bytes of those ``states`` that its modules keep for later pieces."""
    if node.kind != "module":
        return node
    mine = [kept for name, kept in states.items() if covers(node.target, name)]
    nbytes = [(any(t.requires_grad for t in kept), sum(t.nbytes for t in kept)) for kept in mine]
    left_for_backward = sum(n for trained, n in nbytes if trained)
    frozen = sum(n for trained, n in nbytes if not trained)  # kept equally long, but no backward saves them
    return replace(node, saved=node.saved + frozen, left=left_for_backward)


def _same(full_graph: Graph, parts: tuple[Graph, ...], lengths: tuple[int, ...]) -> tuple[Graph, ...]:
    """Returns ``parts`` if their graphs equal ``full_graph``'s and have the sequence in dim 1 throughout.

    Raises ``RequestError`` otherwise.
    """
    total = sum(lengths)
    for part, length in zip(parts, lengths, strict=True):
        alike = _calls(part) == _calls(full_graph)
        for a, b in zip(full_graph.nodes, part.nodes, strict=False):
            if not (alike and _fits(a, b, length, total)):
                text = f"{a.target!r} has unexpected shapes in a piece of {length} positions"
                why = "dim 1 must be the sequence everywhere"
                raise RequestError((Problem("model", f"{text}; {why}", f"{KEY}=1"),))
    return parts


def _calls(graph: Graph) -> list[tuple[str, str, str]]:
    return [(n.name, n.kind, n.target) for n in graph.nodes]


def _fits(full: Node, piece: Node, length: int, total: int) -> bool:
    """Returns true if ``piece`` has the shapes of ``full``, but ``length`` positions, not ``total``."""
    if full.kind == "param" or full.out is None:
        return True
    expected = []
    for t in full.out:
        sequence = len(t.shape) > 1 and t.shape[1] <= total
        expected.append(shortened(t, length, total) if sequence else t)
    return tuple(expected) == piece.out
