"""The tables of the pages, from the records in benchmarks/results/.

    python -m benchmarks.table                  print them
    python -m benchmarks.table --write PAGE...  put each between its marks

docs/numbers.md names the pages. Marks are <!-- table: NAME --> and <!-- end -->; proof.svg goes
beside its page.

Of every file the newest record counts that was made of a commit by the present method of measuring;
of learning all. What is left out is said on stderr. Ends with status 2 where a mark is missing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning import learning
from benchmarks.proof_figure import figure
from benchmarks.proof_tables import DECLARED, FIGURE
from benchmarks.records import RESULTS, kept, newest
from benchmarks.sections import EPS, OTHERS
from benchmarks.timing import BenchmarkError

NOTHING = "No record of a commit by the present method."

Sections = dict[str, list[str]]


def sections(folder: Path) -> tuple[Sections, list[str]]:
    """Lines of every section by name, and what was left out."""
    records, refused = newest(folder, "eps")
    found = {name: make(records) for name, make in EPS.items()}
    for name, (kind, make) in OTHERS.items():
        of_kind, more = newest(folder, kind)
        found[name] = make(of_kind)
        refused = [*refused, *(line for line in more if line not in refused)]
    for name, of_file in kept(folder).items():
        if name.startswith("learn_"):
            found[name] = learning(of_file)
    return {name: trimmed(lines) or [NOTHING] for name, lines in found.items()}, refused


def figure_of(folder: Path) -> bytes | None:
    """The figure of the declared proof; None where there is no record of it."""
    found = [record for record in newest(folder, "proof")[0] if record["name"] == DECLARED]
    return figure(found[0]) if found else None


def trimmed(lines: list[str]) -> list[str]:
    """Without empty lines at the end."""
    return lines if not lines or lines[-1] else trimmed(lines[:-1])


def written(pages: Sequence[str], found: Sections) -> list[str]:
    """`pages` with every section between its marks; BenchmarkError unless each has one place."""
    pages = list(pages)
    for name, lines in found.items():
        begin = f"<!-- table: {name} -->\n"
        end = "<!-- end -->"
        places = [place for place, text in enumerate(pages) if begin in text]
        text = pages[places[0]] if len(places) == 1 else ""
        if text.count(begin) != 1 or end not in text.split(begin)[1]:
            raise BenchmarkError(f"no line {begin.strip()} with a line {end} after it, or several")
        before, after = text.split(begin)
        pages[places[0]] = (
            before + begin + "\n" + "\n".join(lines) + "\n\n" + after[after.index(end) :]
        )
    return pages


def main(arguments: list[str] | None = None) -> int:
    """Print the sections or write them; exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE", help="files with marks")
    options = parser.parse_args(arguments)
    found, refused = sections(options.results)
    for line in refused:
        print(f"left out: {line}", file=sys.stderr)
    if options.write is None:
        print("\n\n".join(f"{name}:\n\n" + "\n".join(lines) for name, lines in found.items()))
        return 0
    drawing = figure_of(options.results)
    try:
        texts = written([page.read_text(encoding="utf-8") for page in options.write], found)
    except BenchmarkError as error:
        print(f"error: {', '.join(map(str, options.write))}: {error}", file=sys.stderr)
        return 2
    for page, text in zip(options.write, texts, strict=True):
        page.write_text(text, encoding="utf-8")
        if drawing is not None and f"]({FIGURE})" in text:
            (page.parent / FIGURE).write_bytes(drawing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
