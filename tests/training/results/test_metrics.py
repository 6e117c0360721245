"""What the metrics of a round say agrees with the env state of its env-steps."""

import math
import sys
from collections import Counter

import pytest
import torch

from esper_soa.config.env import TERM_NAMES
from esper_soa.env.governor import REASON_NAMES
from esper_soa.env.outcome import STABILITY_WINDOW, BlueprintStats, outcomes, stability
from esper_soa.env.parameters import total_params
from esper_soa.nets.model.flops import training_flop
from esper_soa.training.results.metrics import (
    MEAN_OUTCOMES,
    MetricsAccumulator,
    RoundResult,
    blueprint_record,
    read_progress,
)
from esper_soa.vocabulary import BLUEPRINT_NAMES, OP_NAMES, RUNNING_STAGES, Blend, Op, Stage
from tests.builders.tiny_world import CPU, EnvStep, play_state, tiny_rules

NUM_ENVS = 4
NUM_SLOTS = 3
STEPS = 30
TRAIN_SAMPLES = 7


def played(seed: int) -> tuple[RoundResult, list[EnvStep]]:
    rules = tiny_rules(NUM_SLOTS, STEPS)
    steps = []
    metrics = MetricsAccumulator(rules, NUM_ENVS, TRAIN_SAMPLES)
    for step in play_state(rules, NUM_ENVS, seed):
        metrics.add_(step.observed, step.result)
        steps.append(step)
    return metrics.read(steps[-1].result.state), steps


def test_every_seed_of_an_episode_has_one_fate_and_the_sums_agree() -> None:
    result, steps = played(3)
    totals = steps[-1].result.state.totals
    fates = [episode["seeds"] for episode in result.episodes]
    assert sum(fate["germinated"] for fate in fates) > NUM_ENVS
    for env, fate in enumerate(fates):
        assert fate["germinated"] == fate["fossilized"] + fate["pruned"] + fate["unfinished"]
        assert fate["germinated"] == totals.germinated[env]
    by_blueprint = result.record["blueprints"].values()
    for name in ("germinated", "fossilized", "pruned"):
        assert result.seeds[name] == sum(fate[name] for fate in fates)
        assert result.seeds[name] == sum(row[name] for row in by_blueprint)
    assert result.seeds["blended"] == totals.blended.sum()
    assert result.record["seeds"] == {
        name: n for name, n in result.seeds.items() if name != "rollbacks"
    }


def test_an_episode_has_the_stability_of_its_last_rewards_and_the_shapley_values_of_its_last_env_step() -> (  # noqa: E501
    None
):
    result, steps = played(1)
    rewards = torch.stack([step.result.terms.total for step in steps], 1)
    expected = stability(rewards[:, -20:], torch.full((NUM_ENVS,), STEPS))
    last = steps[-1].observed.attribution
    assert last.shapley.any()
    for env, episode in enumerate(result.episodes):
        assert episode["stability"] == expected[env]
        assert math.isclose(episode["reward"], rewards[env].sum(), abs_tol=1e-9)
        assert episode["shapley"] == last.shapley[env].tolist()
        assert episode["shapley_error"] == [0.0] * NUM_SLOTS  # three slots: exact
        assert episode["accuracy"] == result.accuracies[env] == result.points[env][0]
        assert (episode["stability"], episode["param_ratio"]) == tuple(result.points[env][1:])
        assert episode["env_steps"] == STEPS


def test_every_number_of_a_round_is_that_of_the_last_state() -> None:
    result, steps = played(5)
    rules = tiny_rules(NUM_SLOTS, STEPS)
    state = steps[-1].result.state
    costs = training_flop(rules.setup.shape, CPU)
    rewards = torch.stack([step.result.terms.total for step in steps[-STABILITY_WINDOW:]], 1)
    expected = outcomes(state, rewards, rules.reward.counts, costs)
    sizes = total_params(state.slots, rules.reward.counts)
    assert result.parameters == sizes.tolist()
    assert len({*result.parameters}) > 1
    for env, episode in enumerate(result.episodes):
        for name in ("accuracy", "param_ratio", "stability", "reward", "compute_cost", "success"):
            assert episode[name] == getattr(expected, name)[env], name
        names = ("germinated", "fossilized", "contributing", "pruned", "unfinished")
        assert episode["seeds"] == {name: getattr(expected, name)[env] for name in names}
        assert episode["ended_by"] == "limit"
        plain = episode["success"], episode["rollbacks"], episode["env_steps"]
        assert list(map(type, (*plain, *episode["seeds"].values()))) == [bool] + [int] * 7
    means = {name: float(getattr(expected, name).double().mean()) for name in MEAN_OUTCOMES}
    signals = state.signals
    losses = ("val_loss", "train_loss", "train_accuracy")
    wanted = {name: float(getattr(signals, name).mean()) for name in losses}
    wanted["parameters"] = float(sizes.mean())
    found = {name: result.record[name] for name in wanted}
    assert found == pytest.approx(wanted, nan_ok=True)
    assert result.record["outcome"] == pytest.approx(means)
    assert result.seeds["contributing"] == int(expected.contributing.sum())
    for (name, value), reduced in zip(
        result.record["accuracy"].items(), ("mean", "min", "max"), strict=True
    ):
        assert (name, value) == (reduced, float(getattr(expected.accuracy, reduced)()))


def test_the_progress_bar_has_means_over_envs_and_behind_them_what_is_packed() -> None:
    state = played(5)[1][-1].result.state
    wanted = [float(state.signals.val_accuracy.mean()), float(state.totals.reward.mean())]
    packed = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    copy = read_progress(state, packed)
    assert copy.here
    assert copy.numbers.tolist() == [*wanted, 1.0, 2.0, 3.0, 4.0]
    assert read_progress(state).numbers.tolist() == wanted


def test_an_episode_that_ends_early_has_the_shapley_values_of_its_own_last_env_step() -> None:
    """What is measured of an env behind its end counts for nothing."""
    rules = tiny_rules(NUM_SLOTS, STEPS)
    steps = list(play_state(rules, NUM_ENVS, 1))
    lasts = torch.tensor([24, 29, 29, 29])  # env-steps, from 0
    metrics = MetricsAccumulator(rules, NUM_ENVS, TRAIN_SAMPLES)
    for number, step in enumerate(steps):
        metrics.add_(step.observed._replace(ended=number > lasts), step.result)
    result = metrics.read(steps[-1].result.state)
    values = [steps[last].observed.attribution.shapley[env] for env, last in enumerate(lasts)]
    assert not torch.equal(values[0], steps[-1].observed.attribution.shapley[0])
    assert [episode["shapley"] for episode in result.episodes] == [one.tolist() for one in values]
    rewards = torch.stack([step.result.terms.total for step in steps], 1)
    own = [row[: last + 1] for row, last in zip(rewards, lasts, strict=True)]
    expected = stability(torch.stack([row[-20:] for row in own]), lasts + 1)
    assert [episode["stability"] for episode in result.episodes] == expected.tolist()


def test_ops_successes_and_rows_are_those_of_every_env_step_waiting_included() -> None:
    result, steps = played(2)
    chosen = Counter[int]()
    successes = Counter[int]()
    rows = 0
    for step in steps:
        panic = step.view.state.guard.panic.tolist()
        for env, op in enumerate(step.action.op.tolist()):
            took_effect = Op.WAIT if panic[env] else op
            chosen[took_effect] += 1
            successes[took_effect] += step.result.outcome.success[env].item()
        rows += sum(code >= 0 for codes in step.measured.subset.tolist() for code in codes)
    assert result.record["ops"] == {name: chosen[code] for code, name in enumerate(OP_NAMES)}
    assert result.record["ops_successful"] == {
        name: successes[code] for code, name in enumerate(OP_NAMES)
    }
    assert successes[Op.WAIT] > 0
    assert successes[Op.ADVANCE] + successes[Op.PRUNE] + successes[Op.GERMINATE] > 0
    assert result.record["alpha_rows"] == rows / (NUM_ENVS * STEPS) > 1


def test_reward_terms_are_sums_over_env_steps_of_means_over_envs() -> None:
    result, steps = played(4)
    for name in TERM_NAMES:
        by_hand = sum(sum(step.result.terms.get(name).tolist()) / NUM_ENVS for step in steps)
        assert math.isclose(result.record["reward_terms"][name], by_hand, abs_tol=1e-9), name
    assert result.rewards == [episode["reward"] for episode in result.episodes]
    mean = sum(result.rewards) / NUM_ENVS
    spread = {"mean": mean, "min": min(result.rewards), "max": max(result.rewards)}
    assert result.record["reward"] == pytest.approx(spread)
    accuracy = steps[-1].view.state.signals.val_accuracy
    assert result.record["accuracy"]["max"] == accuracy.max()
    assert result.accuracies == accuracy.tolist()


def test_training_flop_are_of_the_host_and_the_seeds_that_ran_when_it_was_trained() -> None:
    """Random play, with rollbacks: stages, blueprints and blends as at each training pass."""
    result, steps = played(7)
    costs = training_flop(tiny_rules(NUM_SLOTS, STEPS).setup.shape, CPU)
    gated = 0
    for env in range(NUM_ENVS):
        total = 0.0
        for step in steps:
            slots = step.before.slots
            total = total + costs.host
            for slot, stage in enumerate(slots.stage[env].tolist()):
                if stage in RUNNING_STAGES:
                    total += costs.seed[slot, slots.blueprint[env, slot]].item()
                    if stage != Stage.TRAINING and slots.blend[env, slot] == Blend.GATE:
                        gated = gated + 1
                        total = total + costs.gate[slot].item()
        assert result.train_flop[env] == pytest.approx(TRAIN_SAMPLES * total)
        assert result.train_flop[env] > TRAIN_SAMPLES * STEPS * costs.host
    assert gated > 0, "no seed was gated"
    assert result.record["train_flop"] == pytest.approx(sum(result.train_flop) / NUM_ENVS)


def test_rollbacks_are_counted_by_reason_and_by_env() -> None:
    reasons = Counter[str]()
    for result, steps in (played(6), played(7)):
        by_env = [0] * NUM_ENVS
        own = Counter[str]()
        for step in steps:
            guard = step.view.state.guard
            for env in range(NUM_ENVS):
                by_env[env] += guard.panic[env].item()
                own[REASON_NAMES[guard.reason[env]]] += guard.panic[env].item()
        assert [episode["rollbacks"] for episode in result.episodes] == by_env
        told = result.record["rollbacks"]
        assert told["total"] == result.seeds["rollbacks"] == sum(by_env)
        assert all(told[name] == own[name] for name in REASON_NAMES[1:])
        reasons += own
    assert reasons.total() > 0, "no host was rolled back"


def test_means_of_blueprints_are_none_where_there_is_nothing_to_average() -> None:
    def place(code: int, value: float) -> torch.Tensor:
        return torch.zeros(13, dtype=torch.float64).index_fill(0, torch.tensor(code), value)

    none = torch.zeros(13, dtype=torch.float64)
    stats = BlueprintStats(
        germinated=place(1, 4),
        fossilized=place(1, 2),
        pruned=place(3, 1),
        gain=place(1, 5.0),
        churn=place(3, -2.0),
        blending_gain=none,
        contribution=none,
        measured=none,
    )
    record = blueprint_record(stats, BLUEPRINT_NAMES)
    assert list(record) == ["conv_light", "norm"]
    assert record["conv_light"] == {
        "germinated": 4,
        "fossilized": 2,
        "pruned": 0,
        "fossilization_rate": 100.0,
        "mean_gain": 2.5,
        "mean_churn": None,
        "mean_blending_gain": 0.0,
        "mean_contribution": None,
    }
    assert record["norm"]["mean_churn"] == -2.0


def calls_of_a_reading(num_envs: int) -> int:
    """Calls of functions, of torch's among them, while the numbers of a round are read."""
    rules = tiny_rules(2, 3)
    counted = 0
    metrics = MetricsAccumulator(rules, num_envs, TRAIN_SAMPLES)
    for step in play_state(rules, num_envs, seed=0):
        metrics.add_(step.observed, step.result)

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        metrics.read(step.result.state)
    finally:
        sys.setprofile(before)
    return counted


def test_no_function_is_called_env_by_env_at_the_end_of_a_round() -> None:
    few, many = (calls_of_a_reading(num_envs) for num_envs in (6, 100))
    assert many < few + 50  # blueprints that only appear among many envs
