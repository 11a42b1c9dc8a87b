"""Reads untrusted pickles of plain data at bounded cost, with Python's own (not the C) unpickler."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any, ClassVar

TUPLE = 1000
"""The most values in a tuple. A nested value counts each time it occurs: hashing visits it each time."""
MADE = 5
"""The fewest bytes of a stream per object that it makes or memoizes; real streams have six or more."""
SMALL = 1 << 60  # integers below it cannot be chosen so that they collide in a dictionary

_OPCODES = [
    # the stream, the stack and the memo
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP,
    pickle.MEMOIZE, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT,
    pickle.GET, pickle.BINGET, pickle.LONG_BINGET,
    # plain values
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.INT,
    pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
    pickle.SHORT_BINBYTES, pickle.BINBYTES,
    # containers
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_SET, pickle.ADDITEMS,
    # names, and the objects that are made from them
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.BINPERSID,
]  # fmt: skip
"""The opcodes that data needs; none of them allocates memory in advance or looks things up elsewhere."""


_DISPATCH: dict[int, Any] = pickle._Unpickler.dispatch


class RefusedPickle(ValueError):
    """Raised for a pickle that is not plain data, or that makes more objects than its size can need."""


class Bounded(pickle._Unpickler):
    """An unpickler whose time and memory are linear in the length of the stream.

    A subclass lists the names that it allows in ``find_class``, and in ``keys`` the types that a key may have
    besides small integers. The base is Python's own unpickler: its memo is a mapping, so a large index in the
    stream does not make it large.
    """

    dispatch: ClassVar[dict[int, Any]] = {code[0]: _DISPATCH[code[0]] for code in _OPCODES}
    keys: ClassVar[tuple[type, ...]] = (str, bytes, type(None))

    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, encoding: str = "ASCII") -> None:
        super().__init__(BytesIO(data), encoding=encoding)
        self._budget = len(data) // MADE + TUPLE
        self._memo_left = self._budget

    def load_tuple(self) -> None:
        self._append(tuple(self.pop_mark()))

    def load_tuple1(self) -> None:
        self.stack[-1] = _small((self.stack[-1],))
        self._count()

    def load_tuple2(self) -> None:
        self.stack[-2:] = [_small((self.stack[-2], self.stack[-1]))]
        self._count()

    def load_tuple3(self) -> None:
        self.stack[-3:] = [_small((self.stack[-3], self.stack[-2], self.stack[-1]))]
        self._count()

    def load_empty_tuple(self) -> None:
        self._append(())

    def load_empty_list(self) -> None:
        self._append([])

    def load_list(self) -> None:
        self._append(self.pop_mark())

    def load_empty_dictionary(self) -> None:
        self._append({})

    def load_dict(self) -> None:
        items = self.pop_mark()
        self._append({})
        self._put(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def load_setitems(self) -> None:
        self._put(self.pop_mark())

    def load_empty_set(self) -> None:
        self._append(set())

    def load_additems(self) -> None:
        items = self.pop_mark()
        into = self.stack[-1]
        if type(into) is not set:
            raise RefusedPickle("it adds items to a value that is not a set")
        into.update(map(self._key, items))

    def load_reduce(self) -> None:
        self._count()
        _DISPATCH[pickle.REDUCE[0]](self)

    def load_newobj(self) -> None:
        self._count()
        _DISPATCH[pickle.NEWOBJ[0]](self)

    def load_memoize(self) -> None:
        self._memo_left -= 1
        if self._memo_left < 0:
            raise RefusedPickle("it memoizes more objects than its length can need")
        self.memo[len(self.memo)] = self.stack[-1]

    for _code, _load in (
        (pickle.EMPTY_TUPLE, load_empty_tuple), (pickle.TUPLE, load_tuple), (pickle.TUPLE1, load_tuple1),
        (pickle.TUPLE2, load_tuple2), (pickle.TUPLE3, load_tuple3),
        (pickle.EMPTY_LIST, load_empty_list), (pickle.LIST, load_list),
        (pickle.EMPTY_DICT, load_empty_dictionary), (pickle.DICT, load_dict),
        (pickle.SETITEM, load_setitem), (pickle.SETITEMS, load_setitems),
        (pickle.EMPTY_SET, load_empty_set), (pickle.ADDITEMS, load_additems),
        (pickle.REDUCE, load_reduce), (pickle.NEWOBJ, load_newobj), (pickle.MEMOIZE, load_memoize),
    ):  # fmt: skip
        dispatch[_code[0]] = _load

    def _append(self, value: Any) -> None:
        self._count()
        self.append(_small(value) if type(value) is tuple else value)

    def _count(self) -> None:
        self._budget -= 1
        if self._budget < 0:
            raise RefusedPickle("it makes more objects than its length can need")

    def _put(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is not dict or len(items) % 2:
            raise RefusedPickle("it adds items to a value that is not a mapping")
        for key, value in zip(items[::2], items[1::2], strict=True):
            into[self._key(key)] = value

    def _key(self, key: Any) -> Any:
        if not isinstance(key, self.keys) and not (isinstance(key, int) and abs(key) < SMALL):
            raise RefusedPickle(f"a key that is neither text nor a small number ({type(key).__name__})")
        return key


def _small(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns ``value``; raises ``RefusedPickle`` if it and the tuples in it have too many values."""
    remaining = TUPLE
    pending = list(value[: TUPLE + 1])
    while pending:
        remaining -= 1
        if remaining < 0:
            raise RefusedPickle(f"a tuple of more than {TUPLE} values")
        inner = pending.pop()
        if type(inner) is tuple:
            pending += inner[: TUPLE + 1]
    return value
