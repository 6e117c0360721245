"""The tables of the pages are those in code."""

from pathlib import Path

import pytest

from esper_soa.telemetry.pages import BLOCK, PAGES, blocks, filled

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_code_says(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == filled(page), "python -m esper_soa.telemetry.pages docs"


def test_every_block_is_on_a_page_and_no_other() -> None:
    found = [
        match["name"]
        for name in PAGES
        for match in BLOCK.finditer((DOCS / name).read_text(encoding="utf-8"))
    ]
    assert sorted(found) == sorted(blocks())
