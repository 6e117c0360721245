"""The page on the simulator has the heads of an action with their choices, by number."""

import re
from pathlib import Path

from esper_soa.vocabulary import BLUEPRINT_NAMES, HEADS, OP_NAMES

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "simulator.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)


def test_the_page_has_each_head_with_its_choices_in_order() -> None:
    rows = {name: cells for name, *cells in ROW.findall(PAGE)}
    assert [name for name in rows if name in {head.name for head in HEADS}] == [
        head.name for head in HEADS
    ]
    for head in HEADS:
        choices, ops, default = rows[head.name]
        if head.names:
            assert re.findall(r"`(\w+)`", choices) == list(head.names)
            assert default == f"`{head.names[head.placeholder]}`"
        if head.name not in ("slot", "op"):
            assert ops.split(", ") == [OP_NAMES[op] for op in head.ops]
    assert re.findall(r"`(\w+)`", rows["blueprint"][0]) == list(BLUEPRINT_NAMES[1:])
