"""Evaluations: numbers worked out again by hand on fresh seeds, equal hosts for all, refusals."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.protocol import Agent
from esper_soa.agent.scripted import RandomPolicy, WaitPolicy
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.env import GatesConfig, RewardConfig
from esper_soa.config.nets import DataConfig, sort_slots
from esper_soa.config.settings import (
    ComputeConfig,
    EvaluateConfig,
    TrainConfig,
    settings_from_mapping,
)
from esper_soa.env.reward import final_rents
from esper_soa.env.world import World
from esper_soa.nets.data.datasets import load_samples
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import SavedRun, read_run
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.evaluation import (
    Scores,
    judge,
    verdict_table,
    write_results,
)
from esper_soa.training.results.final_table import as_text
from esper_soa.training.results.final_test import measure_test
from esper_soa.training.results.statistics import estimate
from tests.builders.equal_runs import CPU, settings
from tests.builders.recording_agent import Witnessed, witnessed_round
from tests.builders.tiny_runs import evaluate, fresh, log_of

ENVS = 2
EPISODES = 2
STEPS = 6
SEED = 3
TRAINED = settings(
    envs=3,
    rounds=1,
    steps=STEPS,
    val_samples=32,
    seed=4,
    data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=64),
    gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.0),
    policy=PolicyConfig(
        network=NetworkConfig(hidden=8, features=8), ppo=PPOConfig(epochs=1, minibatches=3)
    ),
)


def settings_of(saved: SavedRun, cfg: EvaluateConfig) -> TrainConfig:
    return settings_from_mapping(saved.settings).for_evaluation(cfg)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    fresh(TRAINED, path)
    return path


@pytest.fixture(scope="module")
def saved(trained: Path) -> SavedRun:
    return read_run(RunFolder(trained).checkpoint(1), CPU)


def asked(trained: Path, **changed: object) -> EvaluateConfig:
    cfg = EvaluateConfig(
        checkpoint=str(trained),
        device="cpu",
        policies=["wait", "random", "ppo"],
        episodes=EPISODES,
        envs=ENVS,
        seed=SEED,
        deterministic=False,
        progress="off",
        compute=ComputeConfig(threads=1, workers=1),
    )
    return replace(cfg, **changed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def evaluated(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("evaluation"))
    evaluate(asked(trained, progress="plain"), folder)
    return folder


@pytest.fixture(scope="module")
def found(evaluated: RunFolder) -> dict:
    return json.loads(evaluated.evaluation.read_text())


@pytest.fixture(scope="module")
def world(trained: Path, saved: SavedRun) -> World:
    """Hosts and data of seed 2**31 + 3."""
    return build_world(settings_of(saved, asked(trained)), CPU, 2**31 + SEED)


def by_hand(world: World, agent: Agent) -> list[Witnessed]:
    return [witnessed_round(world, agent, episode) for episode in range(EPISODES)]


def learned(saved: SavedRun) -> RecurrentPolicy:
    assert saved.learner is not None
    policy = RecurrentPolicy(TRAINED.policy, sort_slots(TRAINED.task, ["r0c0", "r0c1"]), seed=99)
    policy.load_state_dict(saved.learner["policy"])
    return policy


def last_accuracies(rounds: list[Witnessed]) -> list[float]:
    return [
        accuracy
        for played in rounds
        for accuracy in played.views[-1].state.signals.val_accuracy.tolist()
    ]


def samples(found: dict, policy: str) -> dict[str, list[float]]:
    return found["policies"][policy]["samples"]


@pytest.mark.parametrize("name", ["wait", "random", "ppo"])
def test_every_policy_plays_on_the_fresh_seed_that_was_asked_for(
    found: dict, world: World, saved: SavedRun, name: str
) -> None:
    agent: Agent = (
        {"wait": WaitPolicy, "random": RandomPolicy}[name]() if name != "ppo" else learned(saved)
    )
    rounds = by_hand(world, agent)
    own = samples(found, name)
    assert own["validation_accuracy"] == last_accuracies(rounds)
    assert (
        own["test_accuracy"][-len(world.envs) :] == measure_test(world, rounds[-1].result.hosts)[0]
    )
    assert own["reward"] == pytest.approx(
        [reward for played in rounds for reward in played.rewards().sum(0).tolist()]
    )
    host = world.rules.reward.counts.host
    tested = own["test_accuracy"]
    for size, accuracy, net in zip(own["parameters"], tested, own["net"], strict=True):
        rent = min(1.5, 0.5 * math.log1p((size - host) / max(host, 200)))
        assert net == pytest.approx(accuracy - rent)
    assert (own["parameters"] == [host] * 4) == (name == "wait")


def test_progress_counts_the_env_steps_of_all_policies(evaluated: RunFolder) -> None:
    every = 3 * EPISODES * ENVS * STEPS
    told = [one for one in log_of(evaluated.path) if " env-steps  left " in one]
    assert all(f"/{every} env-steps" in one for one in told)
    assert f"ppo  {every}/{every} env-steps" in told[-1]


def test_means_and_leads_are_those_of_the_samples_pair_by_pair(found: dict, trained: Path) -> None:
    first = samples(found, "wait")["net"]
    for name in ("wait", "random", "ppo"):
        record = found["policies"][name]
        own = samples(found, name)
        for field, values in own.items():
            assert len(values) == ENVS * EPISODES
            assert record["means"][field]["mean"] == pytest.approx(sum(values) / 4)
        lead = [one - other for one, other in zip(own["net"], first, strict=True)]
        if name == "wait":
            assert record["net_less_first"] is None
        else:
            assert record["net_less_first"]["mean"] == pytest.approx(sum(lead) / 4)
    facts = {name: value for name, value in found.items() if name != "policies"}
    source = load_samples(TRAINED.data, CPU)
    assert facts == {
        "checkpoint": str(RunFolder(trained).checkpoint(1)),
        **{"rounds_done": 1, "seed": SEED, "envs": ENVS, "episodes": EPISODES, "steps": STEPS},
        **{"deterministic": False, "confidence": 0.95},
        "data": {"name": source.name, "source": source.source, "identity": source.identity},
    }


def test_task_data_reward_and_rules_are_those_of_the_checkpoint(
    trained: Path, saved: SavedRun
) -> None:
    cfg = settings_of(saved, asked(trained))
    assert (cfg.envs, cfg.rounds, cfg.seed) == (ENVS, EPISODES, TRAINED.seed)
    assert settings_of(saved, asked(trained, envs=0)).envs == TRAINED.envs
    for name in (
        "task",
        "gates",
        "reward",
        "lifecycle",
        "steps",
        "train_samples",
        "val_samples",
        "slots",
        "data",
    ):
        assert getattr(cfg, name) == getattr(TRAINED, name), name


def test_an_evaluation_takes_its_own_data_and_precision_where_it_names_them_else_those_of_the_run(
    trained: Path, saved: SavedRun
) -> None:
    there = saved.settings | {"data": saved.settings["data"] | {"name": "auto", "root": "/there"}}
    there |= {"compute": saved.settings["compute"] | {"precision": "bfloat16"}}
    made = replace(saved, settings=there)
    kept = settings_of(made, asked(trained))
    assert (kept.data.root, kept.compute.precision) == ("/there", "bfloat16")
    own = asked(trained, data_root="/here", compute=ComputeConfig(precision="float16"))
    changed = settings_of(made, own)
    assert (changed.data.root, changed.compute.precision) == ("/here", "float16")


def test_intervals_have_the_confidence_that_was_asked_for(trained: Path) -> None:
    values = [50.0, 52.0, 57.0, 51.0]
    better = [51.0, 53.5, 58.0, 52.0]
    scores = {
        name: Scores(values, values, values, net, values)
        for name, net in (("a", values), ("b", better))
    }
    for confidence in (0.5, 0.99):
        first, second = judge(scores, asked(trained, confidence=confidence))
        assert first.means["net"] == estimate(values, confidence).interval
        assert second.lead == estimate([1.0, 1.5, 1.0, 1.0], confidence).interval


def test_table_and_record_have_every_number_in_its_place(tmp_path: Path) -> None:
    def scores(lead: float) -> Scores:
        return Scores(*([lead + 10 * place, lead + 10 * place + 2] for place in range(1, 6)))

    both = {"wait": scores(0.0), "ppo": scores(0.5)}
    verdicts = judge(both, asked(Path("x")))
    # standard error 1, t of one degree of freedom 12.706; equal differences have no bounds
    titles = "  policy               test (%)        validation (%)    parameters"
    assert as_text(verdict_table(verdicts)).splitlines() == [
        f"{titles}            test - rent                    reward   test - rent, less wait",
        " " + "─" * 141,
        "  wait     11.00 [-1.71, 23.71]   21.00 [8.29, 33.71]   31 [18, 44]   41.00 [28.29, 53.71]"
        "   +51.00 [+38.29, +63.71]",
        "  ppo      11.50 [-1.21, 24.21]   21.50 [8.79, 34.21]   32 [19, 44]   41.50 [28.79, 54.21]"
        f"   +51.50 [+38.79, +64.21]{'+0.50':>25}",
    ]
    path = tmp_path / "evaluation.json"
    write_results(path, {"seed": 3}, both, verdicts)
    record = json.loads(path.read_text())
    assert record == {
        "seed": 3,
        "policies": {
            one.policy: {
                "means": {name: mean._asdict() for name, mean in one.means.items()},
                "net_less_first": None if one.lead is None else one.lead._asdict(),
                "samples": both[one.policy].numbers,
            }
            for one in verdicts
        },
    }


def test_the_rent_is_the_logarithm_of_the_growth_up_to_a_limit() -> None:
    # 0.5 ln(1 + growth), at most 1.5; growth is taken of at least 200 parameters
    reward = RewardConfig()
    assert final_rents([1000.0, 3000.0], 1000, reward) == [0.0, pytest.approx(0.5 * math.log(3))]
    assert final_rents([300.0], 100, reward) == [pytest.approx(0.5 * math.log(2))]
    assert final_rents([1e9], 1000, reward) == [1.5]
