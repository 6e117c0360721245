"""Several batches to an optimiser step: a step is that of the mean gradient, taken whole or not at
all.

That it is what a plain loop with torch.optim.SGD does is shown in test_batch_equals_loop.py, and
that other engines do the same in test_fused.py and test_triton_engine.py.
"""

from dataclasses import replace

import pytest
import torch

from esper_soa.config.nets import DataConfig, TaskConfig, host_slots
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.world import World
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.precision import add_loss_scales_, reset_loss_scales_
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Blend, Blueprint, Stage
from tests.builders.tiny_world import CPU, planned, seeds_where, tiny_settings


def made(batches: int) -> World:
    """Three hosts with weights of some size; batches that differ from env to env."""
    settings = replace(
        tiny_settings(3, 1, 4),
        batch_size=6,
        train_samples=6 * batches,
        val_samples=7,
        task=TaskConfig(base_channels=4, gradient_stride=2),
        compute=ComputeConfig(workers=1, engine="torch"),
        data=DataConfig(name="synthetic", synthetic_train=80, synthetic_test=41),
    )
    world = build_world(settings, CPU)
    g = torch.Generator().manual_seed(3)
    for rows in (world.weights["host", "params"], world.weights["host", "momentum"]):
        rows.copy_(0.2 * torch.randn(rows.shape, generator=g))
    return world


# Every host trains one seed of its own, which is not visible yet.
ONE_SEED = seeds_where([[1]] * 3, Stage.TRAINING, Blueprint.CONV_LIGHT, Blend.ADD)


def test_an_overflow_in_any_batch_undoes_the_whole_step() -> None:
    """Statistics of the batches before it included; the scale of that network alone is halved."""
    world = made(3)
    nets = world.rules.setup._replace(accumulate=3, precision=torch.float16)
    add_loss_scales_(world.weights)
    reset_loss_scales_(world.weights)
    world.weights["loss_scale"][1] = torch.finfo(torch.float32).max
    weights = world.weights.clone()
    training = world.work(0).training
    none = seeds_where([[0]] * 3, Stage.EMPTY, Blueprint.NONE, Blend.ADD)
    plan = planned(TorchEngine(), nets, none)
    TorchEngine().train_(nets, weights, torch.zeros(3, 1), plan, training, 3)
    moved = [
        bool((weights["host", "params"][env] != world.weights["host", "params"][env]).any())
        for env in range(3)
    ]
    assert moved == [True, False, True]
    for name in ("momentum", "statistics"):
        assert torch.equal(weights["host", name][1], world.weights["host", name][1])


def test_two_equal_batches_to_a_step_are_as_one() -> None:
    """The mean of two equal gradients is that gradient; only the running statistics have moved
    twice.
    """
    world = made(2)
    pool = world.weights["seeds", "r0c0", "params"]
    pool.copy_(0.2 * torch.randn(pool.shape, generator=torch.Generator().manual_seed(4)))
    twice = world.weights.clone()
    once = world.weights.clone()
    feed = world.work(0).training
    order = feed.draw.order[:, :6].repeat(1, 2)
    again = feed._replace(draw=feed.draw._replace(order=order, augment=False))
    alpha = torch.zeros(3, 1)
    nets = world.rules.setup
    plan = planned(TorchEngine(), nets, ONE_SEED)
    TorchEngine().train_(nets._replace(accumulate=2), twice, alpha, plan, again, 2)
    TorchEngine().train_(nets, once, alpha, plan, again, 1)
    for name in ("params", "momentum"):
        for rows in (("host", name), ("seeds", "r0c0", name)):
            torch.testing.assert_close(twice[rows], once[rows])
            assert not torch.equal(once[rows], world.weights[rows])
    assert not torch.equal(twice["host", "statistics"], once["host", "statistics"])


def test_images_that_make_no_whole_steps_are_refused() -> None:
    with pytest.raises(SettingError, match="^train_samples=64: .*accumulate=3.* 48 or 96"):
        TrainConfig(batch_size=16, train_samples=64, accumulate=3)
    offered = [spec.name for spec in host_slots(TaskConfig())][:1]
    split = DataConfig(name="synthetic", synthetic_train=80, synthetic_test=41, split=True)
    settings = TrainConfig(envs=2, batch_size=8, accumulate=2, slots=offered, data=split)
    settings.policy.name = "wait"
    told = (
        r"^accumulate=2: must be a divisor of 5, the batches per env-step with data\.split=true\.$"
    )
    with pytest.raises(SettingError, match=told):
        build_world(settings, CPU)
