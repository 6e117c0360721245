"""The processes that share a run's envs, one per device or group of cores, and what they exchange.

A rank has some of the envs, neighbours by their number, with their weights and state; policy,
optimiser and normalisers are the same on all, as whatever moves them is summed over all envs first.
`Ranks` is a process alone, to which nothing of that costs anything; `RankGroup` is one of several.
Both are a `Reduction`, which is all that env and agent see of them. Which process is which rank is
settled in training/start/begin.py.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from esper_soa.env.reduction import Reduction
from esper_soa.system.cores import core_numbers
from esper_soa.system.errors import RankLostError, one_line

Value = TypeVar("Value")
# time that a rank waits for the others: of two, one may build while the other compiles
RANK_TIMEOUT = timedelta(minutes=30)


def share_of(num_envs: int, count: int, rank: int) -> range:
    """Env numbers of one of `count` ranks: as many as any other has, or one more on the first."""
    each, more = divmod(num_envs, count)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def core_group(rank: int, ranks: int) -> list[int]:
    """The CPU cores of one of the processes here: all that there are, cut into equal groups.

    Where there are fewer cores than processes, several share one.
    """
    usable = core_numbers()
    first, end = (len(usable) * edge // ranks for edge in (rank, rank + 1))
    return usable[first:end] or [usable[first]]


def keep_to_cores(rank: int, ranks: int) -> None:
    """Keep this process, the `rank`-th on its machine, to its cores, before it works (on Linux)."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, core_group(rank, ranks))


class Ranks(Reduction):
    """A process alone, which has all envs; what only a run of several processes asks."""

    rank = 0
    local_rank = 0  # on its machine, and so the number of its GPU
    beside = 1  # ranks that share the memory of its device, itself included

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def share(self, num_envs: int) -> range:
        """Numbers of the envs of this rank, n of the N of the run."""
        return share_of(num_envs, self.count, self.rank)

    def from_first(self, find: Callable[[], Value]) -> Value:
        """The result of `find` on the first rank, where alone it is called; nothing on a device."""
        return find()

    def gather_values(self, value: Value) -> list[Value]:
        """The value of every rank, in order; what lies on a device is moved to the host before."""
        return [value]

    def at_first(self, value: Value) -> list[Value]:
        """On the first rank what `gather_values` gives; nothing on the others."""
        return [value]


SINGLE_PROCESS = Ranks()


class RankGroup(Ranks):
    """One of several ranks. What it raises where another one ended or hangs is RankLostError."""

    def __init__(self, num_envs: int, local_rank: int = 0, local_ranks: int = 1) -> None:
        """Once torch.distributed is initialised; num_envs: N, of the run."""
        self.num_envs = num_envs
        self.local_rank = local_rank
        self.beside = local_ranks
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self.first_env = self.share(num_envs).start
        with _rank_errors():
            self._host = dist.new_group(backend="gloo", timeout=RANK_TIMEOUT)

    def all_envs(self, num_here: int) -> int:
        return self.num_envs

    def rows_here(self, entries: Tensor, dim: int = 0) -> Tensor:
        share = self.share(self.num_envs)
        return entries.narrow(dim, share.start, len(share))

    def local_envs(self, envs: Tensor) -> Tensor:
        share = self.share(self.num_envs)
        return envs[(envs >= share.start) & (envs < share.stop)]

    def total(self, *parts: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([part.reshape(-1).double() for part in parts])
        pieces = _Total.apply(flat, self).split([part.numel() for part in parts])
        both = zip(pieces, parts, strict=True)
        return tuple(piece.view(part.shape).to(part.dtype) for piece, part in both)

    def total_gradients(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        flat = self.reduced(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        pieces = flat.split([gradient.numel() for gradient in gradients])
        return [piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True)]

    def extremes(
        self, largest: Sequence[Tensor], smallest: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        highest = self._extreme(largest, dist.ReduceOp.MAX)
        return highest, self._extreme(smallest, dist.ReduceOp.MIN)

    def gather(self, parts: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        rows = [part.movedim(dim, 0) for part in parts]
        flat = [row.unsqueeze(1).flatten(1).double() for row in rows]
        flat_rows = torch.cat(flat, dim=1)
        shares = [share_of(self.num_envs, self.count, rank) for rank in range(self.count)]
        most = flat_rows.new_zeros(len(shares[0]), flat_rows.shape[1])
        most[: len(flat_rows)] = flat_rows
        rooms = zip(self.all_gather(most), shares, strict=True)
        gathered = torch.cat([room[: len(share)] for room, share in rooms])
        pieces = gathered.split([row.shape[1] for row in flat], dim=1)
        return [
            piece.reshape(self.num_envs, *row.shape[1:]).to(row.dtype).movedim(0, dim)
            for piece, row in zip(pieces, rows, strict=True)
        ]

    def from_first(self, find: Callable[[], Value]) -> Value:
        box = [find() if self.first else None]
        with _rank_errors():
            dist.broadcast_object_list(box, src=0, group=self._host)
        return box[0]  # type: ignore[return-value]

    def check_same(self, numbers: Tensor) -> None:
        bits = numbers.detach().view(torch.int32).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        sums = self.all_gather(torch.stack([bits.sum(), (bits * places).sum()]))
        if not all(torch.equal(one, sums[0]) for one in sums):
            problem = "the policies of the ranks have drifted apart"
            raise RuntimeError(f"{problem}, which no arithmetic of theirs should do")

    def gather_values(self, value: Value) -> list[Value]:
        boxes: list = [None] * self.count
        with _rank_errors():
            dist.all_gather_object(boxes, value, group=self._host)
        return boxes

    def at_first(self, value: Value) -> list[Value]:
        boxes: list = [None] * self.count
        with _rank_errors():
            dist.gather_object(value, boxes if self.first else None, dst=0, group=self._host)
        return boxes if self.first else []

    def reduced(self, flat: Tensor, kind: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """`flat`, which is overwritten, reduced over all ranks; the same bits on each."""
        with _rank_errors():
            dist.all_reduce(flat, kind)
        return flat

    def _extreme(self, parts: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> list[Tensor]:
        if not parts:
            return []
        return list(self.reduced(torch.stack(list(parts)), operation).unbind())

    def all_gather(self, numbers: Tensor) -> list[Tensor]:
        room = numbers.contiguous()
        rooms = [torch.empty_like(room) for _ in range(self.count)]
        with _rank_errors():
            dist.all_gather(rooms, room, group=self._host if room.device.type == "cpu" else None)
        return rooms


class _Total(torch.autograd.Function):
    """Sums over ranks, whose gradient is passed on as it is."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, part: Tensor, group: RankGroup
    ) -> Tensor:
        ctx.mark_dirty(part)
        return group.reduced(part)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


@contextmanager
def _rank_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        problem = f"another rank has ended or does not answer ({one_line(error)})"
        raise RankLostError(problem) from error
