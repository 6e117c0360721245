"""Reductions over all envs of a run, which may be split over processes.

`Reduction` is that of a process which has all N envs: every method returns its input. That of
several is in runtime/ranks.py; all processes call the same methods in the same order.
"""

from collections.abc import Sequence

from torch import Tensor


class Reduction:
    """Sums, extremes and parts over the envs of a run; here all of them are in this process."""

    count = 1  # processes that share the envs
    first_env = 0  # number of the first env of this process

    def all_envs(self, num_here: int) -> int:
        """N, where this process has n = `num_here` envs."""
        return num_here

    def rows_here(self, entries: Tensor, dim: int = 0) -> Tensor:
        """The part of this process of a tensor with an entry for each of N envs along `dim`."""
        return entries

    def local_envs(self, envs: Tensor) -> Tensor:
        """The env numbers int64 [M] that belong to this process, int64 [m]."""
        return envs

    def total(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Sums over all processes; the gradient back is that of this process's part alone."""
        return parts

    def total_gradients(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sums over all processes, by one reduction of all tensors as a flat vector."""
        return gradients

    def extremes(
        self, largest: Sequence[Tensor], smallest: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Elementwise maxima of the former over all processes, and minima of the latter."""
        return list(largest), list(smallest)

    def gather(self, parts: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """The tensors with all N entries along `dim`, in every process, from parts of n entries.

        All are on one device. Numbers travel as float64: integers beyond 2**53 would be rounded.
        """
        return list(parts)

    def all_gather(self, numbers: Tensor) -> list[Tensor]:
        """The numbers of every process, of one shape in all, in their order."""
        return [numbers]

    def check_same(self, numbers: Tensor) -> None:
        """Raise RuntimeError where float32 numbers differ between processes in any bit."""


ALL_ENVS = Reduction()
