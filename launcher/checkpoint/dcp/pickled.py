"""Pickles read as plain data: names on a list become stand-ins, anything else is refused, nothing is run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar


class Record:
    """An object of a class that is on the list: the arguments it was made with, the state it was given."""

    __iter__: ClassVar[None] = None  # else Python takes it for a sequence, which has no end

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state.get(field) if isinstance(self.state, dict) else None


class Refused(ValueError):
    """It asks for something that is not plain data."""


Known = Mapping[str, Any]
"""By ``module.name``: what a pickle gets for it, a ``Record``, a plain value or a function of plain values."""

_OPCODES = [
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP, pickle.MEMOIZE,
    pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GET, pickle.BINGET, pickle.LONG_BINGET,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.INT,
    pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
    pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2,
    pickle.TUPLE3, pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.DICT,
    pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.GLOBAL, pickle.STACK_GLOBAL,
    pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.BINPERSID,
]  # fmt: skip
"""What data needs; not among them: those that ask for memory in advance, and those that look things up elsewhere."""


def read(data: bytes, known: Known, storage: Callable[[Any], Any] | None = None) -> Any:
    """The value. ``storage`` gets what is kept outside. Raises ``ValueError`` for everything that is not plain data."""
    try:
        return _Reader(data, known, storage).load()
    except Refused:
        raise
    except Exception as error:  # whatever a broken or hostile stream makes the reader stumble over
        raise ValueError(f"no pickle of plain data ({type(error).__name__})") from error


class _Reader(pickle._Unpickler):
    """The reader in Python: its memo is a mapping, which no number in the stream makes large."""

    dispatch: ClassVar = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def __init__(self, data: bytes, known: Known, storage: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._known, self._storage = known, storage

    def find_class(self, module: str, name: str) -> Any:
        if (found := f"{module}.{name}") not in self._known:
            raise Refused(f"it asks for {found}, which is not on the list of harmless names")
        return self._known[found]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise Refused("it refers to storage outside")
        return self._storage(pid)
