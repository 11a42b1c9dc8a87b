"""The variables of the search: single operators, or groups of light ones that are cut in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.search.candidates import (
    Cuts,
    Dims,
    DisjointSets,
    candidate_cuts,
    followed,
    strategy,
)
from launcher.extras.device_matrix.search.operator_work import PRODUCTS

State = tuple[OpStrategy, ...]
"""A state of a variable: a strategy for each of its members."""

MemberDims = tuple[tuple[tuple[str, str], ...], ...]
"""The letters of each member, with the name that each has among the letters of the variable."""


@dataclass(frozen=True)
class Variable:
    """Nodes (``members``) that are cut in the same way.

    ``letters``: the dims that all members have, with the number that slices have to divide. ``dims``: the
    letters of each member. ``fixed``: the only state, if the strategy is written.
    """

    members: tuple[int, ...]
    letters: tuple[tuple[str, int], ...]
    dims: MemberDims
    fixed: State | None = None

    def state(self, cuts: Cuts, ranks: int) -> State:
        """Returns the state with these cuts, outermost first; the rest of the ranks repeats."""
        return self.fixed if self.fixed is not None else _state(self.dims, cuts, ranks)

    def states(self, ranks: int, bounds: frozenset[int] | None = None) -> tuple[State, ...]:
        """Returns all states, those of ``candidate_cuts``."""
        return (self.fixed,) if self.fixed is not None else _states(self.letters, self.dims, ranks, bounds)

    def cuts(self, state: State) -> Cuts:
        """Returns the number of slices of each letter in ``state``."""
        name = dict(self.dims[0])
        ways = {name[x]: prod(state[0].matrix[a] for a in axes) for x, axes in state[0].axes if x in name}
        return tuple((x, ways[x]) for x, _ in self.letters if ways.get(x, 1) > 1)


@lru_cache(maxsize=1 << 16)
def _state(dims: MemberDims, cuts: Cuts, ranks: int) -> State:
    return tuple(_restricted(strategy(cuts, ranks), names) for names in dims)


@lru_cache(maxsize=1 << 12)
def _states(
    letters: tuple[tuple[str, int], ...], dims: MemberDims, ranks: int, bounds: frozenset[int] | None
) -> tuple[State, ...]:
    return tuple(_state(dims, cuts, ranks) for cuts in candidate_cuts(letters, ranks, bounds))


def _restricted(common: OpStrategy, dims: tuple[tuple[str, str], ...]) -> OpStrategy:
    """Restricts a strategy of the variable to the letters of one member."""
    axes = tuple((letter, common.of[dim]) for letter, dim in dims if dim in common.of)
    return OpStrategy(common.matrix, tuple(sorted(axes, key=lambda item: item[1])))


@dataclass(frozen=True)
class Variables:
    """The variables of a graph; ``of[n]`` is the number of the variable of node n."""

    all: tuple[Variable, ...]
    of: tuple[int, ...]
    dims: tuple[Dims, ...]


def variables(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    dims: tuple[Dims, ...],
    written: Mapping[int, OpStrategy],
    *,
    together: bool,
) -> Variables:
    """Returns a variable for each operator; with ``together``, light neighbors in a module share one."""
    constant = constants(graph)
    uncut = {at for at, rule in enumerate(rules) if rule is None or at in constant}
    alone = uncut | written.keys()

    # the root of a group represents it
    groups = DisjointSets()
    if together:
        _join_light(graph, rules, alone, groups)
    members: dict[object, list[int]] = {}
    for at in range(len(graph.nodes)):
        members.setdefault(groups.root(at), []).append(at)

    every = []
    of = [0] * len(graph.nodes)
    for number, mine in enumerate(sorted(members.values())):
        for at in mine:
            of[at] = number
        if mine[0] in written:
            every.append(Variable((mine[0],), (), ((),), (written[mine[0]],)))
        elif mine[0] in uncut:
            every.append(Variable((mine[0],), (), ((),)))
        else:
            every.append(_variable(mine, rules, dims))
    return Variables(tuple(every), tuple(of), dims)


def _variable(members: Sequence[int], rules: Sequence[OpRule | None], dims: Sequence[Dims]) -> Variable:
    sizes: dict[int, int] = {}
    seen: dict[int, int] = {}
    named = []
    for at in members:
        rule = rules[at]
        assert rule is not None
        mine: dict[int, str] = {}
        twice = {}
        for letter, n in rule.sizes:
            if dims[at][letter] in mine:  # the same dim a second time, as places of queries and of keys
                twice[letter] = f"{dims[at][letter]:06d}{letter}"
                continue
            mine[dims[at][letter]] = letter
            sizes[dims[at][letter]] = gcd(sizes.get(dims[at][letter], 0), n)
            seen[dims[at][letter]] = seen.get(dims[at][letter], 0) + 1
        named.append(
            {letter: f"{dim:06d}" for dim, letter in mine.items()} | (twice if len(members) == 1 else {})
        )

    # a dim that some members do not have is not cut
    kept = {f"{dim:06d}": n for dim, n in sizes.items() if seen[dim] == len(members) and n > 1}
    if len(members) == 1:
        size = rules[members[0]].size  # type: ignore[union-attr]
        kept |= {name: size[x] for x, name in named[0].items() if name not in kept and size[x] > 1}
    # letters are numbered per variable, so that equal variables of equal layers have the same states
    number = {name: f"{i:02d}" for i, name in enumerate(sorted(kept))}
    letters = tuple((number[name], kept[name]) for name in sorted(kept))
    own = tuple(tuple((x, number[d]) for x, d in names.items() if d in kept) for names in named)
    return Variable(tuple(members), letters, own)


def _join_light(
    graph: OpGraph, rules: Sequence[OpRule | None], alone: Set[int], groups: DisjointSets
) -> None:
    """Joins neighbors in one module that neither multiply matrices, nor reduce dims, nor take parameters."""
    params = {v for _, v in graph.params}
    maker: dict[int, int] = {}
    for at, (node, rule) in enumerate(zip(graph.nodes, rules, strict=True)):
        light = (
            rule is not None
            and at not in alone
            and node.kind not in PRODUCTS
            and not (rule.sums or rule.inside or params.intersection(node.ins))
        )
        if not light:
            continue
        for v in node.ins:
            if v in maker and graph.nodes[maker[v]].module == node.module:
                groups.join(maker[v], at)
        maker.update(dict.fromkeys(node.outs, at))


def constants(graph: OpGraph) -> frozenset[int]:
    """Returns the nodes that depend on no input and no parameter: every rank makes their full outputs."""
    dependent = {*graph.inputs, *(v for _, v in graph.params)}
    out = set()
    for at, node in enumerate(graph.nodes):
        if dependent.intersection(node.ins):
            dependent.update(node.outs)
        else:
            out.add(at)
    return frozenset(out)


def as_written(
    variables: Variables, rules: Sequence[OpRule | None], written: Mapping[int, OpStrategy]
) -> list[tuple[State, ...]]:
    """Returns the states of each variable that follow written strategies, whatever their order of axes."""
    sources = list(dict.fromkeys((s, tuple(variables.dims[at].items())) for at, s in sorted(written.items())))
    out = []
    for variable in variables.all:
        states: dict[State, None] = {}
        for source, dims in sources if variable.fixed is None else ():
            members = [(rules[at], variables.dims[at]) for at in variable.members]
            states[tuple(followed(source, dict(dims), r, d) for r, d in members if r is not None)] = None
        out.append(tuple(states))
    return out


def neighbors(variable: Variable, cuts: Cuts, ranks: int) -> tuple[State, ...]:
    """Returns the states that differ by one prime factor, which moves between two letters or repetition."""
    if variable.fixed is not None:
        return ()
    return _neighbors(variable.letters, variable.dims, cuts, ranks)


@lru_cache(maxsize=1 << 14)
def _neighbors(
    letters_of: tuple[tuple[str, int], ...], dims: MemberDims, cuts: Cuts, ranks: int
) -> tuple[State, ...]:
    size = dict(letters_of)
    ways = dict(cuts)
    out: dict[State, None] = {}
    letters = ["", *size]
    for source in letters:
        for target in letters:
            if source == target:
                continue
            have = ways.get(source, 1) if source else ranks // prod(ways.values())
            for p in primes(have):
                moved = dict(ways)
                if source:
                    moved[source] = have // p
                if target:
                    moved[target] = moved.get(target, 1) * p
                if all(size[x] % n == 0 for x, n in moved.items()):
                    new = tuple((x, moved[x]) for x in size if moved.get(x, 1) > 1)
                    out[_state(dims, new, ranks)] = None
    return tuple(out)


def primes(n: int) -> tuple[int, ...]:
    """Returns the distinct prime factors, in ascending order."""
    out, p = [], 2
    while n > 1:
        if n % p == 0:
            out.append(p)
            while n % p == 0:
                n //= p
        p += 1
    return tuple(out)
