"""The tables of the README, from the records in benchmarks/results/.

    python -m benchmarks.table                     print them
    python -m benchmarks.table --write README.md   put each between its marks, <!-- table: NAME --> and <!-- end -->,
                                                   and make docs/proof.svg beside that file

Of every file the newest record counts that was made of a commit by the present method of measuring; of learning all.
What is left out is said on stderr. Ends with status 2 where a mark is missing.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.proof_figure import figure
from benchmarks.proof_tables import FIGURE, MAIN
from benchmarks.records import RESULTS, kept, newest
from benchmarks.sections import EPS, OTHERS, learning
from benchmarks.timing import BenchmarkError

NOTHING = "No record of a commit by the present method."

Sections = dict[str, list[str]]


def sections(folder: Path) -> tuple[Sections, list[str]]:
    """Lines of every section by name, and what was left out."""
    records, refused = newest(folder, "eps")
    found = {name: make(records) for name, make in EPS.items()}
    for name, make in OTHERS.items():
        of_kind, more = newest(folder, name)
        found[name], refused = make(of_kind), refused + more
    for name, of_file in kept(folder).items():
        if name.startswith("learn_"):
            found[name] = learning(of_file)
    return {name: trimmed(lines) or [NOTHING] for name, lines in found.items()}, refused


def figure_of(folder: Path) -> bytes | None:
    """The figure of the declared proof; None where there is no record of it."""
    found = [record for record in newest(folder, "proof")[0] if record["name"] == MAIN]
    return figure(found[0]) if found else None


def trimmed(lines: list[str]) -> list[str]:
    """Without empty lines at the end."""
    return lines if not lines or lines[-1] else trimmed(lines[:-1])


def written(text: str, found: Sections) -> str:
    """`text` with every section between its marks; raises BenchmarkError where it has none."""
    for name, lines in found.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        if text.count(begin) != 1 or end not in text.split(begin)[1]:
            raise BenchmarkError(f"no line {begin.strip()} with a line {end} after it")
        before, after = text.split(begin)
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + after[after.index(end) :]
    return text


def main(arguments: list[str] | None = None) -> int:
    """Print the sections or write them; exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, help="a file with marks")
    options = parser.parse_args(arguments)
    found, refused = sections(options.results)
    for line in refused:
        print(f"left out: {line}", file=sys.stderr)
    if options.write is None:
        print("\n\n".join(f"{name}:\n\n" + "\n".join(lines) for name, lines in found.items()))
        return 0
    try:
        options.write.write_text(written(options.write.read_text(encoding="utf-8"), found), encoding="utf-8")
    except BenchmarkError as error:
        print(f"error: {options.write}: {error}", file=sys.stderr)
        return 2
    drawing, place = figure_of(options.results), options.write.parent / FIGURE
    if drawing is not None:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(drawing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
