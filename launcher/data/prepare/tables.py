"""Reads columns of Parquet and Arrow files in batches; needs pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from launcher.data.file_kinds import BadFile
from launcher.data.prepare.corpus_formats import CorpusFile
from launcher.untrusted.files import check, opened

BATCH = 1 << 20  # bytes of text read at once, unless one row has more
ROWS = 4096
RECORDS = 256  # rows of several columns read at once
BUFFER = 1 << 20  # bytes of a column read ahead


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
    except (pa.ArrowException, OSError) as error:
        raise BadFile(f"{file.path}: cannot be read: {_first_line(error)}") from error


def _record_batches(file: CorpusFile, fields: list[str]) -> Iterator[Any]:
    if file.form == "parquet":
        with _parquet(file) as source:
            yield from source.iter_batches(RECORDS, columns=fields, use_threads=False)
        return
    with _arrow_batches(file) as batches:
        yield from (batch.select(fields) for batch in batches)


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a batch. Raises ``UnicodeDecodeError`` at the first row that is not UTF-8."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        rows = (batch.slice(at, 1).to_pylist()[0] for at in range(len(batch)))
    yield from rows


def column_values(file: CorpusFile, field: str, start: int) -> Iterator[list[Any]]:
    """Yields lists of the column's values, from row ``start`` on.

    Null values are ``None``; a text that is not UTF-8 is ``bytes``. ``start`` must be the first row of a
    list. Raises ``BadFile`` with the path.
    """
    import pyarrow as pa

    try:
        yield from (
            _parquet_rows(file, field, start) if file.form == "parquet" else _arrow_rows(file, field, start)
        )
    except (pa.ArrowException, OSError) as error:
        raise BadFile(f"{file.path}: cannot be read: {_first_line(error)}") from error


def _parquet(file: CorpusFile) -> Any:
    """Opens a Parquet file, and prefetches no complete column chunks, which may be of any size."""
    from pyarrow import parquet

    check(file.path)
    return parquet.ParquetFile(file.path, memory_map=False, buffer_size=BUFFER, pre_buffer=False)


def _parquet_rows(file: CorpusFile, field: str, start: int) -> Iterator[list[Any]]:
    source = _parquet(file)
    with source:
        at = 0
        for group in range(source.metadata.num_row_groups):
            meta = source.metadata.row_group(group)
            if at + meta.num_rows <= start:
                at += meta.num_rows
                continue
            size = _rows_at_once(meta, field)
            for batch in source.iter_batches(size, row_groups=[group], columns=[field], use_threads=False):
                if at >= start:
                    yield _texts(batch.column(0))
                at += len(batch)


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
    except pa.ArrowException as error:
        raise BadFile(f"cannot be read: {_first_line(error)}") from error


def _arrow_schema(file: CorpusFile) -> Any:
    from pyarrow import ipc

    with opened(file.path) as stream:
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
            for part in _parts(column):
                if at >= start:
                    yield _texts(part)
                at += len(part)


@contextmanager
def _arrow_batches(file: CorpusFile) -> Iterator[Iterator[Any]]:
    import pyarrow as pa
    from pyarrow import ipc

    check(file.path)
    with pa.memory_map(str(file.path)) as stream:  # reads only the used parts of a batch
        if _has_index(file):
            indexed = ipc.open_file(stream)
            yield (indexed.get_batch(i) for i in range(indexed.num_record_batches))
        else:
            yield iter(ipc.open_stream(stream))
            _check_end(file)


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


def _parts(column: Any) -> Iterator[Any]:
    """Splits a column into pieces of about ``BATCH`` bytes, the same ones for every start of reading."""
    for first in range(0, len(column), ROWS):
        some = column[first : first + ROWS]
        size = max(1, BATCH * len(some) // max(some.nbytes, 1))
        for at in range(0, len(some), size):
            yield some[at : at + size]


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


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
