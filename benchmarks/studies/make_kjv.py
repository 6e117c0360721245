"""Makes kjv.txt.xz, the embedded text: Genesis to 2 Kings of the King James Bible (1611).

Run as `bible -f Gen1:1-2Kings25:30 | python -m benchmarks.studies.make_kjv OUTPUT` with Debian's
bible-kjv, whose lines are verses with their labels. A chapter becomes a paragraph, without labels.
"""

import lzma
import re
import sys
from itertools import groupby
from pathlib import Path

VERSE = re.compile(r"(\w+?\d+):\d+ (.+)")


def paragraphs(lines: list[str]) -> str:
    """The verses of each chapter in one line; SystemExit for a line that is no verse."""
    verses = [VERSE.fullmatch(line) for line in lines]
    if None in verses:
        raise SystemExit(f"line {verses.index(None) + 1} is no verse")
    pairs = [verse.groups() for verse in verses if verse is not None]
    chapters = [
        " ".join(text.strip() for _, text in some)
        for _, some in groupby(pairs, lambda pair: pair[0])
    ]
    return "\n\n".join(chapters) + "\n"


def main(output: Path) -> None:
    """Write the text."""
    text = paragraphs(sys.stdin.read().splitlines())
    output.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(
            "usage: bible -f Gen1:1-2Kings25:30 | python -m benchmarks.studies.make_kjv OUTPUT"
        )
    main(Path(sys.argv[1]))
