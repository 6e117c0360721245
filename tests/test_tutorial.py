"""The tutorial runs as it stands, in an empty folder and a process of its own."""

import ast
import json
import sys
from pathlib import Path

import pytest
import warm

import esper_soa

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "tutorial.ipynb"


def test_every_cell_is_python_and_keeps_nothing_that_ages() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    names = set()
    for cell in code:
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "esper_soa":
                names.add(node.attr)
    assert {"make", "train"} & names
    assert names <= set(esper_soa.__all__)


@pytest.mark.slow
def test_the_cells_of_the_tutorial_run_from_top_to_bottom(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "tutorial.py").write_text("\n\n".join(code), encoding="utf-8")
    done = warm.run([sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "legal joint actions: 757 of 1543" in done.stdout
    assert "illegal: [True, True, True, True]" in done.stdout
    assert (tmp_path / "host.safetensors").is_file()
