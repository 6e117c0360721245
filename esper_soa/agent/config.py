"""Settings of the decision makers: the recurrent PPO policy and the scripted ones. Needs no torch.

Defaults are the reference's (policy.md 5, 6, 9) except where the README's table of differences says otherwise.
"""

import math
from dataclasses import dataclass, field

from esper_soa.errors import check, check_choice
from esper_soa.vocabulary import BLUEPRINT_NAMES, HEAD_NAMES, HEADS

POLICIES = ("ppo", "random", "wait", "schedule", "heuristic")


@dataclass
class NetworkConfig:
    """Sizes of the recurrent policy network."""

    hidden: int = 512  # LSTM width
    features: int = 512  # width of the feature layer
    layers: int = 1  # LSTM layers, each with layer norm and residual
    blueprint_embedding: int = 4

    def __post_init__(self) -> None:
        for name, value in (("hidden", self.hidden), ("features", self.features)):
            check(value >= 8 and value % 8 == 0, f"policy.network.{name}", value, "a multiple of 8, at least 8")
        check(self.layers >= 1, "policy.network.layers", self.layers, "at least 1")


def _per_head(op: float, slot: float, blueprint: float, style: float, tempo: float, alpha: float) -> dict[str, float]:
    return {"slot": slot, "blueprint": blueprint, "style": style, "tempo": tempo, "alpha_target": style,
            "alpha_speed": alpha, "alpha_curve": alpha, "op": op}  # fmt: skip


@dataclass
class PPOConfig:
    """Proximal policy optimisation with one factored categorical per head."""

    lr: float = 3e-4
    adam_eps: float = 1e-5
    gamma: float = 0.995
    gae_lambda: float = 0.98
    epochs: int = 4
    minibatches: int = 1  # over envs; sequences stay whole
    clip_ratio: float = 0.2
    target_kl: float = 0.015  # epochs stop above 1.5 times this; 0 = never
    max_grad_norm: float = 5.0
    entropy_coef: float = 0.05
    entropy_coef_end: float = 0.05  # reached after entropy_anneal_rounds
    entropy_coef_min: float = 0.01
    entropy_anneal_rounds: int = 0
    entropy_multiplier: dict[str, float] = field(default_factory=lambda: _per_head(1.0, 1.0, 1.3, 1.2, 1.3, 1.2))
    entropy_floor: dict[str, float] = field(
        default_factory=lambda: _per_head(0.30, 0.15, 0.20, 0.15, 0.20, 0.10) | {"alpha_target": 0.10}
    )
    floor_penalty_rounds: int = 100  # rounds over which the floor penalty is relaxed, however long the run
    entropy_floor_penalty: dict[str, float] = field(default_factory=lambda: _per_head(0.3, 0.1, 0.3, 0.1, 0.3, 0.1))
    probability_floor: dict[str, float] = field(default_factory=lambda: _per_head(0.15, 0.05, 0.12, 0.08, 0.12, 0.06))
    value_coef: float = 0.5
    value_coef_start: float = 0.05
    value_warmup_rounds: int = 10
    contribution_coef: float = 0.05
    contribution_warmup: int = 1000  # updates until the auxiliary contribution loss has full weight
    contribution_clip: float = 10.0  # percent points; targets of the auxiliary loss stay within
    forced_value_weight: float = 0.2  # weight in the value loss of steps on which only WAIT was legal
    observation_momentum: float = 0.99
    observation_clip: float = 10.0
    reward_clip: float = 10.0

    def __post_init__(self) -> None:
        check(self.lr > 0, "policy.ppo.lr", self.lr, "above 0")
        check(0 < self.gamma <= 1, "policy.ppo.gamma", self.gamma, "in (0, 1]")
        check(0 <= self.gae_lambda <= 1, "policy.ppo.gae_lambda", self.gae_lambda, "in [0, 1]")
        check(self.epochs >= 1, "policy.ppo.epochs", self.epochs, "at least 1")
        check(
            self.floor_penalty_rounds >= 1, "policy.ppo.floor_penalty_rounds", self.floor_penalty_rounds, "at least 1"
        )
        check(self.minibatches >= 1, "policy.ppo.minibatches", self.minibatches, "at least 1")
        check(0 < self.clip_ratio <= 1, "policy.ppo.clip_ratio", self.clip_ratio, "in (0, 1]")
        check(0 <= self.observation_momentum < 1, "policy.ppo.observation_momentum", self.observation_momentum,
              "in [0, 1)")  # fmt: skip
        for name in ("target_kl", "max_grad_norm", "entropy_coef", "entropy_coef_end", "entropy_coef_min",
                     "entropy_anneal_rounds", "value_coef", "value_coef_start", "value_warmup_rounds",
                     "contribution_coef", "contribution_warmup", "forced_value_weight"):  # fmt: skip
            check(getattr(self, name) >= 0, f"policy.ppo.{name}", getattr(self, name), "at least 0")
        for name in ("adam_eps", "observation_clip", "reward_clip", "contribution_clip"):
            check(getattr(self, name) > 0, f"policy.ppo.{name}", getattr(self, name), "above 0")
        for name in ("entropy_multiplier", "entropy_floor", "entropy_floor_penalty", "probability_floor"):
            table = getattr(self, name)
            check(set(table) == set(HEAD_NAMES), f"policy.ppo.{name}", sorted(table),
                  "a value for each of " + ", ".join(HEAD_NAMES))  # fmt: skip
            for head, value in table.items():
                check(0 <= value < math.inf, f"policy.ppo.{name}.{head}", value, "finite and at least 0")


@dataclass
class ScheduleConfig:
    """Fixed lifecycle per slot: germinate, advance and fossilise at declared env-steps, otherwise wait.

    Where several slots are due at one env-step, the first of them that may act does; what is not legal is skipped.
    """

    germinate: list[int] = field(default_factory=lambda: [1])  # env-step (from 1) of slot 0, 1, ...
    stagger: int = 13  # env-steps after its predecessor at which a slot beyond that list germinates
    advance: list[int] = field(default_factory=lambda: [1, 11, 16])  # env-steps after germination
    fossilize: int = 17  # env-steps after germination
    blueprint: str = "norm"
    style: int = 2  # vocabulary.Style
    tempo: int = 1  # index of vocabulary.TEMPO_STEPS
    alpha_target: int = 2  # index of vocabulary.ALPHA_TARGETS

    def __post_init__(self) -> None:
        check(len(self.germinate) > 0, "policy.schedule.germinate", self.germinate, "a list with at least one env-step")
        check(min(self.germinate) >= 1, "policy.schedule.germinate", self.germinate, "at least 1 each")
        check(min(self.advance, default=1) >= 1, "policy.schedule.advance", self.advance, "at least 1 each")
        check(self.stagger >= 1, "policy.schedule.stagger", self.stagger, "at least 1")
        check(self.fossilize >= 1, "policy.schedule.fossilize", self.fossilize, "at least 1")
        check_choice("policy.schedule.blueprint", self.blueprint, BLUEPRINT_NAMES)
        sizes = dict(HEADS)
        for name, choice in (("style", self.style), ("tempo", self.tempo), ("alpha_target", self.alpha_target)):
            check(0 <= choice < sizes[name], f"policy.schedule.{name}", choice, f"from 0 to {sizes[name] - 1}")

    def germination_steps(self, num_slots: int) -> list[int]:
        """Env-step at which each slot is due to germinate."""
        steps = self.germinate[:num_slots]
        while len(steps) < num_slots:
            steps.append(steps[-1] + self.stagger)
        return steps


@dataclass
class HeuristicConfig:
    """Hand-written rules on plateau, stability and contribution (policy.md 9)."""

    plateau_steps_to_germinate: int = 3
    min_steps_before_germinate: int = 5
    prune_after_steps_without_improvement: int = 5
    prune_if_accuracy_drops_by: float = 2.0
    min_improvement_to_fossilize: float = 0.5
    embargo_steps_after_prune: int = 5
    blueprint_rotation: list[str] = field(
        default_factory=lambda: ["conv_light", "conv_heavy", "attention", "norm", "depthwise"]
    )
    blueprint_penalty_on_prune: float = 2.0
    penalty_decay: float = 0.5
    penalty_threshold: float = 3.0
    ransomware_contribution: float = 0.1
    ransomware_total_improvement: float = 0.0


@dataclass
class PolicyConfig:
    """Who decides: a learning policy or a scripted one, behind the same `act`."""

    name: str = "ppo"
    deterministic: bool = False  # take the likeliest choice instead of sampling (ppo only)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    heuristic: HeuristicConfig = field(default_factory=HeuristicConfig)

    def __post_init__(self) -> None:
        check_choice("policy.name", self.name, POLICIES)
