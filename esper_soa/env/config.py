"""Settings of the simulator: lifecycle, gates, signals, governor and reward. Needs no torch.

Defaults are the reference's (lifecycle.md 14, rewards.md A.1, policy.md 4). Units: accuracies in percent points,
times in env-steps.
"""

from dataclasses import dataclass, field

from esper_soa.errors import check, check_choice

REWARD_MODES = ("shaped", "escrow", "basic", "basic_plus", "sparse", "minimal", "simplified", "loss")
PBRS_GAMMA = 0.995  # discount that shaping, clawback and hindsight credit assume
DRIP_MODES = ("basic", "basic_plus")
MAX_STABLE_WINDOW = 10
GUARD_WINDOW = 20  # losses that the governor remembers
MIN_SHAPLEY_SAMPLES = 12  # 6 independent pairs: below that, a spread says nothing
NUM_REASONS = 4  # what the governor can see in a loss, "nothing" included
POSITIVE_REWARD_SETTINGS = (
    "param_budget", "rent_host_params_floor", "max_drip_per_step", "min_drip_steps", "hacking_ratio_threshold",
    "fossilize_quality_ceiling", "attribution_sigmoid_steepness",
)  # fmt: skip
NON_NEGATIVE_REWARD_SETTINGS = (
    "contribution_weight", "improvement_safe_threshold", "germination_warmup_steps", "pbrs_weight",
    "step_progress_bonus", "max_progress_bonus", "rent_weight", "max_rent", "base_slot_rent_ratio",
    "alpha_shock_coef", "alpha_shock_cap", "seed_occupancy_cost", "free_slots", "fossilized_maintenance_cost",
    "param_penalty_weight",
)  # fmt: skip


@dataclass
class GatesConfig:
    """Thresholds of the quality gates G1, G2, G3 and G5 (lifecycle.md 2)."""

    permissive: bool = True
    min_training_improvement: float = 0.5  # strict G2
    min_blending_steps: int = 10  # G2, strict G3
    min_gradient_ratio: float = 0.10  # strict G2
    min_gradient_health: float = 0.7  # permissive G2
    min_fossilize_contribution: float = 1.0  # strict G5

    def __post_init__(self) -> None:
        check(self.min_blending_steps >= 0, "gates.min_blending_steps", self.min_blending_steps, "at least 0")
        check(0 <= self.min_gradient_health <= 1, "gates.min_gradient_health", self.min_gradient_health, "in [0, 1]")


@dataclass
class LifecycleConfig:
    """What moves a seed from stage to stage (lifecycle.md 1)."""

    auto_forward_g1: bool = False  # GERMINATED -> TRAINING without an action
    auto_forward_g2: bool = False  # TRAINING -> BLENDING
    auto_forward_g3: bool = False  # BLENDING -> HOLDING
    embargo_steps: int = 5
    min_prune_age: int = 5
    detached_stages: list[str] = field(default_factory=lambda: ["training", "blending"])

    def __post_init__(self) -> None:
        check(self.embargo_steps >= 1, "lifecycle.embargo_steps", self.embargo_steps, "at least 1")
        check(self.min_prune_age >= 0, "lifecycle.min_prune_age", self.min_prune_age, "at least 0")
        for stage in self.detached_stages:
            check_choice("lifecycle.detached_stages", stage, ("training", "blending", "holding", "fossilized"))
        check("training" in self.detached_stages, "lifecycle.detached_stages", self.detached_stages,
              "a list with 'training'", "A seed in training must not disturb its host.")  # fmt: skip

    @property
    def advance_disabled(self) -> bool:
        """The ADVANCE op is masked out when every gate forwards by itself."""
        return self.auto_forward_g1 and self.auto_forward_g2 and self.auto_forward_g3


@dataclass
class SignalsConfig:
    """Plateau and stability counters (policy.md 4)."""

    plateau_threshold: float = 0.5
    stabilization_threshold: float = 0.03
    stabilization_steps: int = 3
    regression_threshold: float = 0.05


@dataclass
class GovernorConfig:
    """Loss watch and rollback (rewards.md D)."""

    enabled: bool = True  # False: nothing is watched, a host that is lost stays lost until its episode ends
    sensitivity: float = 6.0  # standard deviations above the mean loss
    multiplier: float = 3.0  # times the mean loss
    absolute_threshold: float = 12.0  # nats
    min_panics: int = 3  # consecutive divergent losses before a rollback
    min_samples: int = 10  # losses before divergence and collapse are judged
    death_penalty: float = 10.0  # taken off the reward of the env-step of a rollback
    snapshot_steps: int = 5  # env-steps between snapshots of a healthy host; one more follows every fossilisation

    def __post_init__(self) -> None:
        for name in ("sensitivity", "multiplier", "absolute_threshold", "death_penalty"):
            check(getattr(self, name) >= 0, f"governor.{name}", getattr(self, name), "at least 0")
        check(self.min_panics >= 1, "governor.min_panics", self.min_panics, "at least 1")
        check(1 <= self.min_samples <= GUARD_WINDOW, "governor.min_samples", self.min_samples,
              f"in 1..{GUARD_WINDOW}, the losses that are kept")  # fmt: skip
        check(self.snapshot_steps >= 1, "governor.snapshot_steps", self.snapshot_steps, "at least 1 env-step")


@dataclass
class LossRewardConfig:
    """The loss family of rewards (rewards.md A.9), with the values for CIFAR."""

    loss_delta_weight: float = 5.0
    max_loss_delta: float = 5.0
    regression_penalty_scale: float = 0.5
    typical_loss_delta_std: float = 0.05
    compute_rent_weight: float = 0.05
    max_rent_penalty: float = 5.0
    grace_steps: int = 3
    stage_potential_weight: float = 0.1
    baseline_loss: float = 2.3
    target_loss: float = 0.3
    terminal_loss_weight: float = 1.0

    def __post_init__(self) -> None:
        check(self.typical_loss_delta_std > 0, "reward.loss.typical_loss_delta_std",
              self.typical_loss_delta_std, "above 0")  # fmt: skip
        check(self.baseline_loss > self.target_loss, "reward.loss.baseline_loss", self.baseline_loss,
              f"above reward.loss.target_loss={self.target_loss}")  # fmt: skip
        for name in ("max_loss_delta", "regression_penalty_scale", "compute_rent_weight", "max_rent_penalty",
                     "grace_steps"):  # fmt: skip
            check(getattr(self, name) >= 0, f"reward.loss.{name}", getattr(self, name), "at least 0")


@dataclass
class AttributionConfig:
    """Subsets that are validated at every env-step in envs with more than four blending seeds; up to four, all are."""

    pairs: bool = True  # each two seeds on their own, n (n - 1) / 2 subsets; without them there are no interactions
    shapley_samples: int = 0  # orders of arrival for sampled Shapley values, n - 1 subsets each; 0 = none are given

    def __post_init__(self) -> None:
        enough = self.shapley_samples >= MIN_SHAPLEY_SAMPLES and self.shapley_samples % 2 == 0
        check(self.shapley_samples == 0 or enough, "attribution.shapley_samples", self.shapley_samples,
              f"0 or an even number of at least {MIN_SHAPLEY_SAMPLES}", "Orders come in pairs.")  # fmt: skip


@dataclass
class RewardConfig:
    """Every term of every reward mode (rewards.md A.1)."""

    mode: str = "shaped"
    scored_slots: str = "all"  # per-seed terms over all live slots, or "target" for the reference's rule
    contribution_weight: float = 1.0
    proxy_confidence_factor: float = 0.3
    attribution_formula: str = "harmonic"
    attribution_sigmoid_steepness: float = 3.0
    improvement_safe_threshold: float = 0.1
    hacking_ratio_threshold: float = 5.0
    germination_warmup_steps: int = 10
    germination_discount_floor: float = 0.4
    disable_timing_discount: bool = False
    escrow_stable_window: int = 3
    escrow_delta_clip: float = 2.0
    pbrs_weight: float = 0.3
    step_progress_bonus: float = 0.3
    max_progress_bonus: float = 2.0
    rent_weight: float = 0.5
    max_rent: float = 1.5
    rent_host_params_floor: int = 200
    base_slot_rent_ratio: float = 0.0039
    alpha_shock_coef: float = 0.1958
    alpha_shock_cap: float = 1.0
    seed_occupancy_cost: float = 0.01
    free_slots: int = 1
    fossilized_maintenance_cost: float = 0.002
    germinate_cost: float = -0.15
    fossilize_cost: float = -0.01
    prune_cost: float = -0.005
    set_alpha_target_cost: float = -0.005
    advance_from_training_penalty: float = -0.1
    germinate_with_seed_penalty: float = -0.3
    invalid_fossilize_penalty: float = -1.0
    fossilize_base_bonus: float = 0.5
    fossilize_contribution_scale: float = 0.1
    fossilize_noncontributing_penalty: float = -0.2
    fossilize_terminal_scale: float = 3.0
    fossilize_quality_ceiling: float = 3.0
    prune_fossilized_penalty: float = -1.0
    prune_hurting_bonus: float = 0.15
    prune_acceptable_bonus: float = 0.1
    prune_good_seed_penalty: float = -0.3
    prune_hurting_threshold: float = -0.5
    min_prune_bonus_age: int = 3
    early_prune_threshold: int = 5
    early_prune_penalty: float = -0.1
    auto_prune_penalty: float = -0.2
    terminal_accuracy_weight: float = 0.05
    basic_accuracy_delta_weight: float = 5.0
    basic_fossilize_base_bonus: float = 0.3
    basic_contribution_scale: float = 0.5
    basic_fossilize_invalid_penalty: float = -0.5
    basic_fossilize_noncontributing_penalty: float = -0.2
    param_budget: int = 500_000
    param_penalty_weight: float = 0.1
    sparse_reward_scale: float = 1.0
    drip_fraction: float = 0.0  # forced to 0.7 in basic_plus where it is 0
    max_drip_per_step: float = 0.1
    min_drip_steps: int = 5
    negative_drip_ratio: float = 0.5
    disable_pbrs: bool = False
    disable_terminal_reward: bool = False
    disable_anti_gaming: bool = False
    loss: LossRewardConfig = field(default_factory=LossRewardConfig)

    def __post_init__(self) -> None:
        check_choice("reward.mode", self.mode, REWARD_MODES)
        check_choice("reward.scored_slots", self.scored_slots, ("all", "target"))
        check_choice("reward.attribution_formula", self.attribution_formula, ("harmonic", "minimum"))
        if self.mode == "basic_plus" and self.drip_fraction == 0.0:
            self.drip_fraction = 0.7
        for name in POSITIVE_REWARD_SETTINGS:
            check(getattr(self, name) > 0, f"reward.{name}", getattr(self, name), "above 0")
        for name in NON_NEGATIVE_REWARD_SETTINGS:
            check(getattr(self, name) >= 0, f"reward.{name}", getattr(self, name), "at least 0")
        for name in ("proxy_confidence_factor", "germination_discount_floor", "drip_fraction", "negative_drip_ratio"):
            check(0 <= getattr(self, name) <= 1, f"reward.{name}", getattr(self, name), "in [0, 1]")
        check(self.prune_good_seed_penalty <= 0, "reward.prune_good_seed_penalty", self.prune_good_seed_penalty,
              "at most 0")  # fmt: skip
        check(1 <= self.escrow_stable_window <= MAX_STABLE_WINDOW, "reward.escrow_stable_window",
              self.escrow_stable_window, f"in 1..{MAX_STABLE_WINDOW}, the accuracies that are kept")  # fmt: skip
        check(self.drip_fraction == 0 or self.mode in DRIP_MODES, "reward.drip_fraction", self.drip_fraction,
              f"0 with reward.mode={self.mode}, which pays no drip",
              "Leave it out or use reward.mode=basic_plus.")  # fmt: skip
