"""Seeds as they are born: what they do to their host at first, and that every kind of them learns
in every blend.
"""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.config.nets import TaskConfig, sort_slots
from esper_soa.nets.engine import TrainReport
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.model.blueprints import BLUEPRINTS, initial_seeds, seed_forward, seed_table
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.nets.setup import Setup
from esper_soa.system import streams
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend, Blueprint, Stage
from tests.builders.tiny_world import CPU, planned, seeds_where

BLENDS = (Blend.ADD, Blend.MULTIPLY, Blend.GATE)
KINDS = [(blueprint, blend) for blueprint in CNN_BLUEPRINTS for blend in BLENDS]
IDENTITIES = (Blueprint.NORM, Blueprint.BOTTLENECK)
BATCH = 4
BATCHES = 2
SIZE = 8


def at_birth(blueprint: int, multiply: bool, x: Tensor) -> Tensor:
    """Output of a newborn seed for activations x [B, C, H, W]."""
    keys = streams.stream_keys(3, streams.SEED_INIT, (), torch.arange(1))
    own = BLUEPRINTS[blueprint]
    rows = initial_seeds(own, x.shape[1], keys, torch.tensor([multiply]), x.dtype)
    return seed_forward(own, seed_table(own, x.shape[1]).unpack(rows), x)


@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize("blueprint", CNN_BLUEPRINTS)
def test_a_newborn_seed_keeps_scales_or_adds_to_its_input(blueprint: int, multiply: bool) -> None:
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = at_birth(blueprint, multiply, x)
    if blueprint in IDENTITIES:
        assert torch.equal(out, x)
    elif blueprint == Blueprint.ATTENTION:  # sigmoid(3) = 0.95; its bias is 0 under MULTIPLY
        torch.testing.assert_close(out, x * (0.5 if multiply else 1 / (1 + math.exp(-3.0))))
    else:
        added = out - x
        assert (added >= 0).all()  # of a ReLU over normalised values: half of them are above 0
        assert 0.3 < float((added > 0).double().mean()) < 0.7
        assert 0.3 < float(added.square().mean()) < 0.7


class OneSet:
    """The same labelled images for all envs at every env-step; brightness tells the label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.labels = torch.arange(BATCH * BATCHES).view(BATCHES, BATCH) % 4
        shape = BATCHES, BATCH, 3, SIZE, SIZE
        images = torch.randn(shape, generator=generator, dtype=torch.float64)
        brightness = torch.tensor([1.0, -1.0, 0.5])[:, None, None]
        self.images = images + (self.labels - 1.5)[..., None, None, None] * brightness

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        images = self.images[index].repeat(1, envs.shape[0], 1, 1)
        labels = self.labels[index][:, None].expand(-1, len(envs))
        return images.contiguous(memory_format=torch.channels_last), labels


def grown(stage: int) -> tuple[Setup, TensorDict, Tensor, ActiveSeeds]:
    """One env per kind of seed, in `stage` at alpha 0.5 (0 in TRAINING), all with the same host,
    which stays.
    """
    given = {"num_blocks": 2, "num_pools": 2, "gradient_stride": 1, "host_lr": 1e-12}
    task = TaskConfig(base_channels=4, seed_lr=0.2, **given)  # type: ignore[arg-type]
    shape = host_shape(task, sort_slots(task, ["r0c1"]))  # 8 channels
    count = len(KINDS)
    weights = pools.allocate(shape, count, CPU, torch.float64)
    host_keys = streams.stream_keys(3, streams.HOST_INIT, (), torch.zeros(count, dtype=torch.int64))
    pools.initialise_hosts_(weights, shape, host_keys)
    blueprint, blend = np.array(KINDS)[:, None].transpose(2, 0, 1)

    alpha = torch.full((count, 1), 0.0 if stage == Stage.TRAINING else 0.5, dtype=torch.float64)
    born = {"newborn": True, "fresh_momentum": True, "ablated": alpha > 0}
    active_seeds = seeds_where(np.ones((count, 1)), stage, blueprint, blend, **born)
    keys = streams.stream_keys(3, streams.SEED_INIT, (), torch.arange(count))
    pools.claim_(weights, shape, pools.claims_of(shape, active_seeds), keys)
    return Setup(shape, task, (Stage.TRAINING,), count, 4), weights, alpha, active_seeds


def epoch(case: tuple[Setup, TensorDict, Tensor, ActiveSeeds]) -> TrainReport:
    """Two steps on the two batches."""
    nets, weights, alpha, active_seeds = case
    plan = planned(TorchEngine(), nets, active_seeds)
    return TorchEngine().train_(nets, weights, alpha, plan, OneSet(), BATCHES)


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING])
def test_after_two_steps_every_tensor_of_every_kind_of_seed_has_a_gradient(stage: int) -> None:
    case = grown(stage)
    epoch(case)
    gradients = epoch(case).gradients
    assert gradients.measured.all()
    assert not [KINDS[env] for env in gradients.vanishing[:, 0].nonzero()]


def test_every_kind_of_seed_lowers_the_loss_of_a_host_that_stays_as_it_is() -> None:
    case = grown(Stage.BLENDING)
    host = case[1]["host", "params"].clone()
    losses = torch.stack([epoch(case).loss for _ in range(6)])
    assert torch.allclose(case[1]["host", "params"], host, rtol=0, atol=1e-9)
    gained = ((losses[0] - losses[-1]) / losses[0]).tolist()
    assert min(gained) > 1e-5, dict(zip(KINDS, gained, strict=True))


def test_a_seed_in_training_learns_behind_its_host() -> None:
    case = grown(Stage.TRAINING)
    before = case[1]["seeds", "r0c1", "params"].clone()
    losses = torch.stack([epoch(case).loss for _ in range(3)])
    assert torch.allclose(losses[0], losses[2], rtol=1e-9)  # the host cannot notice
    moved = (case[1]["seeds", "r0c1", "params"] - before).norm(dim=1)
    assert (moved > 1e-4).all(), dict(zip(KINDS, moved.tolist(), strict=True))
