"""What training costs in FLOP: one image through a host, and through every seed and gate that can stand in its slots.

Counted once by torch's own counter over the plain functions of host.py and blueprints.py, on tensors without numbers: 2
FLOP per multiplication and addition of convolutions and matrix products, padding counted as pixels; norms, activations
and pools are not counted. A declared cost, so the same whichever kernels compute it. Called by env/world.py.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, SlotSpec
from esper_soa.nets.host import HostShape, train_forward
from esper_soa.nets.model.blueprints import BY_CODE, gate_forward, gate_table, seed_forward, seed_table
from esper_soa.nets.model.parameters import Table
from esper_soa.state import LEDGER_FLOAT
from esper_soa.vocabulary import NUM_BLUEPRINTS

# Training over forward pass: the gradients of inputs and of weights take a forward pass each (Kaplan et al. 2020,
# Scaling laws for neural language models, 2.1; Amodei and Hernandez 2018, AI and compute). The same for all, though the
# first layer and a detached seed need no gradient of their input, and a frozen seed none of its weights.
PASSES = 3
COUNTED = 2  # images that are counted together, as a batch norm of one pixel wants more than one


class TrainingFlop(NamedTuple):
    """FLOP of training on one image; the same for every env."""

    host: float
    seed: Tensor  # float64 [S, 13], by slot and blueprint; 0 where there is no CNN blueprint of the code
    gate: Tensor  # float64 [S], of the gate network that GATE adds


class _Empty:
    """Slots that nobody fills."""

    def occupied(self, slot: int) -> bool:
        """Nowhere."""
        return False

    def fill(self, slot: int, x: Tensor, pooled: bool) -> Tensor:
        """Never called, as no slot is occupied."""
        raise AssertionError(f"slot {slot} is empty")


def training_flop(shape: HostShape, device: torch.device) -> TrainingFlop:
    """The costs of hosts of `shape` and of what can grow in them, on `device`."""
    host, seed, gate = _counts(shape)
    return TrainingFlop(
        host,
        torch.tensor(seed, dtype=LEDGER_FLOAT, device=device),
        torch.tensor(gate, dtype=LEDGER_FLOAT, device=device),
    )


@functools.lru_cache(maxsize=64)
def _counts(shape: HostShape) -> tuple[float, list[list[float]], list[float]]:
    """Of the host, of every seed by slot and blueprint code, and of the gate by slot."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:

        def counted(forward: Callable[[], Tensor]) -> float:
            before = counter.get_total_flops()
            forward()
            return PASSES * (counter.get_total_flops() - before) / COUNTED

        host = counted(partial(_host, shape))
        codes = range(NUM_BLUEPRINTS)
        seed = [
            [counted(partial(_seed, code, spec)) if code in BY_CODE else 0.0 for code in codes] for spec in shape.slots
        ]
        gate = [counted(partial(_gate, spec)) for spec in shape.slots]
    return host, seed, gate


def _host(shape: HostShape) -> Tensor:
    """The forward pass of a host without seeds."""
    statistics = [row.flatten() for row in _unpacked(shape.statistics)]
    images = torch.empty(COUNTED, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE, device="meta")
    return train_forward(shape, _unpacked(shape.parameters), statistics, images, _Empty())


def _seed(blueprint: int, spec: SlotSpec) -> Tensor:
    return seed_forward(blueprint, _unpacked(seed_table(blueprint, spec.channels)), _features(spec))


def _gate(spec: SlotSpec) -> Tensor:
    return gate_forward(_unpacked(gate_table(spec.channels)), _features(spec))


def _unpacked(table: Table) -> list[Tensor]:
    """The parameters of one network, without numbers."""
    return table.unpack(torch.empty(1, table.total, device="meta"))


def _features(spec: SlotSpec) -> Tensor:
    """The activations of one network that a slot is given, without numbers."""
    return torch.empty(COUNTED, spec.channels, spec.size, spec.size, device="meta")
