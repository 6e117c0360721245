"""Settings of the decision makers: the recurrent PPO policy and the scripted ones. Needs no torch.

Defaults are those of the reference, esper-lite (tamiyo/networks/factored_lstm.py,
simic/agent/ppo_agent.py), except where docs/esper-lite.md says otherwise. The numbers behind a
default are its range; see config/ranges.py. Coefficients are of the loss, times in env-steps.
"""

from dataclasses import dataclass, field

from esper_soa.config.env import ENV_NUMBERS
from esper_soa.config.nets import GROWABLE
from esper_soa.config.ranges import (
    COUNT,
    WEIGHT,
    Settings,
    choice,
    choices,
    number,
    numbers,
    table,
    weight,
)
from esper_soa.config.registry import AGENT, BLUEPRINT
from esper_soa.vocabulary import ALPHA_TARGETS, HEAD_NAMES, STYLE_BLEND, TEMPO_STEPS

POLICIES = ("ppo", "random", "wait", "schedule", "heuristic")
SCRATCH = "none"  # the value of policy.init that takes no weights from anywhere
ROTATION = ("conv_light", "conv_heavy", "attention", "norm", "depthwise")


@dataclass
class NetworkConfig(Settings, path="policy.network."):
    """Sizes of the recurrent policy network."""

    hidden: int = number(512, 8, 16_384, note="a multiple of 8")  # LSTM width
    features: int = number(512, 8, 16_384, note="a multiple of 8")  # width of the feature layer
    layers: int = number(1, 1, 32)  # LSTM layers, each with layer norm and residual
    slot_features: int = number(64, 8, 16_384, note="a multiple of 8")  # of the encoding of a slot
    blueprint_embedding: int = number(4, 1, 1024)  # width, per slot

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hidden", "features", "slot_features"):
            self.require(vars(self)[name] % 8 == 0, name, "a multiple of 8")


def _per_head(
    op: float, slot: float, blueprint: float, style: float, tempo: float, others: float
) -> dict[str, float]:
    values = {"op": op, "slot": slot, "blueprint": blueprint, "style": style, "tempo": tempo}
    return dict.fromkeys(HEAD_NAMES, others) | values | {"alpha_target": style}


@dataclass
class PPOConfig(Settings, path="policy.ppo."):
    """Proximal policy optimisation with one factored categorical per head."""

    lr: float = number(3e-4, 0, 1000, ends="(]")  # of Adam
    adam_eps: float = number(1e-5, 0, 1, ends="(]")  # added to the root of its second moment
    gamma: float = number(0.995, 0, 1, ends="(]")  # discount per env-step
    gae_lambda: float = number(0.98, 0, 1)  # of generalised advantages
    epochs: int = number(4, 1, 10_000)  # passes over a round
    minibatches: int = number(1, 1, COUNT)  # in a pass, each of whole envs; at most one per env
    clip_ratio: float = number(0.2, 0, 1, ends="(]")  # of new and old probabilities, either way
    target_kl: float = number(0.015, 0, WEIGHT, note="0 = never")  # nats; epochs stop at 1.5 of it
    max_grad_norm: float = number(5.0, 0, WEIGHT, note="0 = no clipping")  # of all parameters
    entropy_coef: float = weight(0.05)  # at the start
    entropy_coef_end: float = weight(0.05)  # reached after entropy_anneal_rounds
    entropy_coef_min: float = weight(0.01)  # never less
    # From start to end.
    entropy_anneal_rounds: int = number(0, 0, COUNT, note="0 = stays at entropy_coef")
    # Factors of entropy_coef, per head.
    entropy_multiplier: dict[str, float] = table(
        _per_head(1.0, 1.0, 1.3, style=1.2, tempo=1.3, others=1.2), 0, WEIGHT
    )
    # Entropy in units of that of a uniform choice, below which it costs.
    entropy_floor: dict[str, float] = table(
        _per_head(0.30, 0.15, 0.20, style=0.15, tempo=0.20, others=0.10) | {"alpha_target": 0.10},
        0,
        1,
    )
    floor_penalty_rounds: int = number(100, 1, COUNT)  # over which the floor penalty is relaxed
    # The price of entropy below the floor.
    entropy_floor_penalty: dict[str, float] = table(_per_head(*[0.3, 0.1] * 3), 0, WEIGHT)
    # Least probability of a legal choice; all of a head together at most 1.
    probability_floor: dict[str, float] = table(
        _per_head(0.15, 0.05, 0.12, style=0.08, tempo=0.12, others=0.06), 0, 1
    )
    value_coef: float = weight(0.5)  # after the warm-up
    value_coef_start: float = weight(0.05)  # of the first update
    value_warmup_rounds: int = number(10, 0, COUNT)  # until value_coef
    contribution_coef: float = weight(0.05)  # of the auxiliary loss that predicts contributions
    contribution_warmup: int = number(1000, 0, COUNT)  # updates until it has full weight
    forced_value_weight: float = weight(0.2)  # in the value loss, of steps with WAIT alone legal
    # Momentum of the running moments of features.
    observation_momentum: float = number(0.99, 0, 1, ends="[)")
    observation_clip: float = number(10.0, 0, WEIGHT, ends="(]")  # standard deviations
    reward_clip: float = number(10.0, 0, WEIGHT, ends="(]")  # standard deviations


@dataclass
class ScheduleConfig(Settings, path="policy.schedule."):
    """Fixed lifecycle per slot: germinate, advance, fossilize at declared env-steps, else wait.

    Where several slots are due at one env-step, the first of them that may act does. An op that is
    due but not legal yet is done as soon as it is; a slot whose seed was pruned takes another one.
    """

    germinate: list[int] = numbers((1,), 1, COUNT)  # env-step (from 1) of slot 0, 1, ...
    stagger: int = number(13, 1, COUNT)  # env-steps between slots beyond that list
    # Age of the seed, env-steps, at which it leaves GERMINATED, TRAINING, BLENDING; fewer = never.
    advance: list[int] = numbers((1, 11, 16), 1, COUNT, least=0)
    fossilize: int = number(17, 1, COUNT)  # age of the seed, env-steps
    blueprint: str = choice("norm", GROWABLE, part=BLUEPRINT)  # of every seed
    style: int = number(2, 0, len(STYLE_BLEND) - 1)  # vocabulary.Style
    tempo: int = number(1, 0, len(TEMPO_STEPS) - 1)  # index of vocabulary.TEMPO_STEPS
    alpha_target: int = number(2, 0, len(ALPHA_TARGETS) - 1)  # index of vocabulary.ALPHA_TARGETS

    def germination_steps(self, num_slots: int) -> list[int]:
        """Env-step at which each slot is due to germinate."""
        last = self.germinate[-1]
        further = range(last + self.stagger, last + num_slots * self.stagger, self.stagger)
        return [*self.germinate, *further][:num_slots]


@dataclass
class HeuristicConfig(Settings, path="policy.heuristic."):
    """Rules on plateau, stability and contribution, as esper-lite's tamiyo/heuristic.py."""

    plateau_steps_to_germinate: int = number(3, 0, COUNT)  # env-steps in a row without a gain
    min_steps_before_germinate: int = number(5, 0, COUNT)  # env-steps of the episode
    prune_after_steps_without_improvement: int = number(5, 0, COUNT)  # age in the stage, env-steps
    prune_if_accuracy_drops_by: float = number(2.0, -100, 100)  # in the stage, from that age on
    min_improvement_to_fossilize: float = number(0.5, -100, 100)  # contribution, percent points
    # Germinated in turn.
    blueprint_rotation: list[str] = choices(ROTATION, GROWABLE, repeated=True, part=BLUEPRINT)


@dataclass
class ImitationConfig(Settings, path="policy.imitation."):
    """Rounds in which the learning policy plays and learns what a teacher would do (DAgger)."""

    rounds: int = number(0, 0, COUNT, note="0 = none")  # the first rounds of a run are of this kind
    # With the settings of policy.heuristic or policy.schedule.
    teacher: str = choice("heuristic", ("heuristic", "schedule"), part=AGENT)
    epochs: int = number(4, 1, 10_000)  # passes over such a round
    lr: float = number(1e-3, 0, 1000, ends="(]")  # of Adam, which starts afresh with PPO


@dataclass
class PolicyConfig(Settings, path="policy."):
    """The policy: learning or scripted, with the same `act`."""

    name: str = choice("ppo", POLICIES, part=AGENT)  # ppo learns, the others follow rules
    init: str = SCRATCH  # what ppo starts from: none, one that ships, a run folder, a checkpoint
    deterministic: bool = False  # take the likeliest choice instead of sampling (ppo only)
    # Settings of its env that it sees, as features of the observation; of use where envs differ.
    observe: list[str] = choices((), ENV_NUMBERS, least=0)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    heuristic: HeuristicConfig = field(default_factory=HeuristicConfig)
