"""Lifecycle of one seed slot as a scalar state machine, in plain Python floats.

The oracle for the masked kernels of esper_soa/env; it shares no code with them, only vocabulary and
settings. Fields of SeedRecord and RampRecord are named as in state.Slots and state.Ramp.
"""

import math
from dataclasses import dataclass

from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.vocabulary import (
    LIVE_STAGES,
    RAMP_STEEPNESS,
    RUNNING_STAGES,
    STYLE_BLEND,
    STYLE_CURVE,
    AlphaMode,
    Blend,
    Blueprint,
    Curve,
    Stage,
    Style,
)

EPSILON = 1e-6  # alphas this close count as equal
CONTRIBUTING_GAIN = 1.0  # percent points that make a fossil a contributing one
LEGAL = {
    Stage.DORMANT: (Stage.GERMINATED,),
    Stage.GERMINATED: (Stage.TRAINING, Stage.PRUNED),
    Stage.TRAINING: (Stage.BLENDING, Stage.PRUNED),
    Stage.BLENDING: (Stage.HOLDING, Stage.PRUNED),
    Stage.HOLDING: (Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED),
    Stage.FOSSILIZED: (),
    Stage.PRUNED: (Stage.EMBARGOED,),
    Stage.EMBARGOED: (Stage.RESETTING,),
    Stage.RESETTING: (),  # the slot empties
}
NEXT_STAGE = {
    Stage.GERMINATED: Stage.TRAINING,
    Stage.TRAINING: Stage.BLENDING,
    Stage.BLENDING: Stage.HOLDING,
}


def clamp01(value: float) -> float:
    """`value` limited to [0, 1]."""
    return min(1.0, max(0.0, value))


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))


def curve_progress(t: float, curve: int, steepness: float) -> float:
    """Share of a ramp that is done at time `t` in [0, 1]."""
    t = clamp01(t)
    if curve == Curve.LINEAR:
        return t
    if curve == Curve.COSINE:
        return 0.5 * (1.0 - math.cos(math.pi * t))
    low = sigmoid(-steepness / 2)
    high = sigmoid(steepness / 2)
    return t if high == low else (sigmoid(steepness * (t - 0.5)) - low) / (high - low)


@dataclass
class RampRecord:
    """Alpha controller of one slot."""

    alpha: float = 0.0
    start: float = 0.0
    target: float = 0.0
    length: int = 0
    done: int = 0
    curve: int = Curve.LINEAR
    steepness: float = RAMP_STEEPNESS
    mode: int = AlphaMode.HOLD

    def retarget(self, target: float, steps: int, curve: int, steepness: float) -> None:
        """Start a ramp of `steps` ticks; 0 jump there. ValueError while one is running."""
        if self.mode != AlphaMode.HOLD:
            raise ValueError("a ramp can be set only while the alpha is held")
        self.start = self.alpha
        self.target = clamp01(target)
        self.curve = curve
        self.steepness = max(0.1, steepness)
        self.length = max(0, steps)
        self.done = 0
        if self.target > self.alpha:
            self.mode = AlphaMode.UP
        elif self.target < self.alpha:
            self.mode = AlphaMode.DOWN
        if self.length == 0:
            self.alpha = self.target
            self.mode = AlphaMode.HOLD

    def step(self) -> bool:
        """One tick; True when it arrives at the target."""
        if self.mode == AlphaMode.HOLD or self.length == 0:
            return False
        self.done += 1
        if self.done >= self.length:
            self.done = self.length
            self.alpha = self.target
            self.mode = AlphaMode.HOLD
            return True
        progress = curve_progress(self.done / self.length, self.curve, self.steepness)
        alpha = clamp01(self.start + (self.target - self.start) * progress)
        low = min(self.start, self.target)
        high = max(self.start, self.target)
        self.alpha = min(high, max(low, alpha))
        return False


@dataclass
class SeedRecord:
    """What is known of the seed in one slot; the defaults are those of an empty slot."""

    stage: int = Stage.EMPTY
    stage_age: int = 0
    seed_age: int = 0
    previous_stage: int = Stage.UNKNOWN
    previous_stage_age: int = 0
    blueprint: int = Blueprint.NONE
    blend: int = Blend.ADD
    style: int = Style.SIGMOID_ADD
    tempo: int = 5
    alpha_goal: float = 1.0
    alpha: float = 0.0
    accuracy_initial: float = 0.0
    accuracy_stage_start: float = 0.0
    accuracy_current: float = 0.0
    accuracy_blending_start: float = 0.0
    blending_started: bool = False
    accuracy_germination: float = 0.0
    germination_known: bool = False
    contribution: float = 0.0
    contribution_known: bool = False
    contribution_velocity: float = 0.0
    contribution_age: int = 0
    interaction_sum: float = 0.0
    gradient_norm: float = 0.0
    gradient_health: float = 0.0
    gradient_vanishing: bool = False
    gradient_exploding: bool = False
    gradient_measured: bool = False
    gradient_ratio: float = 0.0
    gradient_ratio_known: bool = False
    previous_health: float = 0.0
    previous_health_known: bool = False


@dataclass
class TotalsRecord:
    """Counters of one env, named as in state.Totals."""

    germinated: int = 0
    blended: int = 0
    fossilized: int = 0
    contributing: int = 0
    pruned: int = 0


class SlotMachine:
    """One slot: its record, alpha ramp, and the rules that change them. Refusals return False."""

    def __init__(
        self, lifecycle: LifecycleConfig, gates: GatesConfig, totals: TotalsRecord
    ) -> None:
        self.lifecycle = lifecycle
        self.gates = gates
        self.totals = totals
        self.seed = SeedRecord()
        self.ramp = RampRecord()

    @property
    def live(self) -> bool:
        """A seed module is present."""
        return self.seed.stage in LIVE_STAGES

    @property
    def running(self) -> bool:
        """The seed takes part in the forward pass."""
        return self.seed.stage in RUNNING_STAGES

    @property
    def frozen(self) -> bool:
        """The weights of the seed and of its gate stand still: its ramp goes down."""
        return self.live and self.ramp.mode == AlphaMode.DOWN

    @property
    def visible(self) -> bool:
        """The seed changes what the host computes."""
        return self.running and self.seed.alpha > 0

    def germinate(
        self, blueprint: int, style: int, tempo: int, alpha_goal: float, accuracy: float
    ) -> bool:
        """A new seed; `tempo`: length of its first ramp, `accuracy`: the host's now."""
        if self.seed.stage != Stage.EMPTY:
            return False
        self.ramp = RampRecord()
        self.seed = SeedRecord(
            stage=Stage.DORMANT,
            blueprint=blueprint,
            blend=STYLE_BLEND[style],
            style=style,
            tempo=tempo,
            alpha_goal=alpha_goal,
            accuracy_germination=accuracy,
            germination_known=True,
        )
        self._enter(Stage.GERMINATED)
        self.totals.germinated += 1
        return True

    def record_accuracy(self, accuracy: float) -> None:
        """One env-step of validation; only a live seed ages here."""
        seed = self.seed
        if not self.live:
            return
        if seed.seed_age == 0:
            seed.accuracy_initial = seed.accuracy_stage_start = accuracy
        seed.accuracy_current = accuracy
        seed.seed_age += 1
        seed.stage_age += 1

    def record_contribution(self, contribution: float) -> None:
        """Accuracy lost without this seed, measured at this env-step."""
        seed = self.seed
        if seed.contribution_known:
            seed.contribution_velocity = 0.7 * seed.contribution_velocity + 0.3 * (
                contribution - seed.contribution
            )
        seed.contribution = contribution
        seed.contribution_known = True
        seed.contribution_age = 0

    def record_gradient_ratio(self, ratio: float) -> None:
        """Moving average of the gradient ratio, which starts at its first value."""
        seed = self.seed
        seed.gradient_ratio = (
            0.9 * seed.gradient_ratio + 0.1 * ratio if seed.gradient_ratio_known else ratio
        )
        seed.gradient_ratio_known = True

    def age_memories(self) -> None:
        """After the action: what was measured at this env-step is one env-step older."""
        seed = self.seed
        if seed.gradient_measured:
            seed.previous_health = seed.gradient_health
            seed.previous_health_known = True
        if seed.contribution_known:
            seed.contribution_age += 1

    def gate_passes(self, target: int) -> bool:
        """Quality gate before stage `target`: G1, G2, G3 or G5."""
        seed = self.seed
        ramp = self.ramp
        gates = self.gates
        if target == Stage.TRAINING:
            return seed.stage == Stage.GERMINATED
        if target == Stage.BLENDING:
            if seed.stage_age < gates.number("min_blending_steps"):
                return False
            if gates.permissive:
                healthy = seed.gradient_health >= gates.min_gradient_health
                return seed.gradient_measured and not seed.gradient_exploding and healthy
            improved = (
                seed.accuracy_current - seed.accuracy_stage_start >= gates.min_training_improvement
            )
            return (
                improved
                and seed.gradient_ratio_known
                and seed.gradient_ratio >= gates.min_gradient_ratio
            )
        if target == Stage.HOLDING:
            arrived = ramp.mode == AlphaMode.HOLD and abs(ramp.alpha - ramp.target) <= EPSILON
            old_enough = gates.permissive or seed.stage_age >= gates.number("min_blending_steps")
            return arrived and ramp.target >= 1.0 - EPSILON and old_enough
        if target == Stage.FOSSILIZED:
            enough = gates.permissive or seed.contribution >= gates.min_fossilize_contribution
            return seed.contribution_known and enough
        raise ValueError(f"no gate leads to stage {target}")

    def advance(self) -> bool:
        """GERMINATED to TRAINING to BLENDING to HOLDING, one stage if its gate passes."""
        if self.seed.stage not in NEXT_STAGE or not self.gate_passes(NEXT_STAGE[self.seed.stage]):
            return False
        self._enter(NEXT_STAGE[self.seed.stage])
        if self.seed.stage == Stage.BLENDING:
            self._start_blending()
        if self.seed.stage == Stage.HOLDING:
            self._set_alpha(1.0)
            self.ramp.start = self.ramp.target = 1.0
            self.ramp.mode = AlphaMode.HOLD
            self.ramp.done = self.ramp.length
        return True

    def fossilize(self) -> bool:
        """HOLDING to FOSSILIZED if gate G5 passes."""
        if self.seed.stage != Stage.HOLDING or not self.gate_passes(Stage.FOSSILIZED):
            return False
        self._enter(Stage.FOSSILIZED)
        self._set_alpha(1.0)
        self.seed.germination_known = False
        self.totals.fossilized += 1
        gain = self.seed.accuracy_current - self.seed.accuracy_initial
        self.totals.contributing += int(gain >= CONTRIBUTING_GAIN)
        return True

    def set_alpha_target(
        self, target: float, steps: int, curve: int, steepness: float, blend: int
    ) -> bool:
        """A new ramp where alpha is held; HOLDING below 1 goes back to BLENDING."""
        if (
            self.seed.stage not in (Stage.BLENDING, Stage.HOLDING)
            or target <= 0
            or self.ramp.mode != AlphaMode.HOLD
        ):
            return False
        if self.seed.stage == Stage.HOLDING and target < 1.0 - EPSILON:
            self._enter(Stage.BLENDING)
        self.seed.blend = blend
        self.ramp.retarget(target, steps, curve, steepness)
        return True

    def schedule_prune(self, steps: int, curve: int, steepness: float) -> bool:
        """Ramp the seed down to 0 and then remove it; at once where there is nothing to ramp."""
        if not self.live or self.seed.stage == Stage.FOSSILIZED:
            return False
        if steps <= 0 or self.seed.alpha <= 0:
            return self.prune()
        if self.ramp.mode != AlphaMode.HOLD:
            return False
        if self.seed.stage == Stage.HOLDING:
            self._enter(Stage.BLENDING)
        self.ramp.retarget(0.0, steps, curve, steepness)
        return True

    def prune(self) -> bool:
        """Remove the seed at once; False where there is none, or a fossil."""
        if not self._enter(Stage.PRUNED):
            return False
        self._set_alpha(0.0)
        self.ramp.start = self.ramp.target = 0.0
        self.ramp.length = self.ramp.done = 0
        self.ramp.mode = AlphaMode.HOLD
        self.totals.pruned += 1
        return True

    def tick(self) -> None:
        """The mechanical end of an env-step: at most one change of stage, by the stage on entry."""
        stage = self.seed.stage
        if stage == Stage.GERMINATED:
            if self.lifecycle.auto_forward_g1:
                self.advance()
        elif stage == Stage.TRAINING:
            if self.lifecycle.auto_forward_g2:
                self.advance()
        elif stage == Stage.BLENDING:
            self._tick_blending()
        elif stage == Stage.PRUNED:
            self._enter(Stage.EMBARGOED)
        elif stage == Stage.EMBARGOED:
            self.seed.seed_age += 1
            self.seed.stage_age += 1
            if self.seed.stage_age >= self.lifecycle.number("embargo_steps"):
                self._enter(Stage.RESETTING)
        elif stage == Stage.RESETTING:
            self.seed = SeedRecord()
            self.ramp = RampRecord()
        if not self.live:
            self.seed.germination_known = self.seed.gradient_ratio_known = False

    def _tick_blending(self) -> None:
        arrived = self.ramp.step()
        self._set_alpha(self.ramp.alpha)
        held = (
            self.ramp.mode == AlphaMode.HOLD and abs(self.ramp.alpha - self.ramp.target) <= EPSILON
        )
        if (arrived or held) and self.ramp.target <= EPSILON:
            self.prune()
        elif (arrived or held) and self.lifecycle.auto_forward_g3:
            self.advance()

    def _start_blending(self) -> None:
        """First ramp of a seed, by the style, tempo and target chosen at germination."""
        self.seed.accuracy_blending_start = self.seed.accuracy_current
        self.seed.blending_started = True
        self.ramp = RampRecord(alpha=self.seed.alpha)
        self.ramp.retarget(
            self.seed.alpha_goal, self.seed.tempo, STYLE_CURVE[self.seed.style], RAMP_STEEPNESS
        )
        self.totals.blended += 1

    def _set_alpha(self, alpha: float) -> None:
        self.seed.alpha = self.ramp.alpha = clamp01(alpha)

    def _enter(self, stage: int) -> bool:
        """Change of stage, if legal: the stage's counter starts again."""
        seed = self.seed
        if stage not in LEGAL.get(seed.stage, ()):
            return False
        seed.previous_stage = seed.stage
        seed.previous_stage_age = seed.stage_age
        seed.stage = stage
        seed.stage_age = 0
        seed.accuracy_stage_start = seed.accuracy_current
        return True
