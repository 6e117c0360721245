"""Lines of Python per room, as ruff formats them: `python tests/lines.py`.

tests/lines.yaml names the rooms, each with the files that one subject takes, the most lines that it
should have, and why it has more where it has.
"""

from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "lines.yaml"


def lines_of(folder: Path, globs: list[str]) -> int:
    """Lines of the files that match any of the globs."""
    found = {path for glob in globs for path in folder.glob(glob) if path.suffix == ".py"}
    return sum(path.read_bytes().count(b"\n") for path in found)


def rows() -> Iterator[str]:
    """The table in markdown."""
    yield "| room | lines | goal | why it is larger |"
    yield "|---|---|---|---|"
    for room in yaml.safe_load(TABLE.read_text(encoding="utf-8")):
        count = lines_of(ROOT, room["files"])
        reason = room.get("reason", "") if count > room["goal"] else ""
        yield f"| {room['name']} | {count:,} | {room['goal']:,} | {reason} |"


if __name__ == "__main__":
    print("\n".join(rows()))
