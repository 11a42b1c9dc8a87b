"""Attributes that a model's code sets on modules, classes and functions of libraries: ``torch.calls = 1``.

Libraries have far too many variables to compare all of them, and they change some themselves. So only the
variables that the model's code can mean are compared: those on objects that its names lead to, under a name
that it assigns or quotes.
"""

from __future__ import annotations

import builtins
import dis
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from launcher.parallel.model_state.deep_copy import cells
from launcher.parallel.model_state.python_state import MANY, PLAIN, library

STORES = frozenset(dis.opmap[name] for name in ("STORE_ATTR", "DELETE_ATTR"))
IMPORT = dis.opmap["IMPORT_NAME"]
WIDER = dis.opmap["EXTENDED_ARG"]
IMPORTING = frozenset({"modules", "import_module", "__import__"})
"""Names in code that looks a module up by its name, as in ``sys.modules["__main__"]``."""
THREADS: dict[str, Callable[[], threading.Thread]] = {
    "current_thread": threading.current_thread,
    "currentThread": threading.current_thread,
    "main_thread": threading.main_thread,
}
"""Functions that return a thread, whose attributes may be state, by the names that code has for them."""
MAIN = "__main__"
KEPT = (*PLAIN, np.ndarray, np.generic, torch.Tensor, torch.Generator)
"""Types of libraries whose values may be a model's state."""


@dataclass(frozen=True)
class _Words:
    """The names that code reads, and those that it may assign: attributes, and texts that could name one.

    ``texts`` has all its texts, which may name a module.
    """

    read: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()


def library_attributes(
    functions: Iterable[FunctionType], classes: Iterable[type]
) -> Iterator[tuple[str, Any, str, Any]]:
    """Yields the existing attributes of libraries that the code of ``functions`` can assign.

    Each is a name for messages, the owner, the attribute's name and its value. ``classes`` are those of the
    model's files; their base classes may be a library's.
    """
    functions = [*functions]
    words = [_words(f.__code__) for f in functions]
    own = {f.__module__ for f in functions}
    read = frozenset[str]().union(*(w.read for w in words))

    # where the code begins: its variables, imports within functions, base classes
    queue: deque[Any] = deque(kind for c in classes for kind in c.__mro__)
    for names in {id(f.__globals__): f.__globals__ for f in functions}.values():
        queue += [names[name] for name in names.keys() & read]
    queue += [cell.cell_contents for f in functions for _, cell in cells(f)]
    queue += [sys.modules[name] for name in (*read, "builtins") if name in sys.modules]
    queue += [vars(builtins)[name] for name in read if name in vars(builtins)]

    quoted = {v for v in queue if isinstance(v, str)}.union(*(w.texts for w in words))
    assigned = quoted.union(*(w.assigned for w in words))
    if not assigned:
        return

    # objects that its code reaches by a name in a table, or by a call
    if read & IMPORTING:
        queue += [sys.modules[name] for name in quoted if name in sys.modules]
    queue += [thread() for name, thread in THREADS.items() if name in read]

    # and the objects that its names lead to from there
    seen = set[int]()
    while queue:
        owner = queue.popleft()
        if id(owner) in seen or not _of_library(owner):
            continue
        seen.add(id(owner))
        inside = vars(owner)
        queue += [inside[name] for name in inside.keys() & read]
        for key in sorted(inside.keys() & assigned):
            if _is_state(inside[key], own):
                yield f"{_shown(owner)}.{key}", owner, key, inside[key]


def names_read(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Returns the names of global variables and attributes in the code of ``functions``."""
    return frozenset[str]().union(*(_words(f.__code__).read for f in functions))


def _is_state(value: Any, own: set[str]) -> bool:
    """Returns true if ``value`` may be the model's: a number, array or tensor, or an object of its classes.

    A container of these may be, too. Any other value, such as ``sys.modules``, is the library's own.
    """
    if isinstance(value, list | tuple | set | dict) and len(value) <= MANY:
        items = value.values() if isinstance(value, dict) else value
        return all(isinstance(v, KEPT) or type(v).__module__ in own for v in [*items])
    return isinstance(value, KEPT) or type(value).__module__ in own


def _shown(owner: Any) -> str:
    """Returns the name of a library's module, class, function or object."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type | FunctionType) else type(owner)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _of_library(owner: Any) -> bool:
    """Returns true for a library's module, class, function or object that can have further attributes.

    The main program counts as one too, because it is not among the model's files.
    """
    if isinstance(owner, ModuleType):
        return library(owner.__name__) or owner.__name__ == MAIN
    kind = owner if isinstance(owner, type | FunctionType) else type(owner)
    return library(kind.__module__ or "") and hasattr(owner, "__dict__")


@cache
def _words(code: CodeType) -> _Words:
    inner = [_words(c) for c in code.co_consts if isinstance(c, CodeType)]
    quoted = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
    assigned = quoted.union(_assigned(code), *(w.assigned for w in inner))
    texts = frozenset(c for c in code.co_consts if isinstance(c, str)).union(*(w.texts for w in inner))
    return _Words(
        frozenset(code.co_names).union(*(w.read for w in inner)),
        frozenset(name for name in assigned if not name.startswith("__")),
        texts,
    )


def imported(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Returns the names of Python modules that the code of ``functions`` imports when it runs."""
    return frozenset[str]().union(*(_imported(f.__code__) for f in functions))


@cache
def _imported(code: CodeType) -> frozenset[str]:
    inner = (_imported(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(_names_of(code, frozenset({IMPORT}))).union(*inner)


def _assigned(code: CodeType) -> Iterator[str]:
    """Yields the attributes that code assigns or deletes."""
    return _names_of(code, STORES)


def _names_of(code: CodeType, kinds: frozenset[int]) -> Iterator[str]:
    """Yields the names in these instructions of code; faster than ``dis``, which describes each step."""
    wide = 0
    steps = iter(code.co_code)
    for op, arg in zip(steps, steps, strict=True):
        if op in kinds:
            yield code.co_names[wide | arg]
        wide = (wide | arg) << 8 if op == WIDER else 0
