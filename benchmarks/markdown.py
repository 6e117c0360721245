"""Tables in markdown: rows in, lines out, and the words for where a record comes from."""

from collections.abc import Mapping, Sequence

Line = tuple[str, ...]
Records = Sequence[Mapping]


def markdown(rows: Sequence[Line]) -> list[str]:
    """A table and an empty line; nothing where there is only a head."""
    if len(rows) == 1:
        return []
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""]


def place(record: Mapping) -> str:
    """Date, commit and machine of a record."""
    facts = record["machine"]
    gpu = f"{facts['gpu']}, " if "gpu" in facts else ""
    return (
        f"{record['time'][:10]}, commit {record['commit']}, {gpu}{facts['cpu']}, {facts['cores']} "
        f"cores, torch {facts['torch']}"
    )
