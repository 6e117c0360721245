"""The engine of a CPU trains and validates networks as torch does in double precision, whatever
seeds they have.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.build import build_world
from esper_soa.config import ComputeConfig, TrainConfig
from esper_soa.env.world import World
from esper_soa.errors import SettingError
from esper_soa.nets import pools, seed_plan
from esper_soa.nets.config import DataConfig, TaskConfig, host_slots
from esper_soa.nets.engine import (
    TrainingFeed,
    TrainReport,
    ValidationFeed,
    ValidationReport,
)
from esper_soa.nets.engines.cpu import engine, program, proof
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.cpu.support import choose_native
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.host import host_shape
from esper_soa.nets.layers import Layers
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture, gate_table, seed_table
from esper_soa.nets.model.parameters import Table, norm_scale, weight
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
from esper_soa.nets.pools import ActiveSeeds
from esper_soa.vocabulary import BLUEPRINT_NAMES, CNN_BLUEPRINTS, Blend, Blueprint, Stage

pytestmark = pytest.mark.usefixtures("native")

CPU = torch.device("cpu")
NUM_ENVS = 6
NUDGES = 5  # sets of weights with which an env is given a chance to be right
STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
BLENDS = (Blend.ADD, Blend.MULTIPLY, Blend.GATE)
CONVOLUTIONS = (Blueprint.CONV_LIGHT, Blueprint.CONV_SMALL)
TASKS = [
    TaskConfig(),
    TaskConfig(name="pointwise", kernel_size=1, num_pools=1),
    TaskConfig(name="deep", num_blocks=4, num_pools=2, gradient_stride=2, weight_decay=0.0),
    TaskConfig(name="wide", base_channels=32, num_blocks=2, num_pools=2, max_grad_norm=0.0),
]


# Channels that fill no vectors, in blocks, in bottlenecks or in both; images down to one pixel.
NARROW_TASKS = [
    TaskConfig(
        name=f"{channels}_channels_{kernel}x{kernel}",
        base_channels=channels,
        kernel_size=kernel,
        num_blocks=blocks,
        num_pools=pools_,
    )
    for channels, kernel, blocks, pools_ in (
        (1, 1, 3, 3),
        (1, 3, 5, 5),
        (2, 1, 3, 0),
        (2, 3, 3, 3),
        (3, 1, 3, 1),
        (3, 3, 3, 3),
        (4, 1, 2, 1),
        (4, 3, 3, 3),
        (5, 1, 3, 2),
        (5, 3, 3, 1),
        (5, 5, 2, 2),
        (6, 1, 3, 3),
        (6, 3, 2, 2),
        (12, 1, 2, 2),
        (12, 3, 2, 1),
        (20, 1, 2, 1),
        (20, 3, 2, 2),
    )
]


def made(task: TaskConfig, split: bool = False, batches: int = 3, engine: str = "auto") -> World:
    """Hosts with weights of some size, most slots enabled, batches that differ from env to env."""
    offered = [spec.name for spec in host_slots(task)]
    settings = TrainConfig(
        envs=NUM_ENVS,
        steps=4,
        rounds=1,
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
    for name in ("params", "momentum"):
        for rows in (
            world.weights["host", name],
            *(pool[name] for pool in world.weights["seeds"].values()),
        ):
            rows.copy_(0.2 * torch.randn(rows.shape, generator=g))
    world.weights["host", "statistics"].copy_(
        0.5 + torch.rand(world.weights["host", "statistics"].shape, generator=g)
    )
    return world


def active_seeds_of(
    seed: int, num_slots: int, blueprints: tuple[int, ...] = CONVOLUTIONS, others: bool = False
) -> ActiveSeeds:
    """Seeds at random: of every stage that runs, some on their way out; others: of every blend
    too.
    """
    rng = np.random.default_rng(seed)
    size = (NUM_ENVS, num_slots)
    running = rng.random(size) < 0.6
    stage = rng.choice(STAGES, size)
    blend = rng.choice(BLENDS, size) if others else np.full(size, Blend.ADD)
    visible = running & (stage != Stage.TRAINING)
    no = np.zeros(size, dtype=bool)
    frozen = running & (stage == Stage.BLENDING) & (rng.random(size) < 0.3)
    return ActiveSeeds(
        running, stage, rng.choice(blueprints, size), blend, frozen, visible, visible, no, no
    )


class Outcome(NamedTuple):
    weights: TensorDict
    trained: TrainReport
    tested: ValidationReport


def alphas(active_seeds: ActiveSeeds) -> Tensor:
    g = torch.Generator().manual_seed(4)
    return torch.rand(
        active_seeds.running.shape, generator=g, dtype=torch.float64
    ) * torch.from_numpy(active_seeds.visible)


def played(world: World, active_seeds: ActiveSeeds, start: TensorDict | None = None) -> Outcome:
    """An env-step's training and validation from the world's weights or `start`; the world's own
    are not changed.
    """
    nets = world.rules.nets
    work = world.work(0)
    runs = world.rules.engine
    assert isinstance(runs, CpuEngine)
    weights = (world.weights if start is None else start).clone()
    alpha = alphas(active_seeds)
    trained = runs.train_(nets, weights, alpha, active_seeds, work.training, work.num_batches)
    return Outcome(
        weights, trained, runs.validate(nets, weights, alpha, active_seeds, work.validation)
    )


class DoubleTraining(NamedTuple):
    """The batches of a feed in double precision."""

    feed: TrainingFeed

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.feed.batch(envs, index)
        return images.double(), labels


class DoubleValidation(NamedTuple):
    """As DoubleTraining."""

    feed: ValidationFeed

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        return [(images.double(), labels) for images, labels in self.feed.batches(envs, size)]


def in_torch(world: World, active_seeds: ActiveSeeds, start: TensorDict | None = None) -> Outcome:
    """As `played`, by torch's own functions in double precision."""
    nets = world.rules.nets
    work = world.work(0)
    runs = TorchEngine()
    weights = (world.weights if start is None else start).to(torch.float64)
    alpha = alphas(active_seeds)
    trained = runs.train_(
        nets, weights, alpha, active_seeds, DoubleTraining(work.training), work.num_batches
    )
    tested = runs.validate(nets, weights, alpha, active_seeds, DoubleValidation(work.validation))
    return Outcome(weights, trained, tested)


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
    for rows in (
        moved.weights["host", "params"],
        *(pool["params"] for pool in moved.weights["seeds"].values()),
    ):
        rows.mul_(1 + 3e-6 * torch.randn(rows.shape, generator=g))
    return moved


def equals_torch(
    world: World, active_seeds: ActiveSeeds, most: float = 5e-4, **close: float
) -> None:
    """Weights, losses and statistics to rounding, what is counted exactly; see `settled`."""
    settled(
        world,
        lambda one: apart_in(played(one, active_seeds), in_torch(one, active_seeds), most, **close),
    )


def apart_in(
    ours: Outcome, theirs: Outcome, most: float, nothing: float = 1e-9, share: float = 5e-3
) -> Tensor:
    """bool [N], envs in which anything is not the same: weights by more than `most`, or a fiftieth
    in the mean, or what was measured, as `same_measurements` compares it.
    """
    wrong = torch.zeros(NUM_ENVS, dtype=torch.bool)
    for path, rows in ours.weights.items(include_nested=True, leaves_only=True):
        wrong |= (rows.isnan() != theirs.weights[path].isnan()).flatten(1).any(1)
        apart = (rows.double() - theirs.weights[path].double()).nan_to_num(nan=0.0).abs().flatten(1)
        wrong |= (apart.amax(1) > most) | (apart.mean(1) > most / 50)
    counted = [
        (ours.trained.accuracy, theirs.trained.accuracy),
        (ours.tested.accuracy, theirs.tested.accuracy),
        (ours.tested.subset, theirs.tested.subset),
    ]
    counted += [
        (getattr(ours.trained.gradients, name), getattr(theirs.trained.gradients, name))
        for name in ("measured", "exploding")
    ]
    for mine, its in counted:
        wrong |= ((mine != its) & ~(mine.isnan() & its.isnan())).reshape(NUM_ENVS, -1).any(1)
    rounded = [
        (ours.trained.loss, theirs.trained.loss, 1e-5, 1e-6),
        (ours.tested.loss, theirs.tested.loss, 1e-4, 1e-5),
    ]
    rounded += [
        (
            getattr(ours.trained.gradients, name),
            getattr(theirs.trained.gradients, name),
            share,
            nothing,
        )
        for name in ("l2", "ratio")
    ]
    for mine, its, relative, absolute in rounded:
        wrong |= ~mine.isclose(its, relative, absolute, equal_nan=True).reshape(NUM_ENVS, -1).all(1)
    return wrong


def same_measurements(
    ours: Outcome, theirs: Outcome, nothing: float = 1e-9, share: float = 5e-3
) -> None:
    """Losses and statistics of gradients, but for `nothing` or a share of them."""
    torch.testing.assert_close(
        ours.trained.loss, theirs.trained.loss, rtol=1e-5, atol=1e-6, equal_nan=True
    )
    torch.testing.assert_close(
        ours.tested.loss, theirs.tested.loss, rtol=1e-4, atol=1e-5, equal_nan=True
    )
    assert torch.equal(ours.tested.subset, theirs.tested.subset)
    for name in (
        "measured",
        "exploding",
    ):  # a gradient that vanishes in double precision may be rounding here
        assert torch.equal(
            getattr(ours.trained.gradients, name), getattr(theirs.trained.gradients, name)
        ), name
    for name in ("l2", "ratio"):
        mine = getattr(ours.trained.gradients, name)
        its = getattr(theirs.trained.gradients, name)
        torch.testing.assert_close(mine, its, rtol=share, atol=nothing, equal_nan=True)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("seed", range(3))
def test_hosts_and_seeds_of_one_convolution_equal_torch_after_some_steps(
    task: TaskConfig, seed: int
) -> None:
    world = made(task)
    active_seeds = active_seeds_of(seed, len(world.rules.nets.shape.slots))
    ours = played(world, active_seeds)
    assert not torch.equal(ours.weights["host", "params"], world.weights["host", "params"])
    assert ours.trained.gradients.measured.any()
    equals_torch(world, active_seeds)


# Every two of blueprint, stage and blend meet; the rest of the product is slow.
EVERY_SEED = [
    pytest.param(code, stage, blend, marks=[] if (one + two + three) % 3 == 0 else pytest.mark.slow)
    for one, code in enumerate(CNN_BLUEPRINTS)
    for two, stage in enumerate(STAGES)
    for three, blend in enumerate(BLENDS)
]


@pytest.mark.parametrize(("blueprint", "stage", "blend"), EVERY_SEED)
def test_every_seed_equals_torch(blueprint: int, stage: int, blend: int) -> None:
    for detached in ((), (Stage.TRAINING, Stage.BLENDING)):
        world = made(TASKS[0], batches=1)
        world.rules = world.rules._replace(nets=world.rules.nets._replace(detached_stages=detached))
        active_seeds = seeds_of(blueprint, stage, blend, num_slots=6, slots=(0, 3, 4))
        ours = played(world, active_seeds)
        for slot in (0, 3, 4):
            name = world.rules.nets.shape.slots[slot].name
            assert not torch.equal(
                ours.weights["seeds", name]["params"], world.weights["seeds", name]["params"]
            )
        equals_torch(world, active_seeds)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("seed", range(3))
def test_hosts_with_seeds_of_all_kinds_equal_torch(task: TaskConfig, seed: int) -> None:
    world = made(task, batches=1)
    active_seeds = active_seeds_of(
        10 + seed, len(world.rules.nets.shape.slots), tuple(CNN_BLUEPRINTS), others=True
    )
    equals_torch(world, active_seeds)


@pytest.mark.parametrize(
    "task", [TaskConfig(gradient_stride=2), NARROW_TASKS[3]], ids=lambda task: task.name
)
def test_two_batches_to_an_optimiser_step_equal_torch(task: TaskConfig) -> None:
    """Seeds of all stages and blends, some frozen, some behind their host, gates among them."""
    world = made(task, batches=4)
    world.rules = world.rules._replace(nets=world.rules.nets._replace(accumulate=2))
    seeds = active_seeds_of(11, len(world.rules.nets.shape.slots), CNN_BLUEPRINTS, others=True)
    equals_torch(world, seeds)


def test_seeds_that_see_the_graph_of_their_host_train_it() -> None:
    world = made(TASKS[0])
    active_seeds = active_seeds_of(5, 6)
    world.rules = world.rules._replace(nets=world.rules.nets._replace(detached_stages=()))
    ours = played(world, active_seeds)
    equals_torch(world, active_seeds)
    cut_off = played(made(TASKS[0]), active_seeds)
    assert not torch.equal(cut_off.weights["host", "params"], ours.weights["host", "params"])


def test_every_env_has_its_own_validation_images_and_may_have_one_less() -> None:
    world = made(TASKS[0], split=True)
    assert (world.validation.order == -1).any()
    for active_seeds in (
        active_seeds_of(7, 6),
        seeds_of(Blueprint.CONV_LIGHT, Stage.HOLDING, Blend.ADD, num_slots=6),
    ):
        equals_torch(world, active_seeds)


def test_vanishing_and_exploding_gradients_are_noticed() -> None:
    world = made(TASKS[0])
    pool = world.weights["seeds", world.rules.nets.shape.slots[1].name]["params"]
    pool[1] = 0  # scale and shift: nothing reaches the kernel
    world.weights["host", "params"][2, -330:] *= 1e6  # the classifier
    active_seeds = seeds_of(Blueprint.CONV_LIGHT, Stage.BLENDING, Blend.ADD, num_slots=6)
    ours = played(world, active_seeds)
    assert ours.trained.gradients.vanishing.nonzero().tolist() == [[1, 1]]
    assert ours.trained.gradients.exploding.any()
    theirs = in_torch(world, active_seeds)
    same_measurements(ours, theirs)
    for name in ("vanishing", "health"):
        mine = getattr(ours.trained.gradients, name)
        its = getattr(theirs.trained.gradients, name)
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=0)


def test_a_seed_behind_its_host_has_no_part_in_validation_whatever_its_alpha() -> None:
    world = made(TASKS[0], batches=1)
    active_seeds = seeds_of(Blueprint.CONV_LIGHT, Stage.TRAINING, Blend.ADD, num_slots=6)
    seen = active_seeds._replace(visible=active_seeds.running)
    ours = played(world, seen)
    equals_torch(world, seen)
    assert torch.equal(
        ours.tested.accuracy[:, 0], played(world, active_seeds).tested.accuracy[:, 0]
    )


def test_a_network_of_nan_leaves_the_others_as_they_are() -> None:
    world = made(TASKS[0])
    active_seeds = active_seeds_of(8, 6)
    broken = world.weights.clone()
    broken["host", "params"][2, 5] = float("nan")
    healthy = played(world, active_seeds)
    mixed = played(world, active_seeds, start=broken)
    others = [env for env in range(NUM_ENVS) if env != 2]
    for path, rows in mixed.weights.items(include_nested=True, leaves_only=True):
        assert torch.equal(rows[others], healthy.weights[path][others]), path
    assert mixed.weights["host", "params"][2].isnan().any()
    assert torch.equal(mixed.tested.accuracy[others], healthy.tested.accuracy[others])
    assert mixed.tested.loss[2].isnan()
    world.weights = broken
    equals_torch(world, active_seeds)


def seeds_of(
    blueprint: int, stage: int, blend: int, num_slots: int = 3, slots: tuple[int, ...] = (1,)
) -> ActiveSeeds:
    """A running seed per env in each of `slots`."""
    size = (NUM_ENVS, num_slots)
    running = np.zeros(size, dtype=bool)
    no = np.zeros(size, dtype=bool)
    running[:, slots] = True
    visible = running & (stage != Stage.TRAINING)
    codes = (np.full(size, blueprint), np.full(size, blend))
    return ActiveSeeds(running, np.full(size, stage), *codes, no, visible, visible, no, no)


def test_hosts_of_any_width_go_whole_where_the_kernels_are_on() -> None:
    for task in (TASKS[0], *NARROW_TASKS):
        assert isinstance(made(task, batches=1).rules.engine, CpuEngine)
    plain = made(TASKS[0], engine="torch").rules.engine
    assert isinstance(plain, TorchEngine)
    assert type(plain.layers) is Layers


def test_the_engine_refuses_networks_that_it_was_not_made_for() -> None:
    world = made(TASKS[0], batches=1)
    active_seeds = active_seeds_of(9, 6)
    nets = world.rules.nets
    runs = world.rules.engine
    work = world.work(0)
    blocks = nets.shape.blocks
    odd = nets._replace(
        shape=nets.shape._replace(blocks=(blocks[0]._replace(kernel=5), *blocks[1:]))
    )
    for given, weights in ((odd, world.weights), (nets, world.weights.to(torch.float64))):
        with pytest.raises(LookupError, match="no native kernels for torch.float"):
            runs.train_(given, weights, alphas(active_seeds), active_seeds, work.training, 1)
        with pytest.raises(LookupError, match="no native kernels for torch.float"):
            runs.validate(given, weights, alphas(active_seeds), active_seeds, work.validation)


def test_a_profiler_sees_the_native_calls() -> None:
    world = made(TASKS[0], batches=1)
    active_seeds = active_seeds_of(9, 6)
    with torch.profiler.profile() as profiler:
        world.rules = world.rules._replace(nets=world.rules.nets._replace(workers=1))
        played(world, active_seeds)
    seen = {event.name for event in profiler.events() or []}
    assert {"native::train_networks", "native::validate_networks"} <= seen


# --- steps, tensor by tensor


OPTIONS = [
    TaskConfig(name="clipped", max_grad_norm=0.02, weight_decay=0.05),
    TaskConfig(name="barely_clipped", max_grad_norm=1.0, weight_decay=0.05, num_pools=1),
    TaskConfig(
        name="to_nothing",
        max_grad_norm=1e-4,
        momentum=0.0,
        host_lr=0.3,
        seed_lr=0.003,
        kernel_size=1,
    ),
    TaskConfig(name="not_clipped", max_grad_norm=0.0, weight_decay=0.3, momentum=0.5, host_lr=0.02),
    TaskConfig(
        name="wide",
        base_channels=32,
        num_blocks=2,
        num_pools=2,
        max_grad_norm=0.1,
        weight_decay=0.0,
    ),
]


def columns(world: World, active_seeds: ActiveSeeds, env: int, slot: int) -> list[slice]:
    """Where the seed of an env has its numbers in the slot's row, and its gate where it has one."""
    shape = world.rules.nets.shape
    table = seed_table(
        shape.blueprint(active_seeds.blueprint[env, slot]), shape.slots[slot].channels
    )
    layout = pools.row_layout(shape, slot)
    gated = (
        active_seeds.blend[env, slot] == Blend.GATE
        and active_seeds.stage[env, slot] != Stage.TRAINING
    )
    return [
        slice(0, table.total),
        *([slice(layout.seed, layout.seed + layout.gate)] if gated else []),
    ]


def slowed_(world: World) -> TensorDict:
    """The world's weights with momentum so small that its rounding is none beside a clipped
    gradient.
    """
    for rows in (world.weights["host"], *world.weights["seeds"].values()):
        rows["momentum"].mul_(1e-3)
    return world.weights


def step_of(after: TensorDict, before: TensorDict, env: int, momentum: float) -> Tensor:
    """What a step added to an env's row of momentum: its gradient as clipped, and weight decay."""
    return after["momentum"][env].double() - momentum * before["momentum"][env].double()


def close(mine: Tensor, its: Tensor, whole_step: Tensor, share: float = 5e-3) -> bool:
    """Steps of a tensor agree to a share of them, but for the rounding of the whole step that it is
    part of.
    """
    return bool((mine - its).norm() <= share * its.norm() + 2e-5 * whole_step.norm())


@pytest.mark.parametrize("task", OPTIONS, ids=lambda task: task.name)
def test_clipping_decay_gates_and_frozen_seeds_all_at_once_equal_torch(task: TaskConfig) -> None:
    world = made(task, batches=1)
    before = slowed_(world)
    active_seeds = active_seeds_of(
        20, len(world.rules.nets.shape.slots), tuple(CNN_BLUEPRINTS), others=True
    )
    ours = played(world, active_seeds)
    theirs = in_torch(world, active_seeds)
    for env in range(NUM_ENVS):
        mine, its = (
            step_of(one.weights["host"], before["host"], env, task.momentum)
            for one in (ours, theirs)
        )
        assert close(mine, its, its)
        moved = (
            ours.weights["host", "params"][env].double() - before["host", "params"][env].double()
        )
        wanted = -task.host_lr * ours.weights["host", "momentum"][env].double()
        torch.testing.assert_close(moved, wanted, rtol=0, atol=1e-7)
    for env, slot in np.argwhere(active_seeds.running):
        name = world.rules.nets.shape.slots[slot].name
        mine, its = (
            step_of(one.weights["seeds", name], before["seeds", name], env, task.momentum)
            for one in (ours, theirs)
        )
        if active_seeds.frozen[env, slot]:
            for kind in ("params", "momentum"):
                assert torch.equal(
                    ours.weights["seeds", name, kind][env], before["seeds", name, kind][env]
                )
            continue
        parts = columns(world, active_seeds, env, slot)
        assert all(close(mine[part], its[part], its) for part in parts), (env, slot)
        norm = torch.cat([mine[part] for part in parts]).norm()
        if 0 < task.max_grad_norm < float(ours.trained.gradients.l2[env, slot]):
            assert float(norm) == pytest.approx(
                task.max_grad_norm, rel=1e-3
            )  # the gate's numbers count too
    same_measurements(ours, theirs)


@pytest.mark.parametrize("blueprint", CNN_BLUEPRINTS)
def test_every_seed_before_a_pool_and_behind_one_equals_torch_in_every_stage_and_blend(
    blueprint: int,
) -> None:
    world = made(TaskConfig(name="clipped", max_grad_norm=0.02, weight_decay=0.05), batches=1)
    equals_torch_in_every_stage_and_blend(world, blueprint)


def equals_torch_in_every_stage_and_blend(world: World, blueprint: int) -> None:
    before = slowed_(world)
    active_seeds = seeds_of(blueprint, Stage.BLENDING, Blend.ADD, num_slots=6, slots=(1, 4))
    cases = [(stage, blend) for stage in STAGES for blend in BLENDS]
    stage, blend = (
        np.array(column).reshape(2, NUM_ENVS).T.repeat(3, axis=1)
        for column in zip(*cases, strict=True)
    )
    visible = active_seeds.running & (stage != Stage.TRAINING)
    active_seeds = active_seeds._replace(stage=stage, blend=blend, visible=visible, ablated=visible)
    ours = played(world, active_seeds)
    theirs = in_torch(world, active_seeds)
    for env, slot in np.argwhere(active_seeds.running):
        name = world.rules.nets.shape.slots[slot].name
        mine, its = (
            step_of(one.weights["seeds", name], before["seeds", name], env, 0.9)
            for one in (ours, theirs)
        )
        for part in columns(world, active_seeds, env, slot):
            assert its[part].norm() > 0
            assert close(mine[part], its[part], its), (env, slot, part)
    same_measurements(ours, theirs)
    assert torch.equal(ours.tested.accuracy, theirs.tested.accuracy)


# --- blueprints made of known parts

MADE = (
    Architecture(13, "twice", (Conv(kernel=1), Conv(kernel=1))),
    Architecture(14, "one", (Conv(kernel=5, relu=False),)),
    Architecture(15, "instead", (Conv(),), residual=False),
    Architecture(
        16,
        "inverted",
        (
            Conv(Width(times=2), kernel=1, norm=False),
            Depthwise(),
            Excite(Squeeze(REDUCED)),
            Conv(kernel=1, relu=False),
        ),
    ),
    Architecture(17, "bare", (Conv(NARROW, norm=False, relu=False), Conv(norm=False, relu=False))),
    Architecture(
        18, "soft", (SoftNorm(), Excite(Squeeze(NARROW, hidden_bias=False))), residual=False
    ),
    Architecture(19, "softer", (SoftNorm(),)),
    Architecture(
        20, "narrow", (Conv(NARROW), SoftNorm(), Conv(NARROW, relu=False), Conv(kernel=1))
    ),
)


def extended(task: TaskConfig) -> World:
    """As `made`, with the blueprints MADE beside those of the package."""
    world = made(task, batches=1)
    shape = host_shape(task, world.rules.nets.shape.slots, (*BLUEPRINTS, *MADE))
    world.rules = world.rules._replace(nets=world.rules.nets._replace(shape=shape))
    g = torch.Generator().manual_seed(3)
    seeds = pools.allocate(shape, NUM_ENVS, CPU, torch.float32)["seeds"]
    world.weights["seeds"] = seeds.apply(lambda rows: 0.2 * torch.randn(rows.shape, generator=g))
    return world


@pytest.mark.parametrize("blueprint", MADE, ids=lambda one: one.name)
@pytest.mark.parametrize(
    "detached", [(), (Stage.TRAINING, Stage.BLENDING)], ids=["joined", "detached"]
)
@pytest.mark.parametrize("channels", [8, 11])  # in whole vectors or not
def test_a_blueprint_made_of_known_parts_is_one_entry_and_equals_torch(
    blueprint: Architecture, channels: int, detached: tuple[int, ...]
) -> None:
    world = extended(
        TaskConfig(name="clipped", base_channels=channels, max_grad_norm=0.02, weight_decay=0.05)
    )
    assert engine.obstacle("clipped", world.rules.nets.shape, [blueprint.name]) == ""
    world.rules = world.rules._replace(nets=world.rules.nets._replace(detached_stages=detached))
    equals_torch_in_every_stage_and_blend(world, blueprint.code)


# --- hosts whose channels fill no vectors

# norm of a gradient that is the rounding of none: dead channels are common where there are few
NOTHING = 1e-5
# share of a step that one value makes which rounding puts on the other side of a ReLU
ONE_SIDE = 3e-2


@pytest.mark.parametrize("task", NARROW_TASKS, ids=lambda task: task.name)
def test_narrow_hosts_with_seeds_of_all_kinds_equal_torch_after_some_steps(
    task: TaskConfig,
) -> None:
    world = made(task)
    active_seeds = active_seeds_of(
        32, len(world.rules.nets.shape.slots), tuple(CNN_BLUEPRINTS), others=True
    )
    ours = played(world, active_seeds)
    assert not torch.equal(ours.weights["host", "params"], world.weights["host", "params"])
    assert ours.trained.gradients.measured.any()
    equals_torch(world, active_seeds, 1e-4, nothing=NOTHING, share=ONE_SIDE)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=pytest.mark.slow if place % 3 else [], id=task.name)
        for place, task in enumerate(NARROW_TASKS)
    ],
)
def test_every_kind_of_seed_in_a_narrow_host_equals_torch(task: TaskConfig) -> None:
    world = made(task, batches=1)
    names = slowed_(world)["seeds"].keys()
    cases = [
        (code, stage, blend) for code in CNN_BLUEPRINTS for stage in STAGES for blend in BLENDS
    ]
    size = NUM_ENVS, len(names)
    for first in range(0, len(cases), NUM_ENVS * len(names)):
        drawn = [cases[(first + at) % len(cases)] for at in range(NUM_ENVS * len(names))]
        code, stage, blend = (np.array(column).reshape(size) for column in zip(*drawn, strict=True))
        running = np.ones(size, dtype=bool)
        no = np.zeros(size, dtype=bool)
        visible = stage != Stage.TRAINING
        active_seeds = ActiveSeeds(running, stage, code, blend, no, visible, visible, no, no)
        settled(world, partial(steps_apart_in, active_seeds=active_seeds))


def steps_apart_in(world: World, active_seeds: ActiveSeeds) -> Tensor:
    """bool [N], envs in which a step of a part of a seed, or what was measured, is not the same."""
    ours = played(world, active_seeds)
    theirs = in_torch(world, active_seeds)
    wrong = apart_in(ours, theirs, torch.inf, NOTHING, ONE_SIDE)
    for env, slot in np.argwhere(active_seeds.running):
        name = world.rules.nets.shape.slots[slot].name
        before = world.weights["seeds", name]
        mine, its = (
            step_of(one.weights["seeds", name], before, env, 0.9) for one in (ours, theirs)
        )
        for part in columns(world, active_seeds, env, slot):
            nothing = max(mine[part].norm(), its[part].norm()) <= NOTHING
            wrong[env] |= not (nothing or close(mine[part], its[part], its, ONE_SIDE))
    return wrong


@pytest.mark.parametrize("task", [*TASKS, *NARROW_TASKS], ids=lambda task: task.name)
def test_a_network_alone_is_the_same_to_the_bit_as_behind_one_of_nan(task: TaskConfig) -> None:
    world = made(task)
    active_seeds = active_seeds_of(
        31, len(world.rules.nets.shape.slots), tuple(CNN_BLUEPRINTS), others=True
    )
    broken = world.weights.clone()
    broken["host", "params"][2] = float("nan")
    for rows in broken["seeds"].values():
        rows["params"][2] = float("nan")
    nets = world.rules.nets._replace(workers=1)
    world.rules = world.rules._replace(nets=nets._replace(env_chunk=1))
    alone = played(world, active_seeds)
    world.rules = world.rules._replace(nets=nets._replace(env_chunk=NUM_ENVS))
    behind = played(world, active_seeds, start=broken)
    others = [env for env in range(NUM_ENVS) if env != 2]
    assert behind.trained.loss[2].isnan()
    assert behind.tested.loss[2].isnan()
    for path, rows in behind.weights.items(include_nested=True, leaves_only=True):
        assert torch.equal(rows[others], alone.weights[path][others]), path
    for ours, theirs in ((behind.trained, alone.trained), (behind.tested, alone.tested)):
        assert torch.equal(ours.loss[others], theirs.loss[others])
        assert torch.equal(ours.accuracy[others], theirs.accuracy[others])
    for name, values in behind.trained.gradients.to_dict().items():
        assert torch.equal(values[others], alone.trained.gradients.to_dict()[name][others]), name


# --- what the kernels do not know


def test_a_blueprint_with_a_part_that_has_no_kernel_is_refused_by_name() -> None:
    shape = made(TASKS[0]).rules.nets.shape
    wide = Architecture(13, "wide", (Depthwise(kernel=5), Conv(kernel=1)))
    shape = shape._replace(blueprints=(*BLUEPRINTS, wide))
    assert (
        engine.obstacle("cifar", shape, ["norm", "wide"]) == "there is none for the blueprint wide"
    )
    assert engine.obstacle("cifar", shape, ["norm"]) == ""
    with pytest.raises(LookupError, match="no native kernel for seeds of blueprint code 13"):
        engine.training_seeds(
            shape, seed_plan.training_plan(seeds_of(13, Stage.BLENDING, Blend.ADD), ())
        )


def test_a_blueprint_without_a_kernel_is_refused_by_name_while_building(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "DEPTH_SIDE", 5)
    runs = made(TASKS[0]).rules.engine
    assert not runs.chosen.native
    assert runs.chosen.fallback
    assert (
        runs.chosen.reason
        == "plain torch, slower: no native kernels, there is none for the blueprint depthwise"
    )
    assert isinstance(runs, TorchEngine)
    assert type(runs.layers) is Layers
    with pytest.raises(
        SettingError, match=r"compute.engine=native: must be .*the blueprint depthwise"
    ):
        made(TASKS[0], engine="native")
    assert made(
        TaskConfig(blueprints=["conv_light", "norm"]), engine="native"
    ).rules.engine.chosen.native


def test_a_running_seed_without_a_kernel_is_no_empty_slot() -> None:
    shape = made(TASKS[0]).rules.nets.shape
    unknown = seeds_of(BLUEPRINT_NAMES.index("lora"), Stage.BLENDING, Blend.ADD)
    for seeds, plan in (
        (engine.training_seeds, seed_plan.training_plan(unknown, ())),
        (engine.validation_seeds, seed_plan.validation_plan(unknown, ())),
    ):
        with pytest.raises(LookupError, match="no native kernel for seeds of blueprint code 8"):
            seeds(shape, plan)


def test_a_host_that_is_no_plain_chain_is_refused_by_name() -> None:
    shape = made(TASKS[0]).rules.nets.shape
    names = list(TaskConfig().blueprints)
    deep = host_shape(TaskConfig(num_blocks=6, num_pools=5), ())
    assert engine.obstacle("plain", shape, names) == engine.obstacle("plain", deep, names) == ""
    more = Table((*shape.parameters.parameters, norm_scale(8)))
    fewer = Table((*shape.parameters.parameters[:3], *shape.parameters.parameters[4:]))
    projected = Table(
        (*shape.parameters.parameters[:-2], weight(10, 64), *shape.parameters.parameters[-1:])
    )
    others = [
        shape._replace(parameters=more),
        shape._replace(parameters=fewer),
        shape._replace(parameters=projected),
        shape._replace(statistics=Table(shape.statistics.parameters[2:])),
        shape._replace(blocks=(shape.blocks[0], *shape.blocks)),
        shape._replace(blocks=(shape.blocks[0]._replace(slot_after_pool=0), *shape.blocks[1:])),
        shape._replace(slots=shape.slots[::-1]),
        shape._replace(num_classes=9),
        deep._replace(
            blocks=tuple(block._replace(pooled=True) for block in deep.blocks)
        ),  # the last of 1 pixel
    ]
    for other in others:
        assert engine.obstacle("strange", other, names).startswith(
            "the hosts of strange are no plain chain"
        )
        with pytest.raises(SettingError, match="the hosts of strange are no plain chain"):
            choose_native("native", CPU, obstacle=engine.obstacle("strange", other, names))
    choose_native("native", CPU)


@pytest.mark.parametrize("record", ["HostShape", "Block"])
def test_a_host_that_has_more_to_it_than_the_kernels_know_is_refused(
    monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    shape = made(TASKS[0]).rules.nets.shape
    engine.is_chain.cache_clear()
    other = NamedTuple(
        "Other", [(name, object) for name in (*getattr(engine, record)._fields, "skips")]
    )
    monkeypatch.setattr(engine, record, other)
    assert not engine.is_chain(shape)
    engine.is_chain.cache_clear()


@pytest.mark.parametrize("channels", [1, 8, 24, 64])
def test_the_seeds_of_the_proof_have_the_parameters_of_the_blueprints(channels: int) -> None:
    size = proof.Size((channels, 8))
    for name, shapes in size.seeds.items():
        table = seed_table(BLUEPRINTS[BLUEPRINT_NAMES.index(name)], channels)
        assert [one.shape or (1,) for one in table.parameters] == [one or (1,) for one in shapes]
    assert [one.shape for one in gate_table(channels).parameters] == list(size.gate)
    assert set(size.seeds) == {one.name for one in BLUEPRINTS[1:]}
