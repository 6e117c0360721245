"""The base of the steps of training and validation: their inputs, the classifier, and the records
of slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import tree_leaves

from esper_soa.nets.data.images import ImageCrops
from esper_soa.nets.engines.gpu import blocks, slots
from esper_soa.nets.engines.gpu.blocks import BlockPlan
from esper_soa.nets.engines.gpu.kernels.head import HeadOutputs, KernelHead
from esper_soa.nets.engines.gpu.kernels.images import Crops
from esper_soa.nets.engines.gpu.kernels.seed import KernelSlot
from esper_soa.nets.engines.gpu.kernels.tiles import constants, rows
from esper_soa.nets.engines.gpu.kernels.update import TensorTable, tensor_table
from esper_soa.nets.engines.gpu.slots import SlotTable, SlotWorkspace
from esper_soa.nets.engines.gpu.tile_sizes import padded
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.setup import Setup


class Plans(NamedTuple):
    """Tables of a run's hosts, made once."""

    blocks: list[BlockPlan]
    slots: list[SlotTable]
    tensors: list[TensorTable]


class PassInputs(NamedTuple):
    """Inputs of a pass, in static buffers."""

    first: Tensor  # int64 [1 or N, images]: bytes of the bank at which images begin
    labels: Tensor  # int64 [1 or N, images]; -1 does not count
    slot_flags: Tensor  # int32 [N, S], see slot_flags.py
    alpha: Tensor  # float32 [N, S]
    counter: Tensor  # int32 [1], batches so far


def pass_inputs(crops: ImageCrops, slot_flags: Tensor, alpha: Tensor) -> PassInputs:
    """The inputs of a pass that begins."""
    return PassInputs(
        crops.first.contiguous(),
        crops.labels.contiguous(),
        slot_flags,
        alpha=alpha.float().contiguous(),
        counter=torch.zeros(1, dtype=torch.int32, device=alpha.device),
    )


def plans_of(shape: HostShape, device: torch.device) -> Plans:
    """The tables of a host."""
    numbers = range(len(shape.slots))
    tables = [slots.slot_table(shape, number, device) for number in numbers]
    tensors = [tensor_table(shape, number, device) for number in numbers]
    return Plans(blocks.block_plans(shape), tables, tensors)


@dataclass(eq=False)
class PassStep:
    """The batches of a pass, one after the other: a graphs.StaticStep with one key for a run."""

    setup: Setup
    plans: Plans
    weights: TensorDict
    given: PassInputs
    sums: tuple[object, ...]  # what else differs between passes, and what they give
    crops: Crops  # of the bank; its `first` is the given one
    batch: int  # images of each network

    def buffers(self) -> list[Tensor]:
        """The tensors that differ between env-steps."""
        return list(tree_leaves((self.given, self.sums)))

    def block_weights(self, plan: BlockPlan) -> blocks.Weights:
        """A block's columns of the hosts' pools."""
        host = self.weights["host"]
        return blocks.weights_of(plan, host["params"], host["statistics"])

    def slot(self, place: tuple[int, int, bool], work: SlotWorkspace) -> KernelSlot:
        """The record that kernels of a slot read; place: slot, side, whether a pool follows."""
        number, side, pooled = place
        return slots.slot_of(
            self.plans.slots[number],
            self.given.slot_flags,
            self.given.alpha,
            params=self.weights["seeds", self.setup.shape.slots[number].name, "params"],
            work=work,
            size=(side, side),
            pooled=pooled,
        )

    def head(self, features: Tensor) -> KernelHead:
        """The record that kernels of the classifier read; features: [., B, area, C] of the last
        block.
        """
        shape = self.setup.shape
        params = self.weights["host", "params"]
        labels = self.given.labels
        batch, area, channels = features.shape[1:]
        at = shape.parameters.total - shape.num_classes * (channels + 1)
        middle = at + shape.num_classes * channels
        sizes = constants(
            area=area,
            channels=channels,
            classes=shape.num_classes,
            channel_lanes=padded(channels),
            class_lanes=padded(shape.num_classes),
            tile=min(256, triton.next_power_of_2(area)),
        )
        return KernelHead(
            rows(params[:, at:middle]),
            rows(params[:, middle:]),
            labels,
            labels_env=0 if labels.shape[0] == 1 else labels.shape[1],
            counter=self.given.counter,
            batch=batch,
            words=rows(self.given.slot_flags),
            **sizes,
        )


def head_outputs(shape: HostShape, num_nets: int, batch: int, like: Tensor) -> HeadOutputs:
    """Room for the outputs of B = `batch` images of each of `num_nets` networks."""
    wide = like.new_empty(0, dtype=torch.float32)
    return HeadOutputs(
        wide.new_empty(num_nets, batch, padded(shape.segments[-1].input_shape[0])),
        wide.new_empty(num_nets, batch, padded(shape.num_classes)),
        wide.new_empty(num_nets, batch),
        correct=torch.empty(num_nets, batch, dtype=torch.int32, device=like.device),
    )
