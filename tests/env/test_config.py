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
  # all others are those of the calls that tests/parity has recorded
  escrow_stable_window: 3
  base_slot_rent_ratio: 0.0039
  min_prune_bonus_age: 3
  auto_prune_penalty: -0.2
  drip_fraction: 0.0
  disable_pbrs: false
  disable_terminal_reward: false
  disable_anti_gaming: false
  loss: {loss_delta_weight: 5.0, max_loss_delta: 5.0, regression_penalty_scale: 0.5,
    typical_loss_delta_std: 0.05, compute_rent_weight: 0.05, max_rent_penalty: 5.0, grace_steps: 3,
    stage_potential_weight: 0.1, baseline_loss: 2.3, target_loss: 0.3, terminal_loss_weight: 1.0}
"""
KINDS = (GatesConfig, LifecycleConfig, SignalsConfig, GovernorConfig, RewardConfig)


def test_the_defaults_are_the_references() -> None:
    for kind, expected in zip(KINDS, yaml.safe_load(DEFAULTS).values(), strict=True):
        found = asdict(kind())
        assert {name: found[name] for name in expected} == expected
    assert (PBRS_GAMMA, GUARD_WINDOW, MAX_STABLE_WINDOW) == (0.995, 20, 10)


def test_basic_plus_pays_seven_tenths_as_drip_unless_told_otherwise() -> None:
    assert RewardConfig(mode="basic_plus").drip_fraction == 0.7
    assert RewardConfig(mode="basic_plus", drip_fraction=0.25).drip_fraction == 0.25


@pytest.mark.parametrize("off", ["", "auto_forward_g1", "auto_forward_g2", "auto_forward_g3"])
def test_advance_is_disabled_only_where_every_gate_forwards_by_itself(off: str) -> None:
    flags = [f"auto_forward_g{gate}" for gate in (1, 2, 3)]
    cfg = LifecycleConfig(**{name: name != off for name in flags})
    assert cfg.advance_disabled == (off == "")
