"""The command line that compares settings: shared random seeds, finished runs, mistakes."""

import io
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from esper_soa.lab.compare import command as command
from esper_soa.lab.compare.study import Runs, Study, table_runs
from esper_soa.lab.report.text import p_value
from esper_soa.lab.run_folders import MEASURES
from esper_soa.system.errors import UserError
from esper_soa.training.results.statistics import Interval
from esper_soa.training.start.runs import RecordedRun

TINY = shlex.split(
    "+experiment=smoke rounds=1 steps=4 envs=2 train_samples=16 val_samples=16 batch_size=8 "
    "control=none policy=schedule"
)


def study(tmp_path: Path, *given: str) -> Study:
    return command.study_of([*TINY, f"out={tmp_path / 'study'}", *given])


def runs_of(asked: Study, group: str) -> Runs:
    return table_runs(asked, group, 0.0, steps=0, values=())


def folder_of(asked: Study, group: str, random_seed: int) -> Path:
    return runs_of(asked, group).folder(random_seed)


def quiet() -> Console:
    return Console(width=200, record=True, file=io.StringIO())


GROUPS = ("a=", "b=policy.name=wait", "c=task.host_lr=0.5")


class Compared(NamedTuple):
    """Three groups over two seeds."""

    folder: Path  # of the study's own
    asked: Study
    told: str
    record: dict


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("compared")
    asked = study(folder, *GROUPS, "random_seeds=[5,9]")
    console = quiet()
    assert command.compare(asked, console) == []
    record = json.loads((folder / "study" / "compare.json").read_text())
    return Compared(folder, asked, console.export_text(), record)


def test_a_study_leaves_a_report_that_tells_its_tests(compared: Compared) -> None:
    pytest.importorskip("vl_convert", reason="the extra report is not installed")
    place = compared.folder / "study" / "report.html"
    assert f"report   {place}" in compared.told.replace("\n", "")
    page = place.read_text()
    for row in compared.record["comparisons"]:
        effect = "–" if row["effect"] is None else f"{row['effect']:+.2f}"
        cells = [row["group"], "a", MEASURES[row["measure"]]]
        difference = Interval(row["mean"], row["low"], row["high"])
        cells += [difference.text(), f"{row['won']} of 2"]
        cells += [effect, p_value(row["p"]), p_value(row["corrected"]), row["verdict"]]
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
        assert row["power"] in page
    assert "over 2 random seeds that every group has played: differences" in page
    assert "corrected after Holm for 4 comparisons" in page
    assert "p of paired t tests over random seeds and test samples, corrected" in page
    headline = page[page.index("<h1>") : page.index("</h1>")]
    assert headline.endswith("The comparisons of the study say what is sure.")
    assert not list((compared.folder / "study").rglob("random_seed_*/report.html"))


def test_groups_share_seeds_and_keep_runs(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, told, record = compared
    assert asked.random_seeds == (5, 9)
    assert "a random seed 9 ended: " in told
    assert "4 comparisons" in told
    assert "paired t tests over random seeds and test samples at 5%, 4 comparisons" in told
    assert record["test"] == "paired t tests over random seeds and test samples"
    assert list(record["groups"]) == ["a", "b", "c"]
    for seed, order in ((5, ["a", "b", "c"]), (9, ["c", "b", "a"])):
        ends = {one: folder_of(asked, one, seed).joinpath("summary.json").stat() for one in order}
        assert sorted(order, key=lambda one: ends[one].st_mtime_ns) == order
    for group in asked.groups:
        overrides = folder_of(asked, group, 5).joinpath("overrides.txt").read_text().splitlines()
        assert overrides == [f"+experiment={asked.experiment}", *runs_of(asked, group).overrides(5)]
        grown = [
            RecordedRun(folder_of(asked, group, seed)).summary["grown"]
            for seed in asked.random_seeds
        ]
        for measure in MEASURES:
            assert [one[measure] for one in grown] == record["groups"][group][measure]
        seen = [one["validation_accuracies"] for one in grown]
        assert group != "c" or seen[0] != seen[1]
    written = {path: path.stat().st_mtime_ns for path in (folder / "study").rglob("summary.json")}
    folder_of(asked, "b", 9).joinpath("summary.json").unlink()
    monkeypatch.setattr(command, "leave_file", lambda *_: "")
    assert command.compare(study(folder, *GROUPS, "random_seeds=[5,9]"), quiet()) == []
    again = {path: path.stat().st_mtime_ns for path in (folder / "study").rglob("summary.json")}
    changed = {path for path in written if written[path] != again[path]}
    assert changed == {folder_of(asked, "b", 9) / "summary.json"}
    assert json.loads((folder / "study" / "compare.json").read_text()) == record


def test_a_list_for_envs_is_compared_by_configuration(tmp_path: Path) -> None:
    asked = study(tmp_path, "a=task.host_lr=[0.01,0.5]", "envs=4", "random_seeds=[5,9]")
    assert command.compare(asked, quiet()) == []
    record = json.loads((tmp_path / "study" / "compare.json").read_text())
    assert list(record["groups"]) == ["a task.host_lr=0.01", "a task.host_lr=0.5"]
    for place, seed in enumerate(asked.random_seeds):
        tested = RecordedRun(folder_of(asked, "a", seed)).summary["grown"]["test_accuracies"]
        for first, group in enumerate(record["groups"].values()):
            own = tested[first::2]
            assert group["test_accuracy"][place] == pytest.approx(sum(own) / len(own))
    assert all(row["sampled"] for row in record["comparisons"])
    assert {row["reference"] for row in record["comparisons"]} == {"a task.host_lr=0.01"}


def test_several_tasks_are_compared_by_their_mean(tmp_path: Path) -> None:
    tasks = "tasks=[cifar_impaired,cifar_baseline]"
    asked = study(tmp_path, tasks, "steps=1", "a=", "b=policy.name=wait", "random_seeds=[5]")
    assert command.compare(asked, quiet()) == []
    groups = json.loads((tmp_path / "study" / "compare.json").read_text())["groups"]
    for name, group in groups.items():
        summary = RecordedRun(folder_of(asked, name, 5)).summary
        assert group["test_accuracy"] == pytest.approx([summary["grown"]["test_accuracy"]])
        assert group["train_flop"] == pytest.approx([summary["grown"]["flop"]])


def test_a_run_that_fails_does_not_lose_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["a=", "b=data.name=cifar10 data.root=nowhere", "c=data=cifar10 data.root=nowhere"]
    fault = "data.root=nowhere: no such folder or archive. Name the place of CIFAR-10, or leave "
    fault += "data.root empty."
    with pytest.raises(SystemExit) as ended:
        command.main([*TINY, f"out={tmp_path / 'study'}", *given, "random_seeds=[5]"])
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert told.err == f"failed runs:\n  b random seed 5: {fault}\n  c random seed 5: {fault}\n"
    assert re.fullmatch("a random seed 5 ended: 33% done, .* left\n", told.out)
    assert not (tmp_path / "study" / "compare.json").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["a="],
            (
                r'^groups=a: must be two or more, such as a="reward=shaped" b="", or one with '
                r"a list for envs\.$"
            ),
        ),
        (
            ["a=", "b=wrong"],
            (
                r'^b=wrong: must be a setting of esper-train, or a group: NAME="setting=value '
                r'\.\.\."\.$'
            ),
        ),
        (["a=", "b=env=4"], r"^env: there is no such setting\. Did you mean envs\?$"),
        (
            ["a=", "b=", "random_seeds=0"],
            (
                r"^random_seeds=0: must be a number from 1 to 10000, or a list such as "
                r"\[101,102,103\] without any twice\.$"
            ),
        ),
        (
            ["a=", "b=", "random_seeds=[1,1]"],
            (
                r"^random_seeds=\[1,1\]: must be a number from 1 to 10000, or a list such as "
                r"\[101,102,103\] without any twice\.$"
            ),
        ),
        (
            ["a=", "b=", "seed=3", "run_dir=x", "resume=auto"],
            r"^setting=seed=3, run_dir=x, resume=auto: must be left to random_seeds= and out=\.$",
        ),
        ([], r"^groups=none: must be two or more, such as "),
        (["a=task.host_lr=[0.1,0.2] task.momentum=uniform(0.1,0.2)"], "^groups=a: must be two"),
        (["a=task.host_lr=[0.1,0.2]", "tasks=[cifar_minimal,text_small]"], "^groups=a: must be"),
        (
            ["a=", "b=", "random_seeds=99999999999"],
            "^random_seeds=99999999999: must be a number from 1 to 10000",
        ),
        (["a=", "b=", f"{'c' * 32}=rounds=1"], "^c{32}: there is no such setting"),
        (["a=", "b=", "1=rounds=1"], "^1: there is no such setting"),
        (["a=", "b=", "foo"], "^overrides: "),
        (["/", "/"], "^/: for runs that are there, give esper-report all of them$"),
        (["a=", "b=", "budget=minute"], r"^budget=minute: must be added\. Give \+budget=minute\.$"),
        (["a=", "a=", "b="], r"^a='': must be a group of its own: the name is taken\.$"),
    ],
)
def test_mistakes_are_told_before_any_run(tmp_path: Path, given: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        study(tmp_path, *given)
