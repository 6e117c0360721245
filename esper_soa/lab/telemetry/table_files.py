"""The files of tables in a run folder, by pyarrow: which rounds there are, making them and reading
them. A file has one row group; what may be null is null there and NaN here. Needs no torch.
"""

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import pyarrow
from pyarrow import parquet, types

from esper_soa.lab.telemetry.schema import TABLES
from esper_soa.system.errors import DataError, reading
from esper_soa.system.plain_files import FOLDER, list_folder, open_plain

TABLES_FOLDER = "telemetry"
MAX_CELLS = 1 << 22  # rows times columns of a file that is read for a report: 32 MB
CELL_BYTES = 8  # of most cells, as they are in memory
# Types of fields in the head of a page, as Thrift's compact protocol numbers them.
BOOLEANS = (1, 2)
NUMBERS = (4, 5, 6)
BINARY = 8
STRUCT = 12
ROUND_FILE = re.compile(r"round_(\d{6,})\.parquet")


@dataclass(frozen=True)
class Texts:
    """A column of texts: places in `names` (int, of any shape), -1 for null."""

    codes: np.ndarray
    names: Sequence[str]

    def __getitem__(self, where: np.ndarray | tuple[np.ndarray, ...]) -> "Texts":
        return Texts(self.codes[where], self.names)


# Numbers [R], or [R, K] of a column of lists; those of a nullable column are null where they are
# not a number.
Values: TypeAlias = np.ndarray | Texts


class Contents(NamedTuple):
    """Metadata and columns of a file."""

    values: dict[str, np.ndarray]  # [R] by column, or [R, K]; null is NaN, and None among texts
    facts: dict[str, str]


def table_bytes(
    columns: pyarrow.Schema, values: Mapping[str, Values], facts: Mapping[str, str]
) -> bytes:
    """The file of a table with `values` by name of column, all of R rows; facts: its metadata."""
    arrays = [_array(column, values[column.name]) for column in columns]
    table = pyarrow.Table.from_arrays(arrays, schema=columns.with_metadata(dict(facts)))
    content = io.BytesIO()
    parquet.write_table(table, content, compression="zstd")
    return content.getvalue()


def _array(column: pyarrow.Field, values: Values) -> pyarrow.Array:
    if isinstance(values, Texts):
        codes = pyarrow.array(values.codes.astype(np.int32), mask=values.codes < 0)
        return pyarrow.array(values.names, column.type).take(codes)
    if types.is_list(column.type):
        ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        flat = pyarrow.array(values.ravel(), column.type.value_type)
        return pyarrow.ListArray.from_arrays(ends, flat, type=column.type)
    unknown = np.isnan(values) if column.nullable else None
    if types.is_boolean(column.type):
        values = values > 0
    return pyarrow.array(values, column.type, mask=unknown)


def table_from(content: bytes, columns: pyarrow.Schema) -> Contents:
    """The table that `table_bytes` made bytes of; DataError for others, and other columns."""
    return _table_in(io.BytesIO(content), columns, "the bytes")


def _table_in(
    source: BinaryIO, columns: pyarrow.Schema, file: object, most: int | None = None
) -> Contents:
    """The `columns` of a table, each read alone; `most`: cells, of all of them, that may be read.

    Texts are read as codes, so that one that stands in a million rows is in memory once.
    """
    texts = [part.name for part in columns if types.is_string(part.type)]
    with reading(file, DataError, "a table of ours"):
        table = parquet.ParquetFile(source, read_dictionary=texts)
        if most is not None:
            size = _num_cells(table.metadata, source, columns)
            if size > most:
                raise ValueError(f"of {most:,} cells at most, not {size:,}")
        facts = {
            key.decode(): fact.decode() for key, fact in (table.metadata.metadata or {}).items()
        }
        values = {part.name: _values(part, table) for part in columns}
    return Contents(values, {key: fact for key, fact in facts.items() if key != "ARROW:schema"})


def _num_cells(facts: parquet.FileMetaData, source: BinaryIO, columns: pyarrow.Schema) -> int:
    """Cells of the columns, or as many as fill the memory that reading them takes, by the heads of
    their pages: sizes at the end of the file may be any. A text of a letter takes eight cells.
    """
    cells = 0
    for group in map(facts.row_group, range(facts.num_row_groups)):
        for part in map(group.column, range(group.num_columns)):
            if part.path_in_schema in columns.names:
                is_text = types.is_string(columns.field(part.path_in_schema).type)
                begin = min(part.data_page_offset, part.dictionary_page_offset or sys.maxsize)
                source.seek(begin)
                pages = source.read(part.total_compressed_size)
                size = _size_in_memory(pages)
                cells += max(part.num_values, size if is_text else size // CELL_BYTES)
    return max(cells, facts.num_rows * len(columns))


def _size_in_memory(pages: bytes) -> int:
    """Bytes of pages in memory. Before each is a head, which begins with its kind, its size in
    memory and that in the file: https://parquet.apache.org/docs/file-format/data-pages.
    """
    place = size = 0
    while place < len(pages):
        numbers, place = _head_numbers(pages, place)
        size += numbers[1]
        place += numbers[2]
    return size


def _head_numbers(pages: bytes, place: int) -> tuple[list[int], int]:
    """The numbers in the fields of a head, and the place behind it."""
    numbers = []
    while pages[place]:
        step, kind = divmod(pages[place], 16)
        place += 1
        if kind == STRUCT:
            _, place = _head_numbers(pages, place)
        elif kind in (*NUMBERS, BINARY):
            ends = (at for at in range(place, place + 10) if pages[at] < 128)  # of seven bits each
            end = next(ends) + 1
            number = sum((byte & 127) << 7 * at for at, byte in enumerate(pages[place:end]))
            place = end + (number if kind == BINARY else 0)
            numbers.append(number >> 1)
        if not step or kind not in (*BOOLEANS, *NUMBERS, BINARY, STRUCT):
            raise ValueError("a page with a field of no use")  # such as a second size
    return numbers, place + 1


def _values(column: pyarrow.Field, table: parquet.ParquetFile) -> np.ndarray:
    """The values of a column; nullable numbers as float64 with NaN, texts as objects with None."""
    kind = table.schema_arrow.field(column.name).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if kind != column.type:
        raise ValueError(f"{column.name} is {kind}, not {column.type}")
    array = table.read([column.name]).column(0)
    if array.null_count and not column.nullable:
        raise ValueError(f"{column.name} has nulls")
    if types.is_list(column.type):
        numbers = array.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return numbers.reshape(len(array), len(numbers) // max(len(array), 1))
    if types.is_string(column.type):
        parts = [
            np.array([*chunk.dictionary.to_pylist(), None], object)[chunk.indices.fill_null(-1)]
            for chunk in array.chunks
        ]
        return np.concatenate([np.zeros(0, object), *parts])
    if column.nullable:
        kind = pyarrow.float32() if types.is_boolean(column.type) else pyarrow.float64()
        return array.cast(kind).to_numpy().astype("<f8")
    return array.to_numpy()


def table_path(folder: Path, table: str, number: int) -> Path:
    """The file of a table for round `number`, from 1, in the run folder `folder`."""
    return folder / TABLES_FOLDER / table / f"round_{number:06d}.parquet"


def table_files(folder: Path, table: str) -> dict[int, Path]:
    """The files of a table by round, in order; where one is read, it must be a plain file."""
    entries = list_folder(folder / TABLES_FOLDER / table).items()
    named = [(ROUND_FILE.fullmatch(path.name), path) for path, kind in entries if kind != FOLDER]
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def read_file(path: Path, table: str) -> Contents:
    """The columns of one file, see read_table, and metadata; DataError for what is no table."""
    with (
        reading(path, DataError, "a table of ours"),
        os.fdopen(open_plain(path), "rb") as source,
    ):
        return _table_in(source, TABLES[table], path)


def read_columns(path: Path, table: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Some columns of one file, which may be a stranger's; DataError for what is no table, and for
    one of more than MAX_CELLS cells.
    """
    columns = pyarrow.schema([TABLES[table].field(name) for name in names])
    with (
        reading(path, DataError, "a table of ours"),
        os.fdopen(open_plain(path), "rb") as source,
    ):
        return _table_in(source, columns, path, most=MAX_CELLS).values


def num_rows(path: Path) -> int:
    """How many rows a file has, by what stands at its end; DataError for what is no table."""
    with reading(path, DataError, "a table of ours"), os.fdopen(open_plain(path), "rb") as source:
        return int(parquet.read_metadata(source).num_rows)


def read_table(
    folder: str | Path, table: str, rounds: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """The columns of a table of a run, its rounds one after the other; `rounds`: those wanted, None
    = all there are.

    int32, float64, float32 and bool arrays [R], objects for texts, [R, K] for lists; where a column
    may be null, float64 with NaN, and None among texts. No rows where there are no files. Raises
    DataError for what is no such table.
    """
    files = table_files(Path(folder).resolve(), table)
    paths = [path for number, path in files.items() if rounds is None or number in rounds]
    parts = [read_file(path, table).values for path in paths]
    return {
        name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0)
        for name in TABLES[table].names
    }
