"""Seeds at work in a chunk of networks: their rows gathered, blended into the host, and written back.

Given groups from pools.py; supervised.py trains through `TrainingSeeds`, evaluation.py through its own filler.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets import batched, blend
from esper_soa.nets.blueprints import gate_forward, gate_table, seed_forward, seed_table
from esper_soa.nets.host import HostShape
from esper_soa.nets.pools import Group, group_columns
from esper_soa.vocabulary import Blend


@dataclass
class ActiveGroup:
    """A group with its rows in hand; `params` holds the seed and, under GATE, its gate network."""

    group: Group
    channels: int
    params: Tensor  # [m, seed + gate]
    momentum: Tensor  # [m, seed + gate]
    alpha: Tensor  # [m], in the weights' dtype

    @property
    def sizes(self) -> list[int]:
        """Numbers per parameter tensor, the gate's last."""
        sizes = seed_table(self.group.blueprint, self.channels).sizes
        return sizes + gate_table(self.channels).sizes if self.group.blend == Blend.GATE else sizes

    def blend_in(self, host: Tensor, params: Tensor) -> Tensor:
        """Activations [B, m*C, H, W] after the slot; `params` [m, seed + gate] may be a graph leaf."""
        group, table = self.group, seed_table(self.group.blueprint, self.channels)
        seen = host.detach() if group.detached else host
        seed = seed_forward(group.blueprint, table.unpack(params[:, : table.total]), seen)
        if group.blend == Blend.ADD:
            return blend.add(host, seed, self.alpha)
        if group.blend == Blend.MULTIPLY:
            return blend.multiply(host, seed, seen, self.alpha)
        if group.blend == Blend.GATE:
            gates = gate_forward(gate_table(self.channels).unpack(params[:, table.total :]), seen)
            return blend.gate(host, seed, gates, self.alpha)
        return blend.straight_through(host, seed)


def wake(weights: TensorDict, shape: HostShape, group: Group, alpha: Tensor) -> ActiveGroup:
    """The group's rows, copied out of the pool; alpha [N, S] is the ledger's."""
    spec = shape.slots[group.slot]
    pool = weights["seeds", spec.name]
    seed, start, end = group_columns(shape, group)

    def rows(name: str) -> Tensor:
        chosen = pool[name].index_select(0, group.rows)
        return torch.cat([chosen[:, :seed], chosen[:, start:end]], dim=1)

    share = alpha[:, group.slot].index_select(0, group.rows).to(pool["params"].dtype)
    return ActiveGroup(group, spec.channels, rows("params"), rows("momentum"), share)


def put_to_bed_(weights: TensorDict, shape: HostShape, active: ActiveGroup) -> None:
    """Write the rows back into the pool."""
    group = active.group
    pool = weights["seeds", shape.slots[group.slot].name]
    seed, start, end = group_columns(shape, group)
    for name, rows in (("params", active.params), ("momentum", active.momentum)):
        pool[name][:, :seed].index_copy_(0, group.rows, rows[:, :seed])
        if end > start:
            pool[name][:, start:end].index_copy_(0, group.rows, rows[:, seed:])


class TrainingSeeds:
    """Fills the slots of a training pass; `leaves` are the parameters that this pass differentiates."""

    def __init__(self, actives: list[ActiveGroup], num_nets: int) -> None:
        self.actives = actives
        self.num_nets = num_nets
        self.leaves = [active.params.detach().requires_grad_(not active.group.frozen) for active in actives]

    def occupied(self, slot: int) -> bool:
        return any(active.group.slot == slot for active in self.actives)

    def fill(self, slot: int, x: Tensor) -> Tensor:
        for active, leaf in zip(self.actives, self.leaves, strict=True):
            if active.group.slot == slot:
                nets = active.group.nets
                mixed = active.blend_in(batched.take_nets(x, nets, self.num_nets), leaf)
                x = batched.put_nets(x, nets, self.num_nets, mixed)
        return x
