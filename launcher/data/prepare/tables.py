"""Reads columns of Parquet and Arrow files in batches; needs pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.data.file_kinds import BadFile
from launcher.data.prepare.corpus_formats import CorpusFile
from launcher.untrusted.bounded import limited_memory
from launcher.untrusted.files import check, opened

BATCH = 1 << 20  # bytes of text read at once, unless one row has more
ROWS = 4096
RECORDS = 256  # rows of several columns read at once
BUFFER = 1 << 20  # bytes of a column read ahead
LARGE = 16 << 20  # bytes of a batch after which the next ones have fewer rows
LONGEST = 8 << 20  # the most bytes of a text, as of a line of JSON
ROOM = (
    256 << 20
)  # bytes of memory that reading one batch may take; a few bytes of a file can stand for any number

T = TypeVar("T")


@dataclass(frozen=True)
class LongText:
    """Stands for a text of ``nbytes`` bytes, more than ``LONGEST``, which is not decoded."""

    nbytes: int


def check_column(file: CorpusFile, field: str) -> None:
    """Raises ``BadFile`` unless column ``field`` exists and contains text."""
    schema = _schema(file)
    if field not in schema.names:
        raise BadFile(f"no column {field!r} (columns: {', '.join(schema.names)})")
    _check_once(schema, [field])
    kind = schema.field(field).type
    if not _is_text(kind):
        raise BadFile(f"column {field!r} has {kind}, not text")


def _check_once(schema: Any, fields: Sequence[str]) -> None:
    """Raises ``BadFile`` if several columns have the same name in ``fields``."""
    for field in fields:
        if (count := len(schema.get_all_field_indices(field))) > 1:
            raise BadFile(f"{count} columns are named {field!r}: rename all but the one to read")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def columns_of_text(file: CorpusFile) -> list[str]:
    """Returns the names of the columns that contain text. Raises ``BadFile``."""
    return [column.name for column in _schema(file) if _is_text(column.type)]


def columns(file: CorpusFile) -> list[str]:
    """Returns the names of the columns. Raises ``BadFile``."""
    return list(_schema(file).names)


def records(file: CorpusFile, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields each row as a dict of the columns ``fields``. Raises ``BadFile`` with the path."""
    import pyarrow as pa

    try:
        _check_once(_schema(file), fields)
    except BadFile as error:
        raise BadFile(f"{file.path}: {error}") from error
    row = 0
    try:
        for batch in _record_batches(file, list(fields)):
            for at in range(0, len(batch), RECORDS):
                for record in _rows(batch.slice(at, RECORDS)):
                    row += 1
                    yield record
    except UnicodeDecodeError as error:
        raise BadFile(f"{file.path}: row {row + 1} has text that is not UTF-8") from error
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise BadFile(f"{file.path}: cannot be read: {_reason(error)}") from error


def _record_batches(file: CorpusFile, fields: list[str]) -> Iterator[Any]:
    if file.form == "parquet":
        with _parquet(file) as source:
            for group in range(source.metadata.num_row_groups):
                yield from _of_group(source, group, fields, RECORDS)
        return
    with _arrow_batches(file) as batches:
        for batch in batches:
            yield _checked(batch.select(fields))


def _checked(batch: Any) -> Any:
    """Returns ``batch``. Raises ``ArrowInvalid`` for positions outside of its data, which Arrow ignores."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):  # its row is found later
            raise
    return batch


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a batch.

    Raises ``UnicodeDecodeError`` at the first row that is not UTF-8, and ``MemoryError`` at the first one of
    more than ``ROOM`` bytes.
    """
    try:
        rows = iter(_values(batch))
    except (UnicodeDecodeError, MemoryError):
        rows = (_values(batch.slice(at, 1))[0] for at in range(len(batch)))
    yield from rows


def _values(batch: Any) -> list[dict[str, Any]]:
    with limited_memory(ROOM):
        rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def column_values(file: CorpusFile, field: str, start: int) -> Iterator[list[Any]]:
    """Yields lists of the column's values, from row ``start`` on.

    Null values are ``None``; a text that is not UTF-8 is ``bytes``, and one of more than ``LONGEST`` bytes is
    a ``LongText``. Raises ``BadFile`` with the path.
    """
    import pyarrow as pa

    try:
        yield from (
            _parquet_rows(file, field, start) if file.form == "parquet" else _arrow_rows(file, field, start)
        )
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise BadFile(f"{file.path}: cannot be read: {_reason(error)}") from error


def _parquet(file: CorpusFile) -> Any:
    """Opens a Parquet file, and prefetches no complete column chunks, which may be of any size."""
    from pyarrow import parquet

    check(file.path)
    with limited_memory(ROOM):
        return parquet.ParquetFile(file.path, memory_map=False, buffer_size=BUFFER, pre_buffer=False)


def _parquet_rows(file: CorpusFile, field: str, start: int) -> Iterator[list[Any]]:
    with _parquet(file) as source:
        at = 0
        for group in range(source.metadata.num_row_groups):
            meta = source.metadata.row_group(group)
            if at + meta.num_rows <= start:
                at += meta.num_rows
                continue
            for batch in _of_group(source, group, [field], _rows_at_once(meta, field)):
                yield from _lists(batch.column(0), start - at)
                at += len(batch)


def _of_group(source: Any, group: int, fields: Sequence[str], size: int) -> Iterator[Any]:
    """Yields columns of a row group, ``size`` rows at once, or fewer where they have many bytes.

    The sizes in the metadata do not show how many: a value of a dictionary may stand for any number of rows.
    Raises ``MemoryError`` if one row takes more than ``ROOM``.
    """
    done = 0
    while True:
        at = 0
        try:
            batches = source.iter_batches(size, row_groups=[group], columns=fields, use_threads=False)
            for batch in _limited(batches):
                new = batch.slice(max(done - at, 0))
                at += len(batch)
                if at > done:
                    yield new
                    done = at
                if size > 1 and batch.nbytes > LARGE:
                    break
            else:
                return
        except MemoryError:
            if size == 1:
                raise
        size = max(size // 16, 1)


def _rows_at_once(group: Any, field: str) -> int:
    """Returns the rows per batch for about ``BATCH`` bytes, estimated from the mean size of a row."""
    chunks = (group.column(i) for i in range(group.num_columns))
    size = next((c.total_uncompressed_size for c in chunks if c.path_in_schema == field), 0)
    return max(1, min(ROWS, BATCH * int(group.num_rows) // max(int(size), 1)))


def _schema(file: CorpusFile) -> Any:
    """Returns the schema of the file. Raises ``BadFile``."""
    import pyarrow as pa

    try:
        return _parquet(file).schema_arrow if file.form == "parquet" else _arrow_schema(file)
    except (pa.ArrowException, MemoryError) as error:
        raise BadFile(f"cannot be read: {_reason(error)}") from error


def _arrow_schema(file: CorpusFile) -> Any:
    from pyarrow import ipc

    with opened(file.path) as stream, limited_memory(ROOM):
        reader = ipc.open_file(stream) if _has_index(file) else ipc.open_stream(stream)
        return reader.schema


def _has_index(file: CorpusFile) -> bool:
    """Returns true for Arrow's file format. The stream format (of ``datasets``) has no signature."""
    with opened(file.path) as stream:
        return stream.read(6) == b"ARROW1"


def _arrow_rows(file: CorpusFile, field: str, start: int) -> Iterator[list[Any]]:
    at = 0
    with _arrow_batches(file) as batches:
        for batch in batches:
            column = batch.column(batch.schema.get_field_index(field))
            _as_bytes(column).validate(full=True)  # Arrow does not check the positions that it reads from
            for first in range(0, len(column), ROWS):
                yield from _lists(column[first : first + ROWS], start - at - first)
            at += len(column)


@contextmanager
def _arrow_batches(file: CorpusFile) -> Iterator[Iterator[Any]]:
    import pyarrow as pa
    from pyarrow import ipc

    check(file.path)
    with pa.memory_map(str(file.path)) as stream:  # reads only the used parts of a batch
        if _has_index(file):
            indexed = ipc.open_file(stream)
            yield _limited(indexed.get_batch(i) for i in range(indexed.num_record_batches))
        else:
            yield _limited(iter(ipc.open_stream(stream)))
            _check_end(file)


def _limited(batches: Iterator[T]) -> Iterator[T]:
    """Yields the batches. Raises ``MemoryError`` if reading one takes more than ``ROOM`` bytes."""
    batches = iter(batches)
    while True:
        with limited_memory(ROOM):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


_CONTINUES = b"\xff\xff\xff\xff"  # starts each message since version 0.15 of Arrow
_ENDS = _CONTINUES + bytes(4)


def _check_end(file: CorpusFile) -> None:
    """Raises ``BadFile`` if a stream has no mark at its end: its writer may have been killed.

    pyarrow treats the end of the file as the end of the stream, so later batches would be missing silently.
    """
    with opened(file.path) as stream:
        start = stream.read(len(_CONTINUES))
        stream.seek(-min(file.size, len(_ENDS)), io.SEEK_END)
        if start == _CONTINUES and stream.read() != _ENDS:
            raise BadFile(f"{file.path}: the stream has no mark at its end: it is cut short; write it again")


def _lists(column: Any, start: int) -> Iterator[list[Any]]:
    """Yields the values from row ``start`` on, as lists of about ``BATCH`` bytes; one row may have more."""
    ends = np.cumsum(_sizes(column))
    at = max(start, 0)
    while at < len(column):
        before = int(ends[at - 1]) if at else 0
        stop = max(int(np.searchsorted(ends, before + BATCH, side="right")), at + 1)
        size = int(ends[stop - 1]) - before
        if size > max(BATCH, LONGEST):
            yield [LongText(size)]
        else:
            yield _texts(column[at:stop])
        at = stop


def _sizes(column: Any) -> NDArray[np.int64]:
    """Returns the number of bytes of each value; 0 for null. ``pyarrow.compute`` takes long to import."""
    import pyarrow as pa

    valid, first, *_ = column.buffers()
    here = slice(column.offset, column.offset + len(column))
    if pa.types.is_string_view(column.type):  # its views begin with the size, in 4 of 16 bytes
        sizes = np.frombuffer(first, np.int32)[::4][here].astype(np.int64)
    else:
        width = np.int64 if pa.types.is_large_string(column.type) else np.int32
        ends = np.frombuffer(first, width)[here.start : here.stop + 1].astype(np.int64)
        sizes = ends[1:] - ends[:-1]
    if valid is not None:
        sizes *= np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[here]
    return sizes


def _as_bytes(column: Any) -> Any:
    """Returns the same values as bytes, without a copy: what Arrow checks then does not include UTF-8."""
    import pyarrow as pa

    kinds = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    return column.view(kinds[column.type])


def _texts(column: Any) -> list[Any]:
    """Returns the values of a column of text, which writers of Parquet and Arrow do not check for UTF-8."""
    import pyarrow as pa

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_decoded(value) for value in column.cast(pa.large_binary()).to_pylist()]


def _decoded(value: bytes | None) -> str | bytes | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"a batch of rows takes more than {ROOM >> 20} MiB; write it in smaller row groups or batches"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
