"""The pages on security and on the process: each of their rows names a test, which exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@pytest.mark.parametrize(("name", "least"), [("security.md", 31), ("process.md", 10)])
def test_each_row_names_tests_that_exist(name: str, least: int) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("|") and "---" not in row]
    claims = [row for row in rows if not row.endswith("| Test |")]
    assert len(claims) >= least
    assert [row for row in claims if not NAMED.search(row)] == []
    missing = [
        f"{file}::{name}"
        for file, name in NAMED.findall(page)
        if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []
