"""Messages between ranks through an unprotected store, signed with a secret of the job."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from launcher.errors import Problem, RequestError, RunError
from launcher.runtime.cluster.launch_env import SECRET_FILE, Place

VARIABLE = "LAUNCHER_SECRET"
"""An environment variable: a secret text that only the ranks of a job share."""
CAUSE = (
    "another program has written it, or ranks have other secrets; "
    f"{VARIABLE}, the same for all ranks, gives them one"
)
_REFUSED = "refused"
_MAC = hashlib.sha256().digest_size
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "smb", "afs", "panfs", "orangefs")


class Unsigned(RunError):
    """A message that was not signed with the secret of the job."""


@dataclass(frozen=True)
class Secret:
    """``derived``: computed from values that others may know; ``why``: what prevented a better secret."""

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
        """Tells the other ranks that this ``rank`` has refused a message, and ends.

        The keys have no content, as the others may have another secret.
        """
        self.set(f"{_REFUSED}{rank}")
        self.set(_REFUSED)

    def refused(self, ranks: Sequence[int]) -> int | None:
        """The first of ``ranks`` that has refused a message."""
        if not self.check([_REFUSED]):  # one question while all is well
            return None
        return next((rank for rank in ranks if self.check([f"{_REFUSED}{rank}"])), None)

    def within(self, corner: str) -> Messages:
        """Messages whose keys have the prefix ``corner``."""
        return Messages(PrefixStore(corner, self._store), self._secret, f"{self._corner}/{corner}")

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of them exist, signed or not."""
        return bool(self._store.check(list(names)))

    def _mac(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._secret.key, f"{self._corner}/{name}\0".encode() + body, "sha256")


def secret(at: Place, env: Mapping[str, str] = os.environ) -> Secret:
    """The secret of the job that ``at`` belongs to, the same for all of its ranks.

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
        why += f", and {home} is not known to be one folder for all nodes"
    return replace(of_several_nodes(at), why=why)


def private_file(file: Path) -> Path | None:
    """``file`` with a secret for ``LAUNCHER_SECRET_FILE``; creates it unless it exists.

    Returns ``None`` on a file system that is full or does not protect files from other users.
    """
    try:
        _of_user(file)
    except (OSError, RequestError):
        return None
    return file


def of_several_nodes(at: Place) -> Secret:
    """The secret of a job on nodes that share neither an environment nor a home."""
    return Secret(_of_job(str(os.geteuid()).encode(), at), derived=True)


def _of_job(text: bytes, at: Place) -> bytes:
    return hmac.digest(hashlib.sha256(text).digest(), f"{at.host}:{at.port}".encode(), "sha256")


def _state_folder(env: Mapping[str, str]) -> Path | None:
    if env.get("XDG_STATE_HOME"):
        return Path(env["XDG_STATE_HOME"], "launcher")
    return Path(env["HOME"], ".local", "state", "launcher") if env.get("HOME") else None


def _of_user(file: Path) -> bytes:
    """The text in ``file``, which is created atomically if it does not exist."""
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
            raise _refused(file, "it is a link") from error
        raise
    with open(descriptor, "rb") as opened:
        about = os.fstat(opened.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise _refused(file, "others can read it, or have made it")
        text = opened.read(65)
    if len(text) != 64:
        raise _refused(file, "it is no secret of the launcher")
    return text


def _refused(file: Path, why: str) -> RequestError:
    return RequestError((Problem("", f"{file}: {why}; remove it, and a new one is made"),))


def _on_network(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether ``folder`` is on a file system that several nodes share."""
    try:
        lines = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    real = folder.resolve()
    above = [(len(at), kind) for _, at, kind, *_ in lines if real.is_relative_to(at)]
    kind = max(above, default=(0, ""))[1].removeprefix("fuse.")
    return kind.startswith(_NETWORK)
