"""Seeds at work in a chunk of networks: rows gathered, blended into the host, written back."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets import batched
from esper_soa.nets.model import blueprints
from esper_soa.nets.model.blueprints import GATE, Architecture, gate_table, seed_table
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.seeds.pools import row_layout
from esper_soa.nets.seeds.seed_plan import THROUGH, Group
from esper_soa.vocabulary import Blend


class StraightThrough(torch.autograd.Function):
    """Hands the host's activations [B, n*C, ...] on as they are; backward, seeds [B, m*C, ...] of
    `nets` get their whole gradient too: h + (s - stop_gradient(s)) without reading seed values.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, host: Tensor, seed: Tensor, nets: Tensor | None, num_nets: int
    ) -> Tensor:  # type: ignore[override]
        ctx.place = (nets, num_nets)  # type: ignore[attr-defined]
        return host.view_as(host)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        return gradient, batched.select_nets(gradient, *ctx.place), None, None  # type: ignore[attr-defined]


def multiply(host: Tensor, seed: Tensor, seed_input: Tensor, alpha: Tensor) -> Tensor:
    """host (1 + alpha tanh(seed - seed_input)); alpha [m] in [0, 1]."""
    factor = batched.per_channel(alpha, host.shape[1] // alpha.shape[0], host.dim() - 2)
    return (host * (1 + factor * torch.tanh(seed - seed_input))).to(host.dtype)


@dataclass
class ActiveGroup:
    """A group with its rows in hand; `params` holds the seed and, under GATE, its gate network."""

    group: Group
    blueprint: Architecture
    channels: int
    params: Tensor  # [m, seed + gate]
    momentum: Tensor  # [m, seed + gate], or all that the optimizer keeps of these
    alpha: Tensor  # [m], in the weights' dtype

    @property
    def sizes(self) -> list[int]:
        """Numbers per parameter tensor, the gate's last."""
        sizes = seed_table(self.blueprint, self.channels).sizes
        return sizes + gate_table(self.channels).sizes if self.group.blend == Blend.GATE else sizes

    def output(self, inputs: Tensor) -> Tensor:
        """Output [B, m*C, H, W] of the seeds."""
        table = seed_table(self.blueprint, self.channels)
        parameters = table.unpack(self.params[:, : table.total])
        return blueprints.seed_forward(self.blueprint, parameters, inputs)

    def blend_in(self, host: Tensor) -> Tensor:
        """[B, m*C, H, W] of the group's networks after the slot."""
        group = self.group
        inputs = host.detach() if group.detached else host
        seed = self.output(inputs)
        if group.blend == Blend.MULTIPLY:
            return multiply(host, seed, inputs, alpha=self.alpha)
        if group.blend == Blend.ADD:
            return batched.interpolate(host, seed, self.alpha)
        table = gate_table(self.channels)
        gates = GATE.forward(table.unpack(self.params[:, -table.total :]), inputs)
        return batched.interpolate(host, seed, self.alpha * gates.squeeze(-1))


def _columns(shape: HostShape, group: Group, width: int) -> list[slice]:
    layout = row_layout(shape, group.slot)
    gate = layout.gate if group.blend == Blend.GATE else 0
    seed = seed_table(shape.blueprint(group.blueprint), shape.slots[group.slot].channels).total
    parts, count = divmod(width, sum(layout))
    columns = list[slice]()
    for first in range(0, parts * sum(layout), sum(layout)):
        start = first + layout.seed
        columns += [slice(first, first + seed), slice(start, start + gate)]
    return [*columns, slice(width - count, width)]


def gather_rows(weights: TensorDict, shape: HostShape, group: Group, alpha: Tensor) -> ActiveGroup:
    """The group's rows, copied out of the pool; alpha [N, S] is the env state's."""
    spec = shape.slots[group.slot]
    pool = weights["seeds", spec.name]

    def rows(name: str) -> Tensor:
        numbers = pool[name].index_select(0, group.rows)
        columns = _columns(shape, group, numbers.shape[1])
        return torch.cat([numbers[:, part] for part in columns], dim=1)

    return ActiveGroup(
        group,
        shape.blueprint(group.blueprint),
        spec.channels,
        params=rows("params"),
        momentum=rows("momentum"),
        alpha=alpha[:, group.slot].index_select(0, group.rows).to(pool["params"].dtype),
    )


def scatter_rows_(weights: TensorDict, shape: HostShape, active: ActiveGroup) -> None:
    """Write the rows back into the pool."""
    group = active.group
    pool = weights["seeds", shape.slots[group.slot].name]
    for name, rows in (("params", active.params), ("momentum", active.momentum)):
        columns = _columns(shape, group, pool[name].shape[1])
        parts = rows.split([part.stop - part.start for part in columns], dim=1)
        for part, numbers in zip(columns, parts, strict=True):
            pool[name][:, part].index_copy_(0, group.rows, numbers)


@dataclass
class SeedFiller:
    """Fills the slots of a pass with groups of seeds."""

    actives: list[ActiveGroup]
    num_nets: int  # n, of the pass

    def occupied(self, slot: int) -> bool:
        return any(active.group.slot == slot for active in self.actives)

    def fill(self, slot: int, x: Tensor, pooled: bool) -> Tensor:
        values = []
        nets = []
        for active in self.actives:
            group = active.group
            if group.slot != slot:
                continue
            features = batched.select_nets(x, group.nets, self.num_nets)
            if group.blend == THROUGH:
                seed = active.output(features.detach() if group.detached else features)
                x = StraightThrough.apply(x, seed, group.nets, self.num_nets)
            elif group.nets is None:  # no other group stands in the slot
                x = active.blend_in(x)
            else:
                values.append(active.blend_in(features))
                nets.append(group.nets)
        if values:
            x = batched.put_nets(x, torch.cat(nets), self.num_nets, values=torch.cat(values, dim=1))
        return F.max_pool2d(x, 2) if pooled else x


class TrainingSeeds(SeedFiller):
    """Fills the slots of a training pass; `leaves`: parameters that this pass differentiates."""

    def __init__(self, actives: list[ActiveGroup], num_nets: int) -> None:
        learning = [
            replace(active, params=active.params.detach().requires_grad_(not active.group.frozen))
            for active in actives
        ]
        super().__init__(learning, num_nets)
        self.leaves = [active.params for active in learning]
