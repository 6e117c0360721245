"""The page on security: each of its rows names a test, and that test exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_each_row_names_tests_that_exist() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("|") and "---" not in row]
    claims = [row for row in rows if not row.endswith("| Test |")]
    assert len(claims) > 30
    assert [row for row in claims if not NAMED.search(row)] == []
    missing = [
        f"{file}::{name}"
        for file, name in NAMED.findall(PAGE)
        if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []
