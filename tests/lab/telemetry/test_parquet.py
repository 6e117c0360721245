"""Files of tables come back as they were, and other programs read the same numbers from them."""

import importlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from esper_soa.lab.telemetry.schema import schema_of
from esper_soa.lab.telemetry.table_files import (
    Texts,
    Values,
    read_table,
    table_bytes,
    table_from,
    table_path,
)
from esper_soa.system.errors import DataError

duckdb = importlib.import_module("duckdb") if find_spec("duckdb") else None  # extra query
COLUMNS = schema_of(
    "round int, a float, b float?, t text, u text?, f bool, g bool?, k int?, l single[], m bool[], "
    "e single[], s single?"
)
NAMES = ("x", "yé", "z")


def made(rows: int) -> dict[str, Values]:
    random = np.random.default_rng(rows)
    some = random.random(rows) < 0.5
    return {
        "round": np.arange(rows) - 3,
        "a": random.normal(size=rows),
        "b": np.where(some, np.nan, random.normal(size=rows)),
        "t": Texts(random.integers(0, 3, rows), NAMES),
        "u": Texts(random.integers(-1, 3, rows), NAMES),
        "f": some,
        "g": np.where(some, random.random(rows) < 0.5, np.nan),
        "k": np.where(some, random.integers(-5, 9, rows), np.nan),
        "l": random.normal(size=(rows, 3)).astype(np.float32),
        "m": random.random((rows, 5)) < 0.5,
        "e": np.zeros((rows, 0), np.float32),
        "s": np.full(rows, np.nan),
    }


def plain(values: Values) -> list:
    """As any reader should see them."""
    if isinstance(values, Texts):
        return [None if code < 0 else values.names[code] for code in values.codes]
    return [None if value != value else value for value in values.tolist()]


def same(found: list, wanted: list) -> bool:
    """Equal, with None for what is not a number."""
    return [None if value is None or value != value else value for value in found] == wanted


@pytest.mark.parametrize("rows", [0, 1, 8, 333])
def test_a_table_comes_back_and_other_programs_read_it_as_it_is(rows: int, tmp_path: Path) -> None:
    values = made(rows)
    content = table_bytes(COLUMNS, values, {"complete": "true"})
    back = table_from(content, COLUMNS)
    assert back.facts == {"complete": "true"}
    path = tmp_path / "table.parquet"
    path.write_bytes(content)
    arrow = parquet.read_table(path)
    assert parquet.read_metadata(path).row_group(0).column(0).compression == "ZSTD"
    assert arrow.schema.metadata[b"complete"] == b"true"
    for name in COLUMNS.names:
        wanted = plain(values[name])
        assert same(back.values[name].tolist(), wanted), name
        assert same(arrow[name].to_pylist(), wanted), name
        found = duckdb.sql(f"select \"{name}\" from '{path}'").fetchall() if duckdb else []
        assert not duckdb or same([row[0] for row in found], wanted), name


def test_infinity_and_nan_stand_as_they_are_where_nothing_can_be_null() -> None:
    column = schema_of("a float")
    values = np.array([np.inf, -np.inf, np.nan, 0.1])
    back = table_from(table_bytes(column, {"a": values}, {}), column).values["a"]
    np.testing.assert_array_equal(back, values)


def test_what_is_no_table_of_ours_is_refused_and_any_cut_of_one(tmp_path: Path) -> None:
    content = table_bytes(COLUMNS, made(9), {})
    cuts = [content[:end] for end in range(0, len(content), 7)]
    other = table_bytes(schema_of("a float"), {"a": np.zeros(3)}, {})
    for broken in (other, b"PAR1", b"PAR1" * 4, b"PAR1" + b"\x15" * 40 + b"\x20\0\0\0PAR1", *cuts):
        with pytest.raises(DataError, match=r"^the bytes: must be a table of ours \(.+\)$"):
            table_from(broken, COLUMNS)
    path = table_path(tmp_path, "steps", 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PAR1 nothing of ours PAR1")
    with pytest.raises(DataError, match=r"round_000001\.parquet"):
        read_table(tmp_path, "steps")
