"""Random permutations that are looked up, not made: any places of them, in any order, without
memory for the others.

A Feistel network over a grid of as many places as there are members, or a few more, keyed by the
owned random streams.
"""

from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

from esper_soa.nets.streams import fold, integers

# moves along rows and columns in turn; half as many leave a dozen members unevenly placed
ROUNDS = 16


def permuted(keys: Tensor, places: Tensor, size: int) -> Tensor:
    """Members int64 [n, m] at `places` (int64 [m], below `size`) of a permutation per key [n].

    Both coordinates of the grid are moved in turn by what the other and the key say (Luby and
    Rackoff 1988); who ends on one of the spare places is moved on until it does not (Black and
    Rogaway 2002). As no more can be in a row than there are, that is a fixed amount of work, which
    no host has to ask about.
    """
    rows, columns = grid(size)
    round_keys = [fold(keys, number)[:, None] for number in range(ROUNDS)]
    found = _moved(places.expand(keys.shape[0], -1), round_keys, rows, columns)
    for _ in range(rows * columns - size):
        found = torch.where(found < size, found, _moved(found, round_keys, rows, columns))
    return found


@lru_cache(maxsize=64)
def grid(size: int) -> tuple[int, int]:
    """(rows, columns) with fewest places to spare near a square, of those the nearest to one."""
    least = min(2, size // 2 + 1)  # with a single row nobody changes the order
    shapes = [
        (rows, -(-size // rows))
        for rows in range(max(least, isqrt(size) // 2), max(least, isqrt(size)) + 1)
    ]
    return min(shapes, key=lambda shape: (shape[0] * shape[1], -shape[0]))


def _moved(place: Tensor, round_keys: list[Tensor], rows: int, columns: int) -> Tensor:
    """Where the network takes the places [n, m] of the grid: a permutation of all of them."""
    row = place // columns
    column = place % columns
    for number, key in enumerate(round_keys):
        if number % 2:
            column = (column + integers(key, row, columns)) % columns
        else:
            row = (row + integers(key, column, rows)) % rows
    return row * columns + column
