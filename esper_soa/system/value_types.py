"""Whether plain values, of JSON or a checkpoint, are of the types of a record. Needs no torch."""

from collections.abc import Iterable
from dataclasses import is_dataclass
from types import UnionType
from typing import get_args, get_origin, get_type_hints


def type_error(value: object, kind: object, place: str) -> str:
    """Where the plain `value` is not of the type `kind`, in words; an int serves as a float."""
    item_types = get_args(kind)
    parts: Iterable[tuple[object, object, object]] = ()
    if isinstance(kind, UnionType):
        return min((type_error(value, kind, place) for kind in item_types), key=len)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        unknown = sorted(hints.keys() ^ value.keys())
        if unknown:
            return f"{place} {'lacks' if unknown[0] in hints else 'has'} {unknown[0]}"
        parts = ((name, value[name], hint) for name, hint in hints.items())
    elif type(value) is not (get_origin(kind) or kind) and (type(value), kind) != (int, float):
        return f"{place} is {kind_of(value)}"
    elif item_types and isinstance(value, list | dict):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        parts = ((name, item, item_types[-1]) for name, item in named)
    return first(type_error(item, kind, f"{place}.{name}") for name, item, kind in parts)


def first(faults: Iterable[str]) -> str:
    """The first that is not empty; "" where all are."""
    return next(filter(None, faults), "")


def kind_of(value: object) -> str:
    """A number or None itself, the class of anything else."""
    plain = type(value) in (bool, int, float) or value is None
    return repr(value) if plain else f"a {type(value).__name__}"
