"""Networks with all kinds of seeds at random, for tests of the GPU's kernels: rosters, weights and
the plain path.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.config.nets import SlotSpec, TaskConfig
from esper_soa.nets.engines.gpu import slot_flags
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture
from esper_soa.nets.model.host import HostShape, host_shape
from esper_soa.nets.model.parts import (
    CHANNELS,
    NARROW,
    REDUCED,
    Conv,
    Depthwise,
    Excite,
    SoftNorm,
    Squeeze,
    Width,
)
from esper_soa.nets.seeds.pools import allocate
from esper_soa.nets.seeds.seed_plan import THROUGH, SeedPlan, groups_of
from esper_soa.nets.seeds.seeds import TrainingSeeds, gather_rows, scatter_rows_
from esper_soa.system.transfers import move_records
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend

# Parts that no blueprint of the package has in these places.
ODD = (
    Architecture(
        13, "late norm", (Conv(Width(2), kernel=1), SoftNorm(), Conv(CHANNELS)), residual=False
    ),
    Architecture(14, "wide kernel", (Depthwise(5), Excite(Squeeze(REDUCED)), Conv(relu=False))),
    Architecture(
        15, "bare", (Conv(NARROW, norm=False, relu=False), Conv(norm=False)), residual=False
    ),
)


DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
# How much further from torch than in the interpreter: division and exp of a GPU are approximate.
APPROXIMATE = 10.0 if DEVICE.type == "cuda" else 1.0
TF32 = 1e-2  # relative, of products in TensorFloat-32, which have 10 bits


def slot_shape(channels: int, odd: bool = False) -> HostShape:
    """Hosts with one slot of this many channels."""
    task = TaskConfig(name="one_slot", base_channels=channels, num_blocks=2, num_pools=0)
    spec = SlotSpec("r0c0", 0, 0, channels, 32, 0.0)
    return host_shape(task, (spec,), BLUEPRINTS + ODD if odd else BLUEPRINTS)


def mixed_plan(
    num_nets: int, num_slots: int, seed: int, codes: tuple[int, ...] = CNN_BLUEPRINTS
) -> SeedPlan:
    """Seeds of all kinds at random, [N, S]."""
    rng = np.random.default_rng(seed)
    size = (num_nets, num_slots)
    blend = rng.choice([THROUGH, Blend.ADD, Blend.MULTIPLY, Blend.GATE], size)
    detached, frozen, running = (rng.random(size) < share for share in (0.5, 0.2, 0.85))
    measured = ~frozen & (rng.random(size) < 0.7)
    return SeedPlan(running, rng.choice(codes, size), blend, detached, frozen, measured)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype)


def random_weights(shape: HostShape, num_nets: int, seed: int) -> TensorDict:
    """Weights of N networks, none of them 0 or 1 as they are at birth."""
    weights = allocate(shape, num_nets, DEVICE, torch.float32)
    for place, pool in enumerate((weights["host"], *weights["seeds"].values())):
        for number, rows in enumerate(pool.values()):
            rows.copy_(0.3 * drawn(seed + 10 * place + number, *rows.shape))
    statistics = weights["host", "statistics"]
    statistics.copy_(1.0 + 0.2 * statistics)
    return weights


def planned_roster(plan: SeedPlan) -> Tensor:
    """int32 [N, S]: what slot_flags.py makes of the env state, of a plan of the host's."""
    flags = plan.running * slot_flags.RUNNING | (plan.blend == THROUGH) * slot_flags.THROUGH
    flags |= (plan.blend == Blend.MULTIPLY) * slot_flags.MULTIPLIED
    flags |= (plan.blend == Blend.GATE) * slot_flags.GATED
    flags |= plan.detached * slot_flags.DETACHED | plan.frozen * slot_flags.FROZEN
    flags |= plan.measured * slot_flags.MEASURED | plan.blueprint << slot_flags.CODE_SHIFT
    return torch.from_numpy(np.where(plan.running, flags, 0).astype(np.int32)).to(DEVICE)


class SlotResult(NamedTuple):
    """What a slot made of features and of the gradient behind it."""

    features: Tensor  # [N, B, H, W, C], pooled where a pool follows
    gradient: Tensor  # [N, B, H, W, C] of the features before it
    rows: Tensor  # [N, width] of the parameters; zero where none is due


def plain_slot(
    shape: HostShape,
    weights: TensorDict,
    plan: SeedPlan,
    alpha: Tensor,
    x: Tensor,
    upstream: Tensor,
) -> SlotResult:
    """The meaning: torch's layers by groups. x [N, B, H, W, C]; a smaller `upstream` stands behind
    a pool.
    """
    num_nets = x.shape[0]
    together = x.permute(1, 0, 4, 2, 3).flatten(1, 2)
    together = together.contiguous(memory_format=torch.channels_last).requires_grad_()
    groups = move_records(groups_of(plan, np.arange(num_nets)), x.device)
    actives = [gather_rows(weights, shape, group, alpha) for group in groups]
    seeds = TrainingSeeds(actives, num_nets)
    out = seeds.fill(0, together, upstream.shape[2] != x.shape[2])
    behind = upstream.permute(1, 0, 4, 2, 3).flatten(1, 2)
    leaves = [together, *(leaf for leaf in seeds.leaves if leaf.requires_grad)]
    first, *found = torch.autograd.grad(out, leaves, behind)
    kept = allocate(shape, num_nets, x.device, torch.float32)
    pairs = zip(actives, seeds.leaves, strict=True)
    trained = [active for active, leaf in pairs if leaf.requires_grad]
    for active, values in zip(trained, found, strict=True):
        scatter_rows_(kept, shape, replace(active, params=values))
    images = (per_net(part, num_nets) for part in (out.detach(), first))
    return SlotResult(*images, kept["seeds", "r0c0", "params"])


def per_net(x: Tensor, num_nets: int) -> Tensor:
    """[B, N*C, H, W] as [N, B, H, W, C]."""
    return x.unflatten(1, (num_nets, -1)).permute(1, 0, 3, 4, 2)
