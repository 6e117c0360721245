"""The reference's defaults of the simulator and of the decision makers, written out once more:
whoever changes one has to change it here too.
"""

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass

import pytest
import yaml

from esper_soa.config.agent import HeuristicConfig, NetworkConfig, PPOConfig
from esper_soa.config.env import (
    GUARD_WINDOW,
    MAX_STABLE_WINDOW,
    PBRS_GAMMA,
    EarlyStopConfig,
    GatesConfig,
    GovernorConfig,
    LifecycleConfig,
    LossRewardConfig,
    RewardConfig,
    SignalsConfig,
)
from esper_soa.config.ranges import RULE, Settings
from esper_soa.config.settings import EvaluateConfig, TrainConfig, flat_settings
from tests.builders.recorded_numbers import assert_recorded_text

# The reference's, but for governor.enabled, snapshot_steps, slot_features, and the epochs of PPO:
# the reference passes over a round once; here four times, with the same bound on the KL.
DEFAULTS = """
GatesConfig: {permissive: true, min_training_improvement: 0.5, min_blending_steps: 10,
  min_gradient_ratio: 0.1, min_gradient_health: 0.7, min_fossilize_contribution: 1.0}
LifecycleConfig: {auto_forward_g1: false, auto_forward_g2: false, auto_forward_g3: false,
  embargo_steps: 5, min_prune_age: 5, detached_stages: []}
SignalsConfig: {plateau_threshold: 0.5, stabilization_threshold: 0.03, stabilization_steps: 3,
  regression_threshold: 0.05}
GovernorConfig: {enabled: true, sensitivity: 6.0, multiplier: 3.0, absolute_threshold: 12.0,
  min_panics: 3, min_samples: 10, death_penalty: 10.0, snapshot_steps: 5}
RewardConfig: {mode: shaped, split: [], scored_slots: all, contribution_weight: 1.0,
  proxy_confidence_factor: 0.3, attribution_formula: harmonic, attribution_sigmoid_steepness: 3.0,
  improvement_safe_threshold: 0.1, hacking_ratio_threshold: 5.0, germination_warmup_steps: 10,
  germination_discount_floor: 0.4, disable_timing_discount: false, escrow_stable_window: 3,
  escrow_delta_clip: 2.0, pbrs_weight: 0.3, step_progress_bonus: 0.3, max_progress_bonus: 2.0,
  rent_weight: 0.5, max_rent: 1.5, flop_weight: 0.0, rent_host_params_floor: 200,
  base_slot_rent_ratio: 0.0039, alpha_shock_coef: 0.1958, alpha_shock_cap: 1.0,
  seed_occupancy_cost: 0.01, free_slots: 1,
  fossilized_maintenance_cost: 0.002, germinate_cost: -0.15, fossilize_cost: -0.01, prune_cost:
  -0.005, set_alpha_target_cost: -0.005, advance_from_training_penalty: -0.1,
  germinate_with_seed_penalty: -0.3, invalid_fossilize_penalty: -1.0, fossilize_base_bonus: 0.5,
  fossilize_contribution_scale: 0.1, fossilize_noncontributing_penalty: -0.2,
  fossilize_terminal_scale: 3.0, fossilize_quality_ceiling: 3.0, prune_fossilized_penalty: -1.0,
  prune_hurting_bonus: 0.15, prune_acceptable_bonus: 0.1, prune_good_seed_penalty: -0.3,
  prune_hurting_threshold: -0.5, min_prune_bonus_age: 3, early_prune_threshold: 5,
  early_prune_penalty: -0.1, auto_prune_penalty: -0.2,
  terminal_accuracy_weight: 0.05, basic_accuracy_delta_weight: 5.0, basic_fossilize_base_bonus: 0.3,
  basic_contribution_scale: 0.5, basic_fossilize_invalid_penalty: -0.5,
  basic_fossilize_noncontributing_penalty: -0.2,
  param_budget: 500000, param_penalty_weight: 0.1, sparse_reward_scale: 1.0, drip_fraction: 0.0,
  max_drip_per_step: 0.1, min_drip_steps: 5, negative_drip_ratio: 0.5, disable_pbrs: false,
  disable_terminal_reward: false, disable_anti_gaming: false, loss: {loss_delta_weight: 5.0,
  max_loss_delta: 5.0, regression_penalty_scale: 0.5, typical_loss_delta_std: 0.05,
  compute_rent_weight: 0.05, max_rent_penalty: 5.0, grace_steps: 3, stage_potential_weight: 0.1,
  baseline_loss: 2.3, target_loss: 0.3, terminal_loss_weight: 1.0}}
NetworkConfig: {hidden: 512, features: 512, layers: 1, slot_features: 64, blueprint_embedding: 4}
HeuristicConfig: {plateau_steps_to_germinate: 3, min_steps_before_germinate: 5,
  prune_after_steps_without_improvement: 5, prune_if_accuracy_drops_by: 2.0,
  min_improvement_to_fossilize: 0.5, embargo_steps_after_prune: 5, blueprint_rotation:
  [conv_light, conv_heavy, attention, norm, depthwise], blueprint_penalty_on_prune: 2.0,
  penalty_decay: 0.5, penalty_threshold: 3.0, ransomware_contribution: 0.1,
  ransomware_total_improvement: 0.0}
PPOConfig: {lr: 0.0003, adam_eps: 0.00001, gamma: 0.995, gae_lambda: 0.98, epochs: 4, minibatches:
  1, clip_ratio: 0.2, target_kl: 0.015, max_grad_norm: 5.0, entropy_coef: 0.05, entropy_coef_end:
  0.05, entropy_coef_min: 0.01, entropy_anneal_rounds: 0, entropy_multiplier: {slot: 1.0,
  blueprint: 1.3, style: 1.2, tempo: 1.3, alpha_target: 1.2, alpha_speed: 1.2, alpha_curve: 1.2,
  op: 1.0}, entropy_floor: {slot: 0.15, blueprint: 0.2, style: 0.15, tempo: 0.2, alpha_target:
  0.1, alpha_speed: 0.1, alpha_curve: 0.1, op: 0.3}, floor_penalty_rounds: 100,
  entropy_floor_penalty: {slot: 0.1, blueprint: 0.3, style: 0.1, tempo: 0.3, alpha_target: 0.1,
  alpha_speed: 0.1, alpha_curve: 0.1, op: 0.3}, probability_floor: {slot: 0.05, blueprint: 0.12,
  style: 0.08, tempo: 0.12, alpha_target: 0.08, alpha_speed: 0.06, alpha_curve: 0.06, op: 0.15},
  value_coef: 0.5, value_coef_start: 0.05, value_warmup_rounds: 10, contribution_coef: 0.05,
  contribution_warmup: 1000, contribution_clip: 10.0, forced_value_weight: 0.2,
  observation_momentum: 0.99, observation_clip: 10.0, reward_clip: 10.0}
"""
PARTS = {
    part.__name__: part
    for part in (
        *(GatesConfig, LifecycleConfig, SignalsConfig, GovernorConfig, RewardConfig),
        *(NetworkConfig, HeuristicConfig, PPOConfig),
    )
}


def test_the_defaults_are_the_references() -> None:
    for name, listed in yaml.safe_load(DEFAULTS).items():
        found = flat_settings(asdict(PARTS[name]()))
        assert found | flat_settings(listed) == found, name
    assert (PBRS_GAMMA, GUARD_WINDOW, MAX_STABLE_WINDOW) == (0.995, 20, 10)


def lines_of(settings: Settings) -> Iterator[str]:
    """By dotted name, the default of every setting and what is allowed."""
    for item in fields(settings):
        value = vars(settings)[item.name]
        if is_dataclass(value):
            yield from lines_of(value)
        else:
            rule = item.metadata.get(RULE)
            yield f"{settings.path}{item.name} = {value!r}: {rule or type(value).__name__}"


def test_defaults_and_ranges_of_all_settings_are_those_recorded() -> None:
    for settings in (TrainConfig(), EvaluateConfig(checkpoint="runs")):
        assert_recorded_text(type(settings).__name__, "\n".join(lines_of(settings)))


def test_basic_plus_pays_seven_tenths_as_drip_unless_told_otherwise() -> None:
    assert RewardConfig(mode="basic_plus").drip_fraction == 0.7
    assert RewardConfig(mode="basic_plus", drip_fraction=0.25).drip_fraction == 0.25


def test_settings_say_whether_episodes_may_end_early_and_what_differs_by_env() -> None:
    for name in ("patience", "rollbacks", "length"):
        assert EarlyStopConfig(**{name: 1}).enabled
    assert not EarlyStopConfig().enabled
    dear = RewardConfig(rent_weight="[1,2]", loss=LossRewardConfig(compute_rent_weight="[1,2]"))
    assert dear.differing == ("reward.rent_weight", "reward.loss.compute_rent_weight")


@pytest.mark.parametrize("off", ["", "auto_forward_g1", "auto_forward_g2", "auto_forward_g3"])
def test_advance_is_disabled_only_where_every_gate_forwards_by_itself(off: str) -> None:
    cfg = LifecycleConfig(**{f"auto_forward_g{gate}": off[-1:] != str(gate) for gate in (1, 2, 3)})
    assert cfg.advance_disabled == (off == "")
