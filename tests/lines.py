"""Lines of Python per room at 100 columns, now and at another commit.

    python tests/lines.py [COMMIT]

Both are formatted by ruff with `fmt: skip` taken out, so that packed lines do not count as few.
tests/lines.yaml names the rooms, each with the files that one subject takes, the most lines that it
should have, and why it has more where it has.
"""

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "lines.yaml"
FORMAT = ["ruff", "format", "--quiet", "--isolated", "--line-length", "100"]


class Room(NamedTuple):
    """What one subject takes."""

    name: str
    files: list[str]  # globs below the root, of both commits
    goal: int  # lines
    reason: str  # why it is larger than its goal; "" where it is not


def copy_of(commit: str, folder: Path) -> None:
    """The Python files of a commit, or of the working tree where it is "", formatted."""
    if commit:
        packed = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
        )
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
    else:
        listed = subprocess.run(
            ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, check=True
        )
        for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.decode().split()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"[ \t]*# fmt[:] skip.*", "", text), encoding="utf-8")
    subprocess.run([*FORMAT, str(folder)], check=True)


def lines_of(folder: Path, globs: list[str]) -> int:
    """Lines of the files that match any of the globs."""
    found = {path for glob in globs for path in folder.glob(glob) if path.suffix == ".py"}
    return sum(path.read_bytes().count(b"\n") for path in found)


def rows(rooms: list[Room], before: Path, after: Path) -> Iterator[str]:
    """The table in markdown."""
    yield "| room | before | now | goal | why it is larger |"
    yield "|---|---|---|---|---|"
    for room in rooms:
        counts = [lines_of(folder, room.files) for folder in (before, after)]
        reason = room.reason if counts[1] > room.goal else ""
        yield f"| {room.name} | {counts[0]:,} | {counts[1]:,} | {room.goal:,} | {reason} |"


def main() -> None:
    """Print the table."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    commit = sys.argv[1] if len(sys.argv) > 1 else table["before"]
    rooms = [Room(**{"reason": "", **room}) for room in table["rooms"]]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        copy_of(commit, Path(one))
        copy_of("", Path(other))
        print("\n".join(rows(rooms, Path(one), Path(other))))


if __name__ == "__main__":
    main()
