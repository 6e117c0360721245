"""Networks that the native kernels take whole, and their training steps and validation; see nets/native/whole.py.

Hosts of any width are taken whole, whatever their seeds; where the kernels are off, they go through supervised.py and
evaluation.py layer by layer. Used by those two; the trainer asks for an `obstacle` before it turns the kernels on.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.blueprints import norm_groups
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.nets.data import ImageCrops
from esper_soa.nets.host import Block, HostShape
from esper_soa.nets.native import switch, whole
from esper_soa.nets.native.images import cut_images
from esper_soa.nets.native.sgd import Rule
from esper_soa.nets.pools import Roster, row_layout
from esper_soa.state import LEDGER_FLOAT
from esper_soa.vocabulary import BLUEPRINT_NAMES, Blend, Stage

# Kinds of whole.KINDS by blueprint code; -1 where the kernels have none.
_KINDS = np.array([1 + whole.KINDS.index(name) if name in whole.KINDS else -1 for name in BLUEPRINT_NAMES])
# All that chain.h knows of a host and of a block: who adds a field here has to write it there.
_HOST_FIELDS = ("blocks", "num_classes", "slots", "parameters", "statistics")
_BLOCK_FIELDS = ("channels", "pooled", "slot_before_pool", "slot_after_pool")


def obstacle(name: str, shape: HostShape, blueprints: Sequence[str]) -> str:
    """Why the kernels cannot take hosts of the task `name` with seeds of these blueprints; "" where they can."""
    unknown = [one for one in blueprints if one not in whole.KINDS]
    if unknown:
        return f"there is none for the blueprint {', '.join(unknown)}"
    if not is_chain(shape):
        return f"the hosts of {name} are no plain chain of convolutions, batch norms and pools"
    return ""


@lru_cache(maxsize=64)
def is_chain(shape: HostShape) -> bool:
    """Whether the host is what chain.h takes it for: blocks one after the other, their parameters in that order.

    No pool may meet an odd side, of which the kernels would leave a line out.
    """
    if HostShape._fields != _HOST_FIELDS or Block._fields != _BLOCK_FIELDS:
        return False
    channels, halvings = [block.channels for block in shape.blocks], sum(block.pooled for block in shape.blocks)
    kernel = shape.parameters.parameters[0].shape[-1]
    parameters: list[tuple[int, ...]] = []
    for inputs, outputs in zip([IMAGE_CHANNELS, *channels], channels, strict=False):
        parameters += [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]
    parameters += [(shape.num_classes, channels[-1]), (shape.num_classes,)]
    places = [(i, slot) for i, b in enumerate(shape.blocks) for slot in (b.slot_before_pool, b.slot_after_pool)]
    fitting = all(shape.slots[slot].channels == channels[i] for i, slot in places if slot >= 0)
    return (
        [one.shape for one in shape.parameters.parameters] == parameters
        and [one.shape for one in shape.statistics.parameters] == [(count,) for count in channels for _ in range(2)]
        and sorted(shape.execution_order) == list(range(len(shape.slots)))
        and fitting
        and IMAGE_SIZE % 2**halvings == 0
    )


def suits(shape: HostShape, weights: TensorDict) -> bool:
    """Whether the kernels are on and made for such hosts."""
    return switch.takes(weights["host", "params"], dims=2) and is_chain(shape)


def _kinds(roster: Roster, running: np.ndarray) -> np.ndarray:
    kinds = np.where(running, _KINDS[roster.blueprint], 0)
    if (kinds < 0).any():
        raise LookupError(f"no native kernel for blueprint {BLUEPRINT_NAMES[roster.blueprint[kinds < 0][0]]}")
    return kinds


def training_seeds(roster: Roster, detached: tuple[int, ...]) -> whole.Seeds:
    """The running seeds as the kernels know them; detached: stages in which they are cut off from the host's graph."""
    through = roster.stage == Stage.TRAINING
    measured = (through | (roster.stage == Stage.BLENDING)) & ~roster.frozen
    flags = through * whole.THROUGH | np.isin(roster.stage, detached) * whole.DETACHED
    flags |= roster.frozen * whole.FROZEN | measured * whole.MEASURED | _blends(roster)
    return whole.Seeds(_kinds(roster, roster.running), flags)


def validation_seeds(roster: Roster) -> whole.Seeds:
    """The visible seeds as the kernels know them; one that learns behind its host is none."""
    seen = roster.visible & (roster.stage != Stage.TRAINING)
    return whole.Seeds(_kinds(roster, seen), _blends(roster))


def _blends(roster: Roster) -> np.ndarray:
    return (roster.blend == Blend.MULTIPLY) * whole.MULTIPLIED | (roster.blend == Blend.GATE) * whole.GATED


def _layout(shape: HostShape) -> whole.Layout:
    blocks = [(b.channels, b.pooled, b.slot_before_pool, b.slot_after_pool) for b in shape.blocks]
    groups = [norm_groups(spec.channels) for spec in shape.slots]
    kernel = shape.parameters.parameters[0].shape[-1]
    gates = [row_layout(shape, slot).seed for slot in range(len(shape.slots))]
    columns = np.array(blocks, dtype=np.int64).T.copy()
    per_slot = (np.array(column, dtype=np.int64) for column in (groups, gates))
    return whole.Layout(shape.num_classes, kernel, IMAGE_SIZE, columns, *per_slot)


def _networks(shape: HostShape, weights: TensorDict, alpha: Tensor, seeds: whole.Seeds) -> whole.Networks:
    host, rows = weights["host"], [weights["seeds", spec.name] for spec in shape.slots]
    pools = whole.Pools(
        host["params"], host["momentum"], host["statistics"],
        [pool["params"] for pool in rows], [pool["momentum"] for pool in rows],
    )  # fmt: skip
    norm = batched.BATCH_NORM_MOMENTUM, batched.NORM_EPS
    return whole.networks(_layout(shape), pools, seeds, alpha.to(host["params"].dtype).contiguous(), norm)


class StatisticsRule(NamedTuple):
    """Bounds of gradient statistics; see supervised.gradient_statistics."""

    vanishing: float
    exploding: float
    tiny: float


class WholeTraining:
    """Training steps of N networks; `step_` may be called for different envs at the same time."""

    def __init__(
        self,
        shape: HostShape,
        weights: TensorDict,
        alpha: Tensor,
        seeds: whole.Seeds,
        rules: tuple[Rule, Rule, StatisticsRule],
    ) -> None:
        """rules: of the hosts, of the seeds, and of the statistics."""
        self.nets = _networks(shape, weights, alpha, seeds)
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
    """Validation of N networks; `measure` may be called for different envs at the same time."""

    def __init__(self, shape: HostShape, weights: TensorDict, alpha: Tensor, seeds: whole.Seeds) -> None:
        self.nets = _networks(shape, weights, alpha, seeds)

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
