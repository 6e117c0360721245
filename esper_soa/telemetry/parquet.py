"""Tables as Parquet files, by pyarrow: columns as they are made and read here, and as any other
program reads them.

A file has one row group; what may be null is null there and NaN here. Needs no torch.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow
from pyarrow import parquet

from esper_soa.telemetry.schema import Column

PACKING = "zstd"
ARROW = {
    "int": pyarrow.int32(),
    "float": pyarrow.float64(),
    "single": pyarrow.float32(),
    "bool": pyarrow.bool_(),
    "text": pyarrow.string(),
}
# What a list holds is never null.
ARROW |= {
    f"{name}[]": pyarrow.list_(pyarrow.field("element", ARROW[name], nullable=False))
    for name in ("single", "bool")
}


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
    """What a file holds."""

    values: dict[str, np.ndarray]  # [R] by column, or [R, K]; null is NaN, and None among texts
    facts: dict[str, str]


def table_bytes(
    columns: Sequence[Column], values: Mapping[str, Values], facts: Mapping[str, str]
) -> bytes:
    """The file of a table with `values` by name of column, all of R rows; facts: its metadata."""
    fields = [pyarrow.field(one.name, ARROW[one.type], nullable=one.nullable) for one in columns]
    arrays = [_array(one, values[one.name]) for one in columns]
    table = pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(fields, dict(facts)))
    content = io.BytesIO()
    parquet.write_table(table, content, compression=PACKING)
    return content.getvalue()


def _array(column: Column, values: Values) -> pyarrow.Array:
    kind = ARROW[column.type]
    if isinstance(values, Texts):
        codes = pyarrow.array(values.codes.astype(np.int32), mask=values.codes < 0)
        return pyarrow.array(values.names, kind).take(codes)
    if column.is_list:
        ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        flat = pyarrow.array(values.ravel(), kind.value_type)
        return pyarrow.ListArray.from_arrays(ends, flat, type=kind)
    unknown = np.isnan(values) if column.nullable else None
    if column.type == "bool":
        values = values > 0
    return pyarrow.array(values, kind, mask=unknown, safe=False)


def table_from(content: bytes, columns: Sequence[Column]) -> Contents:
    """What `table_bytes` made bytes of; ValueError where it did not, or not with these columns."""
    try:
        table = parquet.ParquetFile(io.BytesIO(content)).read()
        facts = {key.decode(): fact.decode() for key, fact in (table.schema.metadata or {}).items()}
        return Contents({one.name: _numbers(one, table.column(one.name)) for one in columns}, facts)
    except (pyarrow.ArrowException, LookupError, OSError) as error:
        raise ValueError(f"not a table of ours ({type(error).__name__}: {error})") from error


def _numbers(column: Column, found: pyarrow.ChunkedArray) -> np.ndarray:
    """The values of a column; nullable numbers as float64 with NaN, texts as objects with None."""
    if column.is_list:
        numbers = found.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return numbers.reshape(len(found), len(numbers) // max(len(found), 1))
    if column.type == "text":
        return np.array(found.to_pylist(), object)
    if column.nullable:
        kind = pyarrow.float32() if column.type == "bool" else pyarrow.float64()
        return found.cast(kind).to_numpy().astype("<f8")
    return found.to_numpy()
