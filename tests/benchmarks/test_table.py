"""Tables come from records of commits alone, and the pages hold what the command makes of them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib
import pytest

from benchmarks import machine
from benchmarks.proof_figure import figure, stamp
from benchmarks.proof_tables import DECLARED, FIGURE
from benchmarks.records import METHOD, RESULTS, check_folder, keep, newest
from benchmarks.table import NOTHING, main, sections, written
from benchmarks.timing import BenchmarkError
from esper_soa.training.results.statistics import Interval

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/numbers.md", "docs/text.md", "benchmarks/results/README.md")
REMEDY = f"python -m benchmarks.table --write {' '.join(PAGES)}"


def record(commit: str, time: str = "2026-01-01T00:00:00Z", method: int = METHOD) -> dict:
    return {"benchmark": "eps", "method": method, "commit": commit, "time": time}


# --- the pages


def test_the_tables_of_the_pages_are_what_the_command_makes_of_the_committed_records() -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    found, _ = sections(RESULTS)
    for name, lines in found.items():
        assert any("\n".join(lines) in text for text in pages), f"{name}: {REMEDY}"
    assert written(pages, found) == pages


def test_differences_that_are_copied_to_the_page_are_those_of_the_records() -> None:
    """Those of docs/numbers.md outside of marks, which tables beside the records have as well."""
    page = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- table:.*?<!-- end -->", "", page, flags=re.DOTALL)
    copied = re.findall(r"\| ([+-]\d\S* \[\S+ \S+\])", by_hand)
    made = "\n".join("\n".join(lines) for lines in sections(RESULTS)[0].values())
    for budget in json.loads((RESULTS / "equal_flop.json").read_text())["study"]["budgets"]:
        rows = [Interval(row["mean"], row["low"], row["high"]) for row in budget["comparisons"]]
        made = "\n".join([made, *(row.text() for row in rows)])
    assert len(copied) > 20
    assert [cell for cell in copied if cell not in made] == []


def test_the_figure_of_the_proof_is_drawn_from_the_committed_record() -> None:
    """To the byte with the matplotlib that drew it; with another, of the same record."""
    drawn = ROOT / "docs" / FIGURE
    found = [one for one in newest(RESULTS, "proof")[0] if one["name"] == DECLARED]
    assert drawn.exists() == bool(found)
    for record in found:
        text = drawn.read_text(encoding="utf-8")
        assert stamp(record) in text, REMEDY
        if f"Matplotlib v{matplotlib.__version__}" in text:
            assert drawn.read_bytes() == figure(record)


def test_only_text_between_marks_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(sections(tmp_path)[0])
    block = "before {0}\n<!-- table: {0} -->\nold {0}\n<!-- end -->\nafter\n"
    blocks = [block.format(name) for name in names]
    page = tmp_path / "page.md"
    page.write_text("".join(blocks))
    assert main(["--results", str(tmp_path), "--write", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert text.count(NOTHING) == len(names)
    assert all(f"before {name}\n<!-- table: {name} -->\n" in text for name in names)
    page.write_text("".join(blocks[1:]))
    assert main(["--results", str(tmp_path), "--write", str(page)]) == 2
    assert f"no line <!-- table: {names[0]} -->" in capsys.readouterr().err
    assert page.read_text() == "".join(blocks[1:])


# --- records that count


def test_the_newest_record_of_a_commit_by_the_present_method_counts(tmp_path: Path) -> None:
    keep(record("1111111", "old"), tmp_path, "a")
    keep(record("2222222", "counts"), tmp_path, "a")
    keep(record("3333333+", "of changed files"), tmp_path, "a")
    keep(record("4444444", "other method", METHOD - 1), tmp_path, "a")
    keep(record("unknown", "outside git"), tmp_path, "b")
    keep({"name": "learning"}, tmp_path, "learn_x")
    found, refused = newest(tmp_path, "eps")
    assert [one["time"] for one in found] == ["counts"]
    assert refused == [
        "a: the record of of changed files is of no commit (3333333+)",
        "b: the record of outside git is of no commit (unknown)",
    ]


def test_the_results_of_the_repository_take_records_of_commits_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "git_commit", lambda: "1234567+")
    with pytest.raises(BenchmarkError, match="the files differ from 1234567"):
        check_folder(RESULTS)
    with pytest.raises(BenchmarkError):
        keep(record("1234567+"), ROOT / "benchmarks" / "results", "never")
    assert not (RESULTS / "never.jsonl").exists()
    check_folder(tmp_path)
    check_folder("")
    monkeypatch.setattr(machine, "git_commit", lambda: "1234567")
    check_folder(RESULTS)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_files_that_differ_from_the_commit_show_but_for_results(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert machine.git_commit(tmp_path) == "unknown"
    results = tmp_path / "benchmarks" / "results" / "a.jsonl"
    results.parent.mkdir(parents=True)
    code = tmp_path / "code.py"
    for path in (results, code):
        path.write_text("1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    commit = machine.git_commit(tmp_path)
    assert len(commit) >= 7
    results.write_text("2\n")
    assert machine.git_commit(tmp_path) == commit
    code.write_text("2\n")
    assert machine.git_commit(tmp_path) == commit + "+"
