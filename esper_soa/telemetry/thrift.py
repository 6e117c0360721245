"""Thrift's compact protocol, as far as the metadata of a Parquet file needs it: numbers, texts, lists and structs.

Given and giving plain bytes; parquet.py says which fields there are. Needs neither torch nor numpy.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

TRUE, FALSE, I32, I64, BINARY, LIST, STRUCT = 1, 2, 5, 6, 8, 9, 12
Read: TypeAlias = "int | bytes | list[Read] | dict[int, Read]"


class Value(NamedTuple):
    """An encoded value with its type."""

    type: int
    content: bytes


def varint(number: int) -> bytes:
    """A natural number, seven bits a byte, the least first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def i32(number: int) -> Value:
    """A whole number of 32 bits."""
    return Value(I32, varint(number << 1 ^ number >> 63))


def i64(number: int) -> Value:
    """A whole number of 64 bits."""
    return Value(I64, varint(number << 1 ^ number >> 63))


def binary(content: str | bytes) -> Value:
    """A text or bytes."""
    content = content.encode() if isinstance(content, str) else content
    return Value(BINARY, varint(len(content)) + content)


def several(values: Sequence[Value], kind: int = STRUCT) -> Value:
    """A list of values of one type; `kind` says which where there are none."""
    kind = values[0].type if values else kind
    size = bytes([len(values) << 4 | kind]) if len(values) < 15 else bytes([0xF0 | kind]) + varint(len(values))
    return Value(LIST, size + b"".join(value.content for value in values))


def struct(fields: Mapping[int, Value]) -> Value:
    """Fields by their numbers."""
    found, last = bytearray(), 0
    for number in sorted(fields):
        kind, content = fields[number]
        near = 0 < number - last <= 15
        found += bytes([(number - last) << 4 | kind]) if near else bytes([kind]) + varint(number << 1)
        found += content
        last = number
    return Value(STRUCT, bytes(found) + b"\0")


class Reader:
    """Takes values from bytes, one after the other.

    Raises ValueError where there are none, IndexError where the bytes end.
    """

    def __init__(self, content: bytes, place: int = 0) -> None:
        self.content, self.place = content, place

    def struct(self) -> dict[int, Read]:
        """Fields by their numbers."""
        found: dict[int, Read] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            found[number] = self._value(head & 0x0F)
        return found

    def _value(self, kind: int) -> Read:
        if kind in (TRUE, FALSE):
            return int(kind == TRUE)
        if kind in (I32, I64):
            return self._signed()
        if kind == BINARY:
            size = self._natural()
            self.place += size
            return self.content[self.place - size : self.place]
        if kind == LIST:
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._natural()
            return [self._value(head & 0x0F) for _ in range(size)]
        if kind == STRUCT:
            return self.struct()
        raise ValueError(f"a value of type {kind} at byte {self.place}")

    def _byte(self) -> int:
        self.place += 1
        return self.content[self.place - 1]

    def _natural(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    def _signed(self) -> int:
        number = self._natural()
        return number >> 1 ^ -(number & 1)
