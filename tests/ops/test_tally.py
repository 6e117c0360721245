"""What a round's tally says agrees with the ledger of its env-steps."""

import math

import torch
from tiny_world import CPU, EnvStep, play_ledger, tiny_rules

from esper_soa.env.outcome import BlueprintStats, stability
from esper_soa.ops.tally import RoundResult, Tally, blueprint_record

NUM_ENVS, NUM_SLOTS, STEPS = 4, 3, 30


def played(seed: int) -> tuple[RoundResult, list[EnvStep]]:
    rules, tally, steps = tiny_rules(NUM_SLOTS, STEPS), Tally(CPU, NUM_ENVS), []
    for step in play_ledger(rules, NUM_ENVS, seed):
        tally.add_(step.trusted, step.percept, step.response)
        steps.append(step)
    return tally.read(steps[-1].response.state, rules.reward.counts), steps


def test_every_seed_of_an_episode_has_one_fate_and_the_sums_agree() -> None:
    result, steps = played(3)
    totals = steps[-1].response.state.totals
    fates = [episode["seeds"] for episode in result.episodes]
    assert sum(fate["germinated"] for fate in fates) > NUM_ENVS
    for env, fate in enumerate(fates):
        assert fate["germinated"] == fate["fossilized"] + fate["pruned"] + fate["unfinished"]
        assert fate["germinated"] == totals.germinated[env]
    by_blueprint = result.record["blueprints"].values()
    for name in ("germinated", "fossilized", "pruned"):
        assert result.seeds[name] == sum(fate[name] for fate in fates) == sum(row[name] for row in by_blueprint)
    assert result.seeds["blended"] == totals.blended.sum()
    assert result.record["seeds"] == {name: n for name, n in result.seeds.items() if name != "rollbacks"}
    assert result.record["rollbacks"]["total"] == sum(episode["rollbacks"] for episode in result.episodes)


def test_an_episode_has_the_stability_of_its_last_rewards_and_the_shapley_values_of_its_last_env_step() -> None:
    result, steps = played(1)
    rewards = torch.stack([step.response.terms.total for step in steps], 1)
    expected = stability(rewards[:, -20:], torch.full((NUM_ENVS,), STEPS))
    last = steps[-1].percept.attribution
    assert last.shapley.any()
    for env, episode in enumerate(result.episodes):
        assert episode["stability"] == expected[env]
        assert math.isclose(episode["reward"], rewards[env].sum(), abs_tol=1e-9)
        assert episode["shapley"] == last.shapley[env].tolist()
        assert episode["shapley_error"] == [0.0] * NUM_SLOTS  # three slots: exact
        assert episode["accuracy"] == result.accuracies[env] == result.points[env][0]
        assert (episode["stability"], episode["param_ratio"]) == tuple(result.points[env][1:])
        assert episode["env_steps"] == STEPS


def test_means_of_blueprints_are_none_where_there_is_nothing_to_average() -> None:
    def place(code: int, value: float) -> torch.Tensor:
        return torch.zeros(13, dtype=torch.float64).index_fill(0, torch.tensor(code), value)

    none = torch.zeros(13, dtype=torch.float64)
    stats = BlueprintStats(germinated=place(1, 4), fossilized=place(1, 2), pruned=place(3, 1), gain=place(1, 5.0),
                           churn=place(3, -2.0), blending_gain=none, contribution=none, measured=none)  # fmt: skip
    record = blueprint_record(stats)
    assert list(record) == ["conv_light", "norm"]
    assert record["conv_light"] == {
        "germinated": 4, "fossilized": 2, "pruned": 0, "fossilization_rate": 100.0, "mean_gain": 2.5,
        "mean_churn": None, "mean_blending_gain": 0.0, "mean_contribution": None,
    }  # fmt: skip
    assert record["norm"]["mean_churn"] == -2.0
