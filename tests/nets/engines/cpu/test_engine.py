"""The engine of a CPU trains and validates networks as torch does in double precision, whatever
seeds they have.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional

from esper_soa.config.nets import DataConfig, TaskConfig, host_slots
from esper_soa.config.settings import ComputeConfig
from esper_soa.env.world import World
from esper_soa.nets.data.images import ValidationImages
from esper_soa.nets.engine import TrainReport, ValidationReport
from esper_soa.nets.engines.cpu import engine
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.gradients import SMALLEST_NORM
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture, seed_table
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.model.parts import (
    NARROW,
    REDUCED,
    Conv,
    Depthwise,
    Excite,
    SoftNorm,
    Squeeze,
    Width,
)
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend, Blueprint, Stage
from tests.builders.tiny_world import CPU, planned, seeds_where, silence_hosts_, tiny_settings

pytestmark = pytest.mark.usefixtures("native")

NUM_ENVS = 6
NUDGES = 5  # sets of weights with which an env is given a chance to be right
STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
BLENDS = (Blend.ADD, Blend.MULTIPLY, Blend.GATE)
TASKS = [
    TaskConfig(),
    TaskConfig(name="pointwise", kernel_size=1, num_pools=1),
    TaskConfig(name="deep", num_blocks=4, num_pools=2, gradient_stride=2, weight_decay=0.0),
    TaskConfig(name="wide", base_channels=32, num_blocks=2, num_pools=2, max_grad_norm=0.0),
]
# Channels that fill no vectors, in blocks, in bottlenecks or in both; images down to one pixel.
NARROW_SIZES = {  # by channels: kernel, blocks, pools
    1: ((1, 3, 3), (3, 5, 5)),
    2: ((1, 3, 0), (3, 3, 3)),
    3: ((1, 3, 1), (3, 3, 3)),
    4: ((1, 2, 1), (3, 3, 3)),
    5: ((1, 3, 2), (3, 3, 1), (5, 2, 2)),
    6: ((1, 3, 3), (3, 2, 2)),
    12: ((1, 2, 2), (3, 2, 1)),
    20: ((1, 2, 1), (3, 2, 2)),
}
NARROW_TASKS = [
    TaskConfig(
        name=f"{channels}_channels_{kernel}x{kernel}",
        base_channels=channels,
        kernel_size=kernel,
        num_blocks=blocks,
        num_pools=pools_,
    )
    for channels, sizes in NARROW_SIZES.items()
    for kernel, blocks, pools_ in sizes
]
# norm of a gradient that is the rounding of none: dead channels are common where there are few
NOTHING = 1e-5
# share of a step that one value makes which rounding puts on the other side of a ReLU
ONE_SIDE = 3e-2


def named(tasks: list[TaskConfig], every: int) -> list:
    """Parameters of a test; of `every` tasks one is in the default lane."""
    return [
        pytest.param(task, id=task.name, marks=pytest.mark.slow if place % every else [])
        for place, task in enumerate(tasks)
    ]


def made(task: TaskConfig, split: bool = False, batches: int = 3, engine: str = "auto") -> World:
    """Hosts with weights of some size, most slots enabled, batches that differ from env to env."""
    offered = [spec.name for spec in host_slots(task)]
    settings = replace(
        tiny_settings(NUM_ENVS, 1, 4),
        batch_size=6,
        train_samples=6 * batches,
        val_samples=7,
        task=task,
        slots=offered if len(offered) <= 6 else offered[:3] + offered[-3:],
        data=DataConfig(name="synthetic", synthetic_train=80, synthetic_test=41, split=split),
        compute=ComputeConfig(workers=2, env_chunk=2, engine=engine),
    )
    world = build_world(settings, CPU)
    g = torch.Generator().manual_seed(3)
    stores = [world.weights["host"], *world.weights["seeds"].values()]
    for rows in [store[name] for name in ("params", "momentum") for store in stores]:
        rows.copy_(0.2 * torch.randn(rows.shape, generator=g))
    statistics = world.weights["host", "statistics"]
    statistics.copy_(0.5 + torch.rand(statistics.shape, generator=g))
    return world


def rule(world: World, **changed: object) -> None:
    """Change what the networks of a world have in common."""
    world.rules = world.rules._replace(setup=world.rules.setup._replace(**changed))


def num_slots(world: World) -> int:
    return len(world.rules.setup.shape.slots)


def active_seeds_of(seed: int, num_slots: int) -> ActiveSeeds:
    """Seeds at random: of every kind, blend and stage that runs, some on their way out."""
    rng = np.random.default_rng(seed)
    size = (NUM_ENVS, num_slots)
    running = rng.random(size) < 0.6
    stage = rng.choice(STAGES, size)
    blend = rng.choice(BLENDS, size)
    frozen = running & (stage == Stage.BLENDING) & (rng.random(size) < 0.3)
    return seeds_where(running, stage, rng.choice(CNN_BLUEPRINTS, size), blend, frozen=frozen)


def seeds_of(
    blueprint: int, stage: int, blend: int, num_slots: int = 3, slots: tuple[int, ...] = (1,)
) -> ActiveSeeds:
    """A running seed per env in each of `slots`."""
    running = np.zeros((NUM_ENVS, num_slots), dtype=bool)
    running[:, slots] = True
    return seeds_where(running, stage, blueprint, blend)


class Outcome(NamedTuple):
    weights: TensorDict
    trained: TrainReport
    tested: ValidationReport
    answers: Tensor  # [N, V]

    @property
    def rows(self) -> dict[str, Tensor]:
        """All weights, by name."""
        return dict(self.weights.flatten_keys(".").items())


def alphas(active_seeds: ActiveSeeds) -> Tensor:
    g = torch.Generator().manual_seed(4)
    drawn = torch.rand(active_seeds.running.shape, generator=g, dtype=torch.float64)
    return drawn * torch.from_numpy(active_seeds.visible)


def played(
    world: World, active_seeds: ActiveSeeds, exact: bool = False, dtype: torch.dtype | None = None
) -> Outcome:
    """An env-step's training and validation; the world's own weights are not changed.

    exact: by torch's own functions, in double precision or as `dtype` says.
    """
    runs = TorchEngine() if exact else world.rules.engine
    assert exact or isinstance(runs, CpuEngine)
    nets = world.rules.setup
    work = world.work(0)
    dtype = dtype or (torch.float64 if exact else torch.float32)
    weights = world.weights.clone().to(dtype)
    alpha = alphas(active_seeds)
    training, validation = (feed._replace(dtype=dtype) for feed in (work.training, work.validation))
    plan = planned(runs, nets, active_seeds)
    trained = runs.train_(nets, weights, alpha, plan, training, work.num_batches)
    answers = torch.zeros(NUM_ENVS, validation.order.shape[-1], dtype=torch.int16)
    given = nets, weights, alpha, plan, validation
    tested = runs.validate(*given, answers=answers)
    return Outcome(weights, trained, tested, answers)


def settled(world: World, unlike: Callable[[World], Tensor]) -> None:
    """Assert that no env is `unlike` (bool [N]) with the weights as they are and with all weights
    that are nearly so.

    A value that rounding puts on the other side of a ReLU, on one processor and not on another,
    moves weights by more than rounding; with weights that are moved by little it does not. What is
    wrong is wrong with all of them.
    """
    left = torch.ones(NUM_ENVS, dtype=torch.bool)
    for nudge in range(NUDGES):
        left &= unlike(nudged(world, nudge))
        if not left.any():
            return
    raise AssertionError(f"envs {left.nonzero().flatten().tolist()} are not as in torch")


def nudged(world: World, nudge: int) -> World:
    """The world with its weights moved by 3e-6 of each; itself for no nudge."""
    if nudge == 0:
        return world
    moved = copy(world)
    g = torch.Generator().manual_seed(nudge)
    moved.weights = world.weights.clone()
    for store in (moved.weights["host"], *moved.weights["seeds"].values()):
        store["params"].mul_(1 + 3e-6 * torch.randn(store["params"].shape, generator=g))
    return moved


def equals_torch(world: World, active_seeds: ActiveSeeds, **close: float) -> None:
    """Weights, losses and statistics to rounding, what is counted exactly; see `settled`."""

    def unlike(one: World) -> Tensor:
        return apart_in(played(one, active_seeds), played(one, active_seeds, True), **close)

    settled(world, unlike)


def apart_in(
    ours: Outcome, theirs: Outcome, most: float = 5e-4, nothing: float = 1e-9, share: float = 5e-3
) -> Tensor:
    """bool [N], envs in which anything is not the same: weights by more than `most`, or a fiftieth
    in the mean, statistics of gradients by more than `nothing` and a `share`.
    """
    wrong = torch.zeros(NUM_ENVS, dtype=torch.bool)
    for path, rows in ((path, rows) for path, rows in ours.rows.items() if rows.numel()):
        wrong |= (rows.isnan() != theirs.rows[path].isnan()).flatten(1).any(1)
        apart = (rows.double() - theirs.rows[path]).nan_to_num(nan=0.0).abs().flatten(1)
        wrong |= (apart.amax(1) > most) | (apart.mean(1) > most / 50)
    mine, its = ours.trained.gradients, theirs.trained.gradients
    for one, other in (
        (ours.trained.accuracy, theirs.trained.accuracy),
        (ours.tested.accuracy, theirs.tested.accuracy),
        (ours.tested.subset, theirs.tested.subset),
        (ours.answers, theirs.answers),
        (mine.measured, its.measured),
        (mine.exploding, its.exploding),
    ):
        wrong |= ((one != other) & ~(one.isnan() & other.isnan())).reshape(NUM_ENVS, -1).any(1)
    for one, other, relative, absolute in (
        (ours.trained.loss, theirs.trained.loss, 1e-5, 1e-6),
        (ours.tested.loss, theirs.tested.loss, 1e-4, 1e-5),
        (mine.l2, its.l2, share, nothing),
        (mine.ratio, its.ratio, share, nothing),
    ):
        near = one.isclose(other, relative, absolute, equal_nan=True)
        wrong |= ~near.reshape(NUM_ENVS, -1).all(1)
    return wrong


@pytest.mark.parametrize("task", named(TASKS, 1) + named(NARROW_TASKS, 5))
def test_hosts_with_seeds_of_all_kinds_equal_torch_after_some_steps(task: TaskConfig) -> None:
    world = made(task)
    active_seeds = active_seeds_of(38, num_slots(world))
    ours = played(world, active_seeds)
    assert not torch.equal(ours.weights["host", "params"], world.weights["host", "params"])
    assert ours.trained.gradients.measured.any()
    equals_torch(world, active_seeds, nothing=NOTHING, share=ONE_SIDE)


def test_losses_are_as_exact_as_those_of_torch_in_single_precision() -> None:
    world = made(TaskConfig(base_channels=32), batches=1)
    active_seeds = active_seeds_of(38, num_slots(world))
    errors = []
    for one in [nudged(world, nudge) for nudge in range(4)]:
        exact = played(one, active_seeds, True)
        rounded = played(one, active_seeds), played(one, active_seeds, True, torch.float32)
        errors.append([(each.tested.loss - exact.tested.loss).abs() for each in rounded])
    ours, theirs = (torch.cat(each).median() for each in zip(*errors, strict=True))
    assert 0 < ours <= theirs


@pytest.mark.parametrize("task", named([NARROW_TASKS[3], TaskConfig(gradient_stride=2)], 2))
def test_two_batches_to_an_optimiser_step_equal_torch(task: TaskConfig) -> None:
    """Seeds of all stages and blends, some frozen, some behind their host, gates among them."""
    world = made(task, batches=4)
    rule(world, accumulate=2)
    equals_torch(world, active_seeds_of(11, num_slots(world)))


def test_every_env_has_its_own_validation_images_and_may_have_one_less() -> None:
    world = made(TASKS[0], split=True)
    missing = world.validation.order == -1
    assert missing.any()
    equals_torch(world, active_seeds_of(7, 6))
    found = played(world, active_seeds_of(7, 6))
    assert not found.answers[missing].any()
    right = 100 * found.answers.sum(1) / (~missing).sum(1)
    torch.testing.assert_close(found.tested.accuracy[:, 0], right.double(), rtol=1e-6, atol=0)


def test_vanishing_and_exploding_gradients_are_noticed() -> None:
    world = made(TASKS[0])
    pool = world.weights["seeds", world.rules.setup.shape.slots[1].name]["params"]
    pool[1] = 0  # scale and shift: nothing reaches the kernel
    world.weights["host", "params"][2, -330:] *= 1e6  # the classifier
    active_seeds = seeds_of(Blueprint.CONV_LIGHT, Stage.BLENDING, Blend.ADD, num_slots=6)
    ours = played(world, active_seeds)
    assert ours.trained.gradients.vanishing.nonzero().tolist() == [[1, 1]]
    assert ours.trained.gradients.exploding.any()
    theirs = played(world, active_seeds, exact=True)
    for name in ("exploding", "measured", "vanishing", "health"):
        mine, its = (one.trained.gradients.to_dict()[name] for one in (ours, theirs))
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=0)


def test_a_gradient_that_overflows_has_no_health() -> None:
    world = made(TASKS[0], batches=1)
    world.weights["host", "params"][:, -330:] *= 1e39
    active_seeds = seeds_of(Blueprint.CONV_LIGHT, Stage.BLENDING, Blend.ADD, num_slots=6)
    gradients = played(world, active_seeds).trained.gradients
    endless = ~gradients.l2.isfinite()
    assert endless.any()
    assert not gradients.health[endless].any()


def test_no_ratio_is_of_a_host_without_a_gradient() -> None:
    world = made(TASKS[0], batches=1)
    silence_hosts_(world)
    active_seeds = seeds_of(
        Blueprint.CONV_LIGHT, Stage.TRAINING, Blend.ADD, num_slots=6, slots=(5,)
    )
    gradients = played(world, active_seeds).trained.gradients
    assert (gradients.l2[:, 5] > 100 * SMALLEST_NORM).all()
    assert not gradients.ratio.any()


def test_a_seed_behind_its_host_has_no_part_in_validation_whatever_its_alpha() -> None:
    world = made(TASKS[0], batches=1)
    active_seeds = seeds_of(Blueprint.CONV_LIGHT, Stage.TRAINING, Blend.ADD, num_slots=6)
    seen = active_seeds._replace(visible=active_seeds.running)
    first, second = (played(world, one).tested.accuracy[:, 0] for one in (seen, active_seeds))
    assert torch.equal(first, second)
    equals_torch(world, seen)


# --- numbers that are not finite, or equal

OTHERS = [env for env in range(NUM_ENVS) if env != 2]


def assert_same_bits(ours: Outcome, theirs: Outcome, envs: list[int]) -> None:
    for path, rows in ours.rows.items():
        assert torch.equal(rows[envs], theirs.rows[path][envs]), path
    for one, other in ((ours.trained, theirs.trained), (ours.tested, theirs.tested)):
        assert torch.equal(one.loss[envs], other.loss[envs])
        assert torch.equal(one.accuracy[envs], other.accuracy[envs])
    mine, its = (one.trained.gradients.to_dict() for one in (ours, theirs))
    for name, values in mine.items():
        assert torch.equal(values[envs], its[name][envs]), name


@pytest.mark.parametrize("task", named(TASKS, 3) + named(NARROW_TASKS, 6))
def test_a_network_alone_is_the_same_to_the_bit_as_behind_one_of_nan(task: TaskConfig) -> None:
    """And in a chunk that one of two threads has."""
    world = made(task)
    active_seeds = active_seeds_of(31, num_slots(world))
    rule(world, workers=1, env_chunk=1)
    alone = played(world, active_seeds)
    rule(world, workers=2, env_chunk=3)
    world.weights["host", "params"][2] = float("nan")
    for rows in world.weights["seeds"].values():
        rows["params"][2] = float("nan")
    behind = played(world, active_seeds)
    assert behind.trained.loss[2].isnan()
    assert behind.tested.loss[2].isnan()
    assert_same_bits(behind, alone, OTHERS)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("part", range(8))
def test_a_number_that_is_not_finite_spreads_as_in_torch_alone(part: int, broken: float) -> None:
    world = made(TaskConfig(num_blocks=2, num_pools=1), batches=1)
    active_seeds = active_seeds_of(8, num_slots(world))
    healthy = played(world, active_seeds)
    parts = world.rules.setup.shape.parameters.unpack(world.weights["host", "params"])
    parts[part][2].view(-1)[1] = broken
    ours = played(world, active_seeds)
    assert_same_bits(ours, healthy, OTHERS)
    if broken != 1e30:  # whose square overflows here alone
        theirs = played(world, active_seeds, exact=True)
        for path, rows in ours.rows.items():
            assert torch.equal(rows[2].isnan(), theirs.rows[path][2].isnan()), path
        assert torch.equal(ours.trained.loss.isnan(), theirs.trained.loss.isnan())
        assert torch.equal(ours.tested.loss.isnan(), theirs.tested.loss.isnan())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("blend", BLENDS)
def test_infinities_in_a_seed_that_is_not_felt_yet_reach_no_host(blend: int, exact: bool) -> None:
    world = made(TASKS[0], batches=1)
    behind = seeds_of(Blueprint.CONV_LIGHT, Stage.TRAINING, blend, num_slots=6)
    healthy = played(world, behind, exact)
    world.weights["seeds", world.rules.setup.shape.slots[1].name]["params"][:] = float("inf")
    sick = played(world, behind, exact)
    assert sick.rows["seeds.r0c1.params"].isnan().any()
    for name in ("host.params", "host.momentum", "host.statistics"):
        assert torch.equal(sick.rows[name], healthy.rows[name])
    for ours, theirs in ((sick.trained, healthy.trained), (sick.tested, healthy.tested)):
        assert torch.equal(ours.loss, theirs.loss)
        assert torch.equal(ours.accuracy, theirs.accuracy)


@pytest.mark.parametrize("channels", [3, 8, 16])
def test_equal_pixels_send_their_gradient_to_the_first_as_torch_does(channels: int) -> None:
    world = made(TaskConfig(base_channels=channels, num_blocks=2, num_pools=2), batches=1)
    shape = world.rules.setup.shape
    kernel, _, shift, *_ = shape.parameters.unpack(world.weights["host", "params"])
    kernel[:, 0] = 0.0  # all its pixels are equal
    shift[:, 0] = 0.5
    none = seeds_of(1, Stage.BLENDING, Blend.ADD, num_slots(world), slots=())
    before = world.weights["host"]
    mine, its = (
        shape.parameters.unpack(step_of(found.weights["host"], before, slice(None), 0.9))[0][:, 0]
        for found in (played(world, none), played(world, none, exact=True))
    )
    assert float(its.abs().amax()) > 1e-3
    assert all(close(*both, both[1], ONE_SIDE) for both in zip(mine, its, strict=True))


@pytest.mark.parametrize("channels", [3, 8, 16])
def test_nan_is_the_maximum_of_its_window_wherever_it_stands_as_in_torch(channels: int) -> None:
    """Envs 0 to 3 validate an image with NaN at that place of a window, the others a finite one."""
    task = TaskConfig(base_channels=channels, kernel_size=1, num_blocks=2, num_pools=1)
    world = made(task, batches=1)
    validation = world.work(0).validation
    assert isinstance(validation, ValidationImages)
    bank = validation.bank
    lines, values = bank.lines.clamp(max=254), bank.values.clone()
    values[:, 255] = float("nan")
    for place in range(4):
        lines[place, 8 + place // 2, :, 12 + place % 2] = 255
    order = torch.arange(NUM_ENVS)[:, None]
    images = validation._replace(bank=bank._replace(lines=lines, values=values), order=order)
    none = seeds_of(1, Stage.BLENDING, Blend.ADD, num_slots(world), slots=())
    rules = world.rules
    plan = planned(rules.engine, rules.setup, none)
    tested = rules.engine.validate(rules.setup, world.weights, alphas(none), plan, images)
    windows = torch.zeros(4, 4).fill_diagonal_(float("nan")).view(4, 1, 2, 2)
    pooled = functional.max_pool2d(windows, 2).flatten()
    assert tested.loss.isnan().tolist() == [*pooled.isnan().tolist(), False, False]


def test_right_answers_among_equal_or_broken_logits_are_those_of_torch() -> None:
    world = made(TASKS[0], batches=1)
    *_, classifier, bias = world.rules.setup.shape.parameters.unpack(
        world.weights["host", "params"]
    )
    classifier[:2] = 0.0
    bias[0] = 0.0
    bias[1] = torch.tensor([-1.0, *[0.5] * 9])
    bias[3, 1] = float("nan")
    bias[4, 1:] = float("nan")
    active_seeds = active_seeds_of(9, 6)
    ours, theirs = (played(world, active_seeds, exact) for exact in (False, True))
    assert torch.equal(ours.trained.accuracy, theirs.trained.accuracy)
    assert torch.equal(ours.tested.accuracy, theirs.tested.accuracy)
    assert torch.equal(ours.trained.loss.isnan(), theirs.trained.loss.isnan())
    assert len(set(ours.trained.accuracy.tolist())) > 1


# --- what the engine refuses


# --- steps, tensor by tensor


OPTIONS = {
    "clipped": TaskConfig(max_grad_norm=0.02, weight_decay=0.05),
    "barely clipped": TaskConfig(max_grad_norm=1.0, weight_decay=0.05, num_pools=1),
    "to nothing": TaskConfig(
        max_grad_norm=1e-4, momentum=0.0, host_lr=0.3, seed_lr=0.003, kernel_size=1
    ),
    "not clipped": TaskConfig(max_grad_norm=0.0, weight_decay=0.3, momentum=0.5, host_lr=0.02),
}


def columns(world: World, active_seeds: ActiveSeeds, env: int, slot: int) -> list[slice]:
    """Where the seed of an env has its numbers in the slot's row, and its gate where it has one."""
    shape = world.rules.setup.shape
    blueprint = shape.blueprint(active_seeds.blueprint[env, slot])
    table = seed_table(blueprint, shape.slots[slot].channels)
    layout = pools.row_layout(shape, slot)
    blends = active_seeds.stage[env, slot] != Stage.TRAINING
    gated = blends and active_seeds.blend[env, slot] == Blend.GATE
    gate = [slice(layout.seed, layout.seed + layout.gate)] if gated else []
    return [slice(0, table.total), *gate]


def slowed(world: World) -> World:
    """With momentum so small that its rounding is none beside a clipped gradient."""
    for rows in (world.weights["host"], *world.weights["seeds"].values()):
        rows["momentum"].mul_(1e-3)
    return world


def step_of(after: TensorDict, before: TensorDict, env: int | slice, momentum: float) -> Tensor:
    """What a step added to an env's row of momentum: its gradient as clipped, and weight decay."""
    return after["momentum"][env].double() - momentum * before["momentum"][env].double()


def close(mine: Tensor, its: Tensor, whole_step: Tensor, share: float = 5e-3) -> bool:
    """Steps of a tensor agree to a share of them, but for the rounding of the whole step that it is
    part of.
    """
    return bool((mine - its).norm() <= share * its.norm() + 2e-5 * whole_step.norm())


def steps_apart_in(
    world: World, active_seeds: ActiveSeeds, nothing: float = 1e-9, share: float = 5e-3
) -> Tensor:
    """bool [N], envs in which a step of the host or of a part of a seed, or what was measured, is
    not the same.
    """
    ours, theirs = (played(world, active_seeds, exact) for exact in (False, True))
    wrong = apart_in(ours, theirs, torch.inf, nothing, share)
    momentum = world.rules.setup.task.momentum
    for env in range(NUM_ENVS):
        before = world.weights["host"]
        mine, its = (step_of(one.weights["host"], before, env, momentum) for one in (ours, theirs))
        wrong[env] |= not close(mine, its, its, share)
    for env, slot in np.argwhere(active_seeds.running & ~active_seeds.frozen):
        name = world.rules.setup.shape.slots[slot].name
        before = world.weights["seeds", name]
        pools_ = (one.weights["seeds", name] for one in (ours, theirs))
        mine, its = (step_of(pool, before, env, momentum) for pool in pools_)
        for part in columns(world, active_seeds, env, slot):
            none = max(mine[part].norm(), its[part].norm()) <= nothing
            wrong[env] |= not (none or close(mine[part], its[part], its, share))
    return wrong


@pytest.mark.parametrize("name", OPTIONS)
def test_clipping_decay_gates_and_frozen_seeds_all_at_once_equal_torch(name: str) -> None:
    task = OPTIONS[name]
    world = slowed(made(task, batches=1))
    active_seeds = active_seeds_of(20, num_slots(world))
    settled(world, partial(steps_apart_in, active_seeds=active_seeds))
    ours = played(world, active_seeds)
    host = ours.weights["host"]
    moved = host["params"].double() - world.weights["host", "params"].double()
    wanted = -task.host_lr * host["momentum"].double()
    torch.testing.assert_close(moved, wanted, rtol=0, atol=1e-7)
    for env, slot in np.argwhere(active_seeds.running):
        name = world.rules.setup.shape.slots[slot].name
        before = world.weights["seeds", name]
        after = ours.weights["seeds", name]
        if active_seeds.frozen[env, slot]:
            assert torch.equal(after["params"][env], before["params"][env])
            assert torch.equal(after["momentum"][env], before["momentum"][env])
        elif 0 < task.max_grad_norm < float(ours.trained.gradients.l2[env, slot]):
            step = step_of(after, before, env, task.momentum)
            parts = columns(world, active_seeds, env, slot)
            norm = torch.cat([step[part] for part in parts]).norm()  # the gate's numbers count too
            assert float(norm) == pytest.approx(task.max_grad_norm, rel=1e-3)


# Made of known parts, as a user might.
INVERTED = Conv(Width(times=2), kernel=1, norm=False), Depthwise(), Excite(Squeeze(REDUCED))
SOFT = SoftNorm(), Excite(Squeeze(NARROW, hidden_bias=False))
WAIST = Conv(NARROW), SoftNorm(), Conv(NARROW, relu=False), Conv(kernel=1)
BARE = Conv(NARROW, norm=False, relu=False), Conv(norm=False, relu=False)
MADE = (
    Architecture(13, "twice", (Conv(kernel=1), Conv(kernel=1))),
    Architecture(14, "one", (Conv(kernel=5, relu=False),)),
    Architecture(15, "instead", (Conv(),), residual=False),
    Architecture(16, "inverted", (*INVERTED, Conv(kernel=1, relu=False))),
    Architecture(17, "bare", BARE),
    Architecture(18, "soft", SOFT, residual=False),
    Architecture(19, "softer", (SoftNorm(),)),
    Architecture(20, "narrow", WAIST),
    Architecture(21, "apart", (Depthwise(),), residual=False),
)


def extended(task: TaskConfig) -> World:
    """As `made`, with the blueprints MADE beside those of the package."""
    world = made(task, batches=1)
    shape = host_shape(task, world.rules.setup.shape.slots, (*BLUEPRINTS, *MADE))
    rule(world, shape=shape)
    g = torch.Generator().manual_seed(3)
    seeds = pools.allocate(shape, NUM_ENVS, CPU, torch.float32)["seeds"]
    world.weights["seeds"] = seeds.apply(lambda rows: 0.2 * torch.randn(rows.shape, generator=g))
    return slowed(world)


@pytest.mark.parametrize("blueprint", [*BLUEPRINTS[1:], *MADE], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("channels", "detached"),  # channels in whole vectors or not
    [
        (8, ()),
        (11, (Stage.TRAINING, Stage.BLENDING)),
        pytest.param(11, (), marks=pytest.mark.slow),
        pytest.param(8, (Stage.TRAINING, Stage.BLENDING), marks=pytest.mark.slow),
    ],
)
def test_every_seed_before_a_pool_and_behind_one_equals_torch_in_every_stage_and_blend(
    blueprint: Architecture, channels: int, detached: tuple[int, ...]
) -> None:
    task = TaskConfig(name="two", base_channels=channels, num_blocks=2, num_pools=2)
    task.max_grad_norm = 0.02
    world = extended(task)
    assert engine.obstacle(world.rules.setup.shape) == ""
    rule(world, detached_stages=detached)
    cases = [(stage, blend) for stage in STAGES for blend in BLENDS]
    stage, blend = (
        np.array(column).reshape(2, NUM_ENVS).T.repeat(2, axis=1)
        for column in zip(*cases, strict=True)
    )
    active_seeds = seeds_where([[0, 1, 1, 0]] * NUM_ENVS, stage, blueprint.code, blend)
    settled(world, partial(steps_apart_in, active_seeds=active_seeds))


@pytest.mark.parametrize("task", named(NARROW_TASKS, 8))
def test_every_kind_of_seed_in_a_narrow_host_equals_torch(task: TaskConfig) -> None:
    world = slowed(made(task, batches=1))
    cases = [
        (code, stage, blend) for code in CNN_BLUEPRINTS for stage in STAGES for blend in BLENDS
    ]
    size = NUM_ENVS, num_slots(world)
    for first in range(0, len(cases), size[0] * size[1]):
        drawn = [cases[(first + at) % len(cases)] for at in range(size[0] * size[1])]
        code, stage, blend = (np.array(column).reshape(size) for column in zip(*drawn, strict=True))
        seeds = seeds_where(np.ones(size), stage, code, blend)
        settled(world, partial(steps_apart_in, active_seeds=seeds, nothing=NOTHING, share=ONE_SIDE))


# --- what the kernels do not know
