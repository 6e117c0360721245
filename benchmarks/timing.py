"""What a timing of one side of a benchmark is made of: seconds by column and by phase."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from esper_soa.system.errors import UserError

Side = TypeVar("Side")

LIVE_ALPHA = 0.5  # of the live seeds of a benchmark
COLUMNS = ("training", "validation", "policy and state machine", "update")
# Column of a phase; else the third.
PARTS = {"training": "training", "data": "training", "validation": "validation"}


class BenchmarkError(UserError):
    """A side did not do the work that was declared, or could not do it."""


class Timing(NamedTuple):
    """One timing, in seconds per env-step of all envs."""

    # By COLUMNS, not cumulative; those that the side does not have are absent.
    columns: dict[str, float]
    phases: dict[str, float]

    @property
    def figures(self) -> dict[str, float]:
        """Seconds by column, each with those before it; "all" of everything, "alone" of policy and
        state machine.
        """
        present = [column for column in COLUMNS if column in self.columns]
        sums = accumulate(self.columns[column] for column in present)
        found = dict(zip(present, sums, strict=True))
        found["all"] = found[present[-1]]
        alone = self.columns.get(COLUMNS[2])
        return found if alone is None else found | {"alone": alone}


def in_columns(
    phases: dict[str, float], seconds: float, columns: tuple[str, ...] = COLUMNS[:3]
) -> dict[str, float]:
    """Seconds by column; what no phase has counted belongs to the last of `columns`."""
    found = dict.fromkeys(columns, 0.0)
    for phase, spent in phases.items():
        found[PARTS.get(phase, COLUMNS[2])] += spent
    found[columns[-1]] += max(0.0, seconds - sum(phases.values()))
    return found


def in_turns(sides: Sequence[Side], repeats: int) -> Iterator[Side]:
    """Every side once per repeat, in alternating order."""
    for repeat in range(repeats):
        yield from sides if repeat % 2 == 0 else reversed(sides)
