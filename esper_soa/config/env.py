"""Settings of the simulator: lifecycle, gates, signals, governor and reward. Needs no torch.

Defaults are those of the reference, esper-lite (leyline/__init__.py, simic/rewards/contribution.py,
tamiyo/tracker.py). Units: accuracies, contributions and their thresholds in percent points, times
and ages in env-steps, terms of the reward in its unit. Ranges are behind defaults; see ranges.py.
"""

import math
from dataclasses import dataclass, field

from esper_soa.config.nets import SEQUENCES, DataConfig, TaskConfig
from esper_soa.config.ranges import (
    COUNT,
    WEIGHT,
    EnvNumber,
    EnvRange,
    Settings,
    choice,
    choices,
    env_choice,
    env_count,
    env_number,
    env_words,
    number,
    signed,
    weight,
)
from esper_soa.config.registry import REWARD
from esper_soa.vocabulary import STAGE_NAMES

REWARD_MODES = (
    *("shaped", "escrow", "basic", "basic_plus", "sparse", "minimal", "simplified"),
    *("loss", "net"),
)
USER_TERM = "own"  # what a reward of a user's pays
REWARD_TERMS = (  # fields of env/reward_modes.RewardTerms but the total, as columns of tables
    *("attribution", "ratio_penalty", "blending_warning", "holding_warning", "pbrs_bonus"),
    *("synergy_bonus", "compute_rent", "flop_rent", "alpha_shock", "occupancy_rent"),
    *("fossilized_rent", "action_shaping", "fossilize_bonus", "drip", "terminal_bonus"),
    *("loss_change", "accuracy_change", USER_TERM, "escrow_forfeit", "clawback"),
    *("auto_prune_penalty", "hindsight_credit", "rollback_penalty"),
)
TERM_NAMES = tuple(name for name in REWARD_TERMS if name != USER_TERM)  # the package's
PBRS_GAMMA = 0.995  # discount that shaping, clawback and hindsight credit assume
DETACHABLE = ("training", "blending", "holding", "fossilized")
MAX_STABLE_WINDOW = 10
GUARD_WINDOW = 20  # losses that the governor remembers
MIN_SHAPLEY_SAMPLES = 12  # 6 independent pairs: below that, a spread says nothing
NUM_REASONS = 4  # what the governor can see in a loss, "nothing" included


@dataclass
class GatesConfig(Settings, path="gates."):
    """Thresholds of the quality gates G1, G2, G3 and G5, as esper-lite's kasmina/slot.py."""

    permissive: bool = True  # G2 asks for healthy gradients; False: the strict gates
    min_training_improvement: float = number(0.5, -100, 100)  # strict G2: gained in TRAINING
    min_blending_steps: EnvNumber = env_count(10, 0, COUNT)  # age in the stage, of G2 and strict G3
    min_gradient_ratio: float = weight(0.10)  # strict G2: gradient of the seed over the host's
    min_gradient_health: float = number(0.7, 0, 1)  # permissive G2
    min_fossilize_contribution: float = number(1.0, -100, 100)  # strict G5


@dataclass
class LifecycleConfig(Settings, path="lifecycle."):
    """Rules that move a seed from stage to stage, as esper-lite's kasmina/slot.py."""

    auto_forward_g1: bool = False  # GERMINATED -> TRAINING without an action
    auto_forward_g2: bool = False  # TRAINING -> BLENDING
    auto_forward_g3: bool = False  # BLENDING -> HOLDING
    embargo_steps: EnvNumber = env_count(5, 1, COUNT)  # a pruned seed's slot stays closed
    min_prune_age: EnvNumber = env_count(5, 0, COUNT)  # of a seed, below which PRUNE is masked
    # Stages whose seeds send no gradient into their host; [] = training and blending, in sequences
    # training alone.
    detached_stages: list[str] = choices((), DETACHABLE, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "A seed in training must not disturb its host."
        includes_training = not self.detached_stages or "training" in self.detached_stages
        self.require(includes_training, "detached_stages", "a list with 'training'", remedy=remedy)

    def detached_in(self, topology: str) -> tuple[int, ...]:
        """Stages (vocabulary.Stage) whose seeds send no gradient into a host of such features."""
        usual = ("training",) if topology == SEQUENCES else ("training", "blending")
        return tuple(STAGE_NAMES.index(name) for name in self.detached_stages or usual)

    @property
    def advance_disabled(self) -> bool:
        """The ADVANCE op is masked out when every gate forwards by itself."""
        return self.auto_forward_g1 and self.auto_forward_g2 and self.auto_forward_g3


@dataclass
class SignalsConfig(Settings, path="signals."):
    """Plateau and stability counters, as esper-lite's tamiyo/tracker.py."""

    plateau_threshold: float = number(0.5, -100, 100)  # accuracy gained, below it is a plateau
    stabilization_threshold: float = weight(0.03)  # relative fall of the loss, below it is calm
    stabilization_steps: int = number(3, 1, COUNT)  # calm env-steps in a row of a stable host
    regression_threshold: float = weight(0.05)  # relative rise of the loss, from it on not calm


@dataclass
class GovernorConfig(Settings, path="governor."):
    """Loss watch and rollback, as esper-lite's tolaria/governor.py."""

    enabled: bool = True  # False: nothing is watched, a lost host stays lost to its episode's end
    # A loss diverges that is above the mean of the last ones by so many of their standard
    # deviations, above so many times that mean, and above so many nats.
    sensitivity: float = weight(6.0)  # standard deviations
    multiplier: float = weight(3.0)  # times the mean
    absolute_threshold: float = weight(12.0)  # nats
    min_panics: int = number(3, 1, COUNT)  # consecutive divergent losses before a rollback
    # Losses before divergence and collapse are judged.
    min_samples: int = number(10, 1, GUARD_WINDOW, note=f"{GUARD_WINDOW} losses are kept")
    death_penalty: float = weight(10.0)  # taken off the reward of the env-step of a rollback
    snapshot_steps: int = number(5, 1, COUNT)  # between two of a healthy host; and after fossils


@dataclass
class EarlyStopConfig(Settings, path="early_stop."):
    """When the episode of an env ends before its last env-step, as one that is cut off."""

    # Env-steps in a row without a gain in validation accuracy, after which it ends.
    patience: int = number(0, 0, COUNT, note="0 = it never ends for want of gains")
    min_delta: float = number(0.1, 0, 100)  # percent points above the best so far, for a gain
    min_steps: int = number(10, 1, COUNT)  # env-steps of an episode, before which it does not end
    # Times that a host went back to its snapshot, after which its episode ends.
    rollbacks: int = number(0, 0, COUNT, note="0 = however often it does")
    # Env-steps of an episode, whatever its accuracy; the last of them pays what ends pay.
    length: EnvNumber = env_count(0, 0, COUNT, note="0 = all")

    @property
    def enabled(self) -> bool:
        """Whether any episode may end early."""
        values = self.patience, self.rollbacks, self.length
        return any(not isinstance(value, int) or value > 0 for value in values)


@dataclass
class LossRewardConfig(Settings, path="reward.loss."):
    """Rewards by the loss, in nats, for CIFAR, as esper-lite's simic/rewards/loss_primary.py."""

    loss_delta_weight: float = signed(5.0)  # of the fall of the loss
    max_loss_delta: float = weight(5.0)  # most that one env-step counts, in typical changes
    regression_penalty_scale: float = weight(0.5)  # of a rise, relative to a fall
    # A typical change of the loss.
    typical_loss_delta_std: float = number(0.05, 0, WEIGHT, ends="(]")
    compute_rent_weight: EnvNumber = env_number(0.05, 0, WEIGHT)  # of the logarithm of the growth
    max_rent_penalty: float = weight(5.0)  # most rent of one env-step
    grace_steps: int = number(3, 0, COUNT)  # age of a seed, below which its host pays no rent
    stage_potential_weight: float = signed(0.1)  # of the shaping over stages
    baseline_loss: float = signed(2.3)  # final loss that pays nothing
    target_loss: float = signed(0.3)  # final loss that pays all
    terminal_loss_weight: float = signed(1.0)  # what it pays

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = f"above reward.loss.target_loss={self.target_loss}"
        self.require(self.baseline_loss > self.target_loss, "baseline_loss", allowed)


@dataclass
class AttributionConfig(Settings, path="attribution."):
    """Subsets validated at every env-step in envs of more than four blending seeds; else all."""

    pairs: bool = True  # each two on their own, n (n - 1) / 2 subsets; else no interactions
    # Orders of arrival for sampled Shapley values, n - 1 subsets each; 0 = none are given.
    shapley_samples: int = number(0, 0, 10_000, note="0 = none")

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.shapley_samples
        enough = count == 0 or (count >= MIN_SHAPLEY_SAMPLES and count % 2 == 0)
        allowed = f"0 or an even number of at least {MIN_SHAPLEY_SAMPLES}"
        self.require(enough, "shapley_samples", allowed, remedy="Orders come in pairs.")


@dataclass
class RewardConfig(Settings, path="reward."):
    """Every term of every reward mode. Costs and penalties are negative, rents positive."""

    # The rule that pays; see reward_modes.py.
    mode: str = env_choice("shaped", REWARD_MODES, part=REWARD)
    scored_slots: str = choice("all", ("all", "target"))  # live ones, or the reference's rule
    # The return behind the last env-step for a learner: none, or the critic's estimate.
    # auto: nothing in the mode net, which pays for the whole episode there.
    episode_end: str = choice("auto", ("auto", "terminated", "truncated"))
    # attribution
    contribution_weight: float = weight(1.0)  # reward per point of contribution
    proxy_confidence_factor: float = number(0.3, 0, 1)  # of it, if only improvement is known
    # The joint gain of progress and contribution: their mean or the smaller.
    attribution_formula: str = choice("harmonic", ("harmonic", "minimum"))
    attribution_sigmoid_steepness: float = number(3.0, 0, WEIGHT, ends="(]")  # where all do harm
    improvement_safe_threshold: float = number(0.1, 0, 100)  # total gain that backs a contribution
    # Contribution over total gain that is suspect.
    hacking_ratio_threshold: float = number(5.0, 0, WEIGHT, ends="(]")
    # timing of germinations
    germination_warmup_steps: int = number(10, 0, COUNT)  # after which they earn all
    germination_discount_floor: float = number(0.4, 0, 1)  # share earned at the first env-step
    disable_timing_discount: bool = False  # they always earn all
    # escrow
    # Smallest of so many.
    escrow_stable_window: int = number(3, 1, MAX_STABLE_WINDOW, note="accuracies that are kept")
    # Most of one move.
    escrow_delta_clip: float = number(2.0, -WEIGHT, WEIGHT, note="0 or less = no limit")
    # shaping over stages
    pbrs_weight: float = weight(0.3)  # of the potential
    step_progress_bonus: float = weight(0.3)  # potential per env-step within a stage
    max_progress_bonus: float = weight(2.0)  # most of it
    # rents and capacity
    rent_weight: EnvNumber = env_number(0.5, 0, WEIGHT)  # of the logarithm of the growth
    max_rent: EnvNumber = env_number(1.5, 0, WEIGHT)  # of one env-step
    # In the mode net and in final tables, percent points per natural logarithm of the training FLOP
    # over those of the host alone in an episode; at most max_rent.
    flop_weight: EnvNumber = env_number(0.0, 0, WEIGHT)
    rent_host_params_floor: int = number(200, 1, COUNT)  # least that growth is relative to
    base_slot_rent_ratio: float = weight(0.0039)  # of the host's parameters, for a blending seed
    alpha_shock_coef: float = weight(0.1958)  # of squared moves by the seed's share of parameters
    alpha_shock_cap: float = weight(1.0)  # most of it
    seed_occupancy_cost: EnvNumber = env_number(0.01, 0, WEIGHT)  # per slot beyond the free ones
    free_slots: int = number(1, 0, COUNT)  # that cost nothing
    fossilized_maintenance_cost: EnvNumber = env_number(0.002, 0, WEIGHT)  # per fossil
    # costs of ops
    germinate_cost: float = signed(-0.15)  # added to its shaping
    fossilize_cost: float = signed(-0.01)  # added to bonus or penalty
    prune_cost: float = signed(-0.005)  # added to praise or blame
    set_alpha_target_cost: float = signed(-0.005)  # all that it pays
    advance_from_training_penalty: float = signed(-0.1)  # all that it pays
    # fossilizing
    fossilize_base_bonus: float = signed(0.5)  # of a proven seed
    fossilize_contribution_scale: float = signed(0.1)  # per point of its contribution
    fossilize_noncontributing_penalty: float = signed(-0.2)  # of a seed that is not proven
    fossilize_terminal_scale: float = signed(3.0)  # times tanh(1 / ceiling), for a proven seed
    fossilize_quality_ceiling: float = number(3.0, 1e-6, WEIGHT)  # see the scale
    # pruning
    prune_hurting_bonus: float = signed(0.15)  # of a seed below the threshold
    prune_acceptable_bonus: float = signed(0.1)  # of another harmful one
    prune_good_seed_penalty: float = number(-0.3, -WEIGHT, 0)  # also most of the ratio penalty
    prune_hurting_threshold: float = number(-0.5, -100, 100)  # contribution
    min_prune_bonus_age: int = number(3, 0, COUNT)  # of a hurting seed, below it earns blame
    early_prune_threshold: int = number(5, 0, COUNT)  # age, below it an unmeasured one does
    early_prune_penalty: float = signed(-0.1)  # what it costs
    auto_prune_penalty: float = signed(-0.2)  # per seed that a rollback removes
    # The mode net pays for percent points of accuracy, or hundredths of a nat of the loss.
    net_measure: str = choice("accuracy", ("accuracy", "loss"))
    # the end of the episode
    terminal_accuracy_weight: EnvNumber = env_number(0.05, -WEIGHT, WEIGHT)  # per percent
    # basic and basic_plus
    basic_accuracy_delta_weight: float = signed(5.0)  # of the last change, at 100 points
    basic_fossilize_base_bonus: float = signed(0.3)  # of a proven seed
    basic_contribution_scale: float = signed(0.5)  # per point
    basic_fossilize_invalid_penalty: float = signed(-0.5)  # of a seed that is not holding
    basic_fossilize_noncontributing_penalty: float = signed(-0.2)  # of a seed that is not proven
    # basic, sparse and minimal
    param_budget: int = number(500_000, 1, COUNT)  # parameters that cost param_penalty_weight
    param_penalty_weight: EnvNumber = env_number(0.1, 0, WEIGHT)  # price of that many parameters
    sparse_reward_scale: float = signed(1.0)  # of a final score in [-1, 1]
    # drip: what fossils of basic and basic_plus are paid later
    drip_fraction: float = number(0.0, 0, 1)  # of the bonus; in basic_plus 0 becomes 0.7
    max_drip_per_step: float = number(0.1, 0, WEIGHT, ends="(]")  # per fossil
    min_drip_steps: int = number(5, 1, COUNT)  # over which a pool is spread at least
    negative_drip_ratio: float = number(0.5, 0, 1)  # of max_drip_per_step, taken back at most
    # ablations
    disable_pbrs: bool = False  # no shaping over stages
    disable_terminal_reward: bool = False  # nothing for the final accuracy
    disable_anti_gaming: bool = False  # no ratio penalty, no alpha shock
    loss: LossRewardConfig = field(default_factory=LossRewardConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "basic_plus" in self.modes and self.drip_fraction == 0.0:
            remedy = "Alone, basic_plus has 0.7 and basic has 0; envs side by side have the same."
            only_additive = "basic" not in self.modes
            self.require(only_additive, "mode", "given with a reward.drip_fraction", remedy=remedy)
            self.drip_fraction = 0.7
        others = [mode for mode in self.modes if mode not in ("basic", "basic_plus")]
        allowed = f"0 with reward.mode={self.mode}, as {', '.join(others)} pays no drip"
        remedy = "Leave it out or use reward.mode=basic_plus."
        self.require(self.drip_fraction == 0 or not others, "drip_fraction", allowed, remedy=remedy)
        # the share of fossilize_terminal_scale that a proven seed is paid
        self.fossilize_quality = math.tanh(1 / self.fossilize_quality_ceiling)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that are paid, in the order of envs, without repetition."""
        return tuple(dict.fromkeys(env_words(self.mode)))


REWARD_MODE = "reward.mode"
EPISODE_LENGTH = "early_stop.length"
ENV_PARTS: tuple[type[Settings], ...] = (
    *(TaskConfig, DataConfig, RewardConfig, LossRewardConfig),
    *(EarlyStopConfig, GatesConfig, LifecycleConfig),
)
# Rules of the settings that can differ by env, by dotted name.
ENV_SETTINGS = {name: rule for part in ENV_PARTS for name, rule in part.env_rules().items()}
ENV_NUMBERS = tuple(name for name, rule in ENV_SETTINGS.items() if isinstance(rule, EnvRange))
