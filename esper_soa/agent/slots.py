"""Encoder and scores of seed slots, with one set of weights for any number of slots.

The summary is symmetric in the slots (deep sets, Zaheer et al. 2017); each slot gets its own score
(pointer networks, Vinyals et al. 2015). Slots are the last axis but one.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper_soa.agent.products import Product
from esper_soa.config.nets import IMAGE_SIZE, SlotSpec

WIDE = 256  # channels at which a place reads 1


def place_table(slots: Sequence[SlotSpec]) -> Tensor:
    """Where every slot stands, float32 [S, 4]: row, depth in the host, log2 of channels and size.

    Each reads -1 for the least (row 0, the first block, one channel, one pixel) and 1 for the most
    (row 1, the last block, 256 channels, the whole image); only wider hosts go beyond.
    """
    rows = []
    for slot in slots:
        width = math.log2(slot.channels) / math.log2(WIDE)
        size = math.log2(max(slot.size, 1)) / math.log2(IMAGE_SIZE)
        rows.append((slot.row, slot.depth, width, size))
    return 2 * torch.tensor(rows) - 1


class SlotEncoder(nn.Module):
    """Encodings [..., S, W] of what is known of every slot [..., S, inputs]."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(Product(num_inputs, width), nn.LayerNorm(width), nn.ReLU())

    def forward(self, features: Tensor, embedded: Tensor, places: Tensor) -> Tensor:
        """features [..., S, 31], normalised; embedded [..., S, E]: of blueprints; places [S, 4]."""
        expanded = places.expand(*features.shape[:-1], -1)
        return self.net(torch.cat([features, embedded, expanded], dim=-1))


def summary(slots: Tensor) -> Tensor:
    """Mean and largest [..., 2 W] of encodings [..., S, W] over the slots, whatever their order."""
    return torch.cat([slots.mean(-2), slots.amax(-2)], dim=-1)


def slot_encoding(slots: Tensor, slot: Tensor) -> Tensor:
    """Encoding [..., W] of the slot int64 [...] among the encodings [..., S, W]."""
    return torch.take_along_dim(slots, slot[..., None, None], dim=-2).squeeze(-2)


class SlotScores(nn.Module):
    """A number for every slot [..., S] from a context [..., C] and the encodings [..., S, W].

    The pointer of Vinyals et al. (2015), u_s = v . f(A context + B e_s), with ReLU for f.
    """

    def __init__(self, context: int, slot: int, width: int) -> None:
        super().__init__()
        self.context = Product(context, width)
        self.slot = Product(slot, width, bias=False)
        self.score = nn.Linear(width, 1)

    def forward(self, context: Tensor, slots: Tensor) -> Tensor:
        """The context is multiplied once, not once per slot."""
        hidden = torch.relu(self.context(context).unsqueeze(-2) + self.slot(slots))
        return self.score(hidden).squeeze(-1)
