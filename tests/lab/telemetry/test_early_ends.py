"""Episodes that end early: the env-steps that were played, and an event that says why."""

import io
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from esper_soa.config.env import EarlyStopConfig, GatesConfig, LifecycleConfig
from esper_soa.config.settings import TelemetryConfig, settings_yaml
from esper_soa.env.early_stop import CAUSE_NAMES
from esper_soa.lab.report.lanes import accuracy_rows, chosen_rounds, mark_rows, name_rows
from esper_soa.lab.report.run_files import read_run
from esper_soa.lab.report.run_tables import table_of
from esper_soa.lab.telemetry.console_table import EnvsTable
from esper_soa.lab.telemetry.schema import EARLY_ENDINGS
from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.loop.build import build_world, rule_player
from esper_soa.vocabulary import Stage
from tests.builders.recorded_world import record
from tests.builders.recording_agent import Witnessed, witnessed_round
from tests.builders.tiny_runs import fresh, records, settings

ENVS = 6
ROUNDS = 2
STEPS = 24
SLOTS = ("r0c0", "r0c1")
SETTINGS = settings(
    "random",
    envs=ENVS,
    rounds=ROUNDS,
    steps=STEPS,
    val_samples=16,
    gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.0),
    lifecycle=LifecycleConfig(embargo_steps=2, min_prune_age=1),
    early_stop=EarlyStopConfig(patience=13, min_delta=0.0, min_steps=6),
    telemetry=TelemetryConfig(progress="off", level="full"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("early")
    RunFolder(path).config.write_text(settings_yaml(SETTINGS))
    fresh(SETTINGS, path)
    return path


@pytest.fixture(scope="module")
def rounds() -> list[Witnessed]:
    """The same rounds, played by hand."""
    world = build_world(SETTINGS, torch.device("cpu"))
    agent = rule_player("random", "policy.name", SETTINGS.policy, world.setup)
    return [witnessed_round(world, agent, number) for number in range(ROUNDS)]


@pytest.fixture(scope="module")
def played(rounds: list[Witnessed]) -> list[tuple[int, int, int]]:
    """Round, env-step and env of all env-steps that were played, in the order of the tables."""
    found = []
    for number, one in enumerate(rounds, 1):
        over = torch.zeros(ENVS, dtype=torch.bool)
        for step, state in enumerate(one.states, 1):
            found += [(number, step, env) for env in range(ENVS) if not over[env]]
            over = state.ending.over
    lasts = Counter((number, env) for number, _, env in found).values()
    assert min(lasts) < STEPS == max(lasts), "all ended alike: the test says less"
    return found


def keys(table: dict[str, np.ndarray]) -> list[tuple[int, int, int]]:
    return list(zip(*(table[name].tolist() for name in ("round", "step", "env")), strict=True))


def test_every_table_has_the_env_steps_that_were_played_and_no_others_with_what_was_measured(
    folder: Path, rounds: list[Witnessed], played: list[tuple[int, int, int]]
) -> None:
    for name, times in (("steps", 1), ("choices", 1), ("slots", len(SLOTS))):
        assert keys(read_table(folder, name)) == [key for key in played for _ in range(times)], name
    assert sorted(set(keys(read_table(folder, "subsets")))) == sorted(played)
    assert set(keys(read_table(folder, "events"))) <= set(played)
    steps = read_table(folder, "steps")
    slots = read_table(folder, "slots")
    views = [rounds[number - 1].views[step - 1].state for number, step, _ in played]
    envs = [env for _, _, env in played]
    there = list(zip(views, envs, strict=True))
    accuracies = [float(state.signals.val_accuracy[env]) for state, env in there]
    assert steps["accuracy"].tolist() == accuracies
    paid = [float(rounds[number - 1].rewards()[step - 1, env]) for number, step, env in played]
    np.testing.assert_allclose(steps["reward"], paid, rtol=0, atol=1e-9)
    taken = [int(stage) != Stage.EMPTY for state, env in there for stage in state.slots.stage[env]]
    assert (slots["stage"] != "empty").tolist() == taken
    alphas = [float(alpha) for state, env in there for alpha in state.slots.alpha[env]]
    assert slots["alpha"].tolist() == alphas


def test_means_and_counts_of_the_tables_are_those_of_the_records(folder: Path) -> None:
    steps = read_table(folder, "steps")
    episodes = records(folder / "episodes.jsonl")
    for line in records(folder / "metrics.jsonl"):
        mine = steps["round"] == line["round"]
        counted = Counter(steps["effective_op"][mine].tolist())
        assert counted == Counter({name: count for name, count in line["ops"].items() if count})
        assert steps["train_flop"][mine].sum() / ENVS == pytest.approx(line["train_flop"])
        assert steps["subsets"][mine].mean() == pytest.approx(line["alpha_rows"])
    for one in episodes:
        mine = (steps["round"] == one["round"]) & (steps["env"] == one["env"])
        assert mine.sum() == one["env_steps"] == steps["step"][mine].max()
        assert steps["accuracy"][mine][-1] == one["accuracy"]
        assert steps["reward"][mine].sum() == pytest.approx(one["reward"])
    told = json.loads((folder / "summary.json").read_text())["telemetry"]
    assert told == {"level": "full", "env_steps": len(steps["env"]), "dropped": {}}


def test_an_end_is_an_event_the_last_one_of_its_env(folder: Path) -> None:
    assert list(CAUSE_NAMES) == ["", *EARLY_ENDINGS]
    events = read_table(folder, "events")
    episodes = records(folder / "episodes.jsonl")
    names = ("round", "step", "env", "cause", "accuracy")
    there = ("round", "env_steps", "env", "ended_by", "accuracy")
    cut = [one for one in episodes if one["ended_by"] != "limit"]
    early = [tuple(one[name] for name in there) for one in cut]
    where = events["kind"] == "ended_early"
    told = zip(*(events[name][where].tolist() for name in names), strict=True)
    assert sorted(told) == sorted(early)
    assert len(early) > 0
    for name in ("slot", "seed", "blueprint", "stage_from", "gate"):
        assert all(value is None or value != value for value in events[name][where].tolist()), name
    for place in np.flatnonzero(where):
        mine = (events["round"] == events["round"][place]) & (events["env"] == events["env"][place])
        assert np.flatnonzero(mine)[-1] == place


def test_questions_about_the_end_are_of_every_env(folder: Path, rounds: list[Witnessed]) -> None:
    pytest.importorskip("duckdb", reason="extra query")
    from esper_soa.lab.query.database import open_database

    database = open_database([folder])
    page = (Path(__file__).parents[3] / "docs" / "queries.md").read_text()
    questions = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    ends = []
    for number, one in enumerate(rounds, 1):
        for env, steps in enumerate(one.states[-1].signals.step.tolist()):
            alphas = one.views[steps - 1].state.slots.alpha[env].tolist()
            pairs = zip(SLOTS, alphas, strict=True)
            ends += [(number, env, slot, alpha) for slot, alpha in pairs if alpha > 0]
    assert ends
    found = database.execute(questions[-2]).fetchall()
    assert [(number, env, slot, alpha) for _, number, env, slot, *_, alpha in found] == ends
    episodes = records(folder / "episodes.jsonl")
    worth = {
        (one["round"], one["env"], slot): value
        for one in episodes
        for slot, value in zip(SLOTS, one["shapley"], strict=True)
    }
    found = {tuple(row[:3]): row[-1] for row in database.execute(questions[6]).fetchall()}
    assert found == {key: worth[key] for key in found}
    assert {key for key, value in worth.items() if value} <= found.keys()


def test_a_report_shows_every_host_up_to_its_end_and_says_why_it_ended(folder: Path) -> None:
    episodes = records(folder / "episodes.jsonl")
    last = [one for one in episodes if one["round"] == ROUNDS]
    chosen = chosen_rounds([read_run(folder)])[:1]
    curves = table_of(accuracy_rows(chosen))
    hosts = Counter(curves["host"])
    assert sorted(hosts.items()) == [(one["env"], one["env_steps"]) for one in last]
    words = [f"host {one['env']}: {one['accuracy']:.1f} %" for one in last]
    early = [one for one in last if one["ended_by"] != "limit"]
    for one in early:
        words[one["env"]] += f", ended early: {one['ended_by']}"
    assert sorted(table_of(name_rows(chosen))["words"]) == words
    marks = table_of(mark_rows(chosen))
    places = zip(marks["step"], marks["host"], marks["event"], strict=True)
    ends = [(step, host) for step, host, event in places if event == "ended_early"]
    assert sorted(ends) == sorted((one["env_steps"], one["env"]) for one in early)


def test_the_live_view_says_which_envs_are_over() -> None:
    recorded = record(3, num_envs=2, steps=1)
    recorded.played.read("over")[0, 1] = 1
    recorded.played.read("ending")[0, 1] = CAUSE_NAMES.index("diverged")
    table = EnvsTable(recorded.legend)
    table.show(1, 1, recorded.numbers[0])
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as told:
        console.print(table)
    rows = [line.split() for line in told.get().splitlines() if line.strip()[:1].isdigit()]
    accuracies = recorded.steps[0].view.state.signals.val_accuracy.tolist()
    assert [row[:2] for row in rows] == [[str(n), f"{one:.2f}"] for n, one in enumerate(accuracies)]
    assert rows[1][2:4] == ["over:", "diverged"]
    assert "over:" not in rows[0]
