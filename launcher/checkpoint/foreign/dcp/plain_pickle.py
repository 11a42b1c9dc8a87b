"""Reads pickles as plain data: listed names become stand-ins, others are refused, and no code is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from launcher.untrusted.pickles import Bounded, RefusedPickle


class Record:
    """A stand-in for an object of a listed class: its constructor's arguments and its pickled state."""

    __iter__: ClassVar[None] = None  # else Python treats it as a sequence, which never ends

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state.get(field) if isinstance(self.state, dict) else None


Known = Mapping[str, Any]
"""Maps ``module.name`` to its stand-in: a ``Record``, a plain value or a function of plain values."""


def plain(*args: Any) -> dict[str, Any]:
    """Stands in for ``OrderedDict()``, which is made empty and filled later.

    An argument is refused with ``RefusedPickle``, because copying it could take unbounded time.
    """
    if args:
        raise RefusedPickle("a mapping made of another")
    return {}


def read(data: bytes, known: Known, storage: Callable[[Any], Any] | None = None) -> Any:
    """Returns the value of a pickle.

    ``storage`` makes the stand-in for a persistent id. Raises ``ValueError`` for anything but plain data.
    """
    try:
        return _Reader(data, known, storage).load()
    except RefusedPickle:
        raise
    except Exception as error:  # a broken or hostile stream can make the reader raise anything
        raise ValueError(f"no pickle of plain data ({type(error).__name__})") from error


class _Reader(Bounded):
    keys: ClassVar = (*Bounded.keys, Record)

    def __init__(self, data: bytes, known: Known, storage: Callable[[Any], Any] | None) -> None:
        super().__init__(data)
        self._known = known
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        found = f"{module}.{name}"
        if found not in self._known:
            raise RefusedPickle(f"it asks for {found}, which is not on the list of harmless names")
        return self._known[found]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise RefusedPickle("it refers to storage outside")
        return self._storage(pid)
