"""Pickles read as plain data: names on a list become stand-ins, anything else is refused, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from launcher.untrusted.pickles import Bounded, RefusedPickle


class Record:
    """An object of a class that is on the list: the arguments it was made with, the state it was given."""

    __iter__: ClassVar[None] = None  # else Python takes it for a sequence, which has no end

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state.get(field) if isinstance(self.state, dict) else None


Known = Mapping[str, Any]
"""By ``module.name`` what a pickle gets for it: a ``Record``, a plain value or a function of plain values."""


def plain(*args: Any) -> dict[str, Any]:
    """An ``OrderedDict``, which is made empty and filled then; to copy what it is given may take any time."""
    if args:
        raise RefusedPickle("a mapping made of another")
    return {}


def read(data: bytes, known: Known, storage: Callable[[Any], Any] | None = None) -> Any:
    """The value.

    ``storage`` gets what is kept outside. Raises ``ValueError`` for everything that is not plain data.
    """
    try:
        return _Reader(data, known, storage).load()
    except RefusedPickle:
        raise
    except Exception as error:  # whatever a broken or hostile stream makes the reader stumble over
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
