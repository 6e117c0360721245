"""The tutorial runs as it stands, and the API reference has every public name."""

import ast
import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import esper_soa
from tests.builders import warm

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTEBOOK = DOCS / "tutorial.ipynb"


def test_every_cell_is_python_and_has_its_output_as_text() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6
    texts = ["".join("".join(part["text"]) for part in cell["outputs"]) for cell in code]
    assert all(texts), "each cell prints something"
    assert f"\n{esper_soa.__version__}" in f"\n{texts[0]}"
    means = dict(re.findall(r"^(\w+) +([\d.]+) %", texts[3], re.MULTILINE))
    assert [*means] == ["grower", "wait", "random"]
    assert float(means["grower"]) > float(means["wait"]) + 5, "growth pays, as the text says"
    names = set()
    for cell in code:
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "esper_soa":
                names.add(node.attr)
    assert {"make", "train"} & names
    assert names <= set(esper_soa.__all__)


def test_the_reference_has_every_public_name_where_it_is() -> None:
    lines = (DOCS / "api.md").read_text(encoding="utf-8").splitlines()
    named = [line.split()[1] for line in lines if line.startswith("::: ")]
    listed = re.findall(r"^<!-- fields: ([\w ]+) -->$", "\n".join(lines), re.MULTILINE)
    named += [f"esper_soa.state.{name}" for names in listed for name in names.split()]
    places = [name.rpartition(".") for name in named]
    assert sorted(name for *_, name in places) == sorted({*esper_soa.__all__} - {"__version__"})
    for module, _, name in places:
        assert hasattr(import_module(module), name), name


@pytest.mark.slow
def test_the_cells_of_the_tutorial_run_from_top_to_bottom(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "tutorial.py").write_text("\n\n".join(code), encoding="utf-8")
    done = warm.run([sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "legal joint actions: 757 of 1543" in done.stdout
    assert "illegal: env 0: op fossilize is not legal; legal are wait" in done.stdout
    assert (tmp_path / "host.safetensors").is_file()
