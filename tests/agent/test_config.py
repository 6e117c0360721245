"""The defaults of the decision makers, written out once more: a change shows here too."""

from dataclasses import asdict

import pytest

from esper_soa.agent.config import HeuristicConfig, NetworkConfig, PPOConfig
from esper_soa.errors import SettingError

# head: entropy multiplier, entropy floor, weight of the floor penalty, probability floor
PER_HEAD_DEFAULTS = {
    "slot": (1.0, 0.15, 0.1, 0.05),
    "blueprint": (1.3, 0.20, 0.3, 0.12),
    "style": (1.2, 0.15, 0.1, 0.08),
    "tempo": (1.3, 0.20, 0.3, 0.12),
    "alpha_target": (1.2, 0.10, 0.1, 0.08),
    "alpha_speed": (1.2, 0.10, 0.1, 0.06),
    "alpha_curve": (1.2, 0.10, 0.1, 0.06),
    "op": (1.0, 0.30, 0.3, 0.15),
}
TABLES = ("entropy_multiplier", "entropy_floor", "entropy_floor_penalty", "probability_floor")


def test_the_defaults_of_the_heads_are_the_references() -> None:
    settings = PPOConfig()
    for column, name in enumerate(TABLES):
        assert getattr(settings, name) == {
            head: values[column] for head, values in PER_HEAD_DEFAULTS.items()
        }


def test_the_ppo_defaults_are_the_references_but_for_the_epochs() -> None:
    """The reference passes over a round once; here four times, with the same bound on the KL."""
    settings = asdict(PPOConfig())
    assert {name: value for name, value in settings.items() if name not in TABLES} == {
        "lr": 3e-4,
        "adam_eps": 1e-5,
        "gamma": 0.995,
        "gae_lambda": 0.98,
        "epochs": 4,
        "minibatches": 1,
        "clip_ratio": 0.2,
        "target_kl": 0.015,
        "max_grad_norm": 5.0,
        "entropy_coef": 0.05,
        "entropy_coef_end": 0.05,
        "entropy_coef_min": 0.01,
        "entropy_anneal_rounds": 0,
        "floor_penalty_rounds": 100,
        "value_coef": 0.5,
        "value_coef_start": 0.05,
        "value_warmup_rounds": 10,
        "contribution_coef": 0.05,
        "contribution_warmup": 1000,
        "contribution_clip": 10.0,
        "forced_value_weight": 0.2,
        "observation_momentum": 0.99,
        "observation_clip": 10.0,
        "reward_clip": 10.0,
    }


@pytest.mark.parametrize("name", ["hidden", "features", "slot_features"])
def test_widths_of_the_network_are_multiples_of_eight(name: str) -> None:
    with pytest.raises(SettingError, match=rf"policy.network.{name}=12: must be a multiple of 8"):
        NetworkConfig(**{name: 12})


def test_the_other_defaults_are_the_references_but_for_the_encoding_of_a_slot() -> None:
    assert asdict(NetworkConfig()) | asdict(HeuristicConfig()) == {
        "hidden": 512,
        "features": 512,
        "layers": 1,
        "slot_features": 64,
        "blueprint_embedding": 4,
        "plateau_steps_to_germinate": 3,
        "min_steps_before_germinate": 5,
        "prune_after_steps_without_improvement": 5,
        "prune_if_accuracy_drops_by": 2.0,
        "min_improvement_to_fossilize": 0.5,
        "embargo_steps_after_prune": 5,
        "blueprint_rotation": ["conv_light", "conv_heavy", "attention", "norm", "depthwise"],
        "blueprint_penalty_on_prune": 2.0,
        "penalty_decay": 0.5,
        "penalty_threshold": 3.0,
        "ransomware_contribution": 0.1,
        "ransomware_total_improvement": 0.0,
    }
