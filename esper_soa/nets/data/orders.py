"""The samples of a source that envs draw, and their order.

The samples of an env depend on its own stream and on its number of earlier samples, not on other
envs. Nothing here loops over envs or copies to the host.
"""

from copy import copy
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.nets.data.batches import BatchSource
from esper_soa.system.errors import check
from esper_soa.system.streams import DATA_SHARE, VALIDATION_SET, fold, integers, stream_keys

SORT_ELEMENTS = 1 << 24  # sorted, or looked up, at a time, to bound memory
MAX_STORED = 1 << 28  # elements of the orders of a pass, 1 GiB, beyond which they are looked up
FEISTEL_ROUNDS = 16  # moves along rows and columns in turn; 8 leave a dozen members unevenly placed


class SampleOrders:
    """Order in which every env draws training samples: permutations of all, pass after pass.

    Stores the permutations of one pass, int32 [n, D], made by sorting, as all envs are in the same
    pass. A run with more than MAX_STORED elements never makes them; it draws other permutations,
    whose members can be looked up place by place (`permuted`). The sizes of the run decide which
    kind it is; the keys and the position decide what is drawn.
    """

    def __init__(self, keys: Tensor, dataset_size: int, num_envs: int) -> None:
        """keys: int64 [n], stream_keys(seed, DATA_ORDER, (round,), envs). num_envs: of the run."""
        self.keys = keys
        self.dataset_size = dataset_size
        self.stored = num_envs * dataset_size <= MAX_STORED
        self.pass_number = -1
        self.order = torch.empty(0)

    def rows(self, envs: Tensor) -> "SampleOrders":
        """The orders of some of the envs, int64 [m] places among them."""
        part = copy(self)
        part.keys = self.keys[envs]
        part.order = self.order[envs] if len(self.order) else self.order
        return part

    def draw(self, start: int, count: int) -> Tensor:
        """Training samples int64 [n, count] of envs that drew `start` before; may span passes."""
        size = self.dataset_size
        parts = []
        for number in range(start // size, -(-(start + count) // size)):
            first = max(0, start - number * size)
            last = min(size, start + count - number * size)
            parts.append(self._columns(number, slice(first, last)))
        return torch.cat(parts, dim=1).long()

    def _columns(self, pass_number: int, columns: slice) -> Tensor:
        if self.stored:
            if pass_number != self.pass_number:
                self.order = random_permutations(fold(self.keys, pass_number), self.dataset_size)
                self.pass_number = pass_number
            return self.order[:, columns]
        places = torch.arange(columns.start, columns.stop, device=self.keys.device)
        parts = fold(self.keys, pass_number).split(max(1, SORT_ELEMENTS // len(places)))
        found = [permutation_values(part, places, self.dataset_size) for part in parts]
        return torch.cat([part.int() for part in found])


def random_permutations(keys: Tensor, size: int) -> Tensor:
    """One random permutation of 0 to size - 1 per key: int32 [n, size], by sorting hashes."""
    members = torch.arange(size, device=keys.device)
    hashes = (fold(part[:, None], members) for part in keys.split(max(1, SORT_ELEMENTS // size)))
    return torch.cat([part.argsort(dim=1, stable=True).int() for part in hashes])


def permutation_values(keys: Tensor, places: Tensor, size: int) -> Tensor:
    """Members int64 [n, m] at `places` (int64 [m], below `size`) of a permutation per key [n].

    Both coordinates of the grid are moved in turn by what the other and the key say (Luby and
    Rackoff 1988); who ends on one of the spare places is moved on until it does not (Black and
    Rogaway 2002). As no more can be in a row than there are, that is a fixed amount of work.
    """
    rows, columns = grid(size)
    round_keys = [fold(keys, number)[:, None] for number in range(FEISTEL_ROUNDS)]
    index = _permute_places(places.expand(keys.shape[0], -1), round_keys, rows, columns=columns)
    for _ in range(rows * columns - size):
        moved = _permute_places(index, round_keys, rows, columns=columns)
        index = torch.where(index < size, index, moved)
    return index


@lru_cache(maxsize=64)
def grid(size: int) -> tuple[int, int]:
    """(rows, columns) with fewest places to spare near a square, of those the nearest to one."""
    least = min(2, size // 2 + 1)  # with a single row nobody changes the order
    counts = range(max(least, isqrt(size) // 2), max(least, isqrt(size)) + 1)
    shapes = [(rows, -(-size // rows)) for rows in counts]
    return min(shapes, key=lambda shape: (shape[0] * shape[1], -shape[0]))


def _permute_places(place: Tensor, round_keys: list[Tensor], rows: int, columns: int) -> Tensor:
    row = place // columns
    column = place % columns
    for number, key in enumerate(round_keys):
        if number % 2:
            column = (column + integers(key, row, columns)) % columns
        else:
            row = (row + integers(key, column, rows)) % rows
    return row * columns + column


def validation_order(
    num_val: int, val_samples: int, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Validation samples int64 [V] of every env: the first of a fixed shuffle by seed."""
    env = torch.zeros(1, dtype=torch.int64, device=device)
    key = stream_keys(seed, VALIDATION_SET, (), envs=env)
    return random_permutations(key, num_val)[0, :val_samples].long()


def members_of_share(order: Tensor, share: float | Tensor, seed: int, size: int) -> Tensor:
    """Samples int64 [n, m] of a share of the `size` training samples, by the draws `order` [n, m]
    from all of them.

    share: in (0, 1], or float64 [n]. The samples of a share follow from the seed, and a larger
    share has them too; a share of 1 leaves `order` as it is.
    """
    key = stream_keys(seed, DATA_SHARE, (), envs=torch.zeros_like(order[:1, 0]))
    count = torch.as_tensor(share * size, device=order.device).round().clamp(min=1).long()
    count = count.view(-1, 1)
    members = random_permutations(key, size)[0].long()
    return torch.where(count == size, order, members[order % count])


class Split(NamedTuple):
    """Shares of N envs when one pass over the data is divided among them (data.split=true)."""

    num_envs: int
    batch_size: int  # B, of one env
    num_batches: int  # training batches per env and env-step
    train_samples: int  # T = B * num_batches
    val_samples: int  # columns of split_validation_order


def split_sizes(source: BatchSource, batch_size: int, num_envs: int, accumulate: int = 1) -> Split:
    """Shares by the reference's rule, T = B * floor(D / (B N)); SettingError if too small."""
    num_train = len(source.train_labels)
    num_val = len(source.val_labels)
    samples = source.spec.name
    total_batch = batch_size * num_envs
    allowed = (
        f"at most {num_train // batch_size} with data.split=true, so that the {num_train} training "
        f"{samples} of {source.name} give every env a batch of {batch_size}"
    )
    remedy = "Lower envs or batch_size, or set data.split=false."
    check(num_train >= total_batch, "envs", num_envs, allowed=allowed, remedy=remedy)
    num_batches = num_train // total_batch
    allowed = f"a divisor of {num_batches}, the batches per env-step with data.split=true"
    check(num_batches % accumulate == 0, "accumulate", accumulate, allowed=allowed)
    reason = f"so that the validation {samples} of {source.name} give every env one"
    allowed = f"at most {num_val} with data.split=true, {reason}"
    remedy = "Lower envs, or set data.split=false."
    check(num_val >= num_envs, "envs", num_envs, allowed=allowed, remedy=remedy)
    full_batches, rest = divmod(num_val, total_batch)
    train = batch_size * num_batches
    val = full_batches * batch_size + -(-rest // num_envs)
    return Split(num_envs, batch_size, num_batches, train_samples=train, val_samples=val)


def split_training_order(key: Tensor, dataset_size: int, pass_number: int, split: Split) -> Tensor:
    """Training samples int64 [N, T] of one env-step: of every B*N samples of one pass, shuffled by
    the key int64 [1] of all envs, env i takes chunk i; the rest of the samples is dropped.
    """
    order = random_permutations(fold(key, pass_number), dataset_size)[0].long()
    shape = split.num_batches, split.num_envs, split.batch_size
    return order[: split.num_envs * split.train_samples].view(shape).transpose(0, 1).flatten(1)


def split_validation_order(total: int, split: Split, device: torch.device | str = "cpu") -> Tensor:
    """Validation samples int64 [N, val_samples], the same at every env-step: every B*N samples are
    cut among the envs in their order, as by torch.tensor_split; -1 where an env has fewer.
    """
    total_batch = split.batch_size * split.num_envs
    full_batches, rest = divmod(total, total_batch)
    envs = torch.arange(split.num_envs, device=device)[:, None]
    shape = full_batches, split.num_envs, split.batch_size
    order = torch.arange(full_batches * total_batch, device=device).view(shape)
    size, longer = divmod(rest, split.num_envs)
    column = torch.arange(split.val_samples - full_batches * split.batch_size, device=device)
    place = full_batches * total_batch + envs * size + envs.clamp(max=longer) + column
    last = torch.where(column < size + (envs < longer).long(), place, -1)
    return torch.cat((order.transpose(0, 1).flatten(1), last), dim=1)
