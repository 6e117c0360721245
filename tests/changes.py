"""Counts the test files that small changes redden: of messages, of names of functions, of defaults.

    python tests/changes.py [--random-seed 0] [--jobs 2]

Draws 20 messages of errors, 20 private functions and 10 defaults of the package, and changes each
in a copy of the checkout. All messages are changed at once, each by a marker: a red test belongs to
the markers that it shows. A renamed function reddens the files that name it. Defaults are changed
at once, then one at a time for the files that went red. Prints a table in markdown; the default
lane takes some five minutes on two cores, and is played twice.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
COUNTS = {"message": 20, "private function": 20, "default": 10}
RAISERS = re.compile(r"(check\w*|\w*Error|\w*_error|refusal)$")  # calls whose texts users read
RANGED = ("number", "signed", "weight", "env_count", "env_number")  # calls that make a default


class Change(NamedTuple):
    """A piece of a source file, and what it becomes."""

    kind: str
    path: Path  # below the checkout
    name: str  # how the table calls it
    line: int
    before: str
    after: str


def texts_of_errors(tree: ast.Module) -> Iterable[ast.Constant]:
    """Literals of at least four words among the arguments of what raises or makes an error."""
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        name = called.id if isinstance(called, ast.Name) else ""
        if isinstance(node, ast.Call) and RAISERS.match(name):
            for part in [*node.args, *(keyword.value for keyword in node.keywords)]:
                pieces = part.values if isinstance(part, ast.JoinedStr) else [part]
                for piece in pieces:
                    text = piece.value if isinstance(piece, ast.Constant) else ""
                    if isinstance(text, str) and len(text.split()) >= 4 and "\n" not in text:
                        yield piece


def candidates(root: Path) -> dict[str, list[Change]]:
    """All changes that can be drawn, by kind."""
    found: dict[str, list[Change]] = {kind: [] for kind in COUNTS}
    for path in sorted((root / "esper_soa").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        place = path.relative_to(root)
        lines = text.splitlines()
        tree = ast.parse(text)
        for piece in texts_of_errors(tree):
            word = max(re.findall(r"[a-z]{3,}", piece.value), key=len, default="")
            if word and lines[piece.lineno - 1].count(word) == 1:
                found["message"].append(
                    Change("message", place, piece.value.strip()[:60], piece.lineno, word, "")
                )
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and re.match(r"_[a-z]", node.name):
                found["private function"].append(
                    Change("private function", place, node.name, node.lineno, node.name, "")
                )
            value = node.value if isinstance(node, ast.AnnAssign) else None
            if isinstance(value, ast.Call) and ast.unparse(value.func) in RANGED:
                default = value.args[0]
                before = f"{ast.unparse(value.func)}({ast.unparse(default)}"
                numeric = isinstance(default, ast.Constant) and default.value
                if numeric and before in lines[node.lineno - 1]:
                    new = default.value * 2 if isinstance(default.value, int) else default.value / 2
                    found["default"].append(
                        Change(
                            "default",
                            place,
                            ast.unparse(node.target),
                            node.lineno,
                            before,
                            f"{ast.unparse(value.func)}({new!r}",
                        )
                    )
    return found


def copy_of(root: Path, folder: Path) -> Path:
    """The files that git tracks in the checkout, in `folder`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def apply_to(place: Path, changes: Iterable[Change]) -> None:
    """Write the changes into the copy."""
    for change in changes:
        path = place / change.path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        assert change.before in lines[change.line - 1], change
        lines[change.line - 1] = lines[change.line - 1].replace(change.before, change.after, 1)
        path.write_text("".join(lines), encoding="utf-8")


def red_files(place: Path, jobs: int, files: Sequence[str] = ()) -> dict[str, str]:
    """Test files that go red, each with what its failures show."""
    report = place / "report.xml"
    told = ["--tb=short", "-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), *told, *files]
    vectors = {"ESPER_SOA_VECTORS": str(ROOT.parent / "shared" / "vectors")}
    environment = vectors | os.environ | {"PYTHONPATH": str(place)}
    subprocess.run(command, cwd=place, env=environment, capture_output=True)
    red: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [*case.iter("failure"), *case.iter("error")]
        text = "".join(f"{fault.get('message')} {fault.text}" for fault in faults)
        if faults:
            name = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
            red[name] = red.get(name, "") + text
    return red


def rows(changes: Sequence[Change], root: Path, jobs: int) -> Iterable[tuple[Change, set[str]]]:
    """Every change with the test files that it reddens."""
    with tempfile.TemporaryDirectory() as scratch:
        of_kind = {kind: [change for change in changes if change.kind == kind] for kind in COUNTS}
        messages = [
            change._replace(after=f"{change.before}qq{number}qq")
            for number, change in enumerate(of_kind["message"])
        ]
        place = copy_of(root, Path(scratch) / "messages")
        apply_to(place, messages)
        shown = red_files(place, jobs) if messages else {}
        for change in messages:
            marker = change.after[len(change.before) :]
            yield change, {name for name, text in shown.items() if marker in text}
        tests = {path: path.read_text() for path in (root / "tests").rglob("*.py")}
        for change in of_kind["private function"]:
            word = re.compile(rf"(?<![\w])(?<!def ){change.name}\b")
            naming = {
                str(path.relative_to(root)) for path, text in tests.items() if word.search(text)
            }
            yield change, naming
        place = copy_of(root, Path(scratch) / "defaults")
        apply_to(place, of_kind["default"])
        suspects = sorted(red_files(place, jobs)) if of_kind["default"] else []
        for number, change in enumerate(of_kind["default"]):
            place = copy_of(root, Path(scratch) / f"default{number}")
            apply_to(place, [change])
            yield change, set(red_files(place, jobs, suspects)) if suspects else set()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes of tests")
    parser.add_argument("--kinds", nargs="+", choices=list(COUNTS), default=list(COUNTS))
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    draw = random.Random(options.random_seed)
    found = candidates(options.root)
    changes = [
        change for kind, count in COUNTS.items() for change in draw.sample(found[kind], count)
    ]
    print("| change | place | red test files | which |\n|---|---|---|---|")
    total = dict.fromkeys(COUNTS, 0)
    asked = [change for change in changes if change.kind in options.kinds]
    for change, red in rows(asked, options.root, options.jobs):
        total[change.kind] += len(red)
        where = f"{change.path}:{change.line}"
        names = ", ".join(sorted(name.removeprefix("tests/") for name in red))
        print(f"| {change.kind} `{change.name}` | {where} | {len(red)} | {names} |", flush=True)
    print("\n" + "; ".join(f"{kind}: {total[kind]} of {COUNTS[kind]}" for kind in options.kinds))


if __name__ == "__main__":
    main()
