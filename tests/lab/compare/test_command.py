"""The command line that compares settings: seeds shared, finished runs kept, mistakes told."""

import io
import json
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from esper_soa.lab.compare import command as command
from esper_soa.lab.compare.comparison import compare_groups
from esper_soa.system.errors import UserError
from esper_soa.training.results.statistics import Interval
from esper_soa.training.start.runs import RecordedRun

TINY = shlex.split(
    "+experiment=smoke rounds=1 steps=4 envs=2 train_samples=16 val_samples=16 batch_size=8 "
    "control=none policy=schedule"
)


def study(tmp_path: Path, *given: str) -> command.Study:
    return command.study_of([*TINY, f"out={tmp_path / 'study'}", *given])


def quiet() -> Console:
    return Console(width=200, record=True, file=io.StringIO())


GROUPS = ("a=", "b=policy.name=wait", "c=task.host_lr=0.5")


class Compared(NamedTuple):
    """Three groups over two seeds."""

    folder: Path  # of the study's own
    asked: command.Study
    told: str
    record: dict


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("compared")
    asked = study(folder, *GROUPS, "seeds=[5,9]")
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
        cells = [row["group"], "a", command.MEASURES[row["measure"]]]
        difference = Interval(row["mean"], row["low"], row["high"])
        cells += [difference.text(), f"{row['won']} of 2"]
        cells += [effect, f"{row['p']:.3f}", f"{row['corrected']:.3f}", row["verdict"]]
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
        assert row["power"] in page
    assert "over 2 seeds that every group has played: differences" in page
    assert "corrected after Holm for 4 comparisons" in page
    assert "Mann and Whitney" not in page
    assert not list((compared.folder / "study").rglob("seed_*/report.html"))


def test_groups_share_seeds_and_keep_runs(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, told, record = compared
    assert asked.seeds == (5, 9)
    assert "seed 9: test accuracy a " in told
    assert "4 comparisons" in told
    assert "2 seeds cannot show any difference" in told
    assert list(record["groups"]) == ["a", "b", "c"]
    for seed, order in ((5, ["a", "b", "c"]), (9, ["c", "b", "a"])):
        ends = {one: asked.folder(one, seed).joinpath("summary.json").stat() for one in order}
        assert sorted(order, key=lambda one: ends[one].st_mtime_ns) == order
    for group in asked.groups:
        overrides = asked.folder(group, 5).joinpath("overrides.txt").read_text().splitlines()
        assert overrides == [f"+experiment={asked.experiment}", *asked.overrides(group, 5)]
        grown = [RecordedRun(asked.folder(group, seed)).summary["grown"] for seed in asked.seeds]
        for measure in command.MEASURES:
            assert [one[measure] for one in grown] == record["groups"][group][measure]
        seen = [one["validation_accuracies"] for one in grown]
        assert group != "c" or seen[0] != seen[1]
    written = {path: path.stat().st_mtime_ns for path in (folder / "study").rglob("summary.json")}
    asked.folder("b", 9).joinpath("summary.json").unlink()
    monkeypatch.setattr(command, "leave_report", lambda _: "")
    assert command.compare(study(folder, *GROUPS, "seeds=[5,9]"), quiet()) == []
    again = {path: path.stat().st_mtime_ns for path in (folder / "study").rglob("summary.json")}
    changed = {path for path in written if written[path] != again[path]}
    assert changed == {asked.folder("b", 9) / "summary.json"}
    assert json.loads((folder / "study" / "compare.json").read_text()) == record


def test_a_list_for_envs_is_compared_by_configuration(tmp_path: Path) -> None:
    asked = study(tmp_path, "a=task.host_lr=[0.01,0.5]", "envs=4", "seeds=[5,9]")
    assert command.compare(asked, quiet()) == []
    record = json.loads((tmp_path / "study" / "compare.json").read_text())
    assert list(record["groups"]) == ["a task.host_lr=0.01", "a task.host_lr=0.5"]
    for place, seed in enumerate(asked.seeds):
        tested = RecordedRun(asked.folder("a", seed)).summary["grown"]["test_accuracies"]
        for first, group in enumerate(record["groups"].values()):
            own = tested[first::2]
            assert group["test_accuracy"][place] == pytest.approx(sum(own) / len(own))
    assert {row["reference"] for row in record["comparisons"]} == {"a task.host_lr=0.01"}


def test_the_numbers_of_a_run_are_those_of_its_summary(tmp_path: Path) -> None:
    asked = study(tmp_path, "a=", "b=task.host_lr=[0.01,0.5]", "envs=4", "seeds=[5]")
    grown = {"test_accuracy": 1, "validation_accuracy": 2, "net": 3, "size": 4, "flop": 5}
    other = {name: 10 * value for name, value in grown.items()}
    settings = {"task.host_lr": 0.5}
    summary = {"grown": grown, "speed": {"eps": 6}}
    summary["configurations"] = [{"settings": settings, "grown": other}]  # type: ignore[assignment]
    for group in asked.groups:
        asked.folder(group, 5).mkdir(parents=True)
        (asked.folder(group, 5) / "summary.json").write_text(json.dumps(summary))
    names = ("test_accuracy", "validation_accuracy", "net", "parameters", "train_flop", "eps")
    found = {"a": dict(zip(names, (1, 2, 3, 4, 5, 6), strict=True))}
    assert command.numbers_of(asked, "a", 5) == found
    listed = dict(zip(names, (10, 20, 30, 40, 50, 6), strict=True))
    assert command.numbers_of(asked, "b", 5) == {"b task.host_lr=0.5": listed}


def test_seeds_that_a_group_has_not_played_count_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = study(tmp_path, "a=", "b=policy.name=wait", "seeds=[5,9,7,8,6]")

    def numbers(_: object, group: str, seed: int) -> dict[str, dict[str, float]]:
        lead = {"a": 0, "b": seed - 6}[group]
        return {group: dict.fromkeys(command.SUMMARY_NUMBERS, 10.0 * seed + lead)}

    failing = {9: {"b": "fault"}, 6: {"a": "one", "b": "other"}}
    monkeypatch.setattr(command, "play_seed", lambda asked, seed, groups: failing.get(seed, {}))
    monkeypatch.setattr(command, "numbers_of", numbers)
    monkeypatch.setattr(command, "leave_report", lambda _: "none")
    asked.out.mkdir()
    console = quiet()
    faults = ["b seed 9: fault", "a seed 6: one", "b seed 6: other"]
    assert command.compare(asked, console) == faults
    told = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "seed 5: test accuracy a 50.00, b 49.00" in told
    assert "seed 9: test accuracy a 90.00" in told
    assert "seed 6: test accuracy of none" in told
    assert f"written to {asked.out}/compare.json; runs by group and seed beside it" in told
    assert told[-1] == "report none"
    # differences -1, 1 and 2: two of them above; mean 0.667, deviation 1.528, t of two degrees of
    # freedom 4.303, Hedges' factor 1 - 3 / 7; signs of 3 ranks (1.5 twice) leave p at 0.75
    shown = "+0.67 [-3.13, +4.46] 2/3 +0.25 0.750 1.000 no difference shown"
    assert f"b test accuracy {shown}" in told
    assert f"b test accuracy less rent {shown}" in told
    record = json.loads((tmp_path / "study" / "compare.json").read_text())
    values = {"a": [50.0, 70.0, 80.0], "b": [49.0, 71.0, 82.0]}
    overrides = {"a": [], "b": ["policy.name=wait"]}
    assert record.pop("groups") == {
        group: {"overrides": overrides[group]}
        | dict.fromkeys(command.SUMMARY_NUMBERS, values[group])
        for group in ("a", "b")
    }
    rows = record.pop("comparisons")
    assert record == {
        "experiment": "smoke",
        "common": list(TINY[1:]),
        "seeds": [5, 7, 8],
        "confidence": 0.95,
        "significance": 0.05,
    }
    assert [(row["measure"], row["differences"], row["won"]) for row in rows] == [
        (measure, [-1.0, 1.0, 2.0], 2) for measure in ("test_accuracy", "net")
    ]


def test_the_tables_tell_means_over_seeds_and_differences_by_seed() -> None:
    level = {"net": (49.0, 51.0), "parameters": (7000.0, 8000.0), "train_flop": (2e9, 3e9)}
    level |= {"test_accuracy": (50.0, 52.0), "eps": (10.0, 30.0)}
    numbers = {"a": level, "b": level | {"test_accuracy": (51.0, 55.0), "eps": (5.0, 6.0)}}
    console = quiet()
    command.report(console, numbers, compare_groups(numbers))
    told = [" ".join(line.split()) for line in console.export_text().splitlines()]
    few = "2 seeds cannot show any difference at 5% over 2 comparisons: take 7 or more"
    # standard error 1, t of one degree of freedom 12.706
    assert [line for line in told if line.strip("─ ")] == [
        "means over seeds [95%]",
        "group test accuracy test accuracy less rent parameters training GFLOP EPS",
        "a 51.00 [38.29, 63.71] 50.00 [37.29, 62.71] 7,500 2.5 20.0",
        "b 53.00 [27.59, 78.41] 50.00 [37.29, 62.71] 7,500 2.5 5.5",
        "against a, paired by seed, percent points",
        "group measure difference [95%] won effect p Holm verdict",
        "b test accuracy +2.00 [-10.71, +14.71] 2/2 +0.00 0.500 1.000 no difference shown",
        "b test accuracy less rent +0.00 0/2 +0.00 1.000 1.000 no difference shown",
        "exact two-sided signed rank tests at 5%, 2 comparisons, Holm's correction",
        f"b, test accuracy: {few}",
        f"b, test accuracy less rent: {few}",
    ]


def test_equal_values_and_a_seed_alone_have_no_bounds() -> None:
    level = {"net": (49.0, 51.0), "parameters": (7e3, 7e3), "train_flop": (2e9, 2e9)}
    level |= {"test_accuracy": (50.1, 50.1), "eps": (10.0, 30.0)}
    for seeds, net in ((2, "50.00 [37.29, 62.71]"), (1, "49.00")):
        less = {name: values[:seeds] for name, values in level.items()}
        more = less | {"test_accuracy": tuple(one + 0.2 for one in less["test_accuracy"])}
        numbers = {"a": less, "b": less, "c": more}
        console = quiet()
        command.report(console, numbers, compare_groups(numbers))
        told = [" ".join(line.split()) for line in console.export_text().splitlines()]
        assert any(line.startswith(f"a 50.10 {net} 7,000") for line in told)
        assert f"b test accuracy +0.00 0/{seeds} +0.00 1.000 1.000 no difference shown" in told
        lead = next(line for line in told if line.startswith("c test accuracy"))
        assert lead.startswith(f"c test accuracy +0.20 {seeds}/{seeds} – ")


def test_a_run_that_fails_does_not_lose_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["a=", "b=data.name=cifar10 data.root=nowhere", "c=data=cifar10 data.root=nowhere"]
    fault = "data.root=nowhere: no such folder or archive. Name the place of CIFAR-10, or leave "
    fault += "data.root empty."
    with pytest.raises(SystemExit) as ended:
        command.main([*TINY, f"out={tmp_path / 'study'}", *given, "seeds=[5]"])
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert told.err == f"failed runs:\n  b seed 5: {fault}\n  c seed 5: {fault}\n"
    accuracy = RecordedRun(tmp_path / "study" / "a" / "seed_5").summary["grown"]["test_accuracy"]
    assert told.out.splitlines() == [f"seed 5: test accuracy a {accuracy:.2f}"]
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
            ["a=", "b=", "seeds=0"],
            (
                r"^seeds=0: must be a number from 1 to 10000, or a list such as "
                r"\[101,102,103\] without a seed twice\.$"
            ),
        ),
        (
            ["a=", "b=", "seeds=[1,1]"],
            (
                r"^seeds=\[1,1\]: must be a number from 1 to 10000, or a list such as "
                r"\[101,102,103\] without a seed twice\.$"
            ),
        ),
        (
            ["a=", "b=", "seed=3", "run_dir=x", "resume=auto"],
            r"^setting=seed=3, run_dir=x, resume=auto: must be left to seeds= and out=\.$",
        ),
        ([], r"^groups=none: must be two or more, such as "),
        (["a=task.host_lr=[0.1,0.2] task.momentum=uniform(0.1,0.2)"], "^groups=a: must be two"),
        (["a=task.host_lr=[0.1,0.2]", "tasks=[cifar_minimal,text_small]"], "^groups=a: must be"),
        (["a=", "b=", "seeds=99999999999"], "^seeds=99999999999: must be a number from 1 to 10000"),
        (["a=", "b=", f"{'c' * 32}=rounds=1"], "^c{32}: there is no such setting"),
        (["a=", "b=", "1=rounds=1"], "^1: there is no such setting"),
        (["a=", "b=", "foo"], "^overrides: "),
        (["a=", "b=", "budget=minute"], r"^budget=minute: must be added\. Give \+budget=minute\.$"),
        (["a=", "a=", "b="], r"^a='': must be a group of its own: the name is taken\.$"),
    ],
)
def test_mistakes_are_told_before_any_run(tmp_path: Path, given: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        study(tmp_path, *given)
