"""Scripted envs for the comparison of the stacked engine with plain loops: data, scripts, and both
kinds of players.

Data, keys and scripts of an env depend on its global number alone, so that it can be played
together with others, alone, or as a plain loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.baseline_attribution import ValidationReading
from benchmarks.baseline_env import BaselineEnv, Batches, ScalarAction
from benchmarks.baseline_passes import TrainReading, read_together
from esper_soa.config.env import (
    GatesConfig,
    GovernorConfig,
    LifecycleConfig,
    RewardConfig,
    SignalsConfig,
)
from esper_soa.config.nets import TaskConfig, TransformerConfig
from esper_soa.env.reward_records import RewardSettings
from esper_soa.env.step import (
    EnvRules,
    StepData,
    StepResult,
    apply_action,
    guard_,
    initial_state,
    measure_,
    record_and_observe,
)
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.user_parts import task_shape
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.snapshot import add_snapshot_, snapshot_where_
from esper_soa.nets.setup import Setup
from esper_soa.state import Action, EnvState, Measurements
from esper_soa.system import streams
from esper_soa.vocabulary import (
    BLUEPRINT_NAMES,
    CNN_BLUEPRINTS,
    HEADS,
    NUM_BLUEPRINTS,
    SEQUENCE_BLUEPRINTS,
    Op,
)

BATCH = 4  # samples per training batch, batches per env-step
NUM_BATCHES = 2
VAL_BATCH = 6  # the same of validation, which is the same at every env-step
NUM_VAL = 2
# of images; no layer asks for 32, and a quarter of the pixels takes a quarter of the time
SIZE = 16
TOKENS = 11  # of text, in sequences of LENGTH
LENGTH = 6
NUM_SLOTS = 3
TRAINING = 0
VALIDATION = 1

AUTO_FORWARD = ("auto_forward_g1", "auto_forward_g2", "auto_forward_g3")
Batch = tuple[Tensor, Tensor]


class Source(NamedTuple):
    """What envs learn from, and the seeds that fit there."""

    draw: Callable[[torch.Generator, int], Batch]  # so many samples, as a plain loop takes them
    side_by_side: Callable[[list[Batch]], Batch]  # batches of n envs, as the engine takes them
    blueprints: tuple[int, ...]


def draw_images(generator: torch.Generator, size: int) -> Batch:
    """Images [B, 3, SIZE, SIZE] and labels [B]; brightness gives half the label away."""
    labels = torch.randint(10, (size,), generator=generator)
    images = torch.randn(size, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    images[:, 0] += labels[:, None, None] % 5 - 2.0
    return images, labels


def images_side_by_side(batches: list[Batch]) -> Batch:
    """Images [B, n*3, SIZE, SIZE] in channels_last and labels [B, n]."""
    images = torch.cat([images for images, _ in batches], dim=1)
    return images.contiguous(memory_format=torch.channels_last), torch.stack(
        [labels for _, labels in batches], dim=1
    )


def draw_text(generator: torch.Generator, size: int) -> Batch:
    """Tokens [B, T] and the next ones [B*T]; two of three follow from the one before."""
    words = torch.randint(TOKENS, (size, LENGTH + 1), generator=generator)
    free = torch.randint(3, words.shape, generator=generator) == 0
    for place in range(1, LENGTH + 1):
        follows = (3 * words[:, place - 1] + 1) % TOKENS
        words[:, place] = torch.where(free[:, place], words[:, place], follows)
    return words[:, :-1], words[:, 1:].flatten()


def text_side_by_side(batches: list[Batch]) -> Batch:
    """Tokens [B, n*T] and labels [B, n, T]."""
    labels = torch.stack([labels.view(-1, LENGTH) for _, labels in batches], dim=1)
    return torch.cat([words for words, _ in batches], dim=1), labels


IMAGES = Source(draw_images, images_side_by_side, CNN_BLUEPRINTS)
TEXT = Source(draw_text, text_side_by_side, SEQUENCE_BLUEPRINTS)
TEXT_TASK = TaskConfig(
    host="transformer",
    num_classes=TOKENS,
    blueprints=[BLUEPRINT_NAMES[code] for code in SEQUENCE_BLUEPRINTS],
    transformer=TransformerConfig(width=8, layers=3, heads=2, context=LENGTH, segments=3),
    gradient_stride=2,
)


@dataclass
class Setting:
    """What the tests vary."""

    slots: list[str] = field(default_factory=lambda: ["r0c0", "r0c1", "r0c2"])
    source: Source = IMAGES
    auto_forward: bool = False
    reward: str = "shaped"  # basic_plus pays drip and so ablates fossils too
    dtype: torch.dtype = torch.float64
    shared_validation: bool = False  # all envs are measured on the same samples, as in a run
    env_chunk: int = 2
    workers: int = 1
    governed: bool = False  # plain loops have no governor
    accumulate: int = 1  # batches of an optimiser step
    steps: int = 24
    task: TaskConfig = field(default_factory=lambda: TaskConfig(base_channels=4, gradient_stride=2))
    gates: GatesConfig = field(
        default_factory=lambda: GatesConfig(min_blending_steps=2, min_gradient_health=0.2)
    )

    @property
    def num_batches(self) -> int:
        """Batches per env-step."""
        return NUM_BATCHES * self.accumulate

    @property
    def lifecycle(self) -> LifecycleConfig:
        """Short waits, so that a slot sees several lives."""
        auto = dict.fromkeys(AUTO_FORWARD, self.auto_forward)
        return LifecycleConfig(embargo_steps=2, min_prune_age=7, **auto)

    def rules(self) -> EnvRules:
        """The engine's rules."""
        shape = task_shape(self.task, self.slots)
        detached = self.lifecycle.detached_in(shape.slots[0].topology)
        cpu = torch.device("cpu")
        costs = pools.parameter_table(shape, cpu), training_flop(shape, cpu)
        passes = {"workers": self.workers, "accumulate": self.accumulate}
        return EnvRules(
            setup=Setup(shape, self.task, detached, self.env_chunk, VAL_BATCH, **passes),
            engine=TorchEngine(),
            lifecycle=self.lifecycle,
            gates=self.gates,
            signals=SignalsConfig(),
            governor=GovernorConfig(),
            reward=RewardSettings(RewardConfig(mode=self.reward), *costs, self.steps),
            blueprints=torch.ones(NUM_BLUEPRINTS, dtype=torch.bool),
            max_seeds=0,
        )


# --- data


@lru_cache(maxsize=4096)
def batch_of(source: Source, env: int, purpose: int, number: int, dtype: torch.dtype) -> Batch:
    """Batch `number` of one env, floats in `dtype`."""
    size = VAL_BATCH if purpose == VALIDATION else BATCH
    generator = torch.Generator().manual_seed(((env + 1) * 2 + purpose) * 100_003 + number)
    inputs, labels = source.draw(generator, size)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs, labels


def training_batches(env: int, step: int, setting: Setting) -> list[Batch]:
    first = step * setting.num_batches
    numbers = range(first, first + setting.num_batches)
    return [batch_of(setting.source, env, TRAINING, one, setting.dtype) for one in numbers]


def validation_batches(env: int, setting: Setting) -> list[Batch]:
    whose = -1 if setting.shared_validation else env
    numbers = range(NUM_VAL)
    return [batch_of(setting.source, whose, VALIDATION, one, setting.dtype) for one in numbers]


@dataclass
class Feed:
    """Training and validation batches of the envs with the global numbers `ids` at one env-step.

    They come from no bank, so that only the engine in torch can take them.
    """

    ids: list[int]
    step: int
    setting: Setting

    def batch(self, envs: Tensor, index: int) -> Batch:
        source = self.setting.source
        number = self.step * self.setting.num_batches + index
        ids = [self.ids[env] for env in envs.tolist()]
        each = [batch_of(source, env, TRAINING, number, self.setting.dtype) for env in ids]
        return source.side_by_side(each)

    def batches(self, envs: Tensor, size: int) -> list[Batch]:
        seen = envs[:1] if self.setting.shared_validation else envs
        each = [validation_batches(self.ids[env], self.setting) for env in seen.tolist()]
        source = self.setting.source
        return [source.side_by_side(list(batches)) for batches in zip(*each, strict=True)]


# --- scripts

ADVANCE = ScalarAction(op=Op.ADVANCE)
FOSSILIZE = ScalarAction(op=Op.FOSSILIZE)
REMOVE = ScalarAction(op=Op.PRUNE, alpha_speed=0)
FADE = ScalarAction(op=Op.PRUNE, alpha_speed=1, alpha_curve=1)  # 3 ticks, cosine


def aim(target: int, speed: int, curve: int, style: int) -> ScalarAction:
    ways = {"alpha_target": target, "alpha_speed": speed, "alpha_curve": curve}
    return ScalarAction(op=Op.SET_ALPHA_TARGET, style=style, **ways)


def ending(number: int) -> list[ScalarAction]:
    """What becomes of a seed after TRAINING; targets are 0.5, 0.7 and 1.0, speeds at once, 3 and 5
    ticks.
    """
    style = number % 4
    return [
        [ADVANCE, FADE],  # from HOLDING down to nothing
        # a partial way down freezes the seed for 3 ticks, then it fades
        [aim(0, 1, 3, style), FADE],
        [ADVANCE, FOSSILIZE],
        # changes its blend twice
        [ADVANCE, aim(1, 1, 1, style), aim(2, 0, 0, (style + 1) % 4), ADVANCE, REMOVE],
        # down at once, then up in a steep sigmoid
        [aim(0, 0, 0, style), aim(2, 1, 4, style), ADVANCE, FOSSILIZE],
    ][number % 5]


def lives(env: int, slot: int, blueprints: tuple[int, ...]) -> list[ScalarAction]:
    """All that an env means to do in a slot: three seeds, one after the other."""
    ops = []
    for life in range(3):
        number = 11 * (NUM_SLOTS * env + slot) + 10 * life
        blueprint = blueprints[number % len(blueprints)]
        style = number % 4
        goal = 1 if number % 5 == 4 else 2
        ops += [
            ScalarAction(
                op=Op.GERMINATE, blueprint=blueprint, style=style, tempo=0, alpha_target=goal
            )
        ]
        ops += [ADVANCE, REMOVE] if number % 9 == 8 else [ADVANCE, ADVANCE, *ending(number)]
    return [op._replace(slot=slot) for op in ops]


class Script:
    """What one env does: it goes round its slots, and repeats the next op of a slot until it
    succeeds.
    """

    def __init__(self, env: int, setting: Setting) -> None:
        self.env = env
        blueprints = setting.source.blueprints
        self.todo = [lives(env, slot, blueprints) for slot in range(NUM_SLOTS)]
        if setting.auto_forward:
            self.todo = [[op for op in ops if op.op != Op.ADVANCE] for ops in self.todo]

    def action(self, step: int) -> ScalarAction:
        ops = self.todo[(step + self.env) % NUM_SLOTS]
        return ops[0] if ops else ScalarAction()

    def report(self, action: ScalarAction, success: bool) -> None:
        if success and action.op != Op.WAIT:
            self.todo[action.slot].pop(0)


# --- players


class StackedEnvs:
    """The stacked engine over the envs with global numbers `ids`."""

    def __init__(self, setting: Setting, ids: list[int]) -> None:
        self.setting = setting
        self.ids = ids
        self.step = 0
        self.rules = setting.rules()
        self.scripts = [Script(env, setting) for env in ids]
        self.weights = pools.allocate(self.shape, len(ids), torch.device("cpu"), setting.dtype)
        pools.initialise_hosts_(self.weights, self.shape, self.keys(streams.HOST_INIT))
        self.state: EnvState = initial_state(self.rules, len(ids), torch.device("cpu"))
        if setting.governed:
            add_snapshot_(self.weights)
            none = torch.zeros_like(self.weights["snapshot", "fossil"])
            everyone = torch.ones(len(ids), dtype=torch.bool)
            snapshot_where_(self.weights, self.shape, everyone, none, none)

    @property
    def shape(self) -> HostShape:
        return self.rules.setup.shape

    def keys(self, purpose: int) -> Tensor:
        return streams.stream_keys(7, purpose, (), torch.tensor(self.ids))

    def seed_keys(self) -> Tensor:
        return streams.fold(self.keys(streams.SEED_INIT), self.step)

    def actions(self) -> list[ScalarAction]:
        return [script.action(self.step) for script in self.scripts]

    def claimed(self) -> TensorDict:
        """A copy of the weights as the next training pass finds them, newborn rows initialised."""
        weights = self.weights.clone()
        seeds = pools.slot_seeds(self.state.slots, self.state.ramp, ablate_fossils=False)
        claims = pools.claims_of(self.shape, pools.read_active_seeds(seeds))
        pools.claim_(weights, self.shape, claims, self.seed_keys())
        return weights

    def measure(self) -> Measurements:
        """Train and validate; roll back where the setting says so."""
        feed = Feed(self.ids, self.step, self.setting)
        work = StepData(feed, self.setting.num_batches, feed, self.seed_keys())
        self.state, measured = measure_(self.rules, self.weights, self.state, work)
        if self.setting.governed:
            self.state, measured = guard_(self.rules, self.weights, self.state, measured)
        return measured

    def apply_action(self, measured: Measurements, actions: list[ScalarAction]) -> StepResult:
        """Record, act, and let time pass."""
        heads = {head.name: torch.full([len(actions)], head.placeholder) for head in HEADS}
        columns = (torch.tensor(head) for head in zip(*actions, strict=True))
        heads |= dict(zip(ScalarAction._fields, columns, strict=True))
        action = Action(**heads, batch_size=[len(actions)])
        recorded = record_and_observe(self.rules, self.state, measured)
        result = apply_action(self.rules, *recorded[:2], action)
        successes = result.outcome.success.tolist()
        for script, one, success in zip(self.scripts, actions, successes, strict=True):
            script.report(one, success)
        self.state = result.state
        self.step = self.step + 1
        return result

    def play(self, steps: int) -> None:
        """Whole env-steps, as scripted."""
        for _ in range(steps):
            self.apply_action(self.measure(), self.actions())


class LoopEnv(BaselineEnv):
    """A plain loop over the same data as the stacked env with global number `number`."""

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(
            setting.task, setting.slots, setting.lifecycle, setting.gates, setting.dtype
        )
        self.number = number
        self.setting = setting
        self.accumulate = setting.accumulate
        self.ablate_fossils = RewardConfig(mode=setting.reward).drip_fraction > 0

    def measure(self, step: int) -> tuple[TrainReading, ValidationReading]:
        trained = self.train(training_batches(self.number, step, self.setting))
        return trained, evaluate_fused(self, validation_batches(self.number, self.setting))


def evaluate_fused(env: BaselineEnv, batches: Batches) -> ValidationReading:
    """What the env's fused validation pass over `batches` found, read by the host."""
    done = env.fused_validation_pass(batches)
    return done.read(read_together([done])[0])


def build_loops(stacked: StackedEnvs) -> list[LoopEnv]:
    """One loop per stacked env, with the same host."""
    loops = [LoopEnv(stacked.setting, number) for number in stacked.ids]
    for place, loop in enumerate(loops):
        copy_host(stacked.weights, place, loop)
    return loops


# --- weights in and out


def copy_host(weights: TensorDict, place: int, loop: LoopEnv) -> None:
    """Host parameters, momentum and running statistics of the stacked env in row `place`."""
    host = weights["host"][place]
    loop.host.load_flat(host["params"])
    loop.host.load_flat_statistics(host["statistics"])
    set_momentum(loop.optimiser, list(loop.host.parameters()), host["momentum"])


def copy_seeds(
    stacked: StackedEnvs, weights: TensorDict, place: int, loop: LoopEnv, slots: list[int]
) -> None:
    """Seed and gate parameters in `slots`; their momentum too where the loop has an optimiser by
    now.
    """
    for slot in slots:
        plant = loop.plants[slot]
        rows = weights["seeds", stacked.shape.slots[slot].name][place]
        parts = {
            name: seed_parts(stacked, slot, row, plant.seed.num_parameters())
            for name, row in rows.items()
        }
        plant.seed.load_flat(parts["params"][0])
        plant.gate.load_flat(parts["params"][1])
        if plant.optimiser is not None:
            set_momentum(plant.optimiser, plant.parameters(), torch.cat(parts["momentum"]))


def seed_parts(
    stacked: StackedEnvs, slot: int, row: Tensor, seed_size: int
) -> tuple[Tensor, Tensor]:
    """The numbers of a seed and of its gate in a slot's row."""
    layout = pools.row_layout(stacked.shape, slot)
    return row[:seed_size], row[layout.seed : layout.seed + layout.gate]


def set_momentum(
    optimiser: torch.optim.SGD, parameters: list[torch.nn.Parameter], flat: Tensor
) -> None:
    pieces = flat.split([p.numel() for p in parameters])
    for parameter, values in zip(parameters, pieces, strict=True):
        # The fused optimiser takes it for granted that a buffer lies in memory as its parameter
        # does.
        buffer = torch.empty_like(parameter).copy_(values.view_as(parameter))
        optimiser.state[parameter]["momentum_buffer"] = buffer


def momentum_of(optimiser: torch.optim.SGD | None, parameters: list[torch.nn.Parameter]) -> Tensor:
    """Momentum as one vector; zeros where the optimiser has none yet."""
    kept = [optimiser.state[p].get("momentum_buffer") if optimiser else None for p in parameters]
    pairs = zip(kept, parameters, strict=True)
    buffers = [torch.zeros_like(p) if one is None else one for one, p in pairs]
    return torch.cat([one.detach().reshape(-1) for one in buffers])


def loop_weights(loop: LoopEnv) -> dict[str, Tensor]:
    """Everything that training changes, by name."""
    found = {
        "host params": loop.host.flat(),
        "host momentum": momentum_of(loop.optimiser, list(loop.host.parameters())),
        "host statistics": loop.host.flat_statistics(),
    }
    for slot, plant in loop.plants.items():
        found[f"slot {slot} params"] = torch.cat([plant.seed.flat(), plant.gate.flat()])
        found[f"slot {slot} momentum"] = momentum_of(plant.optimiser, plant.parameters())
    return {name: one for name, one in found.items() if one.numel()}


def stacked_weights(stacked: StackedEnvs, place: int, loop: LoopEnv) -> dict[str, Tensor]:
    """The same of the stacked env in row `place`, for the seeds that live in `loop`."""
    found = {f"host {name}": rows[place] for name, rows in stacked.weights["host"].items()}
    for slot, plant in loop.plants.items():
        for name, rows in stacked.weights["seeds", stacked.shape.slots[slot].name].items():
            parts = seed_parts(stacked, slot, rows[place], plant.seed.num_parameters())
            found[f"slot {slot} {name}"] = torch.cat(parts)
    return found
