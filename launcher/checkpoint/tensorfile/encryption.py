"""Encrypts files in blocks, and loads the keys.

A file consists of a head and blocks. The head is the magic, the key id, the salt, the size of the plain text
and a tag over these. Each block is ``BLOCK`` bytes of plain text (the last one may be shorter), encrypted,
and a tag. HKDF derives a key for each file from the user's key and the salt, so the number of a block can be
its nonce: a block that was moved within its file cannot be decrypted. The head is authenticated with every
block, so a block of another file cannot be decrypted either.
"""

from __future__ import annotations

import base64
import binascii
import os
import string
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checkpoint.tensorfile.disk import named_errors
from launcher.optional import install_command
from launcher.plan.resolve.encryption import PLACE, place_text
from launcher.untrusted.files import opened

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM


MAGIC = b"launchr\x01"
BLOCK, TAG, ID, SALT, WORD = 1 << 20, 16, 8, 32, 8
HEAD = len(MAGIC) + ID + SALT + WORD
_HEAD_NONCE = b"\xff" * 12  # no block has this number


class Encryptor:
    """Writes an encrypted file from start to end. ``finish`` writes the last block; the caller syncs it."""

    def __init__(self, path: Path, fd: int, size: int, key: bytes) -> None:
        """Writes the head. ``size`` is the size of the plain text; the caller closes ``fd``."""
        self._path = path
        self._fd = fd
        self._size = size
        salt = os.urandom(SALT)
        self.salt = salt.hex()
        self._head = MAGIC + key_id(key) + salt + size.to_bytes(WORD, "little")
        self._aead = _aead(key, salt)
        self._plain = bytearray()  # plain text of the block that is not full yet
        self._number = 0  # number of that block
        self._at = 0  # offset in the file
        self._put(self._head + self._aead.encrypt(_HEAD_NONCE, b"", self._head))

    def write(self, at: int, data: memoryview) -> None:
        """Writes the next bytes of the plain text; ``at`` must be the number of bytes written before."""
        assert at == self._number * BLOCK + len(self._plain), (at, self._number, len(self._plain))
        while data:
            room = BLOCK - len(self._plain)
            part, data = data[:room], data[room:]
            if len(part) == BLOCK:
                self._block(part)
                continue
            self._plain += part
            if len(self._plain) == BLOCK:
                self._flush()

    def finish(self) -> None:
        if self._plain:
            self._flush()
        assert self._at == encrypted_size(self._size), (self._at, self._size)

    def _flush(self) -> None:
        self._block(bytes(self._plain))
        self._plain.clear()

    def _block(self, plain: bytes | memoryview) -> None:
        self._put(self._aead.encrypt(_nonce(self._number), plain, self._head))
        self._number += 1

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        with named_errors(self._path, encrypted_size(self._size)):
            while view:
                done = os.pwrite(self._fd, view, self._at)
                self._at, view = self._at + done, view[done:]


class EncryptedFile:
    """The plain text of an encrypted file. A few decrypted blocks are kept in memory.

    Raises ``ValueError`` naming the file if it is damaged or the key is wrong.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path = path
        with opened(path) as file:
            head = file.read(HEAD + TAG)
            size = os.fstat(file.fileno()).st_size

        # the file must be encrypted with this key
        if not is_encrypted(head):
            raise ValueError(f"{path}: it is not encrypted, but the manifest says that it is")
        if len(head) < HEAD + TAG:
            raise ValueError(
                f"{path}: truncated: an encrypted file has at least {HEAD + TAG} bytes, this one {size}"
            )
        _check_key(path, head, key)

        # the head must be authentic, and the file must have the size that follows from it
        self._head, tag = head[:HEAD], head[HEAD:]
        self._aead = _aead(key, self._head[len(MAGIC) + ID : -WORD])
        self._open(_HEAD_NONCE, tag, "its head")
        self.size = int.from_bytes(self._head[-WORD:], "little")
        expected = encrypted_size(self.size)
        if expected != size:
            cut = "truncated" if size < expected else "bytes were added"
            raise ValueError(f"{path}: {cut}: its header says {expected} bytes, but it has {size}")
        self._block = lru_cache(maxsize=4)(self._read)

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes ``start`` up to ``stop`` of the plain text."""
        assert 0 <= start <= stop <= self.size, (start, stop, self.size)
        parts = []
        while start < stop:
            number, within = divmod(start, BLOCK)
            parts.append(self._block(number)[within : within + stop - start])
            start += len(parts[-1])
        return b"".join(parts)

    def _read(self, number: int) -> bytes:
        with opened(self.path) as file:
            file.seek(HEAD + TAG + number * (BLOCK + TAG))
            return self._open(_nonce(number), file.read(BLOCK + TAG), f"block {number}")

    def _open(self, nonce: bytes, data: bytes, part: str) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(nonce, data, self._head)
        except InvalidTag as error:
            raise ValueError(
                f"{self.path}: damaged or tampered with: {part} cannot be decrypted with the key"
            ) from error


def check_key(path: Path, key: bytes) -> None:
    """Raises ``ValueError`` if the file is encrypted with another key. It checks nothing else."""
    with opened(path) as file:
        _check_key(path, file.read(HEAD), key)


def _check_key(path: Path, head: bytes, key: bytes) -> None:
    used, mine = head[len(MAGIC) : len(MAGIC) + ID], key_id(key)
    if is_encrypted(head) and used != mine:
        raise ValueError(f"{path}: wrong key: it is encrypted with key {used.hex()}, this is {mine.hex()}")


def is_encrypted(head: bytes) -> bool:
    """Returns true if a file that starts with ``head`` is encrypted in this format."""
    return head.startswith(MAGIC)


def encrypted_size(plain: int) -> int:
    """Returns the size of an encrypted file for ``plain`` bytes of plain text."""
    return HEAD + TAG + plain + -(-plain // BLOCK) * TAG


def salt_of(path: Path) -> str:
    """Returns the file's salt in hexadecimal: 32 random bytes, so that no other file has the same key."""
    with opened(path) as file:
        return file.read(HEAD)[len(MAGIC) + ID : -WORD].hex()


def key_id(key: bytes) -> bytes:
    """Returns a digest that identifies the key and reveals nothing else about it."""
    return derived(key, b"", b"launcher checkpoint key id", ID)


def _aead(key: bytes, salt: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(derived(key, salt, b"launcher checkpoint file", 32))


def derived(key: bytes, salt: bytes, purpose: bytes, size: int) -> bytes:
    """Derives a key of ``size`` bytes for one purpose: HKDF-SHA256 with ``purpose`` as its info."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), size, salt or None, purpose).derive(key)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


ANOTHER = "LAUNCHER_CHECKPOINT_KEY"
"""The environment variable that says where the key is, if it has moved since the checkpoint was written."""
KEY_SIZE = 32  # bytes of an AES-256 key
FORMS = "env:NAME (an environment variable) or file:PATH"


def is_place(text: str) -> bool:
    """Returns true if ``text`` says where a key is: ``env:NAME`` or ``file:PATH``."""
    return PLACE.fullmatch(text) is not None


def load_key(place: str) -> bytes:
    """Returns the key at ``place``.

    Raises ``ValueError`` if there is no valid key or cryptography is not installed. No message shows a key.
    """
    if find_spec("cryptography") is None:
        raise ValueError(
            "encrypted checkpoints need the package cryptography, which is not installed: "
            + install_command("crypto")
        )

    # read the key's bytes
    match = PLACE.fullmatch(place)
    if match is None:
        raise ValueError(f"the place of a key must be {FORMS}")
    raw = _of_variable(place, match[2]) if match[1] else _of_file(place, Path(match[4]))

    # 32 printable characters are a passphrase, not a key: 32 random bytes are practically never all printable
    as_it_is = match[3] and len(raw) == KEY_SIZE and not set(raw) <= set(string.printable.encode())
    key = raw if as_it_is else _decoded(raw.strip())
    if key is None or len(key) != KEY_SIZE:
        raise ValueError(
            f"{place_text(place)}: not an AES-256 key: it has {len(raw)} bytes; give {KEY_SIZE} random "
            "bytes, as 64 hexadecimal digits (openssl rand -hex 32), as base64 or, in a file, raw"
        )
    return key


def _of_variable(place: str, name: str) -> bytes:
    value = os.environ.get(name)
    if not value:
        text = "this environment variable is not set; it must hold the key (openssl rand -hex 32)"
        raise ValueError(f"{place_text(place)}: {text}")
    return os.fsencode(value)


def _of_file(place: str, path: Path) -> bytes:
    try:
        with opened(path) as file:
            return file.read(1024)
    except OSError as error:
        raise ValueError(f"{place_text(place)}: the key cannot be read: {error.strerror}") from error


def _decoded(text: bytes) -> bytes | None:
    try:
        if len(text) == 2 * KEY_SIZE:
            return bytes.fromhex(text.decode("ascii"))
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
