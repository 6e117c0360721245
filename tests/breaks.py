"""Would the tests notice? Breaks one line at a time in a copy of the checkout and runs its guards.

    python tests/breaks.py [AREA ...] [--jobs 2] [--write]
    python tests/breaks.py [AREA ...] --draw 20 --random-seed 7

An AREA is the beginning of a path below esper_soa/ (`env`, `nets/engines/cpu`) or a group of guards
of tests/breaks.yaml, which holds the lines; without an area all are broken. `--draw` draws lines of
the rooms of numbers instead and breaks each by a rule: another comparison, minus for plus, another
number, a call left out. Prints a row per line: place, change, and the test that went red, or GREEN.
Ends with status 1 where anything stays green.

A row whose line its file no longer has is reported; `--write` looks for it in the other files of
the package, gives the row its new file, or takes it out, and breaks nothing.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401, for the forks
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "esper_soa"
TABLE = ROOT / "tests" / "breaks.yaml"
LIMIT_SECONDS = 500  # for the guards of one line
ONE_LINE = {"default_flow_style": True, "width": 10_000}  # of the table
ROOMS = ("env", "agent", "nets", "training")  # lines are drawn from these
OPPOSITE = {
    **{ast.Lt: ast.GtE(), ast.LtE: ast.Gt(), ast.Gt: ast.LtE(), ast.GtE: ast.Lt()},
    **{ast.Eq: ast.NotEq(), ast.NotEq: ast.Eq(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is()},
    **{ast.In: ast.NotIn(), ast.NotIn: ast.In(), ast.Add: ast.Sub(), ast.Sub: ast.Add()},
}


class Break(NamedTuple):
    """A line, what becomes of it, and the tests that guard it."""

    path: str  # below esper_soa/
    start: int  # characters of the file before the line
    line: str
    broken: str
    tests: tuple[str, ...]  # arguments of pytest

    @property
    def place(self) -> str:
        """The file, and the number of the line in it, from 1."""
        text = (PACKAGE / self.path).read_text(encoding="utf-8")
        return f"{self.path}:{text[: self.start].count(chr(10)) + 1}"

    @property
    def change(self) -> str:
        line, broken = (" ".join(text.split()) for text in (self.line, self.broken))
        return f"`{line}` | `{broken}`" if broken else f"`{line}` | (gone)"


class Attempt(NamedTuple):
    """The guards of a line at work on it in a copy of the checkout."""

    row: Break
    place: Path  # the copy
    whole: str  # the file as it was
    process: int
    begun: float  # monotonic seconds


def text_of(path: str) -> str:
    """A file below esper_soa/; empty where there is none."""
    file = PACKAGE / path
    return file.read_text(encoding="utf-8") if file.exists() else ""


def rows_of(table: dict, areas: list[str]) -> list[Break]:
    """The rows of the table in these areas whose line is still in its file."""
    return [
        Break(
            path=path,
            start=text_of(path).index(row["line"]),
            line=row["line"],
            broken=row["broken"],
            tests=tuple(table["guards"][row["guard"]].split()),
        )
        for path, rows in table["breaks"].items()
        for row in rows
        if row["line"] in text_of(path)
        and (not areas or row["guard"] in areas or path.startswith(tuple(areas)))
    ]


def changed_rows(table: dict) -> list[tuple[str, dict]]:
    """The rows whose line has changed, with their path."""
    return [
        (path, row)
        for path, rows in table["breaks"].items()
        for row in rows
        if row["line"] not in text_of(path)
    ]


def write(table: dict) -> None:
    """Give each row whose line has changed the one file that has the line, or take it out."""
    files = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
    for path, row in changed_rows(table):
        homes = [file for file in files if row["line"] in text_of(file)]
        table["breaks"][path].remove(row)
        if len(homes) == 1 and len(row["line"]) > 15:
            table["breaks"].setdefault(homes[0], []).append(row)
    used = {row["guard"] for rows in table["breaks"].values() for row in rows}
    head = TABLE.read_text(encoding="utf-8").partition("guards:\n")[0]
    lines = [f"  {name}: {tests}" for name, tests in table["guards"].items() if name in used]
    lines.append("breaks:")
    for path, rows in table["breaks"].items():
        lines += [f"  {path}:"] if rows else []
        for row in rows:
            text = yaml.dump(row, default_style='"', sort_keys=False, **ONE_LINE)
            text = re.sub(r'"(\w+)": ', r"\1: ", text.strip(), count=3)
            lines.append(f"  - {text}")
    TABLE.write_text(f"{head}guards:\n" + "\n".join(lines) + "\n", encoding="utf-8")


def change_of(node: ast.AST) -> str | None:
    """The source of an expression or a statement after the rule for it; None where no rule is."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed: ast.AST = ast.Compare(node.left, [OPPOSITE[type(node.ops[0])]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE:
        changed = ast.BinOp(node.left, OPPOSITE[type(node.op)], node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return repr(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    else:
        return None
    return f"({ast.unparse(ast.fix_missing_locations(changed))})"


def guards_of(path: str) -> tuple[str, ...]:
    """The tests of a module, of its room, and of the reference's numbers."""
    file = Path("tests", path)
    tests = (file.with_name(f"test_{file.name}"), Path("tests", file.parts[1]))
    return *(str(test) for test in tests if (ROOT / test).exists()), "tests/test_parity.py"


def candidates(path: str) -> list[Break]:
    """Every line of a file that a rule can break, within functions and constants."""
    text = text_of(path)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in ast.walk(ast.parse(text)):
        broken = change_of(node)
        if broken is not None and isinstance(node, ast.expr | ast.stmt):
            start = len(text.encode()[: starts[node.lineno - 1] + node.col_offset].decode())
            source = ast.get_source_segment(text, node) or ""
            if text[start:].startswith(source):
                found.append(Break(path, start, source, broken, guards_of(path)))
    return found


def draw(count: int, seed: int, areas: list[str]) -> list[Break]:
    """`count` lines of the areas, or of the rooms of numbers, drawn by `seed`, broken by rules."""
    paths = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
    wanted = tuple(areas or ROOMS)
    found = [row for path in paths if path.startswith(wanted) for row in candidates(path)]
    return random.Random(seed).sample(found, min(count, len(found)))


def copy_of(root: Path, folder: Path) -> Path:
    """The files that git tracks in the checkout `root`, as they are now, in `folder`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target)
    return folder


def begin(row: Break, place: Path) -> Attempt:
    """Break the line in the copy `place`, and run its guards in a fork."""
    path = place / "esper_soa" / row.path
    whole = path.read_text(encoding="utf-8")
    rest = whole[row.start + len(row.line) :]
    path.write_text(whole[: row.start] + row.broken + rest, encoding="utf-8")
    begun = time.monotonic()
    process = os.fork()
    if process == 0:
        os.setsid()
        _run_guards(place, row.tests)
    return Attempt(row, place, whole, process, begun)


def _run_guards(place: Path, tests: tuple[str, ...]) -> None:
    """In the fork: pytest prints to the file `told` beside the copy. Does not return."""
    with open(place.with_suffix(".told"), "w", encoding="utf-8") as told:
        os.dup2(told.fileno(), 1)
        os.dup2(told.fileno(), 2)
    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place)
    options = ["-x", "-q", "-n", "0", "--tb=no", "-p", "no:cacheprovider"]
    os._exit(pytest.main([*options, *tests]))


def end(attempt: Attempt, status: int | None) -> str:
    """Mend the line; the first test that failed, or the error before any; empty where none did."""
    if status is None:
        os.killpg(attempt.process, signal.SIGKILL)
        os.waitpid(attempt.process, 0)
    kill_orphans(attempt.place)
    path = attempt.place / "esper_soa" / attempt.row.path
    path.write_text(attempt.whole, encoding="utf-8")
    if status is None:
        return f"more than {LIMIT_SECONDS} seconds"
    told = attempt.place.with_suffix(".told").read_text(encoding="utf-8", errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    if status == 0:
        return ""
    return failed[1].removeprefix("tests/") if failed else f"status {status}"


def kill_orphans(place: Path) -> None:
    """Kill what guards of a broken line have left behind, which would go on for ever."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"PYTHONPATH={place}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def attempts(rows: list[Break], places: list[Path]) -> Iterator[tuple[Break, str, float]]:
    """Each row with what went red and the seconds it took, as they end."""
    waiting, free, running = list(rows), list(places), list[Attempt]()
    while waiting or running:
        while waiting and free:
            running.append(begin(waiting.pop(0), free.pop()))
        time.sleep(0.05)
        for attempt in list(running):
            ended, code = os.waitpid(attempt.process, os.WNOHANG)
            late = time.monotonic() - attempt.begun > LIMIT_SECONDS
            if ended or late:
                running.remove(attempt)
                red = end(attempt, os.waitstatus_to_exitcode(code) if ended else None)
                free.append(attempt.place)
                yield attempt.row, red, time.monotonic() - attempt.begun


def main() -> None:
    """Break, test, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("areas", nargs="*", metavar="AREA", help="paths or groups of guards")
    parser.add_argument("--jobs", type=int, default=2, help="lines at a time")
    parser.add_argument("--write", action="store_true", help="rehome or drop changed rows")
    parser.add_argument("--draw", type=int, metavar="N", help="break N lines drawn by chance")
    parser.add_argument("--random-seed", type=int, default=0, help="of --draw")
    options = parser.parse_args()
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    for path, row in changed_rows(table):
        print(f"{path} no longer has {row['line']!r}")
    if options.write:
        write(table)
        return
    rows = rows_of(table, options.areas)
    if options.draw:
        rows = draw(options.draw, options.random_seed, options.areas)
    if not rows:
        sys.exit(f"error: no line in {' '.join(options.areas)}")
    os.environ.setdefault("ESPER_SOA_VECTORS", str(ROOT.parent / "shared" / "vectors"))
    os.environ["OMP_NUM_THREADS"] = "1"
    green = 0
    with tempfile.TemporaryDirectory() as folder:
        places = [copy_of(ROOT, Path(folder) / str(job)) for job in range(options.jobs)]
        for row, red, seconds in attempts(rows, places):
            print(f"{seconds:5.0f} s | {row.place} | {row.change} | {red or 'GREEN'} |", flush=True)
            green += not red
    print(f"{len(rows)} lines broken one at a time, {len(rows) - green} red, {green} green.")
    sys.exit(1 if green else 0)


if __name__ == "__main__":
    main()
