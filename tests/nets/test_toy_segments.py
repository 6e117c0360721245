"""A kind of segment that the package does not know: a perceptron on vectors, defined here, trained
and validated by the engine in torch with seeds in its slot.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from esper_soa.config.nets import VECTORS, SlotSpec, TaskConfig
from esper_soa.nets import batched
from esper_soa.nets.data import streams
from esper_soa.nets.engine import NetsConfig, ValidationReport
from esper_soa.nets.engines.cpu import engine as cpu_engine
from esper_soa.nets.engines.gpu import support as gpu_support
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.head import MeanLinear
from esper_soa.nets.model.host import HostShape, chain_shape
from esper_soa.nets.model.parts import SPREAD, LayerSpec, Parameter
from esper_soa.nets.model.segments import Forward, PlainPart, StatelessSegment
from esper_soa.nets.model.user_module import UserModule
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.pools import ActiveSeeds, read_active_seeds, slot_seeds
from esper_soa.state import Ramp, Slots, initial
from esper_soa.vocabulary import NUM_BLUEPRINTS, Blend, Blueprint, Stage

CPU = torch.device("cpu")
INPUTS = 6
HIDDEN = 12
CLASSES = 3
BATCH = 16
BATCHES = 4
# Stage and blend of the seed of each network; a stage of DORMANT stands for an empty slot.
SEEDS = [
    (Stage.TRAINING, Blend.ADD),
    (Stage.BLENDING, Blend.ADD),
    (Stage.BLENDING, Blend.MULTIPLY),
    (Stage.BLENDING, Blend.GATE),
    (Stage.DORMANT, Blend.ADD),
]


@dataclass(frozen=True)
class Dense(StatelessSegment):
    """Linear layer and ReLU of vectors, plus its input where `residual`; a slot behind it."""

    inputs: int
    outputs: int
    residual: bool = False
    slot: int = -1

    kind = "dense"

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.inputs,)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.outputs,)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        shapes = (self.outputs, self.inputs), (self.outputs,)
        return tuple(SPREAD.tensor(shape, self.inputs) for shape in shapes)

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)

    @property
    def slot_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.output_shape,)

    @property
    def products(self) -> int:
        return self.inputs * self.outputs

    @property
    def activations(self) -> int:
        return self.outputs

    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        each = x.unflatten(1, (-1, self.inputs)).expand(-1, run.num_nets, -1)
        out = F.relu(batched.linear(each, *folded))
        return run.fill(self.slot, (each + out if self.residual else out).flatten(1))

    def plain_parts(self) -> list[PlainPart]:
        sizes = {"in_features": self.inputs, "out_features": self.outputs}
        layers = [LayerSpec("linear", "Linear", dict(sizes)), LayerSpec("relu", "ReLU", {})]
        return [PlainPart(f"dense{self.inputs}", layers, self.residual, self.slot)]


def perceptron(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU())


PERCEPTRON = Architecture(
    NUM_BLUEPRINTS, "perceptron", (UserModule(perceptron, VECTORS),), residual=False
)
SLOT = SlotSpec("r0c1", 0, 1, HIDDEN)


def toy_shape() -> HostShape:
    inner = Dense(HIDDEN, HIDDEN, residual=True, slot=0)
    segments = (Dense(INPUTS, HIDDEN), inner, MeanLinear((HIDDEN,), CLASSES))
    return chain_shape(segments, (SLOT,), (*BLUEPRINTS, PERCEPTRON))


class Vectors:
    """Vectors whose first numbers tell their label, others for every env; the same every time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        size = len(SEEDS), BATCHES * BATCH, INPUTS
        self.x = torch.randn(size, generator=generator, dtype=torch.float64)
        self.labels = self.x[..., :CLASSES].argmax(-1)

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Vectors [B, n*6] and labels [B, n]."""
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[envs, rows].transpose(0, 1).flatten(1), self.labels[envs, rows].T

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        return [self.batch(envs, index) for index in range(BATCHES)]


class SharedVectors(Vectors):
    """The vectors of env 0 for all."""

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        return super().batches(torch.zeros(1, dtype=torch.int64), size)


Networks = tuple[NetsConfig, TensorDict, Tensor, ActiveSeeds]


def networks(blueprint: int = NUM_BLUEPRINTS) -> Networks:
    """A fresh network per entry of SEEDS."""
    shape = toy_shape()
    count = len(SEEDS)
    weights = pools.allocate(shape, count, CPU, torch.float64)
    keys = streams.stream_keys(3, streams.HOST_INIT, (), torch.arange(count))
    pools.initialise_hosts_(weights, shape, keys)
    stage, blend = torch.tensor(SEEDS).unsqueeze(1).unbind(2)
    slots = initial(Slots, (count, 1), "cpu")
    born = stage != Stage.DORMANT
    slots = slots.replace(
        stage=stage,
        blueprint=torch.where(born, blueprint, slots.blueprint),
        blend=blend,
        alpha=0.5 * (stage == Stage.BLENDING),
        newborn=born,
        fresh_momentum=born,
    )
    active = read_active_seeds(slot_seeds(slots, initial(Ramp, (count, 1), "cpu"), False))
    pools.claim_(weights, shape, active, streams.fold(keys, 1))
    task = TaskConfig(host_lr=0.05, seed_lr=0.05, gradient_stride=1)
    return NetsConfig(shape, task, (Stage.TRAINING,), count, BATCH), weights, slots.alpha, active


def trained(chunk: int) -> tuple[Networks, list[float], ValidationReport]:
    """Networks after some epochs in chunks of so many, their losses, and a validation."""
    nets, *rest = networks()
    nets = nets._replace(env_chunk=chunk)
    engine = TorchEngine()
    losses = [engine.train_(nets, *rest, Vectors(), BATCHES).loss.mean().item() for _ in range(20)]
    return (nets, *rest), losses, engine.validate(nets, *rest, Vectors())


def test_an_unknown_kind_of_segment_is_trained_and_validated_with_its_seeds() -> None:
    (_, weights, _, _), losses, report = trained(len(SEEDS))
    assert losses[-1] < 0.5 * losses[0]
    assert (report.accuracy[:, 0] > 80).all()
    # With and without the seed, where one blends.
    assert [row[row >= 0].tolist() for row in report.subset] == [[0], [1, 0], [1, 0], [1, 0], [0]]
    fresh = networks()[1]
    for part in (("host", "params"), ("seeds", SLOT.name, "params")):
        moved = (weights[part] != fresh[part]).any(1).tolist()
        assert moved == [True] * 4 + [part[0] == "host"]


def test_a_network_of_many_is_trained_as_it_is_alone() -> None:
    (_, together, _, _), _, report = trained(len(SEEDS))
    (_, alone, _, _), _, other = trained(1)
    torch.testing.assert_close(together["host"].to_dict(), alone["host"].to_dict())
    torch.testing.assert_close(together["seeds"].to_dict(), alone["seeds"].to_dict())
    torch.testing.assert_close(report.accuracy, other.accuracy)


def test_a_network_is_what_its_plain_layers_are() -> None:
    (nets, weights, alpha, active), _, _ = trained(len(SEEDS))
    empty = len(SEEDS) - 1
    first, bias, second, bias2, last, bias3 = (
        one[empty] for one in nets.shape.parameters.unpack(weights["host", "params"])
    )
    feed = Vectors()
    hidden = F.relu(F.linear(feed.x[0], first, bias))
    hidden = hidden + F.relu(F.linear(hidden, second, bias2))
    logits = F.linear(hidden, last, bias3)
    report = TorchEngine().validate(nets, weights, alpha, active, SharedVectors())
    loss = F.cross_entropy(logits, feed.labels[0])
    torch.testing.assert_close(report.loss[empty], loss, rtol=1e-10, atol=1e-10)


def test_costs_follow_from_the_segments() -> None:
    shape = toy_shape()
    assert shape.parameters.total == 7 * HIDDEN + 13 * HIDDEN + 13 * CLASSES
    flop = training_flop(shape, CPU)
    assert flop.host == 6 * (INPUTS * HIDDEN + HIDDEN * HIDDEN + HIDDEN * CLASSES)
    counted = flop.seed[0].tolist()
    assert counted[NUM_BLUEPRINTS] == 6 * HIDDEN * HIDDEN
    assert sum(counted) == counted[NUM_BLUEPRINTS]  # the others take images
    assert pools.row_layout(shape, 0).seed == 13 * HIDDEN


def test_a_seed_of_another_topology_is_not_born() -> None:
    with pytest.raises(ValueError, match="conv_light takes images: slot r0c1 has vectors"):
        networks(Blueprint.CONV_LIGHT)


def test_segments_that_do_not_fit_make_no_chain() -> None:
    shape = toy_shape()
    with pytest.raises(ValueError, match=r"segment 2 of the host takes features \[7\], not \[12\]"):
        chain_shape((*shape.segments[:-1], MeanLinear((7,), CLASSES)), shape.slots)


def test_engines_with_kernels_of_their_own_name_the_kind_that_they_do_not_know() -> None:
    shape = toy_shape()
    foreign = "0 (dense), 1 (dense)"
    why = cpu_engine.obstacle("toy", shape, [])
    assert why == f"there is none for segments of the host toy: {foreign}"
    why = gpu_support.obstacle(shape, [], torch.float32, BATCH)
    assert why == f"there is none for segments of the hosts: {foreign}"
