"""Files of tables come back as they were, and other programs read the same numbers from them."""

from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from esper_soa.telemetry.parquet import Texts, Values, table_bytes, table_from
from esper_soa.telemetry.schema import Column

COLUMNS = (
    Column("round", "int"),
    Column("a", "float"),
    Column("b", "float", nullable=True),
    Column("t", "text"),
    Column("u", "text", nullable=True),
    Column("f", "bool"),
    Column("g", "bool", nullable=True),
    Column("k", "int", nullable=True),
    Column("l", "single[]"),
    Column("m", "bool[]"),
    Column("e", "single[]"),
    Column("s", "single", nullable=True),
)
NAMES = ("x", "yé", "z")
ROWS = (0, 1, 7, 8, 9, 333)


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


@pytest.mark.parametrize("rows", ROWS)
def test_a_table_comes_back_as_it_was(rows: int) -> None:
    values = made(rows)
    back = table_from(table_bytes(COLUMNS, values, {"complete": "true"}), COLUMNS)
    assert back.facts == {"complete": "true"}
    for column in COLUMNS:
        assert same(back.values[column.name].tolist(), plain(values[column.name])), column.name


def test_infinity_and_nan_stand_as_they_are_where_nothing_can_be_null() -> None:
    column = Column("a", "float")
    values = np.array([np.inf, -np.inf, np.nan, 0.1])
    back = table_from(table_bytes([column], {"a": values}, {}), [column]).values["a"]
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("rows", ROWS)
def test_other_programs_read_it_as_it_is(rows: int, tmp_path: Path) -> None:
    values = made(rows)
    path = tmp_path / "table.parquet"
    path.write_bytes(table_bytes(COLUMNS, values, {"complete": "true"}))
    arrow = parquet.read_table(path)
    assert arrow.schema.metadata[b"complete"] == b"true"
    for column in COLUMNS:
        assert same(arrow[column.name].to_pylist(), plain(values[column.name])), column.name


@pytest.mark.parametrize("rows", ROWS)
def test_duckdb_reads_it_as_it_is(rows: int, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="extra query")
    values = made(rows)
    path = tmp_path / "table.parquet"
    path.write_bytes(table_bytes(COLUMNS, values, {}))
    for column in COLUMNS:
        found = duckdb.sql(f"select \"{column.name}\" from '{path}'").fetchall()
        assert same([row[0] for row in found], plain(values[column.name])), column.name


@pytest.mark.parametrize("rows", ROWS)
def test_polars_and_pandas_read_it_as_it_is(rows: int, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="a reader of others")
    pandas = pytest.importorskip("pandas", reason="a reader of others")
    values = made(rows)
    path = tmp_path / "table.parquet"
    path.write_bytes(table_bytes(COLUMNS, values, {}))
    frame = polars.read_parquet(path)
    other = pandas.read_parquet(path)
    for column in COLUMNS:
        assert same(frame[column.name].to_list(), plain(values[column.name])), column.name
        if not column.is_list:
            assert same(other[column.name].tolist(), plain(values[column.name])), column.name
    assert len(other) == rows


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1" * 4, b"PAR1" + b"\x15" * 40 + b"\x20\0\0\0PAR1"]
)
def test_what_is_no_table_of_ours_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        table_from(content, COLUMNS)


def test_any_cut_of_a_file_is_refused() -> None:
    content = table_bytes(COLUMNS, made(9), {})
    for end in range(len(content)):
        with pytest.raises(ValueError):  # noqa: PT011
            table_from(content[:end], COLUMNS)
