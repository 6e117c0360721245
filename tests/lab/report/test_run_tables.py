"""The numbers that figures are drawn from."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from esper_soa.lab.report import env_steps, lanes, run_tables
from esper_soa.lab.report.groups import FinishedGroup
from esper_soa.lab.report.run_files import RunRecord, Table, read_run
from esper_soa.lab.report.run_tables import table_of
from esper_soa.training.results.statistics import Interval
from tests.builders.report_runs import line, make_run, summary, write_round, write_table


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    lines = [line(1, 40.0), line(2, 46.0), line(3, 43.0)]
    return read_run(make_run(tmp_path / "run", lines, ended=summary([50.0, 53.0])))


def parts(run: RunRecord, name: str) -> Table:
    return table_of(run_tables.part_rows([run], name))


def test_means_are_over_the_runs_that_have_the_round(run: RunRecord, tmp_path: Path) -> None:
    other = read_run(make_run(tmp_path / "other", [line(1, 50.0)]))
    both = table_of(run_tables.round_rows([run, other]))
    found = table_of(run_tables.mean_rows(both, "round"))
    assert (found["accuracy"], found["runs"]) == ([45.0, 46.0, 43.0], [2, 1, 1])


def test_every_column_of_a_row_has_its_own_number(tmp_path: Path) -> None:
    spread = {"mean": 2.0, "min": 1.0, "max": 4.0}
    update = {"explained_variance": 0.25, "approx_kl": 0.5, "kl": 9.0}
    one = line(7, 40.0, reward=spread, eps=30.0, train_flop=5e9, parameters=6.0, update=update)
    run = replace(read_run(make_run(tmp_path / "one", [one])), group="mine")
    row = {
        "group": "mine",
        "run": "one",
        "round": 7,
        **{"accuracy": 40.0, "accuracy_min": 37.0, "accuracy_max": 42.0},
        **{"reward": 2.0, "reward_min": 1.0, "reward_max": 4.0},
        **{"val_loss": 2.1, "parameters": 6.0, "eps": 30.0},
        **{"explained_variance": 0.25, "kl": 0.5, "train_gflop": 5.0},
    }
    assert list(run_tables.round_rows([run])) == [row]
    bare = dict.fromkeys(row) | {"group": "mine", "run": "one", "round": 8}
    assert list(run_tables.round_rows([replace(run, rounds=[{"round": 8}])])) == [bare]
    numbers = {name: value for name, value in row.items() if name not in ("group", "run", "round")}
    means = run_tables.mean_rows(table_of([row, row | {"kl": 1.5}]), "round")
    assert list(means) == [{"group": "mine", "round": 7, "runs": 2} | numbers | {"kl": 1.0}]


def test_rows_at_the_end_of_runs_have_every_number_in_its_column(tmp_path: Path) -> None:
    episode = {
        "validation_accuracies": [1.0, 2.0],
        "test_accuracies": [3.0, 4.0],
        "parameters": [5.0, 6.0],
        "train_flop": [7e9, 8e9],
        "settings": {"task.host_lr": [0.1, 0.2], "data.name": ["fashion32", "synthetic"]},
    }
    end = summary([50.0, 53.0], 4.0)
    end["controls"][0]["episodes"] = [episode]
    cut = {"episodes": [3, {"test_accuracies": [1.0], "settings": {"x": 3, "y": [1.0]}}]}
    run = replace(read_run(make_run(tmp_path / "one", ended=end | {"grown": cut})), group="mine")
    assert list(run_tables.host_rows([replace(run, summary={"grown": {"episodes": 3}})])) == []
    hosts = [{"group": "mine", "run": "one", "hosts": "control", "host": env} for env in (0, 1)]
    ends = [
        {"accuracy": 1.0 + env, "test_accuracy": 3.0 + env, "parameters": 5.0 + env}
        | {"train_gflop": 7.0 + env}
        for env in (0, 1)
    ]
    expected = [host | numbers for host, numbers in zip(hosts, ends, strict=True)]
    assert list(run_tables.host_rows([run])) == expected
    own = {"task.host_lr": [0.1, 0.2], "data.name (1: fashion32, 2: synthetic)": [1, 2]}
    assert list(run_tables.setting_rows([run])) == [
        {"run": "one", "hosts": "control", "setting": name, "host": env, "value": values[env]}
        | {"test_accuracy": 3.0 + env, "parameters": 5.0 + env}
        for name, values in own.items()
        for env in (0, 1)
    ]
    assert list(run_tables.final_rows([run])) == []
    ended = replace(run, summary=end)
    final = {"group": "mine", "run": "one", "accuracy": 51.5, "gain": 4.0}
    assert list(run_tables.final_rows([ended, run])) == [final]
    single = FinishedGroup("a", 1, 2, Interval(5.0, -math.inf, math.inf), None, 6.0, 7e9)
    both = single._replace(accuracy=Interval(5.0, 4.0, 8.0), gain=Interval(1.0, -1.0, 3.0))
    unknown = {"gain": None, "gain_low": None, "gain_high": None}
    head = {"group": "a", "runs": 1, "left_out": 2, "parameters": 6.0, "train_gflop": 7.0}
    assert list(run_tables.standing_rows([both, single])) == [
        head
        | {"accuracy": 5.0, "accuracy_low": 4.0, "accuracy_high": 8.0}
        | {"gain": 1.0, "gain_low": -1.0, "gain_high": 3.0},
        head | {"accuracy": 5.0, "accuracy_low": None, "accuracy_high": None} | unknown,
    ]


def test_means_of_blueprints_weigh_the_seeds_that_they_are_means_of(tmp_path: Path) -> None:
    def fate(kept: int, gain: float, pruned: int, churn: float) -> dict:
        counts = {"germinated": 5, "fossilized": kept, "pruned": pruned}
        means = {"mean_gain": gain, "mean_churn": churn, "mean_contribution": 10 * gain}
        return {"norm": counts | means}

    lines = [
        line(1, 40.0, blueprints=fate(1, 2.0, 4, 1.0)),
        line(2, 40.0, blueprints=fate(3, 6.0, 1, -4.0)),
        line(3, 40.0, blueprints={name: {} for name in "zyxwv"} | {"norm": {"germinated": 2}}),
    ]
    run = read_run(make_run(tmp_path / "b", lines))
    paid = table_of(run_tables.paid_rows([run]))
    assert paid["blueprint"] == ["norm"] * len(paid["points"]), "of the others no seed ended"
    assert {*paid["label"]} == {"norm|4 of 12 fossilized"}
    brought = [("contribution", 50.0, 4), ("gain, fossilized", 5.0, 4)]
    brought.append(("gain, pruned", 0.0, 5))
    assert [*zip(paid["measure"], paid["points"], paid["seeds"], strict=True)] == brought
    found = table_of(run_tables.blueprint_rows([run]))
    assert found.pop("blueprint") == ["norm", *"vwxyz"]
    means = {"kept": 44.4444, "fossil_gain": 5.0, "fossil_contribution": 50.0, "churn": 0.0}
    counts = {"germinated": 12, "fossilized": 4, "pruned": 5}
    assert {name: column[0] for name, column in found.items()} == {"run": "b"} | counts | means
    rest = dict.fromkeys(counts, [0] * 5) | dict.fromkeys(means, [None] * 5)
    assert {name: column[1:] for name, column in found.items()} == {"run": ["b"] * 5} | rest


def test_shapley_values_are_means_per_slot_of_those_measured(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", [line(1, 50.0)]))
    found = parts(run, "shapley")
    assert (found["slot"], found["shapley"]) == (["r0c0", "r0c1", "r0c2"], [1.0, 2.0, 1.0])
    assert found["round"] == [1, 1, 1]
    for episode in run.episodes:
        episode["shapley"] = [0.0, 0.0]
    assert not parts(run, "shapley")


def test_an_episode_without_shapley_values_leaves_out_those_of_no_other(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "one", [line(1, 40.0)]))
    run.episodes[0]["shapley"] = []  # of a host on which none was measured
    assert parts(run, "shapley")["slot"] == ["r0c0", "r0c1", "r0c2"]


def test_the_shapley_value_of_a_fossil_is_not_measured(run: RunRecord) -> None:
    rows = [
        {"step": 1, "slot": "r0c0", "stage": "blending", "seed": 1, "shapley": 0.0},
        {"step": 2, "slot": "r0c0", "stage": "fossilized", "seed": 1, "shapley": 0.0},
    ]
    write_table(run.path, "slots", 1, rows)
    write_table(run.path, "steps", 1, [{"step": step, "accuracy": 40.0} for step in (1, 2)])
    assert table_of(lanes.lane_rows(lanes.chosen_rounds([run])))["shapley"] == [0.0, None]


def test_env_steps_are_means_and_flop_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(make_run(tmp_path / "one", [line(1, 40.0)]))
    write_round(run.path, 1, envs=2, steps=6)
    found = table_of(env_steps.step_rows([run]))
    assert found["step"] == [1, 2, 3, 4, 5, 6]
    assert found["train_gflop"] == pytest.approx([1.5, 3.0, 4.5, 6.0, 7.5, 9.0])
    # 60 * (1 - 0.95 ** 2) + 0.02 = 5.87, and 0.1 more of host 1
    assert {name: column[1] for name, column in found.items()} == {
        **{"group": "", "run": "one", "step": 2, "parameters": 6618.0, "train_gflop": 3.0},
        **{"accuracy": 5.92, "accuracy_min": 5.87, "accuracy_max": 5.97, "control_accuracy": None},
        **{"step_reward": -0.3, "step_reward_min": -0.8, "step_reward_max": 0.2},
        **{"val_loss": 1.905, "train_loss": 1.4},
    }
    born = table_of(env_steps.fate_rows([run, run]))
    # host 0 in env-step 2 and host 1 in 3, first slot; second slots in 5 and 6; of two runs
    told = zip(born["step"], born["event"], born["seeds"], strict=True)
    assert list(told) == [(step, "germinated", 2) for step in (2, 3, 5, 6)]
    write_table(run.path, "events", 1, [{"step": 1, "kind": "blended"}])
    assert list(env_steps.fate_rows([run])) == []
    monkeypatch.setattr(env_steps, "MAX_ROWS", 11)
    every = table_of(env_steps.step_rows([run, run]))
    assert every["step"] == [2, 4, 6] * 2, "the last env-step stays"
    write_table(run.path, "steps", 2, [{"step": 7, "accuracy": math.nan}])
    (newest,) = env_steps.step_rows([run])
    assert (newest["step"], newest["accuracy"], newest["accuracy_min"]) == (7, None, None)


LIFE = (
    ("empty", 0.0, None),
    ("training", 0.0, 1.0),
    ("training", 0.0, 2.0),
    ("blending", 0.5, None),
    ("blending", 1.0, 4.0),
    ("embargoed", 0.0, None),
)  # stage, alpha and contribution of a seed of host 1 by env-step


@pytest.fixture
def played(run: RunRecord) -> RunRecord:
    steps = [{"step": step, "env": 1, "accuracy": 10.0 * step} for step in range(1, 7)]
    seeds = [
        {"slot": "r0c1", "stage": stage, "alpha": alpha, "contribution": worth, "seed": 1}
        | {"blueprint": "norm", "shapley": 0.25}
        for stage, alpha, worth in LIFE
    ]
    write_table(run.path, "slots", 1, [at | seed for at, seed in zip(steps, seeds, strict=True)])
    write_table(run.path, "steps", 1, steps)
    events = [{"slot": "r0c1", "kind": "germinated", "cause": "action"}, {"kind": "panic"}]
    write_table(run.path, "events", 1, [steps[1] | events[0], steps[2] | events[1]])
    return run


def test_an_env_step_is_a_row_of_a_lane_where_there_is_room_else_what_stands_still_is_one(
    played: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = lanes.chosen_rounds([played])
    found = table_of(lanes.lane_rows(chosen))
    assert list(zip(found["from"], found["to"], strict=True)) == [(n, n + 1) for n in range(1, 6)]
    told = zip(found["stage"], found["alpha"], found["contribution"], strict=True)
    assert list(told) == list(LIFE[1:])
    assert next(iter(lanes.lane_rows(chosen))) == {
        **{"run": "run", "round": "1 (last, best, first)", "hosts": "0 to 1", "host": 1},
        **{"slot": "r0c1", "stage": "training", "seed": 1.0, "alpha": 0.0, "from": 1, "to": 2},
        **{"base": -9.0, "blueprint": "norm", "contribution": 1.0, "shapley": 0.25},
    }
    # three slots below a name two lanes high, host 1 below host 0: 5 + 2, then the second slot
    assert set(found["base"]) == {-9.0}
    marks = table_of(lanes.mark_rows(chosen))
    assert (marks["event"], marks["step"], marks["y"]) == (["germinated"], [2], [-8.6])
    monkeypatch.setattr(lanes, "MAX_ROWS", 1)
    found = table_of(lanes.lane_rows(chosen))
    told = zip(found["from"], found["to"], found["contribution"], strict=True)
    assert list(told) == [(1, 3, 1.5), (3, 4, None), (4, 5, 4.0), (5, 6, None)]


def test_accuracies_lie_between_the_ends_of_their_lane(run: RunRecord) -> None:
    steps = [
        {"step": n, "env": 0, "accuracy": each} for n, each in ((1, 20.0), (2, 40.0), (3, 30.0))
    ]
    still = {"slot": "r0c0", "stage": "training", "seed": 1, "blueprint": "norm"}
    write_table(run.path, "slots", 1, [at | still for at in steps])
    write_table(run.path, "steps", 1, steps)
    chosen = lanes.chosen_rounds([run])
    found = table_of(lanes.accuracy_rows(chosen))
    _, base = chosen[0].place(0)
    assert found["y"] == pytest.approx([base, base + 1.4, base + 0.7])


def test_a_curve_has_the_last_env_step(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    write_round(run.path, 1, envs=2, steps=6)
    places = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 1), (5, 1), (6, 1)]
    names = ("step", "env", "accuracy")
    rows = ((*place, float(row)) for row, place in enumerate(places))
    steps = [dict(zip(names, row, strict=True)) for row in rows]
    write_table(run.path, "steps", 1, steps)
    last = [("rollback", "not_finite"), ("advanced", "action"), ("ended_early", "plateau")]
    events = [steps[4] | {"kind": kind, "cause": cause} for kind, cause in last]
    write_table(run.path, "events", 1, events)
    monkeypatch.setattr(lanes, "MAX_ROWS", 8)  # every second env-step
    chosen = lanes.chosen_rounds([run])
    found = table_of(lanes.accuracy_rows(chosen))
    drawn = [(0, 2), (1, 2), (0, 3), (1, 4), (1, 6)]
    assert list(zip(found["host"], found["step"], strict=True)) == drawn
    head = {"run": "run", "round": "1 (last, best, first)", "hosts": "0 to 1"}
    assert list(lanes.name_rows(chosen)) == [
        head | {"host": 0, "y": -1.05, "words": "host 0: 4.0 %, ended early: plateau"},
        head | {"host": 1, "y": -6.05, "words": "host 1: 8.0 %"},
    ]
    assert list(lanes.mark_rows(chosen)) == [
        head
        | {"host": 0, "step": 3, "slot": None, "blueprint": None, "y": -1.6}
        | {"event": kind, "cause": cause}
        for kind, cause in (last[0], last[2])
    ]
