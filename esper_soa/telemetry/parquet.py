"""Tables as Parquet files, written and read with numpy alone; other programs read them as any Parquet.

What is written is the plainest part of the format (parquet.apache.org/docs/file-format): one row group with one page
per column, plain numbers, texts by a dictionary, pages packed by gzip. `table_from` reads what `table_bytes` wrote and
nothing else. Needs no torch.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from esper_soa.telemetry import thrift
from esper_soa.telemetry.schema import Column
from esper_soa.telemetry.thrift import Read, Value, binary, i32, i64, several, struct

MAGIC = b"PAR1"
WRITER = "esper_soa"
PACKING = 1  # gzip's quickest level: higher ones take five times as long for a tenth less
BOOLEAN, INT32, FLOAT, DOUBLE, BYTE_ARRAY = 0, 1, 4, 5, 6
PHYSICAL = {"int": INT32, "float": DOUBLE, "single": FLOAT, "bool": BOOLEAN, "text": BYTE_ARRAY}
DTYPES = {INT32: "<i4", DOUBLE: "<f8", FLOAT: "<f4"}
REQUIRED, OPTIONAL, REPEATED = 0, 1, 2
UTF8, LIST = 0, 3  # converted types
PLAIN, RLE, BY_DICTIONARY = 0, 3, 8  # encodings
DATA_PAGE, DICTIONARY_PAGE = 0, 2
GZIP = 2


class Texts(NamedTuple):
    """A column of texts: int [R], places in `names`, -1 for null."""

    codes: np.ndarray
    names: Sequence[str]


class Known(NamedTuple):
    """A column of numbers that may be null: values [R], and bool [R], where there is one."""

    values: np.ndarray
    known: np.ndarray


# Numbers [R], or [R, K] of a column of lists; floats of a nullable column are null where they are not a number.
Values: TypeAlias = np.ndarray | Texts | Known


def table_bytes(columns: Sequence[Column], values: Mapping[str, Values], facts: Mapping[str, str]) -> bytes:
    """The file of a table with `values` by the name of each column, all of R rows; facts: its metadata."""
    rows = num_rows(values[columns[0].name])
    content, chunks = bytearray(MAGIC), []
    for column in columns if rows else ():
        start = len(content)
        pages, unpacked = _pages(column, values[column.name])
        content += b"".join(pages)
        chunks.append(_chunk(column, start, [len(page) for page in pages], unpacked, _entries(values[column.name])))
    size = len(content) - len(MAGIC)
    group = {1: several(chunks), 2: i64(size), 3: i64(rows)}
    elements = [struct({4: binary("table"), 5: i32(len(columns))})]
    elements += [element for column in columns for element in _elements(column)]
    footer = struct({
        1: i32(1), 2: several(elements), 3: i64(rows), 4: several([struct(group)] if rows else []),
        5: several([struct({1: binary(key), 2: binary(fact)}) for key, fact in facts.items()]), 6: binary(WRITER),
    }).content  # fmt: skip
    return bytes(content) + footer + len(footer).to_bytes(4, "little") + MAGIC


def num_rows(values: Values) -> int:
    """R of a column."""
    return len(values.codes if isinstance(values, Texts) else values.values if isinstance(values, Known) else values)


def _entries(values: Values) -> int:
    """Values of a column as Parquet counts them: those of all lists, and one for each list that is empty."""
    return values.size or len(values) if isinstance(values, np.ndarray) else num_rows(values)


def _elements(column: Column) -> list[Value]:
    """What the schema says of a column."""
    kind, name = i32(PHYSICAL[column.type.removesuffix("[]")]), binary(column.name)
    if column.is_list:
        return [
            struct({3: i32(REQUIRED), 4: name, 5: i32(1), 6: i32(LIST)}),
            struct({3: i32(REPEATED), 4: binary("list"), 5: i32(1)}),
            struct({1: kind, 3: i32(REQUIRED), 4: binary("element")}),
        ]
    fields = {1: kind, 3: i32(OPTIONAL if column.nullable else REQUIRED), 4: name}
    return [struct(fields | ({6: i32(UTF8)} if column.type == "text" else {}))]


def _chunk(column: Column, start: int, sizes: list[int], unpacked: int, entries: int) -> Value:
    """What the footer says of a column whose pages of `sizes` bytes begin at byte `start`."""
    path = [binary(column.name), *([binary("list"), binary("element")] if column.is_list else [])]
    encodings = [i32(one) for one in (PLAIN, RLE, BY_DICTIONARY)]
    data = start + sum(sizes[:-1])
    fields = {
        1: i32(PHYSICAL[column.type.removesuffix("[]")]), 2: several(encodings), 3: several(path), 4: i32(GZIP),
        5: i64(entries), 6: i64(unpacked), 7: i64(sum(sizes)), 9: i64(data),
    }  # fmt: skip
    if len(sizes) > 1:
        fields[11] = i64(start)
    return struct({2: i64(start), 3: struct(fields)})


def _pages(column: Column, values: Values) -> tuple[list[bytes], int]:
    """The pages of a column, the dictionary first where there is one, and their size before packing."""
    levels, known = b"", None
    if column.is_list:
        lists = cast(np.ndarray, values)
        further = np.ones((len(lists), max(lists.shape[1], 1)), bool)
        further[:, 0] = False
        levels = _levels(further.ravel()) + _levels(np.full(further.size, lists.shape[1] > 0))
    elif column.nullable:
        known = _known(values)
        levels = _levels(known)
    encoding = BY_DICTIONARY if isinstance(values, Texts) else PLAIN
    body = levels + _body(column, values, known)
    header = {1: i32(_entries(values)), 2: i32(encoding), 3: i32(RLE), 4: i32(RLE)}
    pages, unpacked = _page(DATA_PAGE, body, {5: struct(header)})
    if not isinstance(values, Texts):
        return [pages], unpacked
    names = b"".join(len(name.encode()).to_bytes(4, "little") + name.encode() for name in values.names)
    words, size = _page(DICTIONARY_PAGE, names, {7: struct({1: i32(len(values.names)), 2: i32(PLAIN)})})
    return [words, pages], unpacked + size


def _page(kind: int, body: bytes, header: Mapping[int, Value]) -> tuple[bytes, int]:
    """A page with its header, and its size without packing."""
    packer = zlib.compressobj(PACKING, zlib.DEFLATED, 31)
    packed = packer.compress(body) + packer.flush()
    head = struct({1: i32(kind), 2: i32(len(body)), 3: i32(len(packed))} | dict(header)).content
    return head + packed, len(head) + len(body)


def _known(values: Values) -> np.ndarray:
    """bool [R]: where a nullable column has a value."""
    if isinstance(values, Texts):
        return values.codes >= 0
    return values.known if isinstance(values, Known) else ~np.isnan(values)


def _body(column: Column, values: Values, known: np.ndarray | None) -> bytes:
    """The values of a page, those that are null left out."""
    if isinstance(values, Texts):
        codes = values.codes if known is None else values.codes[known]
        width = 8 if len(values.names) <= 256 else 16
        groups = -(-len(codes) // 8)
        padded = np.zeros(8 * groups, f"<u{width // 8}")
        padded[: len(codes)] = codes
        return bytes([width]) + thrift.varint(groups << 1 | 1) + padded.tobytes()
    numbers = values.values if isinstance(values, Known) else values
    numbers = numbers.ravel() if known is None else numbers[known]
    kind = PHYSICAL[column.type.removesuffix("[]")]
    if kind == BOOLEAN:
        return np.packbits(numbers.astype(bool), bitorder="little").tobytes()
    return numbers.astype(DTYPES[kind]).tobytes()


def _levels(set_: np.ndarray) -> bytes:
    """Levels 0 and 1 (bool [R]) as Parquet packs them, after their length."""
    if set_.all():
        packed = thrift.varint(len(set_) << 1) + b"\1"
    else:
        groups = -(-len(set_) // 8)
        packed = thrift.varint(groups << 1 | 1) + np.packbits(set_, bitorder="little").tobytes()
    return len(packed).to_bytes(4, "little") + packed


class Contents(NamedTuple):
    """What a file holds."""

    values: dict[str, np.ndarray]  # [R] by column, or [R, K]; null is NaN, and None among texts
    facts: dict[str, str]


def table_from(content: bytes, columns: Sequence[Column]) -> Contents:
    """What `table_bytes` made bytes of; raises ValueError where it did not, or not with these columns."""
    if len(content) < 12 or content[:4] != MAGIC or content[-4:] != MAGIC:
        raise ValueError("no whole Parquet file")
    try:
        size = int.from_bytes(content[-8:-4], "little")
        footer = thrift.Reader(content, len(content) - 8 - size).struct()
        facts = {_text(_struct(fact)[1]): _text(_struct(fact)[2]) for fact in _list(footer[5])}
        if _text(footer[6]) != WRITER:
            raise ValueError(f"written by {_text(footer[6])}")
        groups = _list(footer[4])
        if not groups:
            return Contents({one.name: _empty(one) for one in columns}, facts)
        group = _struct(groups[0])
        chunks = [_struct(_struct(chunk)[3]) for chunk in _list(group[1])]
        found = {_text(_list(chunk[3])[0]): chunk for chunk in chunks}
        rows = _whole(group[3])
        return Contents({one.name: _column(content, one, found[one.name], rows) for one in columns}, facts)
    except (LookupError, TypeError, zlib.error) as error:
        raise ValueError(f"not a table of ours ({type(error).__name__}: {error})") from error


def _empty(column: Column) -> np.ndarray:
    kind = PHYSICAL[column.type.removesuffix("[]")]
    dtype = object if kind == BYTE_ARRAY else "<f8" if column.nullable else DTYPES.get(kind, "bool")
    return np.zeros((0, 0) if column.is_list else 0, dtype)


def _column(content: bytes, column: Column, chunk: Mapping[int, Read], rows: int) -> np.ndarray:
    """The values of a column; nullable numbers as float64 with NaN, texts as objects with None."""
    place, entries = _whole(chunk.get(11, chunk[9])), _whole(chunk[5])
    names: np.ndarray | None = None
    if 11 in chunk:
        body, place = _unpacked(content, place)
        names = np.array(_words(body), object)
    body, _ = _unpacked(content, place)
    known = np.ones(entries, bool)
    if column.is_list:
        body = body[4 + int.from_bytes(body[:4], "little") :]
    if column.is_list or column.nullable:
        size = int.from_bytes(body[:4], "little")
        known, body = _set_levels(body[4 : 4 + size], entries), body[4 + size :]
    numbers = _numbers(column, body, int(known.sum()), names)
    if column.is_list:
        return numbers.reshape(rows, len(numbers) // rows)
    if not column.nullable:
        return numbers
    filled = np.full(entries, None if names is not None else np.nan, object if names is not None else "<f8")
    filled[known] = numbers
    return filled


def _numbers(column: Column, body: bytes, count: int, names: np.ndarray | None) -> np.ndarray:
    """`count` values of a page without its levels."""
    kind = PHYSICAL[column.type.removesuffix("[]")]
    if names is not None:
        reader = thrift.Reader(body, 1)
        while reader.content[reader.place] & 0x80:
            reader.place += 1
        codes = np.frombuffer(body, f"<u{body[0] // 8}", offset=reader.place + 1)
        return names[codes[:count]] if len(names) else np.zeros(0, object)
    if kind == BOOLEAN:
        return np.unpackbits(np.frombuffer(body, np.uint8), count=count, bitorder="little").astype(bool)
    return np.frombuffer(body, DTYPES[kind], count).copy()


def _unpacked(content: bytes, place: int) -> tuple[bytes, int]:
    """The page at byte `place` without its packing, and where the next begins."""
    reader = thrift.Reader(content, place)
    header = reader.struct()
    end = reader.place + _whole(header[3])
    return zlib.decompress(content[reader.place : end], 47), end


def _set_levels(packed: bytes, count: int) -> np.ndarray:
    """bool [R]: levels of a page, 0 or 1."""
    place = 0
    while packed[place] & 0x80:
        place += 1
    if not packed[0] & 1:
        return np.full(count, packed[place + 1] == 1)
    return np.unpackbits(np.frombuffer(packed, np.uint8, offset=place + 1), count=count, bitorder="little").astype(bool)


def _words(body: bytes) -> list[str]:
    """The texts of a dictionary."""
    found, place = [], 0
    while place < len(body):
        end = place + 4 + int.from_bytes(body[place : place + 4], "little")
        found.append(body[place + 4 : end].decode())
        place = end
    return found


def _struct(value: Read) -> dict[int, Read]:
    if not isinstance(value, dict):
        raise TypeError("a struct is wanted")
    return value


def _list(value: Read) -> list[Read]:
    if not isinstance(value, list):
        raise TypeError("a list is wanted")
    return value


def _whole(value: Read) -> int:
    if not isinstance(value, int):
        raise TypeError("a number is wanted")
    return value


def _text(value: Read) -> str:
    if not isinstance(value, bytes):
        raise TypeError("a text is wanted")
    return value.decode()
