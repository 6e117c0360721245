"""The ten questions of docs/queries.md, answered by SQL and by the tensors that training used."""

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import correlation

import pytest
import torch
import warm
from witness import Witnessed, witnessed_round

from esper_soa.agent.config import ScheduleConfig
from esper_soa.build import build_world, rule_player
from esper_soa.config import ComputeConfig, TelemetryConfig, TrainConfig, settings_yaml
from esper_soa.env.config import GatesConfig, LifecycleConfig
from esper_soa.env.world import World
from esper_soa.errors import UserError
from esper_soa.nets.config import DataConfig, TaskConfig
from esper_soa.ops.rundir import RunFolder
from esper_soa.trainer import run
from esper_soa.vocabulary import BLUEPRINT_NAMES, LIVE_STAGES, OP_NAMES, STAGE_NAMES, Op, Stage

duckdb = pytest.importorskip("duckdb", reason="extra query")
from esper_soa.telemetry.database import open_database  # noqa: E402
from esper_soa.telemetry.views import VIEWS  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "queries.md"
ENVS = 4
ROUNDS = 2
STEPS = 30
SLOTS = ("r0c0", "r0c1")
SETTINGS = TrainConfig(
    envs=ENVS,
    rounds=ROUNDS,
    steps=STEPS,
    batch_size=4,
    train_samples=4,
    val_samples=16,
    slots=list(SLOTS),
    task=TaskConfig(name="tiny", base_channels=2, num_blocks=2, kernel_size=1, num_pools=2),
    data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=16),
    gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.0),
    control="none",
    lifecycle=LifecycleConfig(embargo_steps=2, min_prune_age=1),
    compute=ComputeConfig(threads=1, workers=1),
    telemetry=TelemetryConfig(progress="off"),
)
SETTINGS.policy.schedule = ScheduleConfig(germinate=[1, 21], advance=[1, 4, 10], fossilize=12)


def question(number: int) -> str:
    """The SQL of a question on the page."""
    found = re.search(rf"### {number}\. .*?```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module", params=["random", "schedule"])
def player(request: pytest.FixtureRequest) -> str:
    """Random play prunes much and fossilises nothing; a schedule the other way round."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(player: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = RunFolder(tmp_path_factory.mktemp("asked"))
    cfg = replace(SETTINGS, policy=replace(SETTINGS.policy, name=player))
    place.config.write_text(settings_yaml(cfg))
    run(cfg, place)
    return place.path


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(SETTINGS, torch.device("cpu"))


@pytest.fixture(scope="module")
def rounds(player: str, world: World) -> list[Witnessed]:
    """The same rounds, played by hand."""
    agent = rule_player(SETTINGS, player, "policy.name")
    return [witnessed_round(world, agent, number) for number in range(ROUNDS)]


def answer(folder: Path, number: int) -> list[tuple]:
    return open_database([folder]).execute(question(number)).fetchall()


def test_there_are_ten_questions() -> None:
    assert [number for number in range(1, 12) if f"### {number}. " in PAGE.read_text()] == list(
        range(1, 11)
    )


def test_1_accuracy_and_reward_by_round(folder: Path, rounds: list[Witnessed]) -> None:
    accuracy = [float(played.states[-1].signals.val_accuracy.mean()) for played in rounds]
    reward = [float(played.states[-1].totals.reward.mean()) for played in rounds]
    rolling = [accuracy[0], sum(accuracy) / 2]
    assert answer(folder, 1) == list(zip((1, 2), accuracy, reward, rolling, strict=True))


def test_2_how_hosts_ended(folder: Path, rounds: list[Witnessed]) -> None:
    ends = [(number, played.states[-1]) for number, played in enumerate(rounds, 1)]
    assert answer(folder, 2) == [
        (
            number,
            env,
            float(state.signals.val_accuracy[env]),
            float(state.totals.reward[env]),
            int(state.totals.fossilized[env]),
        )
        for number, state in ends
        for env in range(ENVS)
    ]


class Life:
    """A seed, followed by hand."""

    def __init__(self, slot: int, blueprint: int, step: int) -> None:
        self.slot = slot
        self.blueprint = blueprint
        self.germinated = step
        self.blended = self.fossilized = self.pruned = None

    def follow(self, stage: int, step: int) -> None:
        if stage >= Stage.BLENDING and stage <= Stage.FOSSILIZED and self.blended is None:
            self.blended = step
        if stage == Stage.FOSSILIZED and self.fossilized is None:
            self.fossilized = step
        if stage not in LIVE_STAGES and self.pruned is None:
            self.pruned = step

    @property
    def fate(self) -> str:
        return "fossilized" if self.fossilized else "pruned" if self.pruned else "unfinished"


def lives(played: Witnessed) -> dict[int, list[Life]]:
    """The seeds of each env in order of germination."""
    found: dict[int, list[Life]] = {env: [] for env in range(ENVS)}
    here: dict[tuple[int, int], Life] = {}
    for step, state in enumerate(played.states, 1):
        for env in range(ENVS):
            for slot, stage in enumerate(state.slots.stage[env].tolist()):
                if stage == Stage.EMPTY:
                    here.pop((env, slot), None)
                    continue
                if (env, slot) not in here:
                    here[env, slot] = Life(slot, int(state.slots.blueprint[env, slot]), step)
                    found[env].append(here[env, slot])
                here[env, slot].follow(stage, step)
    return found


def test_3_what_became_of_every_seed(player: str, folder: Path, rounds: list[Witnessed]) -> None:
    expected = [
        (
            number,
            env,
            seed,
            SLOTS[life.slot],
            BLUEPRINT_NAMES[life.blueprint],
            life.germinated,
            life.blended,
            life.fossilized,
            life.pruned,
            life.fate,
        )
        for number, played in enumerate(rounds, 1)
        for env, seeds in lives(played).items()
        for seed, life in enumerate(seeds, 1)
    ]
    assert ("fossilized" if player == "schedule" else "pruned") in {row[-1] for row in expected}
    assert answer(folder, 3) == expected


def test_4_what_the_policy_does(folder: Path, rounds: list[Witnessed]) -> None:
    expected = []
    for number, played in enumerate(rounds, 1):
        chosen = Counter(OP_NAMES[op] for action in played.actions for op in action.op.tolist())
        done: Counter[str] = Counter()
        for action, state in zip(played.actions, played.states, strict=True):
            pairs = zip(action.op.tolist(), state.signals.last_success.tolist(), strict=True)
            done.update(OP_NAMES[op] for op, success in pairs if success)
        expected += [
            (number, op, chosen[op], done[op], chosen[op] / (ENVS * STEPS)) for op in sorted(chosen)
        ]
    assert answer(folder, 4) == expected


def test_5_what_the_reward_was_paid_for(folder: Path, rounds: list[Witnessed]) -> None:
    found = answer(folder, 5)
    for number, played in enumerate(rounds, 1):
        paid = sum(paid for round_, _, paid in found if round_ == number)
        assert paid == pytest.approx(float(played.rewards().sum()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, term, paid in found:
        assert paid == pytest.approx(lines[number - 1]["reward_terms"][term] * ENVS)


def test_6_how_slots_spend_their_time(folder: Path, rounds: list[Witnessed]) -> None:
    expected = []
    for number, played in enumerate(rounds, 1):
        stages = Counter(
            STAGE_NAMES[stage]
            for view in played.views
            for stage in view.state.slots.stage.flatten().tolist()
        )
        expected += [
            (number, stage, stages[stage], stages[stage] / (ENVS * STEPS * 2))
            for stage in sorted(stages)
        ]
    assert answer(folder, 6) == expected


def test_7_what_each_seed_adds_in_the_end(
    player: str, folder: Path, rounds: list[Witnessed]
) -> None:
    episodes = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    found = answer(folder, 7)
    for number, env, slot, blueprint, contribution, shapley in found:
        place = SLOTS.index(slot)
        slots = rounds[number - 1].views[STEPS - 1].state.slots
        episode = next(one for one in episodes if (one["round"], one["env"]) == (number, env))
        assert shapley == episode["shapley"][place]
        assert contribution == float(slots.contribution[env, place])
        assert blueprint == BLUEPRINT_NAMES[slots.blueprint[env, place]]
    told = sum(bool(share) for one in episodes for share in one["shapley"])
    assert len(found) >= told
    assert found or player == "random"


def test_8_which_blueprints_earn_their_place(folder: Path, rounds: list[Witnessed]) -> None:
    fates: dict[str, Counter[str]] = defaultdict(Counter)
    for played in rounds:
        for seeds in lives(played).values():
            for life in seeds:
                fates[BLUEPRINT_NAMES[life.blueprint]].update(["germinated", life.fate])
    assert answer(folder, 8) == [
        (name, fates[name]["germinated"], fates[name]["fossilized"], fates[name]["pruned"])
        for name in sorted(fates)
    ]


def test_9_which_gates_hold_seeds_back(player: str, folder: Path, rounds: list[Witnessed]) -> None:
    path = {Stage.GERMINATED: "G1", Stage.TRAINING: "G2", Stage.BLENDING: "G3", Stage.HOLDING: "G5"}
    passed = Counter[str]()
    refused = Counter[str]()
    for played in rounds:
        for view, action, state in zip(played.views, played.actions, played.states, strict=False):
            for env in range(ENVS):
                op = int(action.op[env])
                slot = int(action.slot[env])
                before = view.state.slots.stage[env].tolist()
                after = state.slots.stage[env].tolist()
                if op in (Op.ADVANCE, Op.FOSSILIZE) and not bool(state.signals.last_success[env]):
                    refused[path[before[slot]]] += 1
                order = list(path) + [Stage.FOSSILIZED]
                for was, now in zip(before, after, strict=True):
                    if was in path and now in order:
                        passed.update(
                            path[stage] for stage in order[order.index(was) : order.index(now)]
                        )
    names = sorted({*passed, *refused})
    assert answer(folder, 9) == [(gate, refused[gate], passed[gate]) for gate in names]
    assert passed["G1"]
    assert refused if player == "random" else passed["G5"]


def test_10_whether_the_reward_says_what_we_want(folder: Path, rounds: list[Witnessed]) -> None:
    ends = [played.states[-1] for played in rounds]
    reward = [float(value) for state in ends for value in state.totals.reward]
    accuracy = [float(value) for state in ends for value in state.signals.val_accuracy]
    ((found, episodes, calibration),) = answer(folder, 10)
    wanted = correlation(reward, accuracy)
    assert (found, episodes) == (pytest.approx(wanted), ENVS * ROUNDS)
    assert calibration == next(
        word
        for least, word in ((0.7, "well"), (0.3, "moderate"), (0, "weak"), (-2, "inverted"))
        if wanted >= least
    )


def test_every_view_answers_for_any_run_and_for_several(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "empty"
    other.mkdir()
    (other / "config.yaml").write_text("rounds: 1\nseed: 7\nname: other\n")
    for runs in ([folder], [folder, other], [other]):
        database = open_database(runs)
        for view in VIEWS:
            assert database.execute(f"select * from {view.name}").description[0][0] in (
                "run",
                "name",
            )
    differing = (
        open_database([folder, other])
        .execute("select name, run, value from run_confounders")
        .fetchall()
    )
    assert ("seed", "empty", "7") in differing


def test_a_run_that_was_cut_off_in_a_line_is_read_as_far_as_it_came(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("rounds: 1\nseed: 7\n")
    text = (folder / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text[: len(text) - 40])
    assert open_database([tmp_path]).execute("select round from rounds").fetchall() == [(1,)]


def test_a_sweeps_folder_stands_for_all_of_its_runs(tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / "sweep" / str(seed)).mkdir(parents=True)
        (tmp_path / "sweep" / str(seed) / "config.yaml").write_text(f"rounds: 1\nseed: {seed}\n")
    asked = "select run, value from settings where name = 'seed' order by run"
    assert open_database([tmp_path / "sweep"]).execute(asked).fetchall() == [("0", "0"), ("1", "1")]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml"):
        open_database([tmp_path])


def asked(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, "-m", "esper_soa.query", *words], capture_output=True, text=True
    )


def test_the_command_prints_tables_csv_and_json(folder: Path) -> None:
    sql = "select round, count(*) as hosts from episodes group by round order by round"
    assert asked(str(folder), sql, "format=csv").stdout.splitlines() == [
        "round,hosts",
        "1,4",
        "2,4",
    ]
    assert json.loads(asked(str(folder), sql, "format=json").stdout.splitlines()[1]) == {
        "round": 2,
        "hosts": 4,
    }
    shown = asked(str(folder), sql, "limit=1")
    assert (shown.returncode, "1 rows more" in shown.stdout) == (0, True)
    assert "seed_lifecycle" in asked(str(folder)).stdout


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    wrong = asked(str(folder), "select nothing from nowhere")
    assert (wrong.returncode, "nowhere" in wrong.stderr) == (1, True)
    assert asked(str(tmp_path), "select 1").returncode == 2
    assert "format" in asked(str(folder), "format=xml").stderr
