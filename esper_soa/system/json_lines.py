"""metrics.jsonl and episodes.jsonl: a line of valid JSON per policy update or episode, readable
while the run goes on. NaN and infinity, which JSON does not have, become null and are named in the
line's `non_finite` list. Needs no torch.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from esper_soa.system.files import write_text
from esper_soa.system.plain_files import open_plain, read_bytes

Json: TypeAlias = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


def finite_json(value: Json, path: str, paths: list[str]) -> Json:
    """`value` with None for every NaN and infinity, whose paths `paths` gets.

    Raises TypeError for what JSON cannot hold, tensors among it.
    """
    if isinstance(value, float) and not math.isfinite(value):
        paths.append(f"{path[1:]}={value}")
        return None
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: finite_json(item, f"{path}.{key}", paths) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [finite_json(item, f"{path}[{at}]", paths) for at, item in enumerate(value)]
    remedy = "give plain numbers, texts or lists"
    raise TypeError(f"{path[1:]}: a {type(value).__name__} cannot be written as JSON; {remedy}")


def finite_record(record: Mapping[str, Json]) -> dict[str, Json]:
    """`record` as JSON can hold it, with the list `non_finite` where something was replaced."""
    paths: list[str] = []
    clean = {key: finite_json(value, f".{key}", paths) for key, value in record.items()}
    return clean | {"non_finite": paths} if paths else clean


def json_line(record: Mapping[str, Json]) -> str:
    """`record` as one line of JSON without the line end."""
    return json.dumps(finite_record(record), separators=(",", ":"))


def write_json(path: Path, record: Mapping[str, Json]) -> None:
    """Replace the file `path` by `record`, over several lines; raises OSError."""
    write_text(path, json.dumps(finite_record(record), indent=2) + "\n")


def keep_rounds(path: Path, rounds: int) -> int:
    """Cut `path` down to the lines of the first `rounds` rounds, all or nothing; how many remain.

    What comes later, a line that was cut off included, is dropped: a resumed run writes it again.
    Needs no room on the disk unless something else is between those lines; raises OSError.
    """
    lines: list[bytes] = []
    with suppress(FileNotFoundError):
        lines = read_bytes(path).splitlines(keepends=True)
    whole = (line for line in lines if line.endswith(b"\n"))
    first_lines = [line for line in whole if _round_of(line) in range(1, rounds + 1)]
    if first_lines == lines[: len(first_lines)]:
        if len(first_lines) < len(lines):
            with os.fdopen(open_plain(path, os.O_WRONLY), "wb") as file:
                file.truncate(sum(map(len, first_lines)))
    else:
        write_text(path, b"".join(first_lines).decode("utf-8", "replace"))
    return len(first_lines)


def _round_of(line: bytes) -> object:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record.get("round") if isinstance(record, dict) else None
