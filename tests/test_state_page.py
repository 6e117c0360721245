"""The fields of the env state in the API reference: all of them, each with its meaning."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import esper_soa
from tests.builders.tiny_world import tiny_world

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORDS = ("Slots", "Ramp", "Signals", "Guard", "Totals", "Ending")


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("state_fields", DOCS / "state_fields.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_the_state_is_told_with_its_type_shape_and_meaning(
    page: ModuleType, name: str
) -> None:
    state = tiny_world(2, 3, 4).start_round(0)
    record = state.get(name.lower())
    assert type(record) is getattr(esper_soa, name)
    rows = {row[0]: row[1:] for row in page.fields(name)}
    assert list(rows) == list(type(record).__annotations__)
    for field, (size, _, meaning) in rows.items():
        value = record.get(field)
        dtype, _, shape = size.partition(" ")
        assert dtype == str(value.dtype).removeprefix("torch."), field
        axes = shape.strip("[]").replace("N", "2").replace("S", "3").split(", ")
        assert list(map(int, axes)) == list(value.shape), field
        assert meaning, field


def test_the_reference_asks_for_them_and_a_table_has_them(page: ModuleType) -> None:
    text = page.on_page_markdown((DOCS / "api.md").read_text("utf-8"))
    for name in RECORDS:
        assert f"### {name}\n" in text
    assert "| `stage` | int64 \\[N, S] | Stage.EMPTY | Stage |" in text
    assert "| `rollbacks` | int64 \\[N, 4] |  | times that the env went back" in text
    assert "`live`: bool [N, S]: a seed module is present" in text
