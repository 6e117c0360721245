"""How a network depends on those that share its chunk: not on what they hold, on their number by
rounding alone.

The native kernels, which go network by network, do not depend even on that (test_fused.py).
"""

from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.world import World
from esper_soa.nets import batched
from esper_soa.nets.data.batches import TrainingFeed
from esper_soa.nets.engine import ValidationReport
from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.training.build import build_world
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend, Stage

CPU = torch.device("cpu")
NUM_ENVS = 4
BATCH = 16
OTHERS = [0, 2, 3]  # all but the env that is looked at
# of the norm of a row's step; a ReLU on the other side of 0 moves some gradients by more than
# rounding
ROUNDING = 1e-3


class Training(NamedTuple):
    """Batches of `feed` in the weights' precision, those of the env `n` times `shares[n]`."""

    feed: TrainingFeed
    shares: Tensor

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.feed.batch(envs, index)
        shares = self.shares[envs].repeat_interleave(3)[:, None, None]
        return (images.to(shares.dtype) * shares).contiguous(
            memory_format=torch.channels_last
        ), labels


def build(chunk: int, batches: int = 1) -> World:
    settings = TrainConfig(
        envs=NUM_ENVS,
        steps=2,
        rounds=1,
        batch_size=BATCH,
        train_samples=BATCH * batches,
        val_samples=9,
        task=TaskConfig(),
        slots=["r0c0", "r0c1", "r1c1"],
        data=DataConfig(name="synthetic", synthetic_train=64, synthetic_test=32),
        compute=ComputeConfig(workers=1, env_chunk=chunk, engine="torch"),
    )
    world = build_world(settings, CPU)
    g = torch.Generator().manual_seed(3)
    for rows in (
        world.weights["host", "params"],
        *(pool["params"] for pool in world.weights["seeds"].values()),
    ):
        rows.copy_(0.2 * torch.randn(rows.shape, generator=g))
    return world


def active_seeds(seed: int = 1) -> ActiveSeeds:
    """Seeds of all kinds at random."""
    rng = np.random.default_rng(seed)
    size = (NUM_ENVS, 3)
    running = rng.random(size) < 0.8
    no = np.zeros(size, dtype=bool)
    stage = rng.choice([Stage.TRAINING, Stage.BLENDING, Stage.HOLDING], size)
    blend = rng.choice([Blend.ADD, Blend.MULTIPLY, Blend.GATE], size)
    visible = running & (stage != Stage.TRAINING)
    return ActiveSeeds(
        running, stage, rng.choice(CNN_BLUEPRINTS, size), blend, no, visible, visible, no, no
    )


class Played(NamedTuple):
    # Rows of hosts and seeds [N, ...] after a training pass less those before.
    steps: dict[str, Tensor]
    loss: Tensor
    tested: ValidationReport


def play(
    world: World,
    seeds: ActiveSeeds,
    dtype: torch.dtype = torch.float32,
    other: bool = False,
) -> Played:
    """Training and validation in `dtype`; other: the OTHERS have other weights and images."""
    nets = world.rules.nets
    engine = world.rules.engine
    work = world.work(0)
    weights = world.weights.clone()
    shares = torch.ones(NUM_ENVS, dtype=dtype)
    if other:
        shares[OTHERS] = -3.0
        for pool in (weights["host"], *weights["seeds"].values()):
            pool["params"][OTHERS] = 0.5 - pool["params"][OTHERS]
    before = weights.to(dtype)
    weights = before.clone()
    alpha = 0.7 * torch.from_numpy(seeds.visible).to(torch.float64)
    training = Training(work.training, shares)
    validation = work.validation._replace(dtype=dtype)
    trained = engine.train_(nets, weights, alpha, seeds, training, work.num_batches)
    return Played(
        steps_of(weights, before),
        trained.loss,
        engine.validate(nets, weights, alpha, seeds, validation),
    )


def steps_of(after: TensorDict, before: TensorDict) -> dict[str, Tensor]:
    ours, theirs = (dict(one.flatten_keys(".").items()) for one in (after, before))
    return {name: ours[name] - theirs[name] for name in ours}


def apart(ours: Played, theirs: Played) -> float:
    """The largest distance between the steps of a row, of its norm."""
    found = [0.0]
    for name, rows in theirs.steps.items():
        norms = rows.double().norm(dim=1)
        differences = (ours.steps[name].double() - rows.double()).norm(dim=1)
        found += (differences / norms)[norms > 1e-5].tolist()
    return max(found)


def test_in_double_precision_a_network_among_others_is_the_same_alone() -> None:
    together, alone = (play(build(chunk), active_seeds(), torch.float64) for chunk in (4, 1))
    assert apart(together, alone) < 1e-10
    torch.testing.assert_close(together.tested.loss, alone.tested.loss, rtol=1e-12, atol=0)
    assert torch.equal(together.tested.accuracy, alone.tested.accuracy)


def test_in_single_precision_it_differs_by_rounding_and_is_no_farther_from_the_truth() -> None:
    together, alone = (play(build(chunk), active_seeds()) for chunk in (4, 1))
    truth = play(build(1), active_seeds(), torch.float64)
    assert 0 < apart(together, alone) < ROUNDING
    assert apart(together, truth) < apart(alone, truth) + ROUNDING / 10
    torch.testing.assert_close(together.loss, alone.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(together.tested.loss, alone.tested.loss, rtol=1e-5, atol=0)


def test_what_the_others_of_a_chunk_hold_changes_no_bit() -> None:
    world = build(4, batches=2)
    ours = play(world, active_seeds())
    theirs = play(world, active_seeds(), other=True)
    for name, rows in ours.steps.items():
        assert torch.equal(rows[1], theirs.steps[name][1]), name
    assert not torch.equal(ours.steps["host.params"][0], theirs.steps["host.params"][0])
    assert torch.equal(ours.tested.accuracy[1], theirs.tested.accuracy[1])
    assert torch.equal(ours.tested.loss[1], theirs.tested.loss[1])


def test_batch_norms_of_one_channel_each_are_those_of_their_networks_alone() -> None:
    g = torch.Generator().manual_seed(1)
    x, upstream = torch.randn(2, 4, 2, 3, 3, generator=g, dtype=torch.float64)
    # of a pool: scales and shifts of networks lie apart
    rows = torch.randn(2, 5, generator=g, dtype=torch.float64)

    def gradients(nets: slice) -> Tensor:
        seen = x[:, nets].contiguous(memory_format=torch.channels_last).requires_grad_()
        moving = torch.zeros(seen.shape[1]), torch.ones(seen.shape[1])
        out = batched.batch_norm(
            seen, rows[nets, 1:2], rows[nets, 3:4], *(part.double() for part in moving)
        )
        return torch.autograd.grad(
            out, seen, upstream[:, nets].contiguous(memory_format=torch.channels_last)
        )[0]

    alone = torch.cat([gradients(slice(0, 1)), gradients(slice(1, 2))], dim=1)
    torch.testing.assert_close(gradients(slice(0, 2)), alone)
