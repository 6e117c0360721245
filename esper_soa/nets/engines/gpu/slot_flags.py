"""The seed in a slot and how it takes part in a pass, as a number per network and slot.

Made without a read by the host; the kernels branch on it. ENDED is of the whole network, whose
episode is over: it stands in every slot, and nothing of the network moves. Imports no Triton.
"""

import torch
from torch import Tensor

from esper_soa.nets.seeds.pools import SlotSeeds
from esper_soa.state import stage_in
from esper_soa.vocabulary import Blend, Stage

FLAGS = [1 << bit for bit in range(9)]
RUNNING, THROUGH, MULTIPLIED, GATED, DETACHED, FROZEN, MEASURED, ABLATED, ENDED = FLAGS
CODE_SHIFT = 9  # the blueprint's code stands above the flags


def training_flags(seeds: SlotSeeds, detached_stages: tuple[int, ...]) -> Tensor:
    """int32 [N, S] of a training pass."""
    measured = stage_in(seeds.stage, (Stage.TRAINING, Stage.BLENDING)) & ~seeds.frozen
    return _slot_words(
        seeds, seeds.running, detached_stages, marks=[(seeds.frozen, FROZEN), (measured, MEASURED)]
    )


def validation_flags(seeds: SlotSeeds, detached_stages: tuple[int, ...]) -> Tensor:
    """int32 [N, S] of a validation pass: seeds with alpha above 0, ABLATED if rows omit them."""
    return _slot_words(seeds, seeds.visible, detached_stages, marks=[(seeds.ablated, ABLATED)])


def _slot_words(
    seeds: SlotSeeds,
    running: Tensor,
    detached_stages: tuple[int, ...],
    marks: list[tuple[Tensor, int]],
) -> Tensor:
    through = seeds.stage == Stage.TRAINING
    paths = [
        (through, THROUGH),
        ((seeds.blend == Blend.MULTIPLY) & ~through, MULTIPLIED),
        ((seeds.blend == Blend.GATE) & ~through, GATED),
    ]
    detached = [(stage_in(seeds.stage, detached_stages), DETACHED)] if detached_stages else []
    words = (seeds.blueprint << CODE_SHIFT) | RUNNING
    for where, flag in [*paths, *detached, *marks]:
        words = words | where.long() * flag
    words = torch.where(running, words, 0)
    return (words if seeds.over is None else torch.where(seeds.over, ENDED, words)).int()
