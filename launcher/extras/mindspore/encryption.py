"""MindSpore's encrypted files."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from launcher.checkpoint.tensorfile.safetensors import CHUNK
from launcher.optional import install_command
from launcher.untrusted.files import check

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher


PAGE = 1 << 16  # bytes read ahead, for headers


class ByteSource(Protocol):
    """Bytes to read. ``size`` and offsets count plain bytes; in an encrypted file, decrypted bytes."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes | memoryview: ...


class PlainFile:
    """A file on disk. It is opened for each read, so that thousands of these objects keep no file open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check(path)
        self.size = path.stat().st_size
        self._at = 0
        self._page = memoryview(b"")

    def read(self, start: int, stop: int) -> memoryview:
        if not self._at <= start <= stop <= self._at + len(self._page):
            if stop - start > PAGE:
                return memoryview(self._load(start, stop))
            self._page = memoryview(self._load(start, min(start + PAGE, self.size)))
            self._at = start
        return self._page[start - self._at : stop - self._at]

    def _load(self, start: int, stop: int) -> bytes:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            out = os.pread(fd, stop - start, start)
            while len(out) < stop - start:
                at = start + len(out)
                piece = os.pread(fd, stop - at, at)
                if not piece:
                    raise ValueError(f"{self.path}: truncated while it was read: it ends at byte {at}")
                out += piece
            return out
        finally:
            os.close(fd)


CipherMode = Literal["AES-GCM", "AES-CBC", "SM4-CBC"]
MODES: tuple[CipherMode, ...] = get_args(CipherMode)
MAGIC: dict[int, CipherMode] = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
BLOCK = 64 << 20  # bytes of plain text in each block but the last
BLOCKS = 1 << 16  # the most blocks of a file: 4 TiB
KEYS = {"AES-GCM": (16, 24, 32), "AES-CBC": (16, 24, 32), "SM4-CBC": (16,)}  # sizes of keys, in bytes
WORD, IV, TAG, STEP = 4, 16, 16, 16
NONCE = 12  # bytes of the IV that GCM uses, whatever the IV's length


@dataclass(frozen=True)
class CipherBlock:
    """One block of a file; its cipher text is bytes ``start`` up to ``stop``."""

    mode: CipherMode
    tag: bytes
    iv: bytes
    start: int
    stop: int


def mode_of(head: bytes | memoryview) -> CipherMode | None:
    """Returns the mode of an encrypted file that starts with ``head``; ``None`` if it is not encrypted."""
    return MAGIC.get(int.from_bytes(head[:WORD], "little"))


def check_key(key: bytes, mode: str) -> None:
    """Raises ``ValueError`` unless the key fits the mode. The message does not show the key."""
    if mode not in MODES:
        raise ValueError(f"dec_mode: {mode} is not one of {', '.join(MODES)}")
    if not isinstance(key, bytes) or len(key) not in KEYS[mode]:
        actual = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        sizes = ", ".join(map(str, KEYS[mode]))
        raise ValueError(f"dec_key: {actual}; the key of {mode} is {sizes} bytes")


class EncryptedCkpt:
    """The plain text of an encrypted file.

    The last decrypted block is kept in memory. A block in mode GCM is authenticated before it is used.
    """

    def __init__(self, path: Path, key: bytes, mode: CipherMode) -> None:
        check_key(key, mode)
        self.path = path
        self._key = key
        self._mode = mode
        self._file = PlainFile(path)
        self._blocks = tuple(self._scan())
        self._kept: tuple[int, bytearray] = (-1, bytearray())

        # where the plain text of each block ends
        ends = [0]
        for block in self._blocks:
            ends.append(ends[-1] + self._length(block))
        self._ends = tuple(ends)
        self.size = ends[-1]

    def read(self, start: int, stop: int) -> bytes:
        out = b""
        first = bisect_right(self._ends, start) - 1
        for i in range(first, bisect_left(self._ends, stop, first)):
            at = self._ends[i]
            out += self._block(i)[max(start - at, 0) : stop - at]
        return out

    def _block(self, index: int) -> bytearray:
        if self._kept[0] != index:
            self._kept = (-1, bytearray())  # free the old block before decrypting another
            self._kept = (index, self._open(self._blocks[index]))
        return self._kept[1]

    def _open(self, block: CipherBlock) -> bytearray:
        decryptor = cipher(self._mode, self._key, block.iv, block.tag).decryptor()
        out = bytearray()
        for at in range(block.start, block.stop, CHUNK):
            out += decryptor.update(self._file.read(at, min(at + CHUNK, block.stop)))
        try:
            out += decryptor.finalize()
        except _invalid() as error:
            raise self.refusal() from error
        if self._mode != "AES-GCM":
            del out[-self._padding(out[-STEP:]) :]
        return out

    def _length(self, block: CipherBlock) -> int:
        size = block.stop - block.start
        if self._mode == "AES-GCM":
            return size
        last = block.stop - STEP  # to decrypt a CBC step, only the one before it is needed
        iv = self._file.read(last - STEP, last) if size > STEP else block.iv
        decryptor = cipher(self._mode, self._key, bytes(iv), b"").decryptor()
        end = decryptor.update(self._file.read(last, block.stop)) + decryptor.finalize()
        return size - self._padding(end)

    def _padding(self, last: bytes | bytearray) -> int:
        n = last[-1]
        if not 1 <= n <= STEP or last[-n:] != bytes([n]) * n:
            raise self.refusal()
        return n

    def refusal(self) -> ValueError:
        return ValueError(
            f"{self.path}: cannot be decrypted by {self._mode} with this dec_key: wrong key or damaged file"
        )

    def _scan(self) -> Iterator[CipherBlock]:
        at = count = 0
        while at < self._file.size:
            block = _parse(self._file, at)
            if block.mode != self._mode:
                raise ValueError(f"{self.path}: encrypted with {block.mode}, not with dec_mode {self._mode}")
            yield block
            at = block.stop
            count += 1
            if count > BLOCKS:
                raise ValueError(f"{self.path}: damaged: more than {BLOCKS} encrypted blocks")


def _parse(file: PlainFile, at: int) -> CipherBlock:
    """Parses the block at byte ``at``.

    A block consists of: magic, tag (GCM only), length of the rest, length of the IV, IV, length of the cipher
    text, cipher text.
    """
    mode = mode_of(file.read(at, min(at + WORD, file.size)))
    if mode is None:
        raise ValueError(
            f"{file.path}: byte {at} does not start an encrypted block: damaged, or not encrypted"
        )

    # the head, whose length depends on the mode
    tagged = _tag_size(mode)
    start = at + WORD + tagged + WORD + WORD + IV + WORD
    if start > file.size:
        raise ValueError(
            f"{file.path}: truncated: it ends within the head of the encrypted block at byte {at}"
        )
    head = bytes(file.read(at + WORD, start))
    tag, rest = head[:tagged], head[tagged:]

    # its lengths must agree, and the file must have the complete block
    length, iv_length, size = (int.from_bytes(rest[i : i + WORD], "little") for i in (0, WORD, 2 * WORD + IV))
    padded = tagged or (size and size % STEP == 0)  # CBC pads its last step, or adds a step of padding
    if iv_length != IV or length != 2 * WORD + IV + size or not padded:
        raise ValueError(
            f"{file.path}: damaged: the lengths in the encrypted block at byte {at} contradict each other"
        )
    if start + size > file.size:
        raise ValueError(
            f"{file.path}: truncated: a block ends at byte {start + size}, the file has {file.size}"
        )
    return CipherBlock(mode, tag, iv=rest[2 * WORD : 2 * WORD + IV], start=start, stop=start + size)


def _tag_size(mode: CipherMode) -> int:
    """Returns the bytes of the tag: only GCM has one."""
    return TAG if mode == "AES-GCM" else 0


class CkptEncryptor:
    """Writes encrypted blocks to a file descriptor, from byte 0; ``close`` finishes the last block."""

    def __init__(self, fd: int, key: bytes, mode: CipherMode) -> None:
        check_key(key, mode)
        self._fd = fd
        self._key = key
        self._mode = mode
        self._at = 0  # offset in the file
        self._start()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            if not self._block_left:
                self._end()
                self._start()
            piece, view = view[: self._block_left], view[self._block_left :]
            self._block_left -= piece.nbytes
            self._put(self._encryptor.update(piece))

    def close(self) -> None:
        self._end()

    def _start(self) -> None:
        self._head = self._at
        self._size = 0  # bytes of the block's cipher text
        self._block_left = BLOCK  # bytes of plain text that still fit in the block
        self._iv = os.urandom(IV)
        self._encryptor: Any = cipher(self._mode, self._key, self._iv, b"").encryptor()
        self._at += WORD + _tag_size(self._mode) + WORD + WORD + IV + WORD

    def _end(self) -> None:
        if self._mode != "AES-GCM":
            n = STEP - (BLOCK - self._block_left) % STEP
            self._put(self._encryptor.update(bytes([n]) * n))
        self._put(self._encryptor.finalize())

        # write the head, now that its lengths are known
        magic = next(number for number, mode in MAGIC.items() if mode == self._mode)
        tag = self._encryptor.tag if self._mode == "AES-GCM" else b""
        words = (2 * WORD + IV + self._size, IV)
        lengths = b"".join(n.to_bytes(WORD, "little") for n in words)
        head = magic.to_bytes(WORD, "little") + tag + lengths + self._iv + self._size.to_bytes(WORD, "little")
        write_at(self._fd, head, self._head)

    def _put(self, data: bytes) -> None:
        write_at(self._fd, data, self._at)
        self._at += len(data)
        self._size += len(data)


def _invalid() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    return InvalidTag


def write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    """Writes all of ``data`` at byte ``at``."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        at, view = at + done, view[done:]


def cipher(mode: CipherMode, key: bytes, iv: bytes, tag: bytes) -> Cipher[Any]:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        text = f"{mode} needs the package cryptography, which is not installed: {install_command('crypto')}"
        raise ModuleNotFoundError(text, name="cryptography") from error
    if mode == "AES-GCM":
        return Cipher(algorithms.AES(key), modes.GCM(iv[:NONCE], tag or None))
    algorithm = algorithms.AES(key) if mode == "AES-CBC" else algorithms.SM4(key)
    return Cipher(algorithm, modes.CBC(iv))
