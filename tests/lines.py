"""Lines of Python per room at 100 columns, and how the rooms hang together, now and before.

    python tests/lines.py [COMMIT]

Both are formatted by ruff with `fmt: skip` taken out, so that packed lines do not count as few.
tests/lines.yaml names the rooms, each with the files that one subject takes, the most lines that it
should have, and why it has more where it has. The second table counts what should be few, the third
says what the lines of the first rooms are.
"""

import ast
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from imports import LAYERS, class_names_used_twice, imports_against_the_order

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "lines.yaml"
PARTED = 3  # first rooms, whose lines the third table parts
FORMAT = ["ruff", "format", "--quiet", "--isolated", "--line-length", "100"]
REACHED = """
import sys
import esper_soa.simulator
print(sum(name.partition(".")[0] == "esper_soa" for name in sys.modules))
"""


class Room(NamedTuple):
    """What one subject takes."""

    name: str
    files: list[str]  # globs below the root, of both commits
    goal: int  # lines
    reason: str = ""  # why it is larger than its goal; "" where it is not
    without: tuple[str, ...] = ()  # globs of files that belong to other rooms


def copy_of(commit: str, folder: Path) -> None:
    """The files of a commit, or those tracked in the working tree where it is "", formatted."""
    if commit:
        asked = ["git", "archive", commit]
        packed = subprocess.run(asked, cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
    else:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
        for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.decode().split()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"[ \t]*# fmt[:] skip.*", "", text), encoding="utf-8")
    subprocess.run([*FORMAT, str(folder)], check=True)


def paths_of(folder: Path, room: Room) -> set[Path]:
    """The room's Python files in a copy."""

    def found(globs: list[str] | tuple[str, ...]) -> set[Path]:
        return {path for glob in globs for path in folder.glob(glob) if path.suffix == ".py"}

    return found(room.files) - found(room.without)


def lines_of(folder: Path, room: Room) -> int:
    """Lines of the room's Python files in a copy."""
    return sum(path.read_bytes().count(b"\n") for path in paths_of(folder, room))


def kinds_of(path: Path) -> dict[str, set[int]]:
    """The lines of docstrings, imports and other code; blanks and comments are the rest."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [one.body[0] for one in nodes if isinstance(one, documented) and ast.get_docstring(one)]
    imports = [one for one in nodes if isinstance(one, ast.Import | ast.ImportFrom)]
    found = {
        kind: {line for one in some for line in range(one.lineno, (one.end_lineno or 0) + 1)}
        for kind, some in (("docstrings", texts), ("imports", imports))
    }
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in layout and token.string
        for line in range(token.start[0], token.end[0] + 1)
    }
    return found | {"code": code - found["docstrings"] - found["imports"]}


def kinds_row(folder: Path, room: Room) -> str:
    """A room's row of the third table."""
    kinds = [kinds_of(path) for path in paths_of(folder, room)]
    counts = [sum(len(one[kind]) for one in kinds) for kind in ("code", "imports", "docstrings")]
    total = lines_of(folder, room)
    cells = [room.name, *(f"{count:,}" for count in (total, *counts, total - sum(counts)))]
    return f"| {' | '.join(cells)} |"


def top_entries(folder: Path) -> int:
    """Modules and folders of modules at the top level of the package."""
    return len({path.relative_to(folder).parts[1] for path in folder.glob("esper_soa/**/*.py")})


def modules_reached(folder: Path) -> int:
    """Modules of the package that are imported with its simulator."""
    done = subprocess.run(
        [sys.executable, "-c", REACHED],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        check=True,
    )
    return int(done.stdout)


def names_used_twice(folder: Path) -> int:
    """Class names that more than one class of the package has."""
    return len(class_names_used_twice(folder / "esper_soa"))


def upward(folder: Path) -> int | None:
    """Imports against the direction of docs/development.md; None for a package of other rooms."""
    rooms = {name.partition(".")[0] for layer in LAYERS for name in layer}
    package = folder / "esper_soa"
    found = {path.stem for path in package.iterdir() if path.suffix in ("", ".py")}
    return len(imports_against_the_order(package)) if found - {"__init__"} <= rooms else None


# What is counted of the package, and the most that it should be.
COUNTS: dict[str, tuple[Callable[[Path], int | None], int]] = {
    "entries at the top level of the package": (top_entries, 17),
    "modules of the package that its simulator reaches": (modules_reached, 105),
    "class names used twice": (names_used_twice, 0),
    "imports against the direction": (upward, 0),
}


def rows(rooms: list[Room], before: Path, after: Path) -> Iterator[str]:
    """The tables in markdown."""
    yield "| room | before | now | goal | why it is larger |"
    yield "|---|---|---|---|---|"
    for room in rooms:
        counts = [lines_of(folder, room) for folder in (before, after)]
        reason = room.reason if counts[1] > room.goal else ""
        yield f"| {room.name} | {counts[0]:,} | {counts[1]:,} | {room.goal:,} | {reason} |"
    yield ""
    yield "| count | before | now | goal |"
    yield "|---|---|---|---|"
    for name, (counted, goal) in COUNTS.items():
        found = ["-" if one is None else f"{one:,}" for one in map(counted, (before, after))]
        yield f"| {name} | {found[0]} | {found[1]} | {goal:,} |"
    yield ""
    yield "| room | lines | code | imports | docstrings | blanks and comments |"
    yield "|---|---|---|---|---|---|"
    yield from (kinds_row(after, room) for room in rooms[:PARTED])


def main() -> None:
    """Print the tables."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    commit = sys.argv[1] if len(sys.argv) > 1 else table["before"]
    rooms = [Room(**room) for room in table["rooms"]]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        copy_of(commit, Path(one))
        copy_of("", Path(other))
        print("\n".join(rows(rooms, Path(one), Path(other))))


if __name__ == "__main__":
    main()
