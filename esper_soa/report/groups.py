"""Runs that differ in nothing but the seed belong together: groups by overrides, and what differs
between settings.

Given records of runs by page.py. Needs no torch.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from esper_soa.report.run_files import RunRecord

# Overrides that say where and how a run is done, or are repeated on purpose: they make no group.
APART = re.compile(
    r"(seed|name|run_dir|resume|report|track|profile|device|checkpoint_\w+|(hydra|compute|telemetry)\..*)"
)


class Group(NamedTuple):
    """Runs of the same overrides but for the seed."""

    label: str
    runs: list[RunRecord]


class Differing(NamedTuple):
    """A setting that is not the same in all runs."""

    name: str
    values: list[str]  # one per run; empty where a run has no such setting


def groups_of(runs: Sequence[RunRecord]) -> list[Group]:
    """The runs by their overrides, in the order of their first runs."""
    by_key: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        by_key.setdefault(key_of(run), []).append(run)
    common = set.intersection(*(set(key) for key in by_key)) if by_key else set()
    return [Group(_label(key, common, members), members) for key, members in by_key.items()]


def key_of(run: RunRecord) -> tuple[str, ...]:
    """The overrides that decide what a run does, sorted."""
    plain = (override.lstrip("+") for override in run.overrides)
    return tuple(sorted(one for one in plain if not APART.fullmatch(one.partition("=")[0])))


def _label(key: Sequence[str], common: set[str], members: Sequence[RunRecord]) -> str:
    own = [override for override in key if override not in common]
    names = list(dict.fromkeys(str(run.settings.get("name", run.label)) for run in members))
    return ", ".join(own) if own else ", ".join(names)


def differing(runs: Sequence[RunRecord]) -> list[Differing]:
    """The settings in which the runs differ, by name."""
    names = sorted(set().union(*(run.settings for run in runs)) if runs else [])
    rows = [Differing(name, [_written(run, name) for run in runs]) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]


def _written(run: RunRecord, name: str) -> str:
    return str(run.settings[name]) if name in run.settings else ""
