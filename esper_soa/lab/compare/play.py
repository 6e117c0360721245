"""Plays the runs of a study: those that choose values, then those of the table, budget by budget.
What has ended is not played again. Needs no torch before a run is played.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from rich.console import Console

from esper_soa.lab.compare.lengths import Lengths, corrected
from esper_soa.lab.compare.study import Runs, Study, planned_runs, table_runs, tuning_runs
from esper_soa.lab.compare.tuning import ChosenValues, Tuning, tune
from esper_soa.training.results.answers import stacked
from esper_soa.training.results.progress import duration
from esper_soa.training.results.verdict import Configuration

NO_SAMPLES: Mapping[str, Mapping[int, np.ndarray | None]] = {}
MOST_PLAYS = 3  # of a group at a budget, each with another length


class StudyTable(NamedTuple):
    """The numbers of a study at a budget."""

    gflop: float  # 0 where there are no budgets
    # By group, or by group and configuration where it has lists, and by random seed, those of
    # Runs.figures; of a group without a run that has ended, nothing.
    figures: Mapping[str, Mapping[int, Mapping[str, float]]]
    tunings: Mapping[str, Tuning]  # by group that was played
    # By group and random seed as `figures`, those of Runs.samples.
    samples: Mapping[str, Mapping[int, np.ndarray | None]] = NO_SAMPLES
    by_loss: bool = False  # whether groups are ranked by the test loss, as texts are

    @property
    def choices(self) -> dict[str, ChosenValues]:
        """The values that were chosen, by group."""
        return {
            side: choice
            for tuning in self.tunings.values()
            for side, choice in tuning.choices.items()
        }

    @property
    def complete(self) -> list[int]:
        """The random seeds that every group has played."""
        first, *others = self.figures.values()
        return [seed for seed in first if all(seed in played for played in others)]

    @property
    def numbers(self) -> dict[str, dict[str, list[float]]]:
        """By group and name, a number for each complete random seed, of which there must be one."""
        rows = {
            group: [played[seed] for seed in self.complete]
            for group, played in self.figures.items()
        }
        return {
            group: {name: [row[name] for row in columns] for name in columns[0]}
            for group, columns in rows.items()
        }

    @property
    def answers(self) -> dict[str, np.ndarray | None]:
        """By group, `samples` of the complete random seeds as rows."""
        return {
            group: stacked([played.get(seed) for seed in self.complete])
            for group, played in self.samples.items()
        }


class StudyPlayer:
    """Plays the runs of a study, and says how each ended and what time is left."""

    def __init__(self, study: Study, console: Console) -> None:
        self.study = study
        self.console = console
        self.lengths = Lengths(study)
        self.failed: dict[str, str] = {}  # by name of a run, the reason
        self._ended = set[tuple[str, int]]()
        # FLOP of a host by env-steps, of a group at a budget
        self._costs: dict[tuple[str, float], dict[int, float]] = {}
        # training of hosts in the runs that have ended, their seconds, and what is left of the plan
        self._done = 0.0
        self._seconds = 0.0
        self._by_loss = False  # see StudyTable
        self._left = sum(
            runs.work(runs.planned) * len(random_seeds)
            for runs, random_seeds in planned_runs(study)
        )

    def table(self, gflop: float) -> StudyTable:
        """Play all runs at a budget, or at none (0)."""
        study = self.study
        tunings = self.tune_groups(gflop) if study.grid else {}
        runs = {}
        for group in tunings if study.grid else study.settings:
            tuning = tunings.get(group)
            flop = tuning.choices[group].train_flop if tuning else math.nan
            steps = self.lengths.of_table(group, gflop, tuned_flop=flop)
            values = tuning.values if tuning else ()
            runs[group] = table_runs(study, group, gflop, steps=steps, values=values)
        # the first random seed by itself tells most lengths that miss the budget
        for random_seeds in (study.random_seeds[:1], study.random_seeds):
            changed = runs
            for corrections_left in reversed(range(MOST_PLAYS)):
                self.play_all([*changed.values()], random_seeds)
                may_change = gflop > 0 and corrections_left > 0
                changed = self.corrected(runs, tunings) if may_change else {}
                runs |= changed
        figures = self.figures(runs, tunings)
        samples = self.samples(runs, tunings)
        return StudyTable(gflop, figures, tunings, samples=samples, by_loss=self._by_loss)

    def tune_groups(self, gflop: float) -> dict[str, Tuning]:
        """Choose values for all groups at a budget; without those of which a run fails."""
        tunings = {}
        for group in self.study.settings:
            steps = self.lengths.of_tuning(group, gflop)
            tuning = tune(tuning_runs(self.study, group, gflop, steps=steps), self.play)
            if tuning is None:
                continue
            tunings[group] = tuning
            for side, choice in tuning.choices.items():
                words = "; ".join([choice.text, *choice.edge_texts])
                self.console.print(f"chosen for {side}: {words}", highlight=False, soft_wrap=True)
        return tunings

    def play_all(self, runs: Sequence[Runs], random_seeds: Sequence[int]) -> None:
        """Play runs of several groups, one random seed after the other."""
        for number, random_seed in enumerate(random_seeds):
            # the order and its reverse, so that a machine that gets busy favours no group
            for part in runs[:: -1 if number % 2 else 1]:
                self.play(part, random_seed)

    def play(self, runs: Runs, random_seed: int) -> bool:
        """Play a run unless it has ended; whether it has."""
        key = runs.place, random_seed
        name = f"{runs.place} random seed {random_seed}"
        if key in self._ended or name in self.failed:
            return key in self._ended
        reason = runs.play(random_seed)
        self._left = max(0.0, self._left - runs.work(runs.planned))  # other lengths come on top
        if reason:
            self.failed[name] = reason
            return False
        self._ended.add(key)
        self._done += runs.work(max(1, len(runs.values)))
        summary = runs.summary(random_seed)
        self._by_loss = all(part["perplexity"] for part in runs.summaries(random_seed))
        self._seconds += float(summary["wall_seconds"])
        left = duration(self._left / self._done * self._seconds)
        words = f"{name} ended: {self._done / (self._done + self._left):.0%} done, {left} left"
        self.console.print(words, highlight=False, soft_wrap=True)
        return True

    def corrected(self, runs: Mapping[str, Runs], tunings: Mapping[str, Tuning]) -> dict[str, Runs]:
        """The runs, by group, of groups that miss the budget, with a better length."""
        better = {}
        for group, part in runs.items():
            played = self.figures({group: part}, tunings).get(group, {})
            costs = [figures["train_flop"] for figures in played.values()]
            known = self._costs.setdefault((group, part.gflop), {})
            known[part.steps] = fmean(costs or [math.nan])
            steps = corrected(part.gflop, known, part.steps)
            if steps != part.steps:
                self.lengths.keep_of_table(group, part.gflop, steps)
                better[group] = table_runs(
                    self.study, group, part.gflop, steps=steps, values=part.values
                )
        return better

    def figures(
        self, runs: Mapping[str, Runs], tunings: Mapping[str, Tuning]
    ) -> dict[str, dict[int, dict[str, float]]]:
        """The figures of StudyTable, of the runs by group."""
        study = self.study
        found: dict[str, dict[int, dict[str, float]]] = {}
        for side in study.groups:
            group = study.finals.get(side, side)
            if group not in study.listed:
                found[side] = {}
            for part, values, random_seed in self.ended(side, runs, tunings):
                for name, row in part.figures(random_seed, side, values).items():
                    found.setdefault(name, {})[random_seed] = row
        return found

    def samples(
        self, runs: Mapping[str, Runs], tunings: Mapping[str, Tuning]
    ) -> dict[str, dict[int, np.ndarray | None]]:
        """The samples of StudyTable, of the runs by group."""
        found: dict[str, dict[int, np.ndarray | None]] = {}
        for side in self.study.groups:
            for part, values, random_seed in self.ended(side, runs, tunings):
                for name, row in part.samples(random_seed, side, values).items():
                    found.setdefault(name, {})[random_seed] = row
        return found

    def ended(
        self, side: str, runs: Mapping[str, Runs], tunings: Mapping[str, Tuning]
    ) -> list[tuple[Runs, Configuration, int]]:
        """The runs that have ended of which `side` is hosts, with its values and random seeds."""
        group = self.study.finals.get(side, side)
        values = tunings[group].choices[side].values if group in tunings else ()
        seeds = self.study.random_seeds if group in runs else ()
        return [
            (runs[group], values, random_seed)
            for random_seed in seeds
            if (runs[group].place, random_seed) in self._ended
        ]
