"""The names whose values a model's code uses for more than to keep or to print them.

A count, a meter or a table of statistics that code only writes, prints and stores changes no results:
``STATS[self.name] = x.norm().item()``, ``self.calls += 1``,
``if self.calls % 10 == 0: RECORDS.append(x.mean())``.

A name is a global variable or an attribute, of any object. The source of a function tells what flows where:
from the names of an expression to the variable, attribute or container in which its value is stored. A name
is used if its value reaches anything else: a result, a call, a condition around such code. Without the
source, all names of a function are used.
"""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any, TypeGuard

import torch
from torch.nn import functional as F

from launcher.parallel.model_state.library_attributes import names_read

FILLS = frozenset({"add", "append", "appendleft", "clear", "discard", "extend", "insert", "remove", "update"})
"""Methods of Python's containers that store their arguments in them, and return nothing."""

NOT_CONTAINERS = ("np", "numpy", "torch")

PRINTS = frozenset({"print", "debug", "info", "warning", "error", "critical", "exception", "log"})
"""Functions and methods of loggers that only print their arguments."""

_PYTHON = "abs all any array bool float int len max min repr round str sum time perf_counter monotonic"
_HOLDS = ("_", "apply", "backward", "map", "register", "requires", "retain", "set", "share")
COMPUTES = frozenset(
    name
    for name in {*_PYTHON.split(), *dir(math), *dir(F), *dir(torch.Tensor), *dir(torch._C._VariableFunctions)}
    if not name.startswith(_HOLDS) and not name.endswith("_")
)
"""Functions and methods that return a new value, and keep none of their arguments."""

STORES_ITEM, STORES_ATTRIBUTE = "__setitem__", "__setattr__"
ADDS = tuple(
    f"__i{n}__" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "or", "and", "xor")
)
WRITTEN = ("__init__", "__repr__", "__eq__")
LOCAL = "local "
"""Begins the name of a variable of a function; it is followed by the place of the function."""
ANY = f"{LOCAL}*"
"""An object of unknown origin, which is used."""
INSIDE = "in "
"""Begins the name of what is in a container: ``RECORDS[0][key] = x`` stores in it."""

Functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class _Flow:
    """The flow of values between the names in the code of one function.

    ``used``: names that reach anything else than a store. ``stores``: pairs of a name, and a name in which
    its value is stored. ``same``: pairs of a name, and a name of the same object. ``filled``: names of
    objects in which something is stored. ``given``: names that functions of these names are given, which may
    be the user's.
    """

    used: set[str] = field(default_factory=set)
    stores: set[tuple[str, str]] = field(default_factory=set)
    same: set[tuple[str, str]] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    given: dict[str, set[str]] = field(default_factory=dict)


def values_used(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Returns the names of variables and attributes whose values the code of ``functions`` uses.

    Variables of closures count as used. The methods that ``dataclass`` writes are left out: forwards make no
    such objects of their state.
    """
    functions = [f for f in functions if f.__code__.co_filename != "<string>" or f.__name__ not in WRITTEN]
    own = {f.__name__ for f in functions}
    flows = [_flow(f.__code__) or _Flow({*names_read([f])}) for f in functions]
    used = {ANY}.union(*(flow.used for flow in flows), *(f.__code__.co_freevars for f in functions))
    used.update(name for flow in flows for key in flow.given.keys() & own for name in flow.given[key])
    sources: dict[str, set[str]] = {}
    filled = set[str]().union(*(flow.filled for flow in flows))
    aliases = {
        (place.removeprefix(INSIDE), of.removeprefix(INSIDE))
        for flow in flows
        for place, of in flow.same
        if place in filled
    }
    for source, place in aliases.union(*(flow.stores for flow in flows)):
        sources.setdefault(place, set()).add(source)

    # what is stored in a place that is used
    queue = [*used]
    while queue:
        new = sources.get(queue.pop(), set()) - used
        used |= new
        queue += new
    return frozenset(name for name in used if not name.startswith(LOCAL))


@cache
def _flow(code: CodeType) -> _Flow | None:
    """Returns how a function's code uses names; ``None`` if its source cannot be identified."""
    nodes = _definitions(code.co_filename).get((code.co_name, code.co_firstlineno), ())
    if len(nodes) != 1 or not _all_names(code) <= _words(nodes[0]):
        return None
    reader = _Reader(f"{LOCAL}{code.co_filename}:{code.co_firstlineno} ", _locals(code))
    reader.function(nodes[0])
    return reader.flow


@cache
def _definitions(file: str) -> dict[tuple[str, int], list[Scope]]:
    """Returns the functions of a file, by name and first line."""
    out: dict[tuple[str, int], list[Scope]] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            out.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            out.setdefault((node.name, first), []).append(node)
    return out


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for c in code.co_consts:
        if isinstance(c, CodeType):
            yield from _codes(c)


def _all_names(code: CodeType) -> set[str]:
    return {name for c in _codes(code) for name in c.co_names}


def _locals(code: CodeType) -> frozenset[str]:
    return frozenset(n for c in _codes(code) for n in (*c.co_varnames, *c.co_cellvars, *c.co_freevars))


def _words(scope: ast.AST) -> set[str]:
    """Returns all names in a piece of source."""
    out: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            out.add(node.id)
        elif isinstance(node, ast.Attribute):
            out.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            out.update(part for a in node.names for part in (a.name, *a.name.split("."), a.asname or ""))
            out.add(getattr(node, "module", "") or "")
        elif isinstance(node, ast.ClassDef):
            out.update((node.name, "__name__", "__module__", "__qualname__"))
        elif isinstance(node, ast.Assert):
            out.add("AssertionError")
    return out


@dataclass
class _Reader:
    """Reads the source of one function into ``flow``."""

    prefix: str
    local: frozenset[str]
    flow: _Flow = field(default_factory=_Flow)

    def function(self, node: Scope) -> None:
        if isinstance(node, ast.Lambda):
            self._expression(node.body)
        else:
            self._body(node.body)

    # statements: each method returns where values are stored, or None if anything else happens

    def _body(self, body: Sequence[ast.stmt]) -> set[str] | None:
        each = [self._statement(s) for s in body]
        stored = [places for places in each if places is not None]
        return set[str]().union(*stored) if len(stored) == len(each) else None

    def _statement(self, node: ast.stmt) -> set[str] | None:
        if isinstance(node, ast.Pass | ast.Global | ast.Nonlocal):
            return set()
        if isinstance(node, ast.Assign):
            return self._assign(node.targets, node.value)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return self._assign([node.target], node.value)
        if isinstance(node, ast.AugAssign):
            return self._assign([node.target], node.value, ADDS)
        if isinstance(node, ast.Delete):
            return self._assign(node.targets, None)
        if isinstance(node, ast.Expr):
            return self._expression(node.value)
        if isinstance(node, ast.If | ast.While):
            return self._under([node.test], [node.body, node.orelse])
        if isinstance(node, ast.For):
            places = self._assign([node.target], node.iter)
            inner = self._under([node.iter], [node.body, node.orelse])
            return None if places is None or inner is None else places | inner
        if isinstance(node, ast.With):
            for item in node.items:
                self._use(item.context_expr)
                self._use(item.optional_vars)
            return self._body(node.body)
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                self._use(handler.type)
            handlers = [s for handler in node.handlers for s in handler.body]
            return self._body([*node.body, *handlers, *node.orelse, *node.finalbody])
        if isinstance(node, ast.FunctionDef):
            for value in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
                self._use(value)
            self._body(node.body)
            return None
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                first = alias.name if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0]
                local = self._name(alias.asname or first)
                self._store({first}, {local})
                self._store({local}, {first})
            return None
        self._use(node)
        return None

    def _under(self, tests: list[ast.expr], bodies: list[list[ast.stmt]]) -> set[str] | None:
        """Returns the places in which ``bodies`` store; the values of ``tests`` reach them too.

        Returns ``None`` if the bodies do anything else.
        """
        each = [self._body(body) for body in bodies]
        if any(places is None for places in each):
            for test in tests:
                self._use(test)
            return None
        out = set[str]().union(*(places for places in each if places is not None))
        for test in tests:
            self._store(self._names(test), out)
        return out

    def _assign(
        self, targets: Sequence[ast.expr], value: ast.expr | None, methods: Sequence[str] = ()
    ) -> set[str] | None:
        if any(isinstance(t, ast.Tuple | ast.List) for t in targets):
            return self._assign_parts(targets, value)
        places = {self._place(t) for t in targets}
        known = {p for p in places if p is not None}
        if len(known) < len(places):
            for node in (*targets, *((value,) if value is not None else ())):
                self._use(node)
            return None
        names = self._names(value)
        for target in targets:
            around = names | self._names(target)
            self._store(around - known, known)
            item = isinstance(target, ast.Subscript)
            for place in known if item or methods else ():
                self.flow.filled.update(_filled(place, target))
            kept = (STORES_ITEM if item else STORES_ATTRIBUTE, *methods)
            for name in (*kept, *(known if isinstance(target, ast.Attribute) else ())):
                self._give(name, around)
            if value is not None:
                self._alias(self._place(target) or ANY, value, item)
        return known

    def _assign_parts(self, targets: Sequence[ast.expr], value: ast.expr | None) -> set[str] | None:
        """Reads ``a, b = c, d`` as ``a = c`` and ``b = d``, and ``a, b = c`` as if both were ``c``."""
        out: set[str] | None = set()
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            whole = not isinstance(value, ast.Tuple) or not isinstance(target, ast.Tuple)
            values = value.elts if isinstance(value, ast.Tuple) and not whole else [value] * len(parts)
            if len(values) != len(parts):
                parts, values = [target], [value]
            for part, v in zip(parts, values, strict=True):
                nested = isinstance(part, ast.Starred | ast.Tuple | ast.List)
                if nested:
                    self._use(part)
                    self._use(v)
                places = None if nested else self._assign([part], v)
                out = None if places is None or out is None else out | places
        return out

    def _expression(self, node: ast.expr) -> set[str] | None:
        if isinstance(node, ast.Constant):
            return set()
        if isinstance(node, ast.Call) and (place := self._filled(node)) is not None:
            self._fill(node, place)
            return {place}
        if isinstance(node, ast.Call) and _callee(node) in PRINTS:
            names = self._names(node.func) | self._arguments(node)
            self._give(_callee(node), names)
            return set()
        self._use(node)
        return None

    # expressions

    def _names(self, node: ast.AST | None) -> set[str]:
        """Returns the names whose values reach the result of an expression."""
        if node is None or isinstance(node, ast.Constant):
            return set()
        if isinstance(node, ast.Name):
            return {self._name(node.id)}
        if isinstance(node, ast.Attribute):
            return {node.attr} | self._names(node.value)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Lambda) and isinstance(node.body, ast.Call) and self._filled(node.body):
            self._expression(node.body)
            return set()
        return set[str]().union(*(self._names(child) for child in ast.iter_child_nodes(node)))

    def _alias(self, place: str, value: ast.expr, inside: bool) -> None:
        """Notes that the object in ``place``, or one inside of it, is the result of ``value``."""
        if _new(value):
            return
        if isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict):
            for child in ast.iter_child_nodes(value):
                if isinstance(child, ast.expr):
                    self._alias(place, child, True)
            return
        of = self._place(value) or ANY
        self.flow.same.add((f"{INSIDE}{place}" if inside else place, of))
        self.flow.same.add((f"{INSIDE}{place}", f"{INSIDE}{of}"))

    def _call(self, node: ast.Call) -> set[str]:
        names = self._arguments(node) | self._names(node.func)
        callee, f = _callee(node), node.func
        known = callee in COMPUTES and not any(k.arg in ("out", None) for k in node.keywords)
        own = f.value if isinstance(f, ast.Attribute) else f  # such as ``self.norm(x)``, or a parameter
        if known and not (isinstance(own, ast.Name) and own.id in ("self", *self._callables(f))):
            self._give(callee, names)
            return names
        if _sets_default(node) and (place := self._place(node)) is not None:
            self._fill(node, place)
            return names
        if callee == "getattr":
            texts = (a.value for a in node.args if isinstance(a, ast.Constant))
            names |= {t for t in texts if isinstance(t, str)}
        self.flow.used.update(names)
        return names

    def _callables(self, f: ast.expr) -> frozenset[str]:
        return self.local if isinstance(f, ast.Name) else frozenset()

    def _fill(self, node: ast.Call, place: str) -> None:
        """Notes that a call stores its arguments in ``place``."""
        names = (self._arguments(node) | self._names(node.func)) - {place, _callee(node)}
        self._store(names, {place})
        self.flow.filled.update(_filled(place, node.func))
        for argument in node.args:
            self._alias(place, argument, True)
        self._give(_callee(node), names | {place})

    def _arguments(self, node: ast.Call) -> set[str]:
        return set[str]().union(*(self._names(a) for a in (*node.args, *(k.value for k in node.keywords))))

    def _filled(self, node: ast.Call) -> str | None:
        """Returns the container that a call fills, if it is a call of this kind."""
        f = node.func
        if isinstance(f, ast.Attribute) and f.attr in FILLS and ast.unparse(f.value) not in NOT_CONTAINERS:
            return self._place(f.value)
        return None

    def _place(self, node: ast.expr) -> str | None:
        """Returns the name in which a value is stored."""
        if isinstance(node, ast.Attribute):
            return node.attr
        if isinstance(node, ast.Subscript):
            return self._place(node.value)
        if _sets_default(node):
            return self._place(node.func.value)
        return self._name(node.id) if isinstance(node, ast.Name) else None

    def _name(self, name: str) -> str:
        return f"{self.prefix}{name}" if name in self.local else name

    def _use(self, node: ast.AST | None) -> None:
        self.flow.used.update(self._names(node))

    def _store(self, names: Iterable[str], places: Iterable[str]) -> None:
        self.flow.stores.update((name, place) for name in names for place in places if name != place)

    def _give(self, function: str, names: Iterable[str]) -> None:
        self.flow.given.setdefault(function, set()).update(names)


def _callee(node: ast.Call) -> str:
    """Returns the name by which a function is called; "" without one."""
    f = node.func
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def _sets_default(node: ast.AST) -> TypeGuard[Any]:
    """Returns true for a call of ``setdefault``, whose result is an entry of a dictionary."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _callee(node) == "setdefault"
    )


def _filled(place: str, target: ast.expr) -> set[str]:
    """Returns the names of the objects in which ``target``, a container or an entry of one, is stored."""
    entries = [n for n in ast.walk(target) if isinstance(n, ast.Subscript) or _sets_default(n)]
    deep = len(entries) > 1 or (isinstance(target, ast.Attribute) and bool(entries))
    return {place, f"{INSIDE}{place}"} if deep else {place}


def _new(node: ast.expr) -> bool:
    """Returns true if the result of an expression is a new value, and not a known object."""
    if isinstance(node, ast.Call):
        return _callee(node) in COMPUTES
    return isinstance(node, ast.Constant | ast.BinOp | ast.UnaryOp | ast.Compare | ast.JoinedStr)
