"""Runs that differ in nothing but the random seed belong together: groups by overrides, how each
stands, and every pair of groups with its t test.

A run counts with one number, the mean test accuracy of its hosts at the end; hosts of a run are not
independent of each other. Runs that have not come to their end are left out, and counted. Needs no
torch.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from operator import sub
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from esper_soa.lab.report.run_files import (
    Record,
    RunRecord,
    listed,
    mean_of,
    number,
    part,
    read_json,
)
from esper_soa.lab.run_folders import COMPARISON_FILE, MAX_DEPTH, by_value
from esper_soa.training.results.answers import GROWN, stacked
from esper_soa.training.results.statistics import (
    Estimate,
    Interval,
    estimate,
    holm,
    paired_answers,
)

# Overrides that say where and how a run is done, or are repeated on purpose: they make no group.
IGNORED_SETTINGS = re.compile(
    r"(seed|name|run_dir|resume|report|track|profile|device|checkpoint_\w+|(hydra|compute|telemetry)\..*)"
)
CONFIDENCE = 0.95
SIGNIFICANCE = 0.05  # of the tests, all comparisons together


class RunGroup(NamedTuple):
    """Runs of the same overrides but for the seed."""

    label: str
    runs: list[RunRecord]

    @property
    def ended(self) -> list[RunRecord]:
        """Those that have come to their end with a finite test accuracy."""
        return [run for run in self.runs if run.accuracy is not None]

    @property
    def accuracies(self) -> list[float]:
        """Percent, of the runs that have ended."""
        return [run.accuracy for run in self.runs if run.accuracy is not None]


class FinishedGroup(NamedTuple):
    """A group by the runs that have come to their end."""

    label: str
    runs: int  # that have ended
    left_out: int  # that have not
    accuracy: Interval  # of the test images, percent, mean over runs
    # Percent points over the control, mean over runs; None where one has no control.
    gain: Interval | None
    parameters: float | None  # mean over runs and hosts
    train_flop: float | None


class Pair(NamedTuple):
    """Two groups, compared where both have ended with two random seeds or more."""

    label: str
    other: str
    seeds: int  # random seeds with which both have ended
    found: Estimate  # percent points, the first group less the other, paired by random seed
    adjusted: float  # p for all comparisons together (Holm 1979)


def groups_of(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """The runs of a study by the names of its command line, others by their overrides: in the order
    of their first runs, and of numbers that are all in which they differ.
    """
    by_key: dict[tuple[str, ...], list[RunRecord]] = {}
    given = _given_names(runs)
    for run in runs:
        by_key.setdefault(given.get(run.path) or key_of(run), []).append(run)
    common = set.intersection(*(set(key) for key in by_key)) if by_key else set()
    groups: dict[str, RunGroup] = {}
    for key, members in by_key.items():
        distinct = [override for override in key if override not in common]
        names = dict.fromkeys(str(run.settings.get("name", run.label)) for run in members)
        label = ", ".join(distinct or names)
        groups[label] = RunGroup(label, [replace(run, group=label) for run in members])
    return [groups[label] for label in by_value(groups)]


def _given_names(runs: Sequence[RunRecord]) -> dict[Path, tuple[str, ...]]:
    """The names that a command line of esper-compare gave the groups of runs, by their paths."""
    folder = study_folder(runs)
    study = read_json(folder / COMPARISON_FILE) if folder else {}
    tables = [study, *listed(study, "budgets")]
    names = {name.split()[0] for table in tables for name in part(table, "groups")}
    places = {run.path: run.path.resolve().relative_to(folder or "/").parts for run in runs}
    return {path: (" ".join(at[:-1]),) for path, at in places.items() if {*at[:1]} & names}


def key_of(run: RunRecord) -> tuple[str, ...]:
    """The overrides that decide what a run does, sorted."""
    plain = (override.lstrip("+") for override in run.overrides)
    return tuple(sorted(x for x in plain if not IGNORED_SETTINGS.fullmatch(x.partition("=")[0])))


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The settings in which the runs differ, by name: a value per run, empty where it has none."""
    names = sorted(set().union(*(run.settings for run in runs)))
    by_name = {name: [str(run.settings.get(name, "")) for run in runs] for name in names}
    return {name: values for name, values in by_name.items() if len(set(values)) > 1}


def standings(groups: Sequence[RunGroup]) -> list[FinishedGroup]:
    """Every group that has a run at its end, the highest accuracy first."""
    rows = []
    for group in groups:
        ended = group.ended
        gains = [run.gain for run in ended if run.gain is not None]
        if ended:
            answers = stacked([run.samples.get(GROWN) for run in ended])
            gain = estimate(gains, CONFIDENCE, stacked([run.gain_by_sample for run in ended]))
            finished = FinishedGroup(
                group.label,
                len(ended),
                len(group.runs) - len(ended),
                accuracy=estimate(group.accuracies, CONFIDENCE, answers).interval,
                gain=gain.interval if len(gains) == len(ended) else None,
                parameters=mean_of([number(run.summary, "grown", "size") for run in ended]),
                train_flop=mean_of([number(run.summary, "grown", "flop") for run in ended]),
            )
            rows.append(finished)
    return sorted(rows, key=lambda finished: -finished.accuracy.mean)


def pairs(groups: Sequence[RunGroup]) -> list[Pair]:
    """All pairs of groups that have ended with two random seeds in common or more, surest first; p
    also for all pairs together.
    """
    found = []
    for first, other in combinations(groups, 2):
        seeds = sorted(_seeds(first) & _seeds(other))
        if len(seeds) > 1:
            (mine, answers), (theirs, others) = _rows(first, seeds), _rows(other, seeds)
            paired = paired_answers(answers, others)
            difference = estimate(list(map(sub, mine, theirs)), CONFIDENCE, paired)
            found.append(Pair(first.label, other.label, len(seeds), found=difference, adjusted=1.0))
    adjusted = holm([pair.found.p for pair in found])
    both = zip(found, adjusted, strict=True)
    return sorted((pair._replace(adjusted=p) for pair, p in both), key=lambda pair: pair.found.p)


def _seeds(group: RunGroup) -> set[float]:
    """The random seeds with which runs have ended."""
    seeds = {number(run.settings, "seed") for run in group.ended}
    return {seed for seed in seeds if seed is not None}


def _rows(group: RunGroup, seeds: Sequence[float]) -> tuple[list[float], np.ndarray | None]:
    """The accuracy of every random seed, mean over its runs; and on each test sample, if known."""
    runs = [[run for run in group.ended if number(run.settings, "seed") == seed] for seed in seeds]
    samples = [stacked([run.samples.get(GROWN) for run in part]) for part in runs]
    means = [None if rows is None else rows.mean(0) for rows in samples]
    return [fmean(run.accuracy or 0.0 for run in part) for part in runs], stacked(means)


def study_of(groups: Sequence[RunGroup]) -> Record:
    """The content of compare.json of the folder that all runs are in; empty without one."""
    folder = study_folder([run for group in groups for run in group.runs])
    return read_json(folder / COMPARISON_FILE) if folder else {}


def study_folder(runs: Sequence[RunRecord]) -> Path | None:
    """The folder with compare.json that all runs are in; None without one."""
    paths = [run.path.resolve() for run in runs]
    above = [folder for folder in paths[0].parents if all(folder in path.parents for path in paths)]
    studies = (folder for folder in above[:MAX_DEPTH] if (folder / COMPARISON_FILE).is_file())
    return next(studies, None)
