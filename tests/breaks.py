"""Would the tests notice? Breaks one line at a time in a copy of the checkout and runs its guards.

    python tests/breaks.py [AREA ...] [--jobs 2] [--write]

An AREA is the beginning of a path below esper_soa/ (`env`, `nets/engines/cpu`) or a group of guards
of tests/breaks.yaml, which holds the lines; without one all are broken, those that were never tried
first. Prints a row per line: place, change, and the test that went red, or GREEN. `--write` brings
tests/BREAKS.md up to date with these rows. A line that its file no longer has is an error. Ends
with status 1 where anything stays green.

Each line is tried in a fork of a process that has imported torch and nothing of this project; the
test that went red the last time runs first.
"""

import argparse
import os
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
TABLE = ROOT / "tests" / "breaks.yaml"
RECORD = ROOT / "tests" / "BREAKS.md"
LIMIT = 500  # seconds for the guards of one line
HEAD = "| place | line | broken | red |\n|---|---|---|---|\n"


class Break(NamedTuple):
    """One line, what becomes of it, and the tests that guard it."""

    path: str  # below esper_soa/
    line: str
    broken: str
    guard: str  # a group of the table
    tests: tuple[str, ...]  # of that group, arguments of pytest

    @property
    def number(self) -> int:
        """Of the line in its file, from 1."""
        return (ROOT / "esper_soa" / self.path).read_text().split(self.line)[0].count("\n") + 1

    @property
    def change(self) -> str:
        """The two middle columns of the record: what finds the row there again."""
        line, broken = (
            " ".join(text.split()).replace("|", "\\|") for text in (self.line, self.broken)
        )
        return f"`{line}` | `{broken}`" if broken else f"`{line}` | (gone)"


class Attempt(NamedTuple):
    """The guards of a line at work on it in a copy of the checkout."""

    row: Break
    place: Path  # the copy
    whole: str  # the file as it was
    process: int
    begun: float  # monotonic seconds


def breaks(areas: list[str]) -> list[Break]:
    """The rows of the table in these areas; ends the program where a line is not in its file."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    rows = [
        Break(path, guard=one.pop("guard"), tests=(), **one)
        for path, lines in table["breaks"].items()
        for one in lines
    ]
    wanted = [
        row._replace(tests=tuple(table["guards"][row.guard].split()))
        for row in rows
        if not areas or any(row.path.startswith(area) or row.guard == area for area in areas)
    ]
    gone = [row for row in wanted if row.line not in (ROOT / "esper_soa" / row.path).read_text()]
    if gone or not wanted:
        missing = [f"{row.path} has no {row.line!r}: bring the table up to date" for row in gone]
        sys.exit("error: " + "\nerror: ".join(missing or [f"no line in {' '.join(areas)}"]))
    return wanted


def recorded() -> dict[str, str]:
    """The test that went red the last time, by path and change."""
    text = RECORD.read_text(encoding="utf-8") if RECORD.exists() else ""
    found = re.findall(r"^\| (\S+):\d+ \| (.*) \| ([^|]*) \|$", text, re.MULTILINE)
    return {f"{path} {change}": red for path, change, red in found if red != "not tried"}


def copy_of(root: Path, folder: Path) -> Path:
    """The files that git tracks in the checkout `root`, as they are now, in `folder`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target)
    return folder


def begin(row: Break, place: Path, known: str) -> Attempt:
    """Break the line in the copy `place`, and run its guards in a fork, the test `known` first."""
    path = place / "esper_soa" / row.path
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(row.line, row.broken, 1), encoding="utf-8")
    begun = time.monotonic()
    process = os.fork()
    if process == 0:
        os.setsid()
        _run_guards(place, row.tests, known)
    return Attempt(row, place, whole, process, begun)


def _run_guards(place: Path, tests: tuple[str, ...], known: str) -> None:
    """In the fork: what pytest prints goes to the file `told` beside the copy. Does not return."""
    with open(place.with_suffix(".told"), "w", encoding="utf-8") as told:
        os.dup2(told.fileno(), 1)
        os.dup2(told.fileno(), 2)
    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place)
    options = ["-x", "-q", "-n", "0", "--tb=no", "-p", "no:cacheprovider"]
    status = 0
    if known and (place / "tests" / known.partition("::")[0]).exists():
        first = os.fork()
        if first == 0:
            os._exit(pytest.main([*options, "-m", "slow or not slow", f"tests/{known}"]))
        status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        status = 0 if status in (4, 5) else status  # the test is no longer there
    os._exit(status or pytest.main([*options, *tests]))


def end(attempt: Attempt, status: int | None) -> str:
    """Mend the line; the first test that failed, or the error before any; empty where none did."""
    if status is None:
        os.killpg(attempt.process, signal.SIGKILL)
        os.waitpid(attempt.process, 0)
    kill_orphans(attempt.place)
    path = attempt.place / "esper_soa" / attempt.row.path
    path.write_text(attempt.whole, encoding="utf-8")
    if status is None:
        return f"more than {LIMIT} seconds"
    told = attempt.place.with_suffix(".told").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    if status == 0:
        return ""
    return found[1].removeprefix("tests/") if found else f"status {status}"


def kill_orphans(place: Path) -> None:
    """Kill what guards of a broken line have left behind, which would go on for ever."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"PYTHONPATH={place}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def attempts(rows: list[Break], places: list[Path]) -> Iterator[tuple[Break, str, float]]:
    """Each row with what went red and the seconds it took, as they end."""
    known = recorded()
    waiting, free, running = list(rows), list(places), list[Attempt]()
    while waiting or running:
        while waiting and free:
            row = waiting.pop(0)
            running.append(begin(row, free.pop(), known.get(f"{row.path} {row.change}", "")))
        time.sleep(0.05)
        for attempt in list(running):
            ended, code = os.waitpid(attempt.process, os.WNOHANG)
            late = time.monotonic() - attempt.begun > LIMIT
            if ended or late:
                running.remove(attempt)
                red = end(attempt, os.waitstatus_to_exitcode(code) if ended else None)
                free.append(attempt.place)
                yield attempt.row, red, time.monotonic() - attempt.begun


def write(reds: dict[Break, str]) -> None:
    """Bring the record up to date with these rows; of the others it keeps what it says."""
    before = recorded()
    every = breaks([])
    told = {f"{row.path} {row.change}": red or "GREEN" for row, red in reds.items()}
    told = {f"{row.path} {row.change}": "not tried" for row in every} | before | told
    lines = [
        f"| {row.path}:{row.number} | {row.change} | {told[f'{row.path} {row.change}']} |"
        for row in every
    ]
    green, left = (
        sum(line.endswith(f"| {end} |") for line in lines) for end in ("GREEN", "not tried")
    )
    title = "# Lines broken on purpose\n\nMade by `python tests/breaks.py --write`: one at a time, "
    title += f"{len(lines) - green - left} red, {green} green, {left} not tried.\n\n"
    RECORD.write_text(title + HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Break, test, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("areas", nargs="*", metavar="AREA", help="paths or groups of guards")
    parser.add_argument("--jobs", type=int, default=2, help="lines at a time")
    parser.add_argument("--write", action="store_true", help="bring tests/BREAKS.md up to date")
    options = parser.parse_args()
    known = recorded()
    rows = sorted(breaks(options.areas), key=lambda row: f"{row.path} {row.change}" in known)
    vectors = str(ROOT.parent / "shared" / "vectors")
    os.environ.setdefault("ESPER_SOA_VECTORS", vectors)
    os.environ["OMP_NUM_THREADS"] = "1"
    reds = dict[Break, str]()
    with tempfile.TemporaryDirectory() as folder:
        places = [copy_of(ROOT, Path(folder) / str(job)) for job in range(options.jobs)]
        for row, red, seconds in attempts(rows, places):
            place = f"{row.path}:{row.number}"
            print(f"{seconds:5.0f} s | {place} | {row.change} | {red or 'GREEN'} |", flush=True)
            reds[row] = red
            if options.write:
                write(reds)
    green = sum(not red for red in reds.values())
    print(f"{len(rows)} lines broken one at a time, {len(rows) - green} red, {green} green.")
    sys.exit(1 if green else 0)


if __name__ == "__main__":
    main()
