"""Figures in files, and the page of a study at several budgets: who is ahead, all pairs, accuracy
against FLOP.
"""

import json
import re
from pathlib import Path

import pytest

from esper_soa.lab.report.figures import write_figures, write_frontier
from esper_soa.lab.report.groups import groups_of
from esper_soa.lab.report.page import page_of
from esper_soa.lab.report.run_files import find_runs
from esper_soa.lab.report.sections import make_drawing
from esper_soa.lab.report.write import main
from esper_soa.lab.run_folders import COMPARISON_FILE
from esper_soa.system.errors import UserError
from tests.builders.report_runs import line, make_run, summary, write_round

SENTENCES = ["At 200: host is first.", "At 600: no group was shown ahead."]


def make_study(folder: Path, measure: str = "test_accuracy") -> None:
    """Two groups at two budgets, each with a run."""
    budgets = []
    for place, gflop in enumerate((200, 600)):
        groups = {}
        for name, mean in (("host", 80.0), ("grown", 82.0 + place)):
            make_run(folder / name / f"{gflop}gflop" / "0", ended=summary([mean]))
            bounds = {"mean": mean, "low": mean - 1, "high": None}
            groups[name] = {"intervals": {measure: bounds}, "train_flop": [gflop * 1e9, 1e9]}
            groups[name] |= {"all_flop": [2e12], "parameters": [77.0], "env_steps": [4.0, 6.0]}
        pair = {"group": "grown", "other": "host", "mean": 2.0, "low": 1.0, "high": 3.0}
        pairs = [pair | {"p": 0.01, "corrected": 0.02}]
        budgets.append({"gflop": gflop, "groups": groups, "sentence": SENTENCES[place]})
        budgets[-1]["pairs"] = pairs
    told = {"confidence": 0.95, "budgets": budgets}
    (folder / COMPARISON_FILE).write_text(json.dumps(told))


def test_the_page_tells_the_study_at_every_budget(tmp_path: Path) -> None:
    make_study(tmp_path)
    page = page_of(find_runs([tmp_path]), "")
    assert f"<h1>{SENTENCES[1]}</h1>" in page
    card = page[page.index("<h3>Comparisons") :]
    assert re.findall('<p class="about">(.*?)</p>', card)[:2] == SENTENCES
    cells = re.findall("<td>(.*?)</td>", card[: card.index("</table>")])
    row = ["grown", "host", "+2.000 [+1.000, +3.000]", "0.010", "0.020"]
    assert cells == ["200", *row, "600", *row]
    _, tables = make_drawing(groups_of(find_runs([tmp_path])))
    table = tables["frontier"]
    assert table["side"] == ["host", "grown"] * 2
    assert table["test_accuracy"] == [80, 82, 80, 83]
    assert (table["test_accuracy_low"][1], table["test_accuracy_high"][1]) == (81, None)
    assert table["train_gflop"] == [100.5, 100.5, 300.5, 300.5]
    assert (table["all_gflop"][0], table["env_steps"][0]) == (2000, 5)


@pytest.mark.parametrize("measure", ["test_accuracy", "test_loss"])
def test_the_figure_is_drawn_in_files_of_its_own(tmp_path: Path, measure: str) -> None:
    pytest.importorskip("vl_convert", reason="the extra report is not installed")
    make_study(tmp_path, measure)
    assert write_frontier(tmp_path) == ""
    svg = (tmp_path / "frontier.svg").read_text()
    for text in ("host", "grown", "GFLOP", "test loss" if "loss" in measure else "test accuracy"):
        assert text in svg
    assert "var(--" not in svg
    assert (tmp_path / "frontier.pdf").read_bytes().startswith(b"%PDF")


def test_every_figure_of_a_report_is_written_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert", reason="the extra report is not installed")
    run = make_run(tmp_path / "run", [line(1, 40.0), line(2, 44.0)], ended=summary([50.0]))
    for number in (1, 2):
        write_round(run, number, envs=2, steps=6)
    main([str(run), "--figures", str(tmp_path / "new" / "figures")])
    lines = capsys.readouterr().out.splitlines()
    figures = [
        one for section in make_drawing(groups_of(find_runs([run])))[0] for one in section.figures
    ]
    assert [text.partition(":")[0] for text in lines] == [figure["id"] for figure in figures]
    assert "lanes: Lives of the seeds (run run, round 2 (last, best), hosts 0 to 1)" in lines
    written = [*(tmp_path / "new" / "figures").iterdir()]
    assert len(written) == 3 * len(figures)
    files = {path.name: path.read_text() for path in written if path.suffix == ".svg"}
    assert {*files} == {f"{figure['id']}.svg" for figure in figures}
    for svg in files.values():
        assert not re.findall(r"var\(|color-mix|light-dark", svg)
    lives = files["lanes.svg"]
    assert 'paint-order="stroke"' in lives
    assert "#d5d7d6" in lives, "of a seed that germinated: 18 % of the ink on the card"
    assert lives.count("host 0") >= 1


def test_figures_are_pdf_and_png_too_and_runs_without_any_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="the extra report is not installed")
    run = make_run(tmp_path / "run", [line(1, 40.0), line(2, 44.0)])
    with pytest.raises(UserError, match="nothing to draw"):
        write_figures(find_runs([make_run(tmp_path / "empty")]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_figures(find_runs([run]), tmp_path / "out")
    assert (tmp_path / "out" / "curve-accuracy.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "out" / "curve-accuracy.png").read_bytes().startswith(b"\x89PNG")
