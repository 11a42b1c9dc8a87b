"""A graph as tables of costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph, OpNode, Ref, Value
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.search.cost import (
    CostModel,
    Layouts,
    StepCost,
    made,
    move_cost,
    node_cost,
    port,
    stored_cost,
    uses,
)
from launcher.extras.device_matrix.search.elimination import Array, Eliminator, Scoped, Table
from launcher.extras.device_matrix.search.variables import State, Variables


class MoveTable:
    """A table with one axis for each of ``sizes``, in which layouts are numbered."""

    def __init__(self, value: Value, model: CostModel, sizes: Sequence[int]) -> None:
        self.value, self.model, self.sizes = value, model, sizes
        self.layouts: list[TensorLayout] = []
        self._number: dict[TensorLayout, int] = {}

    def states(self, layouts: Sequence[TensorLayout], axis: int | None) -> Array:
        """Returns the numbers of the layouts of the states along ``axis``; ``None``: one layout for all."""
        numbers = np.array([self._add(x) for x in layouts])
        return numbers.reshape([-1 if i == axis else 1 for i in range(len(self.sizes))])

    def priced(
        self, source: Array, ways: Sequence[Array], written: TensorLayout | None, *, last_only: bool
    ) -> tuple[Array, Array]:
        """Returns the seconds, and bytes kept on a rank, of the moves of a value made as ``source``.

        They are those of ``value_cost``. ``last_only``: only the move to the last of ``ways``; terms of a sum
        then rest, summed, in the layout in which they are made.
        """
        first = ways[0] if ways and not last_only else source
        rest = self.states([written], None) if written else self._settled(source, first)
        seconds, memory = np.zeros(self.sizes), np.zeros(self.sizes)
        moves = [] if last_only else [(source, rest, np.True_)]
        for i, way in enumerate(ways):
            new = np.True_
            for earlier in ways[:i]:
                new = new & (earlier != way)
            if not last_only or i == len(ways) - 1:
                moves.append((rest, way, new))
        for a, b, new in moves:
            cost, kept = self._moves(a, b)
            seconds += np.where(new, cost, 0)
            memory += np.where(new, kept, 0)
        return seconds, memory

    def _add(self, layout: TensorLayout) -> int:
        if layout not in self._number:
            self._number[layout] = len(self.layouts)
            self.layouts.append(layout)
        return self._number[layout]

    def _settled(self, source: Array, first: Array) -> Array:
        """Returns the layout at rest of each source; a sum of terms rests as it is first taken."""
        partial = np.array([bool(x.partial) for x in self.layouts])[source]
        summed = np.array([self._add(x.summed().canonical) for x in list(self.layouts)])
        return np.where(partial, summed[first], source)

    def _moves(self, src: Array, dst: Array) -> tuple[Array, Array]:
        src, dst = np.broadcast_arrays(src, dst)
        pairs, place = np.unique(src.astype(np.int64) * len(self.layouts) + dst, return_inverse=True)
        costs = [move_cost(*self._pair(int(p)), self.value, self.model) for p in pairs]
        seconds = np.array([c.predicted for c in costs])[place].reshape(src.shape)
        return seconds, np.array([c.memory.total for c in costs], dtype=float)[place].reshape(src.shape)

    def _pair(self, pair: int) -> tuple[TensorLayout, TensorLayout]:
        a, b = divmod(pair, len(self.layouts))
        return self.layouts[a], self.layouts[b]


SHARED = 1 << 18
"""The largest table over all users of a value.

Users that take a value in one layout share a move. Above this size, only neighbors are compared for that.
"""


@dataclass(frozen=True, eq=False)
class OperatorClass:
    """A class of equal operators with the same candidates; ``number`` identifies it."""

    number: int
    node: OpNode
    rule: OpRule | None
    candidates: tuple[OpStrategy, ...]

    def ports(self, place: int, dims: int) -> tuple[TensorLayout, ...]:
        return tuple(port(self.rule, s, place, dims) for s in self.candidates)

    def made(self, place: int, dims: int) -> tuple[TensorLayout, ...]:
        return tuple(made(self.rule, s, place, dims) for s in self.candidates)


@dataclass(frozen=True)
class Priced:
    """Tables of seconds, and of bytes on a rank, over the variables ``scope``; they count ``weight`` times.

    ``key`` identifies their origin.
    """

    scope: tuple[int, ...]
    key: int
    seconds: Array
    memory: Array
    weight: int


Maker = tuple[int, int, OperatorClass]
"""The origin of a value: the node that makes it, the place among its outputs, and its class."""


class Pricer:
    """Computes the tables of one graph, each only once, whichever candidates are tried."""

    def __init__(
        self,
        graph: OpGraph,
        rules: Sequence[OpRule | None],
        model: CostModel,
        fixed: Layouts,
        weights: Sequence[int] | None = None,
    ) -> None:
        """``weights``: the number of operators that each one of the graph counts for; by default 1."""
        self.graph, self.rules, self.model, self.fixed = graph, rules, model, fixed
        self.weights = weights or [1] * len(graph.nodes)
        self.shared = Eliminator()
        self._of: Sequence[int] = ()
        self._classes: dict[object, OperatorClass] = {}
        self._columns: dict[int, tuple[tuple[OpStrategy, ...], ...]] = {}
        self._menus: dict[tuple[State, ...], tuple[State, ...]] = {}
        self._hold: list[object] = []
        self._numbers: dict[object, int] = {}
        self._weighted: dict[object, Table] = {}
        self._known: dict[int, tuple[Array, Array]] = {}

    @cached_property
    def uses(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        return uses(self.graph)

    @cached_property
    def makers(self) -> Mapping[int, int]:
        """The node that makes each value."""
        return {v: at for at, node in enumerate(self.graph.nodes) for v in node.outs}

    @cached_property
    def signatures(self) -> tuple[int, ...]:
        """A number for each node, the same for equal operators on tensors of equal shapes and dtypes."""
        numbers: dict[object, int] = {}
        return tuple(
            numbers.setdefault(signature(self.graph, node), len(numbers)) for node in self.graph.nodes
        )

    def _number(self, *key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def equal(self, menus: Sequence[tuple[State, ...]]) -> list[tuple[State, ...]]:
        """Returns ``menus`` with equal ones as one object, because caches identify menus by ``id``."""
        return [self._menus.setdefault(m, m) for m in menus]

    def columns(self, menu: tuple[State, ...]) -> tuple[tuple[OpStrategy, ...], ...]:
        """Returns the strategies of each member in all states of a menu."""
        if id(menu) not in self._columns:
            self._columns[id(menu)] = tuple(zip(*menu, strict=True))
            self._hold.append(menu)
        return self._columns[id(menu)]

    def classes(self, candidates: Sequence[tuple[OpStrategy, ...]]) -> tuple[OperatorClass, ...]:
        out = []
        for at, (node, rule, mine) in enumerate(zip(self.graph.nodes, self.rules, candidates, strict=True)):
            key = self.signatures[at], id(mine)  # the id stays valid, because _hold keeps a reference
            op_class = self._classes.get(key)
            if op_class is None:
                same = self._classes.get((self.signatures[at], mine))
                op_class = same or OperatorClass(len(self._classes), node, rule, mine)
                self._classes[key] = self._classes[self.signatures[at], mine] = op_class
                self._hold.append(mine)
            out.append(op_class)
        return tuple(out)

    def priced(self, classes: Sequence[OperatorClass], of: Sequence[int]) -> list[Priced]:
        """Returns tables whose sum is the cost of the graph; ``of[n]`` is the variable of node n."""
        self._of = of
        out = [self._of_node(at, op_class) for at, op_class in enumerate(classes)]
        for at, (node, op_class) in enumerate(zip(self.graph.nodes, classes, strict=True)):
            for place, v in enumerate(node.outs):
                out += self._of_value(v, classes, (at, place, op_class))
        for v in self.graph.inputs:
            if v in self.fixed.rest:
                out += self._of_value(v, classes, None)
        for name, v in self.graph.params:
            out += (
                self._of_value(v, classes, None)
                if name in self.graph.buffers
                else self._of_parameter(v, classes)
            )
        return out

    def _of_node(self, at: int, op_class: OperatorClass) -> Priced:
        key = self._number("node", op_class.number)
        if key not in self._known:
            costs = [
                node_cost(self.graph, op_class.node, op_class.rule, s, self.model)
                for s in op_class.candidates
            ]
            self._known[key] = _arrays(costs, (len(costs),))
        return Priced((self._of[at],), key, *self._known[key], self.weights[at])

    def _of_value(self, v: int, classes: Sequence[OperatorClass], producer: Maker | None) -> list[Priced]:
        """Returns the moves of a value: in one table over all users if it is small, else over neighbors."""
        users = list(self.uses.get(v, ()))
        states = prod(len(classes[at].candidates) for at in self._one_each(at for at, _ in users))
        states *= len(producer[2].candidates) if producer else 1
        if states <= SHARED or len(users) < 3:
            return self._moves(v, classes, producer, users)
        out = self._moves(v, classes, producer, users[:1])
        for i in range(1, len(users)):
            out += self._moves(v, classes, producer, users[i - 1 : i + 1], last_only=True)
        return out

    def _moves(
        self,
        v: int,
        classes: Sequence[OperatorClass],
        producer: Maker | None,
        users: Sequence[tuple[int, int]],
        last_only: bool = False,
    ) -> list[Priced]:
        """Returns the table of the moves of value ``v`` to all ``users``; none if these cost nothing.

        ``last_only``: only the move to the last user, which costs nothing if an earlier one takes it so too.
        """
        value, dims = self.graph.values[v], len(self.graph.values[v].shape)
        leave = None if last_only else self.fixed.leave.get(v)
        if not users and leave is None and v not in self.graph.outputs:
            return []
        nodes = [*(at for at, _ in users), *([producer[0]] if producer else ())]
        scope, axis, sizes = self._scope(nodes, classes)
        key = self._number(
            "value", value, leave, last_only, self.fixed.rest.get(v),
            (axis[producer[0]], producer[1], producer[2].number) if producer else None,
            tuple((axis[at], place, classes[at].number) for at, place in users),
        )  # fmt: skip
        if key not in self._known:
            moves = MoveTable(value, self.model, sizes)
            written = self.fixed.rest.get(v)
            if producer is None:
                assert written is not None
                source = moves.states([written], None)
            else:
                source = moves.states(producer[2].made(producer[1], dims), axis[producer[0]])
            ways = [moves.states(classes[at].ports(place, dims), axis[at]) for at, place in users]
            ways += [moves.states([leave], None)] if leave is not None else []
            self._known[key] = moves.priced(source, ways, written, last_only=last_only)
        seconds, memory = self._known[key]
        weight = self.weights[producer[0]] if producer else 1
        return [Priced(scope, key, seconds, memory, weight)] if seconds.any() or memory.any() else []

    def _of_parameter(self, v: int, classes: Sequence[OperatorClass]) -> list[Priced]:
        """Returns the tables of a parameter, which rests in the layout of its first user.

        If the table over all users is too large, each user is paired with the first one.
        """
        users = list(self.uses.get(v, ()))
        if not users:
            return []
        nodes = self._one_each(at for at, _ in users)
        states = prod(len(classes[at].candidates) for at in nodes)
        if states <= SHARED or len(nodes) < 3:
            return [self._stored(v, classes, users)]
        return [self._stored(v, classes, [users[0], user]) for user in users[1:]]

    def _stored(self, v: int, classes: Sequence[OperatorClass], users: Sequence[tuple[int, int]]) -> Priced:
        value, written = self.graph.values[v], self.fixed.rest.get(v)
        scope, axis, sizes = self._scope([at for at, _ in users], classes)
        places = tuple((axis[at], place, classes[at].number) for at, place in users)
        key = self._number("parameter", value, written, places)
        if key not in self._known:
            ports = [(axis[at], classes[at].ports(place, len(value.shape))) for at, place in users]
            costs = [
                stored_cost(value, tuple(layouts[states[i]] for i, layouts in ports), written, self.model)
                for states in np.ndindex(*sizes)
            ]
            self._known[key] = _arrays(costs, tuple(sizes))
        return Priced(scope, key, *self._known[key], self.weights[users[0][0]])

    def _scope(
        self, nodes: Sequence[int], classes: Sequence[OperatorClass]
    ) -> tuple[tuple[int, ...], dict[int, int], list[int]]:
        """Returns the variables of ``nodes``, each node's place among them, and their numbers of states."""
        scope = tuple(sorted({self._of[at] for at in nodes}))
        sizes = {self._of[at]: len(classes[at].candidates) for at in nodes}
        return scope, {at: scope.index(self._of[at]) for at in nodes}, [sizes[x] for x in scope]

    def _one_each(self, nodes: Iterable[int]) -> list[int]:
        """Returns one node for each variable."""
        return list({self._of[at]: at for at in nodes}.values())

    def scoped(self, priced: Sequence[Priced], second: float, byte: float) -> list[Scoped]:
        """Returns the tables for the eliminator; ``second`` and ``byte``: weights of a second and a byte."""
        out = []
        for p in priced:
            key = p.key, p.weight, second, byte
            if key not in self._weighted:
                costs = p.weight * (second * p.seconds + byte * p.memory)
                self._weighted[key] = self.shared.table(("priced", *key), costs)
            out.append(Scoped(p.scope, self._weighted[key]))
        return out


def signature(graph: OpGraph, node: OpNode) -> object:
    """Returns a key that is equal for nodes which do the same with tensors of the same shapes and dtypes."""
    first: dict[int, int] = {}

    def plain(arg: object) -> object:
        if isinstance(arg, Ref):
            return "ref", first.setdefault(arg.value, len(first)), graph.values[arg.value]
        if isinstance(arg, tuple):
            return tuple(plain(a) for a in arg)
        return type(arg).__name__, arg

    args = tuple(plain(a) for a in node.args), tuple((k, plain(a)) for k, a in node.kwargs)
    return node.op, args, tuple(graph.values[v] for v in node.outs)


def _arrays(costs: Sequence[StepCost], sizes: tuple[int, ...]) -> tuple[Array, Array]:
    seconds = np.array([c.predicted for c in costs]).reshape(sizes)
    return seconds, np.array([c.memory.total for c in costs], dtype=float).reshape(sizes)


Menus = Sequence[tuple[State, ...]]
"""The states that each variable may have."""


@dataclass(frozen=True)
class Assignment:
    """One state for each variable, at ``places`` of the menus, with seconds of a step and bytes on a rank."""

    states: tuple[State, ...]
    places: tuple[int, ...]
    seconds: float
    memory: float

    def strategies(self, variables: Variables) -> tuple[OpStrategy, ...]:
        by_node: list[OpStrategy] = [OpStrategy((1,))] * len(variables.of)
        for variable, state in zip(variables.all, self.states, strict=True):
            for at, strategy in zip(variable.members, state, strict=True):
                by_node[at] = strategy
        return tuple(by_node)


@dataclass(frozen=True)
class VariableSearch:
    """A search among ``menus``; ``priced``: their tables of costs."""

    pricer: Pricer
    menus: Menus
    priced: Sequence[Priced]

    def cheapest(self, byte: float = 0.0, second: float = 1.0) -> Assignment:
        """Returns the choice with the lowest sum of ``second`` per second and ``byte`` per byte on a rank."""
        scoped = self.pricer.scoped(self.priced, second, byte)
        return self.at(self.pricer.shared.solve([len(m) for m in self.menus], scoped))

    def at(self, picked: Sequence[int]) -> Assignment:
        """Returns the choice of these places in the menus."""
        states = tuple(menu[i] for menu, i in zip(self.menus, picked, strict=True))
        seconds = memory = 0.0
        for p in self.priced:
            place = tuple(picked[x] for x in p.scope)
            seconds += p.weight * float(p.seconds[place])
            memory += p.weight * float(p.memory[place])
        return Assignment(states, tuple(picked), seconds, memory)

    def swapped(self, choice: Assignment, limit: float) -> Assignment:
        """Improves ``choice``: each variable in turn gets its cheapest state that still fits, twice."""
        tables: list[list[Priced]] = [[] for _ in self.menus]
        for p in self.priced:
            for x in p.scope:
                tables[x].append(p)
        places, room = list(choice.places), limit - choice.memory
        for x in [*range(len(places)), *range(len(places))]:
            seconds, memory = np.zeros(len(self.menus[x])), np.zeros(len(self.menus[x]))
            for p in tables[x]:
                row = tuple(slice(None) if y == x else places[y] for y in p.scope)
                seconds += p.weight * p.seconds[row]
                memory += p.weight * p.memory[row]
            fits = memory - memory[places[x]] <= room
            best = int(np.where(fits, seconds, np.inf).argmin())
            if seconds[best] < seconds[places[x]]:
                room -= memory[best] - memory[places[x]]
                places[x] = best
        return self.at(places)


def search(pricer: Pricer, variables: Variables, menus: Menus) -> VariableSearch:
    aligned: list[tuple[OpStrategy, ...]] = [()] * len(variables.of)
    for variable, menu in zip(variables.all, menus, strict=True):
        columns = pricer.columns(menu)
        for place, at in enumerate(variable.members):
            aligned[at] = columns[place]
    return VariableSearch(pricer, menus, pricer.priced(pricer.classes(aligned), variables.of))
