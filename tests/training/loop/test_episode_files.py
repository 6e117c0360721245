"""An episode of a simulator as a run folder: what the run of one round would have left."""

from pathlib import Path

import pytest

import esper_soa
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.lab.report.groups import groups_of
from esper_soa.lab.report.run_files import find_runs
from esper_soa.lab.report.sections import make_drawing
from esper_soa.simulator import Simulator
from esper_soa.system.errors import UserError
from esper_soa.training.start.begin import make_run_folder
from esper_soa.training.start.runs import train_in_folder
from tests.builders.equal_runs import same
from tests.builders.tiny_runs import settings

ROUND = settings("random", rounds=1)


def rows(run: esper_soa.RecordedRun, name: str) -> list[dict]:
    return list(run.table(name).to_pylist())


def test_an_episode_leaves_the_folder_of_a_run_of_one_round(tmp_path: Path) -> None:
    sim = Simulator(ROUND)
    sim.record(tmp_path / "episode")
    steps = list(sim.episode())
    list(sim.episode())  # which nobody asked to record
    train_in_folder(make_run_folder(ROUND, str(tmp_path / "run")), ROUND, [], verbose=0)
    found, wanted = (esper_soa.open_run(tmp_path / name) for name in ("episode", "run"))
    for table in ("steps", "slots", "events"):
        assert rows(found, table) == rows(wanted, table)
    assert found.episodes() == wanted.episodes()
    (line,), (expected,) = found.metrics(), wanted.metrics()
    for name in ("accuracy", "reward", "parameters", "seeds", "ops", "env_steps"):
        assert line[name] == expected[name]
    same(found.summary["grown"], wanted.summary["grown"])
    net = found.export(1)
    assert net.spec["validation_accuracy"] == float(steps[-1].accuracy[1])
    sections, _ = make_drawing(groups_of(find_runs([found.path])))
    assert "steps-accuracy" in [figure["id"] for section in sections for figure in section.figures]


def test_steps_of_a_caller_are_recorded_and_an_episode_that_is_left_has_no_end(
    tmp_path: Path,
) -> None:
    sim = Simulator(ROUND, RandomPolicy())
    sim.record(tmp_path / "left")
    sim.reset()
    sim.step({"op": "wait"})
    sim.record(tmp_path / "whole")
    sim.reset()
    twin = sim.copy()
    for _ in range(ROUND.steps):
        twin.step({"op": "wait"})  # of which nothing is recorded
        sim.step({"op": "wait"})
    left, whole = (esper_soa.open_run(tmp_path / name) for name in ("left", "whole"))
    assert [row["op"] for row in rows(left, "steps")] == ["wait"] * 2
    assert len(rows(whole, "steps")) == 2 * ROUND.steps
    assert whole.summary["rounds"] == 1
    assert (left.metrics(), left.path.joinpath("summary.json").exists()) == ([], False)
    sim.record(tmp_path / "whole")
    with pytest.raises(UserError, match="already holds the results of a run"):
        sim.reset()
