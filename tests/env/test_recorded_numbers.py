"""Numbers of every reward and of whole episodes of the state machine, as they were recorded."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import yaml

from esper_soa.agent.protocol import Memory
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.env import (
    REWARD_MODES,
    EarlyStopConfig,
    GovernorConfig,
    LossRewardConfig,
    RewardConfig,
    SignalsConfig,
)
from esper_soa.config.settings import TrainConfig
from esper_soa.env.ahead import made_up
from esper_soa.env.outcome import (
    STABILITY_WINDOW,
    count_blueprints,
    empty_blueprint_stats,
    outcomes,
)
from esper_soa.env.reward import adjust
from esper_soa.env.reward_modes import score
from esper_soa.env.signals import push
from esper_soa.env.user_reward import sample_inputs
from esper_soa.state import STATE_FLOAT, Decision, Totals, View, initial
from esper_soa.vocabulary import Op
from tests.builders.recorded_numbers import assert_recorded, fingerprint, fingerprints
from tests.builders.tiny_world import CPU, SMALL_TASK, play_state, rules_from, tiny_settings

ENVS = 600
# Switches, and weights that are other than the defaults in all modes.
SWITCHES = {
    "target": {"scored_slots": "target"},
    "minimum": {"attribution_formula": "minimum"},
    "no_pbrs": {"disable_pbrs": True},
    "no_terminal": {"disable_terminal_reward": True},
    "no_anti_gaming": {"disable_anti_gaming": True},
    "no_timing": {"disable_timing_discount": True},
    "unlimited": {"escrow_delta_clip": 0.0},
    "by_loss": {"net_measure": "loss"},
}
WEIGHTS = """
contribution_weight: 2.0, proxy_confidence_factor: 0.5, attribution_sigmoid_steepness: 0.4,
improvement_safe_threshold: 1.5, hacking_ratio_threshold: 1.2, germination_warmup_steps: 20,
germination_discount_floor: 0.1, escrow_delta_clip: 0.5, pbrs_weight: 0.7, step_progress_bonus: 0.2,
max_progress_bonus: 0.9, rent_weight: 0.9, max_rent: 0.7, flop_weight: 0.6,
rent_host_params_floor: 4000, alpha_shock_coef: 0.8, alpha_shock_cap: 0.9,
seed_occupancy_cost: 0.05, free_slots: 0, fossilized_maintenance_cost: 0.07, germinate_cost: -0.21,
fossilize_cost: -0.03, prune_cost: -0.07, set_alpha_target_cost: -0.11,
advance_from_training_penalty: -0.13, fossilize_base_bonus: 0.9, fossilize_contribution_scale: 0.23,
fossilize_noncontributing_penalty: -0.29, fossilize_terminal_scale: 3.1,
fossilize_quality_ceiling: 2.0, prune_hurting_bonus: 0.31,
prune_acceptable_bonus: 0.37, prune_good_seed_penalty: -0.41, prune_hurting_threshold: -2.0,
min_prune_bonus_age: 9, early_prune_threshold: 12, early_prune_penalty: -0.43,
terminal_accuracy_weight: 0.09, basic_accuracy_delta_weight: 7.0, basic_fossilize_base_bonus: 0.47,
basic_contribution_scale: 0.53, basic_fossilize_invalid_penalty: -0.59,
basic_fossilize_noncontributing_penalty: -0.61, param_budget: 3000, param_penalty_weight: 0.3,
sparse_reward_scale: 1.7
"""
DRIP = "drip_fraction: 0.4, max_drip_per_step: 2.0, min_drip_steps: 9, negative_drip_ratio: 0.3"
LOSS = LossRewardConfig(2.0, 3.0, 0.7, 0.9, 0.3, 0.2, 9, 0.19, 4.0, -3.0, 1.7)


def rewards() -> Iterator[tuple[str, RewardConfig]]:
    """Every mode as it is, with other weights, and with each of the switches."""
    for mode in REWARD_MODES:
        yield mode, RewardConfig(mode=mode)
        text = f"{{{WEIGHTS}, {DRIP if mode.startswith('basic') else ''}}}"
        other = RewardConfig(mode=mode, loss=LOSS, **yaml.safe_load(text))
        yield f"{mode} weights", other
        for name, switch in SWITCHES.items():
            yield f"{mode} {name}", replace(other, **switch)


def paid(cfg: RewardConfig) -> float:
    """All terms, and the readings behind them, of generated env-steps, as one number."""
    inputs = sample_inputs(ENVS, 3, 40, CPU)
    # every second env has numbers beyond the limits of terms; every third is at its end
    large = torch.where(torch.arange(ENVS) % 2 == 0, 8.0, 1.0)
    for name in ("total", "loss_delta", "accuracy_delta"):
        inputs = inputs.replace(**{name: inputs.get(name) * large})
    for name in ("contribution", "drip_contribution", "interaction_sum", "improvement"):
        inputs = inputs.replace(**{name: inputs.get(name) * large[:, None]})
    last = torch.arange(ENVS) % 3 == 0
    inputs = inputs.replace(step=torch.where(last, inputs.max_steps, inputs.step))
    terms, readings = score(inputs, cfg)
    dues = torch.arange(ENVS, dtype=STATE_FLOAT)
    totals = initial(Totals, (ENVS,), CPU, rollbacks=torch.zeros(ENVS, 4, dtype=torch.int64))
    totals = totals.replace(pending_penalty=-dues, pending_hindsight=0.1 * dues.sqrt())
    terms = adjust(terms, inputs, readings, totals, cfg)
    numbers = [*fingerprints({"terms": terms, "readings": readings}).values()]
    return fingerprint(torch.tensor(numbers))


def test_rewards_are_those_recorded() -> None:
    assert_recorded("rewards", {name: paid(cfg) for name, cfg in rewards()})


class Grower(RandomPolicy):
    """Random play that prunes and waits more rarely than RandomPolicy."""

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        op = view.masks.op.clone()
        op[:, Op.PRUNE] &= view.noise[:, 0] < 0.1
        op[:, Op.WAIT] = ~op[:, Op.WAIT + 1 :].any(1)
        return super().act(view.replace(masks=view.masks.replace(op=op)), memory)


def settings(num_slots: int, steps: int, **changed: object) -> TrainConfig:
    return replace(tiny_settings(16, num_slots, steps), **changed)


EPISODES = {
    "shaped": settings(3, 24),
    "short": settings(
        3,
        30,
        early_stop=EarlyStopConfig(patience=6, min_delta=0.5, min_steps=8, rollbacks=2),
        governor=GovernorConfig(
            sensitivity=1.2, multiplier=1.1, absolute_threshold=1.2, min_panics=2, min_samples=3
        ),
        task=replace(SMALL_TASK, num_classes=4),
        signals=SignalsConfig(20.0, 0.3, 1, 0.4),
        reward=RewardConfig(mode="loss"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EPISODES)
def test_episodes_are_those_recorded(name: str) -> None:
    cfg = EPISODES[name]
    rules = rules_from(cfg, CPU)
    steps = list(play_state(rules, cfg.envs, 5, Grower()))
    rewards = torch.zeros(cfg.envs, STABILITY_WINDOW, dtype=STATE_FLOAT)
    stats = empty_blueprint_stats(CPU)
    for step in steps:
        rewards = push(rewards, step.result.terms.total)
        stats = count_blueprints(stats, step.view.state.slots, step.result.state.slots)
    seen = torch.stack([step.view.exclude("noise") for step in steps])
    compared = [made_up(rules, step.before, number) for number, step in enumerate(steps)]
    found = {
        "view": seen,
        "attribution": torch.stack([step.observed.attribution for step in steps]),
        "action": torch.stack([step.action for step in steps]),
        "terms": torch.stack([step.result.terms for step in steps]),
        "outcome": torch.stack([step.result.outcome for step in steps]),
        "after": torch.stack([step.result.state for step in steps]),
        "episode": outcomes(
            steps[-1].result.state, rewards, rules.reward.counts, rules.reward.flop
        ),
        "blueprints": stats,
        # one number for the measurements on which libraries are compared with the eager kernels
        "made_up": torch.tensor([*fingerprints({"": torch.stack(compared)}).values()]),
    }
    assert_recorded(f"episode_{name}", fingerprints(found))
