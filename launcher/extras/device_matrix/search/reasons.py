"""Explains why operators got their strategies, with one line for equal ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_rule import OpStrategy
from launcher.extras.device_matrix.redistribution import redistribution
from launcher.extras.device_matrix.search.candidates import Dims, dims_of_model, ordered, strategy
from launcher.extras.device_matrix.search.cost import (
    StepCost,
    made,
    node_cost,
    parameter_cost,
    port,
    redistribution_cost,
    value_cost,
)
from launcher.extras.device_matrix.search.operator_work import PRODUCTS
from launcher.extras.device_matrix.search.repeats import unnumbered
from launcher.extras.device_matrix.search.tables import Pricer
from launcher.extras.device_matrix.search.variables import constants
from launcher.plan.values.dtypes import WIDTH
from launcher.plan.values.text import bytes_text, many, seconds_text

COLLECTIVES = {
    "all_gather": "an all-gather", "all_to_all": "an all-to-all", "reduce_scatter": "a reduce-scatter",
    "all_reduce": "an all-reduce", "exchange": "an exchange", "slice": "a slice",
}  # fmt: skip

CLASSIFYING = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
"""Kinds in which the letter c stands for classes."""


@dataclass(frozen=True)
class _Term:
    """A part of the cost of an operator: that of one value that it takes or makes."""

    value: int
    cost: StepCost
    text: str
    nbytes: float


@dataclass(frozen=True)
class Reason:
    """Why equal operators of ``modules`` modules called ``name`` got their strategy.

    ``light``: the number of operators, if they are light ones. ``text``: the strategy and its advantage.
    """

    name: str
    modules: int
    light: str
    text: str

    def __str__(self) -> str:
        count = f" ({self.modules})" if self.modules > 1 else ""
        return f"inferred: {self.name}{count}{self.light}: {self.text}"


def merged(reasons: Iterable[Reason]) -> Iterator[Reason]:
    """Yields the reasons of several stages, with equal ones merged, in order of first occurrence."""
    modules: dict[tuple[str, str, str], int] = {}
    for r in reasons:
        modules[r.name, r.light, r.text] = modules.get((r.name, r.light, r.text), 0) + r.modules
    for (name, light, text), count in modules.items():
        yield Reason(name, count, light, text)


class Reasons:
    """The reasons for one solution."""

    def __init__(self, pricer: Pricer, strategies: Sequence[OpStrategy]) -> None:
        self.pricer, self.strategies = pricer, strategies
        self.graph, self.rules = pricer.graph, pricer.rules
        self.dims = dims_of_model(self.graph, self.rules)
        self.names = _names(pricer, self.dims)
        self._params = {v for _, v in self.graph.params}

    def of_unwritten(self, written: Mapping[int, OpStrategy]) -> Iterator[Reason]:
        """Yields the reasons of operators without a written strategy, in the order of their first run."""
        groups: dict[tuple[str, str, str, bool], list[int]] = {}
        constant = constants(self.graph)
        for at, node in enumerate(self.graph.nodes):
            rule = self.rules[at]
            if at in written or at in constant or rule is None or not self.dims[at]:
                continue
            main = self._main(at)
            key = (
                unnumbered(node.module),
                node.kind if main else "",
                self.words(at),
                main,
            )
            groups.setdefault(key, []).append(at)
        for (module, kind, words, main), nodes in groups.items():
            modules = len({self.graph.nodes[at].module for at in nodes})
            if not main:
                light = many(len(nodes) // modules, "light operator")
                yield Reason(module or "the model", modules, f", {light}", words)
                continue
            several = any(k[0] == module and k[3] and k[1] != kind for k in groups)
            operator = f"{module}.{kind}" if module and several else module or kind
            yield Reason(operator, modules, "", words + self.why(nodes[len(nodes) // 2]))

    def words(self, at: int, chosen: OpStrategy | None = None) -> str:
        """Describes a strategy: ``batch 4 x columns 2``, or one word if all ranks cut the same letter."""
        chosen = chosen or self.strategies[at]
        cuts = [(self._word(at, x), prod(chosen.matrix[a] for a in axes)) for x, axes in chosen.axes if axes]
        ranks = prod(chosen.matrix)
        return " x ".join(w if n == ranks else f"{w} {n}" for w, n in cuts) or "whole"

    def why(self, at: int) -> str:
        """Describes the extra cost of the best other strategy of operator ``at``, all else being equal."""
        here = self._terms(at, self.strategies[at])
        others = []
        for other in self._others(at):
            there = self._terms(at, other)
            others.append((sum(t.cost.predicted for t in there) - sum(t.cost.predicted for t in here), there))
        if not others:
            return ""
        more, there = min(others, key=lambda item: item[0])
        if more <= 0:
            return ""
        mine = {t.value: t for t in here}
        grown = [(t.cost.predicted - mine[t.value].cost.predicted, i) for i, t in enumerate(there)]
        worst = there[max(grown)[1]]
        if not worst.text:
            return f", saves {seconds_text(more)} of computation"
        return f", saves {worst.text} of {bytes_text(worst.nbytes)}"

    def _main(self, at: int) -> bool:
        rule, node = self.rules[at], self.graph.nodes[at]
        assert rule is not None
        takes_params = not self._params.isdisjoint(node.ins)
        return node.kind in PRODUCTS or takes_params or bool(rule.sums or rule.inside)

    def _word(self, at: int, letter: str) -> str:
        rule, node = self.rules[at], self.graph.nodes[at]
        assert rule is not None
        if node.kind in PRODUCTS and letter in rule.sums:
            return "rows"
        new = rule.outs[0] and letter == rule.outs[0][-1] and letter not in rule.ins[0]
        if node.kind in PRODUCTS and new:
            return "columns"
        if node.kind == "embedding" and letter in rule.ins[0]:
            return "rows" if letter == rule.ins[0][0] else "columns"
        if node.kind in CLASSIFYING and letter == "c":
            return "classes"
        name = self.names.get(self.dims[at][letter])
        if name is not None:
            return name
        places = [
            (d, len(tensor))
            for tensor in (*rule.outs, *rule.ins)
            for d, x in enumerate(tensor)
            if x == letter
        ]
        dim, dims = places[0]
        return "features" if dims in (2, 3) and dim == dims - 1 else f"dim {dim}"

    def _others(self, at: int) -> list[OpStrategy]:
        """Returns the alternatives: all ranks along one letter, or no cut, if their description differs."""
        rule = self.rules[at]
        assert rule is not None
        ranks = self.strategies[at].ranks
        letters = [((x, ranks),) for x, n in ordered(rule, self.dims[at]) if n % ranks == 0]
        every = [strategy(cuts, ranks) for cuts in (*letters, ())]
        return [s for s in every if self.words(at, s) != self.words(at)]

    def _terms(self, at: int, chosen: OpStrategy) -> list[_Term]:
        """Returns the costs of operator ``at`` with strategy ``chosen``: its own (-1), and its values'."""
        node, rule, model = self.graph.nodes[at], self.rules[at], self.pricer.model
        out = [_Term(-1, node_cost(self.graph, node, rule, chosen, model), "", 0)]
        named = {v for name, v in self.graph.params if name not in self.graph.buffers}
        for v in dict.fromkeys((*node.ins, *node.outs)):
            value, ways = self.graph.values[v], []
            for user, place in self.pricer.uses.get(v, ()):
                how = chosen if user == at else self.strategies[user]
                ways.append(port(self.rules[user], how, place, len(value.shape)))
            ways += [self.pricer.fixed.leave[v]] if v in self.pricer.fixed.leave else []
            if v in named:
                own = ways[0]
                cost = parameter_cost(own, value, model)
                text, nbytes = self._moved(own, own.summed().canonical, v)
                out.append(_Term(v, cost, text and f"{text} of gradients", nbytes))
                continue
            source = self._source(v, at, chosen)
            if source is None:
                continue
            cost = value_cost(value, source, ways, self.pricer.fixed.rest.get(v), model)
            mine = next(
                (w for w, (user, _) in zip(ways, self.pricer.uses.get(v, ()), strict=False) if user == at),
                None,
            )
            text, nbytes = self._largest(source, mine or (ways[0] if ways else source.summed()), v)
            out.append(_Term(v, cost, text, nbytes))
        return out

    def _source(self, v: int, at: int, chosen: OpStrategy) -> TensorLayout | None:
        maker = self.pricer.makers.get(v)
        if maker is None:
            return self.pricer.fixed.rest.get(v)
        how = chosen if maker == at else self.strategies[maker]
        place = self.graph.nodes[maker].outs.index(v)
        return made(self.rules[maker], how, place, len(self.graph.values[v].shape))

    def _largest(self, source: TensorLayout, way: TensorLayout, v: int) -> tuple[str, float]:
        """Returns the larger of two moves: that of the value and that of its gradient."""
        there = self._moved(source, way.summed().canonical, v)
        if not self.graph.values[v].trains:
            return there
        return max(there, self._moved(way, source.summed().canonical, v), key=lambda item: item[1])

    def _moved(self, src: TensorLayout, dst: TensorLayout, v: int) -> tuple[str, float]:
        value = self.graph.values[v]
        itemsize = WIDTH[value.spec.dtype]
        if src.canonical == dst.canonical:
            return "", 0
        elements, _ = redistribution_cost(src.canonical, dst.canonical, value.shape, itemsize)
        steps = redistribution(src.canonical, dst.canonical, value.shape, itemsize).steps
        step = max(steps, key=lambda s: s.elements)
        return (COLLECTIVES[step.op], elements * itemsize) if elements else ("", 0)


def _names(pricer: Pricer, dims: Sequence[Dims]) -> dict[int, str]:
    """Returns the names of dims of the model that have one: those of the inputs, and heads."""
    out: dict[int, str] = {}
    for at, node in enumerate(pricer.graph.nodes):
        rule = pricer.rules[at]
        if rule is None:
            continue
        if node.kind == "scaled_dot_product_attention" and len(rule.ins[0]) > 3 and rule.ins[0][-3]:
            out.setdefault(dims[at][rule.ins[0][-3]], "heads")
        for v, letters in zip(node.ins, rule.ins, strict=True):
            if v not in pricer.graph.inputs:
                continue
            for name, letter in zip(("batch", "sequence"), letters[: max(1, len(letters))], strict=False):
                if letter and (name == "batch" or _positions(pricer, v)):
                    out.setdefault(dims[at][letter], name)
    return out


def _positions(pricer: Pricer, v: int) -> bool:
    """Returns true if dim 1 of an input is a sequence: the input contains token ids, or vectors."""
    value = pricer.graph.values[v]
    return len(value.shape) == 3 or (len(value.shape) == 2 and value.spec.dtype.startswith("int"))
