"""Messages between ranks: signed, typed JSON, no pickles.

A message contains values only; it never decides which class is built. So a forged message can at worst change
values; unlike a pickle it cannot run code.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from launcher.errors import Problem, RequestError, RunError
from launcher.parallel import byte_collectives
from launcher.parallel.trace.tensor_specs import spec
from launcher.runtime.cluster.launch_env import SECRET_FILE, Place

VARIABLE = "LAUNCHER_SECRET"
"""An environment variable: a secret text that only the ranks of a job share."""
CAUSE = (
    "another program wrote it, or the ranks have different secrets; "
    f"set {VARIABLE} to the same value on all ranks"
)
_REFUSED = "refused"
_MAC = hashlib.sha256().digest_size
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "smb", "afs", "panfs", "orangefs")


class Unsigned(RunError):
    """A message that was not signed with the secret of the job."""


@dataclass(frozen=True)
class Secret:
    """The secret that signs the messages between ranks.

    ``derived``: computed from values that others may know; ``why``: what prevented a better secret.
    """

    key: bytes
    derived: bool = False
    why: str = ""


class Messages:
    """A store for ranks: reading a message that was not signed with the secret raises an error.

    ``corner``: the prefix that ``store`` adds to keys. It is signed too, so a message is valid only under its
    key.
    """

    def __init__(self, store: Store, secret: Secret, corner: str = "") -> None:
        self._store = store
        self._corner = corner
        self._secret = secret

    def set(self, name: str, body: bytes | str = b"") -> None:
        body = body.encode() if isinstance(body, str) else body
        self._store.set(name, self._mac(name, body) + body)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        """Waits for the message. Raises ``Unsigned`` unless it is signed."""
        message = bytes(self._store.get(name))
        mac, body = message[:_MAC], message[_MAC:]
        if not hmac.compare_digest(mac, self._mac(name, body)):
            raise Unsigned(f"{name} in the store of this job is not signed with its secret: {CAUSE}")
        return body

    def refuse(self, rank: int) -> None:
        """Tells the other ranks that this ``rank`` has refused a message and will end.

        Only the existence of the keys counts, as the others may have another secret.
        """
        self.set(f"{_REFUSED}{rank}")
        self.set(_REFUSED)

    def first_refusing(self, ranks: Sequence[int]) -> int | None:
        """Returns the first of ``ranks`` that has refused a message."""
        if not self.check([_REFUSED]):  # one request as long as no rank has refused
            return None
        return next((rank for rank in ranks if self.check([f"{_REFUSED}{rank}"])), None)

    def within(self, corner: str) -> Messages:
        """Returns messages whose keys have the prefix ``corner``."""
        return Messages(PrefixStore(corner, self._store), self._secret, f"{self._corner}/{corner}")

    def check(self, names: Sequence[str]) -> bool:
        """Returns true if all ``names`` exist, signed or not."""
        return bool(self._store.check(list(names)))

    def _mac(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._secret.key, f"{self._corner}/{name}\0".encode() + body, "sha256")


def secret(at: Place, env: Mapping[str, str] = os.environ) -> Secret:
    """Returns the secret of the job that ``at`` belongs to, the same for all of its ranks.

    It comes from the environment, or from the file that it names; else from a file that only this user can
    read, if all ranks see the same home: on one node, or on a network file system. Otherwise it is derived.
    Raises ``RequestError`` for a file that others can read or own, and for a named file that cannot be read.
    """
    if env.get(VARIABLE):
        return Secret(_of_job(env[VARIABLE].encode(), at))
    if env.get(SECRET_FILE):
        try:
            return Secret(_of_job(_read(Path(env[SECRET_FILE])), at))
        except OSError as error:
            text = f"{SECRET_FILE}={env[SECRET_FILE]}: {error.strerror}; unset it, or set {VARIABLE}"
            raise RequestError((Problem("", text),)) from error
    why = f"{VARIABLE} is not set"
    home = _state_folder(env)
    if home is None:
        why += ", nor is HOME"
    elif at.size == at.local_size or _on_network(home):
        try:
            return Secret(_of_job(_of_user(home / "secret"), at))
        except OSError as error:
            why += f", and {home / 'secret'} cannot be written ({error.strerror})"
    else:
        why += f", and {home} may not be shared by all nodes"
    return replace(of_several_nodes(at), why=why)


def private_file(file: Path) -> Path | None:
    """Returns ``file`` with a secret for ``LAUNCHER_SECRET_FILE``; creates it unless it exists.

    Returns ``None`` on a file system that is full or does not protect files from other users.
    """
    try:
        _of_user(file)
    except (OSError, RequestError):
        return None
    return file


def of_several_nodes(at: Place) -> Secret:
    """Returns the secret of a job on nodes that share neither an environment nor a home."""
    return Secret(_of_job(str(os.geteuid()).encode(), at), derived=True)


def _of_job(text: bytes, at: Place) -> bytes:
    return hmac.digest(hashlib.sha256(text).digest(), f"{at.host}:{at.port}".encode(), "sha256")


def _state_folder(env: Mapping[str, str]) -> Path | None:
    if env.get("XDG_STATE_HOME"):
        return Path(env["XDG_STATE_HOME"], "launcher")
    return Path(env["HOME"], ".local", "state", "launcher") if env.get("HOME") else None


def _of_user(file: Path) -> bytes:
    """Returns the text in ``file``, which is created atomically if it does not exist."""
    try:
        return _read(file)
    except FileNotFoundError:
        pass
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(secrets.token_hex(32).encode())
            out.flush()
            os.fsync(out.fileno())
        with suppress(FileExistsError):  # another rank was first
            os.link(new, file)
    finally:
        new.unlink(missing_ok=True)
    return _read(file)


def _read(file: Path) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _bad_secret(file, "it is a link") from error
        raise
    with open(descriptor, "rb") as opened:
        about = os.fstat(opened.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise _bad_secret(file, "other users can read it, or own it")
        text = opened.read(65)
    if len(text) != 64:
        raise _bad_secret(file, "it is not a secret of the launcher")
    return text


def _bad_secret(file: Path, why: str) -> RequestError:
    return RequestError((Problem("", f"{file}: {why}; remove it, and the next start creates a new one"),))


def _on_network(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Returns true if ``folder`` is on a file system that several nodes share."""
    try:
        lines = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    real = folder.resolve()
    above = [(len(at), kind) for _, at, kind, *_ in lines if real.is_relative_to(at)]
    kind = max(above, default=(0, ""))[1].removeprefix("fuse.")
    return kind.startswith(_NETWORK)


_PLAIN = (str, int, float, bool)


class Unsuitable(RunError):
    """A value or a message that does not have the declared type."""


@dataclass(frozen=True)
class _Codec:
    """``fits``: a quick check of whether a value has the type; it distinguishes the members of a union."""

    fits: Callable[[Any], bool]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode(value: object, kind: Any) -> bytes:
    """Returns ``value`` of type ``kind`` as JSON. Raises ``Unsuitable`` if ``kind`` declares no content."""
    return json.dumps(_codec(kind, "").encode(value), separators=(",", ":")).encode()


def decode(body: bytes, kind: Any) -> Any:
    """Returns the ``kind`` that ``encode`` wrote. Raises ``Unsuitable`` for anything else."""
    try:
        return _codec(kind, "").decode(json.loads(body))
    except Unsuitable:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Unsuitable(f"not a message between ranks: {error}") from error


@cache
def _codec(kind: Any, module: str) -> _Codec:
    """Returns the codec of a type.

    ``module``: the module of the annotation ``kind``, to resolve names of types.
    """
    if isinstance(kind, str | ForwardRef):
        name = kind if isinstance(kind, str) else kind.__forward_arg__
        return _codec(eval(name, vars(sys.modules[module])), module)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _codec(inner[0], module)
    if origin is Literal:
        return _leaf(lambda value: value in inner, str(kind))
    if origin in (Union, types.UnionType):
        return _union(inner, module)
    if origin is tuple:
        return _tuple(inner, module)
    if origin in (list, Sequence):
        return _many(list, _later(inner[0], module), lambda value: isinstance(value, list | tuple))
    if origin in (frozenset, set):
        return _many(origin, _later(inner[0], module), lambda value: isinstance(value, frozenset | set))
    if origin in (dict, Mapping):
        return _mapping(_later(inner[0], module), _later(inner[1], module))
    if kind is Any or kind is object:
        return _Codec(lambda _: True, _any, lambda value: value)
    if kind is type(None):
        return _leaf(lambda value: value is None, "None")
    if isinstance(kind, type):
        return _class(kind)
    raise Unsuitable(f"{kind} is not a type that ranks can send")


def _class(kind: type) -> _Codec:
    if kind is float:
        return _leaf(lambda value: type(value) in (int, float), "float")
    if kind in _PLAIN:
        return _leaf(lambda value: type(value) is kind, kind.__name__)
    if kind is complex:
        return _Codec(lambda v: type(v) is complex, lambda v: [v.real, v.imag], lambda data: complex(*data))
    if issubclass(kind, Path):
        return _Codec(lambda v: isinstance(v, Path), str, lambda data: Path(_text(data)))
    if issubclass(kind, BaseModel):
        return _settings(kind)
    if is_dataclass(kind):
        return _record(kind, tuple(f.name for f in fields(kind)))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _record(kind, kind._fields)
    raise Unsuitable(f"{kind.__name__} is not a type that ranks can send")


def _text(data: Any) -> str:
    if type(data) is not str:
        raise Unsuitable(f"{data!r:.80} where a text is expected")
    return data


def _leaf(fits: Callable[[Any], bool], name: str) -> _Codec:
    def same(value: Any) -> Any:
        if not fits(value):
            raise Unsuitable(f"{value!r:.80} where {name} is expected")
        return value

    return _Codec(fits, same, same)


def _later(kind: Any, module: str) -> Callable[[], _Codec]:
    """Resolves a type when it is used, as types may contain themselves."""
    return lambda: _codec(kind, module)


def _union(members: Sequence[Any], module: str) -> _Codec:
    """Encodes the index of the matching member, and the value."""
    laters = [_later(member, module) for member in members]

    def number(value: Any) -> int:
        for i, codec in enumerate(laters):
            if codec().fits(value):
                return i
        raise Unsuitable(f"{type(value).__name__} is not one of {members}")

    def put(value: Any) -> Any:
        i = number(value)
        return [i, laters[i]().encode(value)]

    def got(data: Any) -> Any:
        i, value = data
        if type(i) is not int or not 0 <= i < len(laters):
            raise Unsuitable(f"{i!r:.80} is not an index of {members}")
        return laters[i]().decode(value)

    return _Codec(lambda value: any(codec().fits(value) for codec in laters), put, got)


def _many(make: Callable[[Any], Any], each: Callable[[], _Codec], fits: Callable[[Any], bool]) -> _Codec:
    def got(data: Any) -> Any:
        return make([each().decode(one) for one in _list(data)])

    def put(value: Any) -> Any:
        if not fits(value):
            raise Unsuitable(f"{type(value).__name__} where several values are expected")
        return [each().encode(one) for one in value]

    return _Codec(fits, put, got)


def _tuple(inner: Sequence[Any], module: str) -> _Codec:
    if len(inner) == 2 and inner[1] is Ellipsis:
        return _many(tuple, _later(inner[0], module), lambda value: isinstance(value, tuple))
    laters = [_later(one, module) for one in inner]

    def fits(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == len(laters)

    def put(value: Any) -> Any:
        if not fits(value):
            raise Unsuitable(f"{value!r:.80} where {len(laters)} values are expected")
        return [codec().encode(one) for codec, one in zip(laters, value, strict=True)]

    def got(data: Any) -> Any:
        return tuple(codec().decode(one) for codec, one in zip(laters, _list(data), strict=True))

    return _Codec(fits, put, got)


def _mapping(key: Callable[[], _Codec], item: Callable[[], _Codec]) -> _Codec:
    def put(value: Any) -> Any:
        return [[key().encode(k), item().encode(v)] for k, v in value.items()]

    def got(data: Any) -> Any:
        return {key().decode(k): item().decode(v) for k, v in _list(data)}

    return _Codec(lambda value: isinstance(value, Mapping), put, got)


def _record(kind: Any, names: Sequence[str]) -> _Codec:
    """Encodes the field values of a class, in the order of its fields."""

    @cache
    def codecs() -> list[_Codec]:
        hints = get_type_hints(kind, include_extras=True)
        return [_codec(hints[name], kind.__module__) for name in names]

    def put(value: Any) -> Any:
        if type(value) is not kind:
            raise Unsuitable(f"{type(value).__name__} where {kind.__name__} is expected")
        return [codec.encode(getattr(value, name)) for name, codec in zip(names, codecs(), strict=True)]

    def got(data: Any) -> Any:
        each = zip(names, codecs(), _list(data), strict=True)
        return kind(**{name: codec.decode(one) for name, codec, one in each})

    return _Codec(lambda value: type(value) is kind, put, got)


def _settings(kind: Any) -> _Codec:
    """Encodes settings unvalidated: they were validated when they were made, and may have changed since."""

    @cache
    def codecs() -> dict[str, _Codec]:
        hints = get_type_hints(kind, include_extras=True)
        return {name: _codec(hints[name], kind.__module__) for name in kind.model_fields}

    def put(value: Any) -> Any:
        if type(value) is not kind:
            raise Unsuitable(f"{type(value).__name__} where {kind.__name__} is expected")
        known = [codec.encode(getattr(value, name)) for name, codec in codecs().items()]
        return [known, _any(dict(value.model_extra or {})), sorted(value.model_fields_set)]

    def got(data: Any) -> Any:
        known, more, set_fields = data
        made = {n: c.decode(one) for (n, c), one in zip(codecs().items(), _list(known), strict=True)}
        if more and kind.model_config.get("extra") != "allow":
            raise Unsuitable(f"{kind.__name__} has no {', '.join(more)}")
        names = {by for n, f in kind.model_fields.items() for by in (n, f.alias)} & {*more}
        if names:
            raise Unsuitable(f"{kind.__name__} has {', '.join(map(str, names))} twice")
        by_alias = {kind.model_fields[name].alias or name: value for name, value in made.items()}
        return kind.model_construct({_text(one) for one in set_fields}, **by_alias, **more)

    return _Codec(lambda value: type(value) is kind, put, got)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise Unsuitable(f"{type(data).__name__} where a list is expected")
    return data


def _any(value: Any) -> Any:
    """Returns plain data that a user supplied, as in YAML."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [_any(one) for one in value]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _any(one) for key, one in value.items()}
    raise Unsuitable(f"{type(value).__name__} is not plain data, so ranks cannot send it")


_HEAD = 8
"""Bytes of the number that contains the header's length."""
_Header = list[tuple[str, str, list[int]]]
"""The name, dtype and shape of each tensor."""


def all_gather(mine: object, kind: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks of ``group``; ``encode`` sends them as ``kind``.

    Every rank calls it.
    """
    return [decode(body, kind) for body in byte_collectives.all_gather(encode(mine, kind), group)]


def gather(mine: object, kind: Any) -> list[Any] | None:
    """Like ``all_gather``, but returns ``None`` on all ranks except rank 0."""
    every = byte_collectives.gather(encode(mine, kind))
    return None if every is None else [decode(body, kind) for body in every]


def broadcast(value: object, kind: Any) -> Any:
    """Returns rank 0's ``value`` on every rank; the others may pass anything. Every rank calls it."""
    return decode(byte_collectives.broadcast(encode(value, kind) if dist.get_rank() == 0 else b""), kind)


def send(value: object, kind: Any, rank: int) -> None:
    """Sends ``value`` to ``rank``, which calls ``recv``."""
    byte_collectives.send(encode(value, kind), rank)


def recv(kind: Any, rank: int) -> Any:
    """Receives the value that ``rank`` passes to ``send``."""
    return decode(byte_collectives.recv(rank), kind)


def gather_tensors(mine: Mapping[str, Tensor]) -> list[dict[str, Tensor]] | None:
    """Returns on rank 0 the tensors of each rank, on the CPU; on the others ``None``. Every rank calls it."""
    every = byte_collectives.gather(_packed(mine))
    return None if every is None else [_unpacked(body) for body in every]


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns a header, followed by the bytes of each tensor."""
    specs = {name: spec(t) for name, t in tensors.items()}
    header = encode([(name, s.dtype, [*s.shape]) for name, s in specs.items()], _Header)
    flat = (t.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in tensors.values())
    numbers = (t.view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in flat)
    return b"".join([len(header).to_bytes(_HEAD, "little"), header, *numbers])


def _unpacked(body: bytes) -> dict[str, Tensor]:
    """Returns the tensors that ``_packed`` wrote. Raises ``RunError`` for anything else."""
    at = _HEAD + int.from_bytes(body[:_HEAD], "little")
    header: _Header = decode(body[_HEAD:at], _Header)
    tensors = {}
    for name, dtype_name, shape in header:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
            raise RunError(
                f"not a message between ranks: {name} of dtype {dtype_name!r:.80} and shape {shape}"
            )
        t = torch.empty(shape, dtype=dtype)
        raw = body[at : at + t.nbytes]
        if len(raw) != t.nbytes:
            raise RunError(f"not a message between ranks: {name} has {len(raw)} bytes of {t.nbytes}")
        if raw:
            t.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        tensors[name] = t
        at += t.nbytes
    return tensors


T = TypeVar("T")
LOOK_S = 0.05


def nothing() -> None:
    """The default ``look``: checks nothing."""


def interruptible(
    call: Callable[[], T], look: Callable[[], None] = nothing, within_s: float | None = None
) -> T:
    """Runs ``call`` in another thread and returns its result; this thread waits in Python.

    So the main thread runs its signal handlers at once, and calls ``look`` every ``LOOK_S`` seconds.
    Exceptions of ``look`` or a handler are raised here; ``call`` then stays in its thread, which ends with
    the process. Raises ``TimeoutError`` after ``within_s``, and what ``call`` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="waiting", daemon=True).start()
    end = None if within_s is None else time.monotonic() + within_s
    while not done.wait(LOOK_S):
        look()
        if end is not None and time.monotonic() > end:
            raise TimeoutError(f"no answer within {within_s:g} s")
    if errors:
        raise errors[0]
    return results[0]
