"""What is read of a run folder, whole or cut off."""

import os
import re
from pathlib import Path

import pytest

from esper_soa.lab.report.groups import differing, groups_of, key_of
from esper_soa.lab.report.run_files import find_runs, read_run
from esper_soa.lab.run_folders import read_settings
from esper_soa.system.errors import UserError
from tests.builders.report_runs import line, make_run, summary


@pytest.mark.parametrize("depth", [100, 100_000])
def test_unread_files_have_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    run = make_run(tmp_path / "run", [line(1, 40.0)], ended=summary([50.0]))
    (run / "summary.json").write_text('{"a":' * depth + "1" + "}" * depth)
    (run / "versions.json").unlink()
    os.mkfifo(run / "versions.json")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"round":{"1" * 5000}}}\n')
    found = read_run(run)
    assert (found.summary, found.versions, len(found.rounds)) == ({}, {}, 1)
    for name in (
        f"a file: {run}/summary.json: must be JSON .*",
        f"a file: {run}/versions.json: must be .*a pipe, .*",
        f"1 lines: {run}/metrics.jsonl: .*Exceeds the limit .*",
    ):
        told = [re.fullmatch(f"report   without {name}", one) for one in caplog.messages]
        assert len([one for one in told if one]) == 1, caplog.messages


def test_runs_are_found_once_each_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10", "2", "0", "x"):
        make_run(tmp_path / "sweep" / name)
    (tmp_path / "sweep" / "other").mkdir()
    for name in ("1/2/name", "1/2/3/name"):
        make_run(tmp_path / "deep" / name)
    assert [run.label for run in find_runs([tmp_path / "deep"])] == ["name"]
    assert [run.label for run in find_runs([tmp_path / "sweep"])] == ["x", "0", "2", "10"]
    one = make_run(tmp_path / "a" / "run")
    other = make_run(tmp_path / "b" / "run")
    found = find_runs([one, other, tmp_path / "b/../a/run"])
    assert [run.label for run in found] == [
        "a/run",
        "b/run",
    ]
    told = (
        r"^RUN=/.*/sweep/other: holds no run: there is no config\.yaml of a run in it or below it$"
    )
    with pytest.raises(UserError, match=told):
        find_runs([tmp_path / "sweep" / "other"])


def test_a_run_whose_settings_cannot_be_read_is_named_and_hydras_copy_is_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path / "sweep" / "whole")
    broken = make_run(tmp_path / "sweep" / "broken")
    make_run(broken / ".hydra")
    (broken / "config.yaml").write_text("rounds: &x [*x]\n")
    os.mkfifo(broken / "pipe")
    assert read_settings(broken / "pipe") == {}, "a pipe is not waited for"
    assert [run.label for run in find_runs([tmp_path / "sweep"])] == ["whole"]
    assert caplog.messages == [
        f"runs     without {broken}/config.yaml: no settings that can be read"
    ]
    told = (
        r"^RUN=/.*/sweep/broken: holds no run: there is no config\.yaml of a run in it or below it$"
    )
    with pytest.raises(UserError, match=told):
        find_runs([broken])


def test_runs_of_the_same_overrides_but_for_the_seed_are_a_group(tmp_path: Path) -> None:
    plain, net = (
        [
            read_run(make_run(tmp_path / f"{name}{seed}", seed=seed, overrides=overrides))
            for seed in (1, 2)
        ]
        for name, overrides in (("p", ["+experiment=x"]), ("n", ["reward=net", "experiment=x"]))
    )
    groups = groups_of([plain[0], net[0], plain[1], net[1]])
    assert [(group.label, [run.label for run in group.runs]) for group in groups] == [
        ("trial", ["p1", "p2"]),
        ("reward=net", ["n1", "n2"]),
    ]
    assert key_of(net[0]) == ("experiment=x", "reward=net")


def test_overrides_that_decide_nothing_make_no_group(tmp_path: Path) -> None:
    names = ("name", "run_dir", "resume", "report", "track", "profile", "device")
    names += ("checkpoint_every", "checkpoint_keep", "hydra.job.num", "compute.engine")
    names += ("telemetry.level", "+seed")
    decisive = ("seeds=1", "names=a", "data.name=x", "checkpoint=y", "hydra=z", "rounds=2")
    overrides = [*(f"{name}=1" for name in names), *decisive]
    run = read_run(make_run(tmp_path / "run", overrides=overrides))
    assert key_of(run) == tuple(sorted(decisive))


def test_settings_that_differ_are_listed_with_each_runs_value(tmp_path: Path) -> None:
    one = read_run(make_run(tmp_path / "one", seed=1, settings="  extra: 3\n"))
    other = read_run(make_run(tmp_path / "other", seed=2))
    assert differing([one, other]) == {"seed": ["1", "2"], "task.extra": ["3", ""]}
