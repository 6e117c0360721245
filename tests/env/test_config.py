"""The defaults of the simulator's settings, written out once more: whoever changes one has to
change it here too.
"""

from dataclasses import asdict

import pytest
import yaml

from esper_soa.env.config import (
    GUARD_WINDOW,
    MAX_STABLE_WINDOW,
    PBRS_GAMMA,
    GatesConfig,
    GovernorConfig,
    LifecycleConfig,
    RewardConfig,
    SignalsConfig,
)

# The reference's; `enabled` and `snapshot_steps` are this project's own.
DEFAULTS = """
gates: {permissive: true, min_training_improvement: 0.5, min_blending_steps: 10,
  min_gradient_ratio: 0.1, min_gradient_health: 0.7, min_fossilize_contribution: 1.0}
lifecycle: {auto_forward_g1: false, auto_forward_g2: false, auto_forward_g3: false,
  embargo_steps: 5, min_prune_age: 5, detached_stages: [training, blending]}
signals: {plateau_threshold: 0.5, stabilization_threshold: 0.03, stabilization_steps: 3,
  regression_threshold: 0.05}
governor: {enabled: true, sensitivity: 6.0, multiplier: 3.0, absolute_threshold: 12.0,
  min_panics: 3, min_samples: 10, death_penalty: 10.0, snapshot_steps: 5}
reward:
  mode: shaped
  split: []
  scored_slots: all
  # attribution
  contribution_weight: 1.0
  proxy_confidence_factor: 0.3
  attribution_formula: harmonic
  attribution_sigmoid_steepness: 3.0
  improvement_safe_threshold: 0.1
  hacking_ratio_threshold: 5.0
  # timing, escrow and shaping
  germination_warmup_steps: 10
  germination_discount_floor: 0.4
  disable_timing_discount: false
  escrow_stable_window: 3
  escrow_delta_clip: 2.0
  pbrs_weight: 0.3
  step_progress_bonus: 0.3
  max_progress_bonus: 2.0
  # rents
  rent_weight: 0.5
  max_rent: 1.5
  rent_host_params_floor: 200
  base_slot_rent_ratio: 0.0039
  alpha_shock_coef: 0.1958
  alpha_shock_cap: 1.0
  seed_occupancy_cost: 0.01
  free_slots: 1
  fossilized_maintenance_cost: 0.002
  # costs of ops
  germinate_cost: -0.15
  fossilize_cost: -0.01
  prune_cost: -0.005
  set_alpha_target_cost: -0.005
  advance_from_training_penalty: -0.1
  germinate_with_seed_penalty: -0.3
  # fossilising and pruning
  invalid_fossilize_penalty: -1.0
  fossilize_base_bonus: 0.5
  fossilize_contribution_scale: 0.1
  fossilize_noncontributing_penalty: -0.2
  fossilize_terminal_scale: 3.0
  fossilize_quality_ceiling: 3.0
  prune_fossilized_penalty: -1.0
  prune_hurting_bonus: 0.15
  prune_acceptable_bonus: 0.1
  prune_good_seed_penalty: -0.3
  prune_hurting_threshold: -0.5
  min_prune_bonus_age: 3
  early_prune_threshold: 5
  early_prune_penalty: -0.1
  auto_prune_penalty: -0.2
  terminal_accuracy_weight: 0.05
  # the other modes
  basic_accuracy_delta_weight: 5.0
  basic_fossilize_base_bonus: 0.3
  basic_contribution_scale: 0.5
  basic_fossilize_invalid_penalty: -0.5
  basic_fossilize_noncontributing_penalty: -0.2
  drip_fraction: 0.0
  max_drip_per_step: 0.1
  min_drip_steps: 5
  negative_drip_ratio: 0.5
  param_budget: 500000
  param_penalty_weight: 0.1
  sparse_reward_scale: 1.0
  disable_pbrs: false
  disable_terminal_reward: false
  disable_anti_gaming: false
  loss: {loss_delta_weight: 5.0, max_loss_delta: 5.0, regression_penalty_scale: 0.5,
    typical_loss_delta_std: 0.05, compute_rent_weight: 0.05, max_rent_penalty: 5.0, grace_steps: 3,
    stage_potential_weight: 0.1, baseline_loss: 2.3, target_loss: 0.3, terminal_loss_weight: 1.0}
"""
KINDS = (GatesConfig, LifecycleConfig, SignalsConfig, GovernorConfig, RewardConfig)


def test_the_defaults_are_the_references() -> None:
    found = [asdict(kind()) for kind in KINDS]
    assert found == list(yaml.safe_load(DEFAULTS).values())
    assert (PBRS_GAMMA, GUARD_WINDOW, MAX_STABLE_WINDOW) == (0.995, 20, 10)


def test_basic_plus_pays_seven_tenths_as_drip_unless_told_otherwise() -> None:
    assert RewardConfig(mode="basic_plus").drip_fraction == 0.7
    assert RewardConfig(mode="basic_plus", drip_fraction=0.25).drip_fraction == 0.25


@pytest.mark.parametrize("off", ["", "auto_forward_g1", "auto_forward_g2", "auto_forward_g3"])
def test_advance_is_disabled_only_where_every_gate_forwards_by_itself(off: str) -> None:
    flags = [f"auto_forward_g{gate}" for gate in (1, 2, 3)]
    cfg = LifecycleConfig(**{name: name != off for name in flags})
    assert cfg.advance_disabled == (off == "")
