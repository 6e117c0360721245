"""How large the project is and how its parts hang together, before and now, beside the ceilings.

    python -m tests.lines [COMMIT]

Ends with status 1 where a ceiling is passed. Python is counted as ruff formats it at 100 columns,
with `fmt: skip` taken out, so that packed lines do not count as few; code is what remains without
blank lines, comments, docstrings and imports. A later change that needs more raises its ceiling
here, in a commit that says why.
"""

import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.imports import (
    circles,
    class_names_used_twice,
    imports_against_the_order,
    imports_between,
    parsed,
)
from tests.wording import counted, starred_tuples

ROOT = Path(__file__).resolve().parent.parent
BEFORE = "58d03e46"  # compared with where no commit is named
FORMAT = ["ruff", "format", "--quiet", "--isolated", "--line-length", "100"]
REACHED = """
import sys
import esper_soa.simulator
print(sum(name.partition(".")[0] == "esper_soa" for name in sys.modules))
"""
SETTINGS = """
from dataclasses import fields, is_dataclass
from esper_soa.config.settings import EvaluateConfig, TrainConfig

def settings(config, prefix):
    for field in fields(config):
        if is_dataclass(field.type):
            yield from settings(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name

print(len([*settings(TrainConfig, ""), *settings(EvaluateConfig, "")]))
"""


class Room(NamedTuple):
    """Python files that are counted together."""

    name: str
    files: tuple[str, ...]  # globs below the root
    ceiling: int  # lines
    without: tuple[str, ...] = ()  # globs of files that do not count


ROOMS = (
    Room("the package", ("esper_soa/**/*.py",), 44_650),
    Room(
        "its core: without the lab and the engines in C and Triton",
        ("esper_soa/**/*.py",),
        29_260,
        (
            "esper_soa/lab/**/*.py",
            "esper_soa/nets/engines/cpu/**/*.py",
            "esper_soa/nets/engines/gpu/**/*.py",
        ),
    ),
    Room("tests", ("tests/**/*.py",), 49_490, ("tests/gpu/stand_in_cuda.py",)),
    Room(
        "benchmarks besides finished studies",
        ("benchmarks/**/*.py",),
        6_620,
        ("benchmarks/studies/**/*.py",),
    ),
)


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


def files_of(folder: Path, room: Room) -> set[Path]:
    """The Python files of the room in a copy."""

    def matches(globs: Iterable[str]) -> set[Path]:
        return {path for glob in globs for path in folder.glob(glob)}

    return matches(room.files) - matches(room.without)


def num_lines(path: Path) -> int:
    """All lines of a file."""
    return path.read_bytes().count(b"\n")


def num_code_lines(path: Path) -> int:
    """Lines of a file that are no blank line, comment, docstring or import."""
    text = path.read_text(encoding="utf-8")
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in layout and token.string
        for line in range(token.start[0], token.end[0] + 1)
    }
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            node = node.body[0]
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        code -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(code)


def asked_of_python(folder: Path, program: str) -> int:
    """The number that a program prints which imports the package of a copy."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    return int(done.stdout)


def identifiers(folder: Path, name: str) -> int:
    """Times that the package has the identifier `name`."""
    return counted(folder / "esper_soa", [name])[name]


def num_starred_tuples(folder: Path) -> int:
    """Tuples of the package that are made to be starred into a call."""
    paths = (folder / "esper_soa").rglob("*.py")
    return sum(len(list(starred_tuples(parsed(path)[1]))) for path in paths)


def num_circles(folder: Path) -> int:
    """Circles of modules of the package."""
    return len(circles(imports_between(folder / "esper_soa")))


def num_whole_settings(folder: Path) -> int:
    """Functions of the package that take a whole record of settings."""
    total = 0
    for path in (folder / "esper_soa").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.args, *node.args.kwonlyargs]
                kinds = [ast.unparse(part.annotation) for part in arguments if part.annotation]
                total += any("TrainConfig" in kind for kind in kinds)
    return total


def num_words(folder: Path) -> int:
    """Words of the pages of docs/, without what the code of notebooks prints."""
    texts = [path.read_text(encoding="utf-8") for path in (folder / "docs").glob("*.md")]
    for path in (folder / "docs").glob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell | {"outputs": []} for cell in notebook["cells"]]
        texts.append(json.dumps(notebook | {"cells": cells}, indent=1))
    return sum(len(text.split()) for text in texts)


# Counts that should be small, each with its ceiling.
COUNTS: dict[str, tuple[Callable[[Path], int], int]] = {
    "words in docs/": (num_words, 41_840),
    "settings": (lambda folder: asked_of_python(folder, SETTINGS), 264),
    "functions that take a whole record of settings": (num_whole_settings, 34),
    "tuples starred into calls": (num_starred_tuples, 10),
    "the identifier `one`": (lambda folder: identifiers(folder, "one"), 300),
    "the identifier `own`": (lambda folder: identifiers(folder, "own"), 100),
    "circles of modules": (num_circles, 0),
    "imports against the direction": (
        lambda folder: len(imports_against_the_order(folder / "esper_soa")),
        0,
    ),
    "class names used twice": (lambda folder: len(class_names_used_twice(folder / "esper_soa")), 0),
    "modules of the package that its simulator reaches": (
        lambda folder: asked_of_python(folder, REACHED),
        109,
    ),
}


def rows(before: Path, now: Path) -> Iterator[tuple[str, bool]]:
    """Rows of the tables in markdown, and whether each is within its ceiling."""
    yield (
        "| room | lines before | now | ceiling | code before | now |\n|---|---|---|---|---|---|",
        True,
    )
    for room in ROOMS:
        lines = [sum(map(num_lines, files_of(folder, room))) for folder in (before, now)]
        code = [sum(map(num_code_lines, files_of(folder, room))) for folder in (before, now)]
        cells = [*lines, room.ceiling, *code]
        yield (
            f"| {room.name} | {' | '.join(format(cell, ',') for cell in cells)} |",
            (lines[1] <= room.ceiling),
        )
    yield "\n| count | before | now | ceiling |\n|---|---|---|---|", True
    for name, (count, ceiling) in COUNTS.items():
        found = [count(folder) for folder in (before, now)]
        yield f"| {name} | {found[0]:,} | {found[1]:,} | {ceiling:,} |", found[1] <= ceiling


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as now:
        copy_of(sys.argv[1] if len(sys.argv) > 1 else BEFORE, Path(before))
        copy_of("", Path(now))
        within = True
        for row, holds in rows(Path(before), Path(now)):
            print(row, flush=True)
            within = within and holds
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
