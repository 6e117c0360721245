"""Flat rows of parameters: a row per network, a table that says what lies where, how it starts.

A host, or a seed of one blueprint, is a row of numbers; clipping, SGD, re-initialisation and
snapshots work on rows and never look inside. Tables are made by blueprints.py from parts and by
nets/host.py; pools.py and the engines read them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.nets import streams


class Parameter(NamedTuple):
    """One parameter tensor of a network: it starts at value + bound * U(-1, 1)."""

    shape: tuple[int, ...]
    bound: float = 0.0
    value: float = 0.0
    cleared: bool = False  # at 0 instead, in a seed that is germinated with MULTIPLY


class Table(NamedTuple):
    """The parameters of a network in row order."""

    parameters: tuple[Parameter, ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers per parameter tensor."""
        return [math.prod(parameter.shape) for parameter in self.parameters]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """rows [n, total] -> one [n, *shape] view per parameter."""
        if not self.parameters:
            return []
        parts = rows.split(self.sizes, dim=1)
        return [
            part.reshape(part.shape[0], *row.shape)
            for part, row in zip(parts, self.parameters, strict=True)
        ]

    def spread(self, facts: Sequence[float], device: torch.device) -> Tensor:
        """The fact of each parameter tensor for all of its numbers: [total]."""
        each = zip(self.sizes, facts, strict=True)
        return torch.cat([torch.full((size,), fact, device=device) for size, fact in each])

    def initial(self, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Fresh rows [n, total] from the random streams `keys` (int64 [n])."""
        bound = self.spread([one.bound for one in self.parameters], keys.device).to(dtype)
        value = self.spread([one.value for one in self.parameters], keys.device).to(dtype)
        counters = torch.arange(self.total, device=keys.device)
        draws = streams.uniform(keys[:, None], counters, dtype)
        return value + bound * (2 * draws - 1)
