"""Networks that the native kernels take whole, and their training steps and validation; see nets/native/whole.py.

A network is taken whole where all its seeds are of one convolution and are added to the host, or learn behind it. That
depends on the network alone, so that its results do not depend on its neighbours; the others go through supervised.py
and evaluation.py layer by layer. Used by those two.
"""

from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.blueprints import norm_groups
from esper_soa.nets.config import IMAGE_SIZE
from esper_soa.nets.data import ImageCrops
from esper_soa.nets.host import HostShape
from esper_soa.nets.native import switch, whole
from esper_soa.nets.native.images import cut_images
from esper_soa.nets.native.library import LANES
from esper_soa.nets.native.sgd import Rule
from esper_soa.nets.pools import Roster
from esper_soa.state import LEDGER_FLOAT
from esper_soa.vocabulary import Blend, Blueprint, Stage

KERNELS = {Blueprint.CONV_LIGHT: 3, Blueprint.CONV_SMALL: 1}  # seeds of one convolution


class Fleet(NamedTuple):
    """Which of N networks are taken whole, and what the kernels know about them."""

    taken: np.ndarray  # bool [N]
    seeds: whole.Seeds

    def others(self) -> np.ndarray:
        """Env numbers of the networks that go layer by layer."""
        return np.flatnonzero(~self.taken)


def _suits(shape: HostShape, weights: TensorDict) -> bool:
    """Whether the kernels are on and made for such hosts: channels in whole vectors."""
    params = weights["host", "params"]
    return switch.takes(params, dims=2) and all(block.channels % LANES == 0 for block in shape.blocks)


def _kernels(roster: Roster) -> np.ndarray:
    """Sides [N, S] of the kernels of the seeds; 0 = the seed is no single convolution."""
    sides = np.zeros(1 + max(roster.blueprint.max(initial=0), *KERNELS), dtype=np.int64)
    sides[list(KERNELS)] = list(KERNELS.values())
    return sides[roster.blueprint]


def training_fleet(
    shape: HostShape, weights: TensorDict, roster: Roster, detached: tuple[int, ...], possible: bool
) -> Fleet:
    """The networks whose training is taken whole; none where it is not `possible` for reasons outside the networks.

    detached: stages in which seeds are cut off from the host's graph.
    """
    running, stage = roster.running, roster.stage
    through = stage == Stage.TRAINING
    sides = np.where(running, _kernels(roster), 0)
    known = ~running | ((sides > 0) & (through | (roster.blend == Blend.ADD)))
    flags = through * whole.THROUGH + np.isin(stage, detached) * whole.DETACHED + roster.frozen * whole.FROZEN
    flags = flags + ((through | (stage == Stage.BLENDING)) & ~roster.frozen) * whole.MEASURED
    return Fleet(known.all(1) & (possible and _suits(shape, weights)), whole.Seeds(sides, flags.astype(np.int64)))


def validation_fleet(shape: HostShape, weights: TensorDict, roster: Roster, possible: bool) -> Fleet:
    """The networks whose validation is taken whole; none where it is not `possible`."""
    visible = roster.visible
    sides = np.where(visible, _kernels(roster), 0)
    known = ~visible | ((sides > 0) & (roster.stage != Stage.TRAINING) & (roster.blend == Blend.ADD))
    return Fleet(known.all(1) & (possible and _suits(shape, weights)), whole.Seeds(sides, np.zeros_like(sides)))


def _layout(shape: HostShape) -> whole.Layout:
    blocks = [(b.channels, b.pooled, b.slot_before_pool, b.slot_after_pool) for b in shape.blocks]
    groups = [norm_groups(spec.channels) for spec in shape.slots]
    kernel = shape.parameters.parameters[0].shape[-1]
    columns = np.array(blocks, dtype=np.int64).T.copy()
    return whole.Layout(shape.num_classes, kernel, IMAGE_SIZE, columns, np.array(groups, dtype=np.int64))


def _networks(shape: HostShape, weights: TensorDict, alpha: Tensor, fleet: Fleet) -> whole.Networks:
    host, seeds = weights["host"], [weights["seeds", spec.name] for spec in shape.slots]
    pools = whole.Pools(
        host["params"], host["momentum"], host["statistics"],
        [pool["params"] for pool in seeds], [pool["momentum"] for pool in seeds],
    )  # fmt: skip
    norm = batched.BATCH_NORM_MOMENTUM, batched.NORM_EPS
    return whole.networks(_layout(shape), pools, fleet.seeds, alpha.to(host["params"].dtype).contiguous(), norm)


class StatisticsRule(NamedTuple):
    """Bounds of gradient statistics; see supervised.gradient_statistics."""

    vanishing: float
    exploding: float
    tiny: float


class WholeTraining:
    """Training steps of a fleet; `step_` may be called for different envs at the same time."""

    def __init__(
        self,
        shape: HostShape,
        weights: TensorDict,
        alpha: Tensor,
        fleet: Fleet,
        rules: tuple[Rule, Rule, StatisticsRule],
    ) -> None:
        """rules: of the hosts, of the seeds, and of the statistics."""
        self.nets = _networks(shape, weights, alpha, fleet)
        self.host, self.seed, self.bounds = whole.rule_of(rules[0]), whole.rule_of(rules[1]), rules[2]

    def step_(
        self, envs: np.ndarray, crops: ImageCrops, loss: Tensor, hits: Tensor, gradients: dict[str, Tensor] | None
    ) -> None:
        """One optimiser step of the networks `envs` (int64 [n]) on `crops` [n, B].

        Adds to loss (float32 [n]) and hits (int64 [n]); writes gradient statistics [N, S] where asked for.
        """
        bank, first, labels = crops.bank, crops.first.contiguous(), crops.labels.contiguous()
        record = whole.Training(
            nets=self.nets, count=envs.size, batch=first.shape[1], envs=envs.ctypes.data, host=self.host,
            seed=self.seed, images=whole.crops_of(bank.lines, first, bank.values), labels=labels.data_ptr(),
            loss=loss.data_ptr(), hits=hits.data_ptr(), vanishing_norm=self.bounds.vanishing,
            exploding_norm=self.bounds.exploding, tiny=self.bounds.tiny,
        )  # fmt: skip
        for name, values in (gradients or {}).items():
            setattr(record, name, values.data_ptr())
        whole.train_(record)


class WholeValidation:
    """Validation of a fleet; `measure` may be called for different envs at the same time."""

    def __init__(self, shape: HostShape, weights: TensorDict, alpha: Tensor, fleet: Fleet) -> None:
        self.nets = _networks(shape, weights, alpha, fleet)

    def measure(
        self, envs: np.ndarray, crops: ImageCrops, codes: tuple[int, ...], ablated: int
    ) -> tuple[Tensor, Tensor]:
        """Loss float64 [n] of the first code and accuracy float64 [n, codes], percent.

        ablated: bit mask of the slots in which the codes differ.
        """
        bank, first, labels = crops.bank, crops.first.contiguous(), crops.labels.contiguous()
        loss = torch.zeros(envs.size, dtype=LEDGER_FLOAT)
        hits = torch.zeros(envs.size, len(codes), dtype=torch.int64)
        counted = torch.zeros(envs.size, dtype=torch.int64)
        code = np.array(codes, dtype=np.int64)
        record = whole.Validation(
            nets=self.nets, count=envs.size, images=first.shape[1], envs=envs.ctypes.data, labels=labels.data_ptr(),
            own=whole.crops_of(bank.lines, first, bank.values), codes=code.size, ablated=ablated, code=code.ctypes.data,
            loss=loss.data_ptr(), hits=hits.data_ptr(), counted=counted.data_ptr(),
        )  # fmt: skip
        shared = cut_images(bank.lines, first.T, bank.values, IMAGE_SIZE) if first.shape[0] == 1 else None
        record.pixels = None if shared is None else shared.data_ptr()
        whole.validate(record)
        return loss / counted, 100.0 * hits.to(LEDGER_FLOAT) / counted[:, None]
