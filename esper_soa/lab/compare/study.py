"""A study of esper-compare and the runs that it is made of: a run for each group and random seed,
in a folder of its own; where there are budgets of training FLOP, for each of them. No torch before
a run is played.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from esper_soa.config.compose import compose_settings
from esper_soa.config.ranges import LIST_PATTERN
from esper_soa.config.settings import TrainConfig
from esper_soa.lab.compare.grid import Grid, configurations_of, format_value
from esper_soa.lab.run_folders import finished_accuracy
from esper_soa.system.console import KNOWN_ERRORS
from esper_soa.system.plain_files import make_folder, read_text
from esper_soa.system.signals import import_guard
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.results.answers import GROWN, read_answers
from esper_soa.training.results.verdict import Configuration
from esper_soa.training.start.begin import make_run_folder

FINAL = "static_final"  # the control that trains final networks from the first env-step on
# Names of lists with a number per host in the episodes of summary.json, by those of their means.
FIGURES = {
    "test_accuracy": "test_accuracies",
    "validation_accuracy": "validation_accuracies",
    "test_loss": "test_losses",
    "net": "nets",
    "parameters": "parameters",
    "env_steps": "num_steps",
    "train_flop": "train_flop",
    "all_flop": "all_flop",
    "validation_loss": "validation_losses",
}
GIGA = 1e9
NOT_IN_FOLDERS = re.compile(r"[^\w.+-]+")


class Study(NamedTuple):
    """The groups, random seeds and folder of a comparison."""

    experiment: str
    common: tuple[str, ...]  # overrides of all groups
    groups: Mapping[str, tuple[str, ...]]  # overrides by name, the reference first
    finals: Mapping[str, str]  # by name of a group, the one whose final networks it is
    settings: Mapping[str, TrainConfig]  # by name of a group that is played, the others
    random_seeds: tuple[int, ...]
    budgets: tuple[float, ...]  # training GFLOP of a host; () = env-steps of the settings
    grid: Grid  # values that are tried
    tune_seeds: tuple[int, ...]  # random seeds on which they are
    out: Path

    @property
    def is_plain(self) -> bool:
        """Whether groups are played as they are, at one length."""
        return not (self.budgets or self.grid or self.finals)

    @property
    def listed(self) -> list[str]:
        """Groups in which envs have lists of settings: each configuration stands by itself."""
        return [group for group, settings in self.settings.items() if is_listed(settings)]

    def sides(self, group: str) -> list[str]:
        """The groups that are hosts of the runs of `group`: itself, and its final networks."""
        return [group, *(final for final, grown in self.finals.items() if grown == group)]


def is_listed(settings: TrainConfig) -> bool:
    """Whether envs have configurations that do not change with the random seed."""
    if settings.worlds:
        return False  # summary.json has means over all tasks
    texts = [str(attrgetter(name)(settings)) for name in settings.differing]
    return bool(texts) and all(map(LIST_PATTERN.fullmatch, texts))


class Runs(NamedTuple):
    """The runs of a group with the same settings but for the random seed."""

    study: Study
    group: str
    place: str  # their folder, below that of the study
    gflop: float = 0.0  # of training a host; 0 = there is no budget
    steps: int = 0  # env-steps; 0 = those of the settings
    values: tuple[Configuration, ...] = ()  # of tuned settings, of which envs take one in turn
    planned: int = 1  # how many values they were expected to have

    def folder(self, random_seed: int) -> Path:
        """The folder of a run."""
        return self.study.out / self.place / f"random_seed_{random_seed}"

    @property
    def envs(self) -> int:
        """Hosts of a run, those of controls not counted."""
        return self.study.settings[self.group].envs * max(1, len(self.values))

    def work(self, values: int) -> float:
        """Training of the hosts of a run with so many values, beside other runs of the study."""
        hosts = self.study.settings[self.group].envs * values
        return (self.gflop or 1.0) * hosts * len(self.study.sides(self.group))

    def overrides(self, random_seed: int) -> list[str]:
        """The overrides of a run."""
        study = self.study
        with_final = len(study.sides(self.group)) > 1
        return [
            "report=false",
            *["control=none", "telemetry.level=rounds"] * (not study.is_plain),
            *study.common,
            *study.groups[self.group],
            *[f"steps={self.steps}"] * (self.steps > 0),
            *_tuned(self.values),
            *[f"envs={self.envs}"] * (len(self.values) > 1),
            *[f"control=[{FINAL}]", "control_budget=flop"] * with_final,
            f"seed={random_seed}",
            f"run_dir='{self.folder(random_seed)}'",
            "resume=auto",
        ]

    def play(self, random_seed: int) -> str:
        """Play a run, unless it has ended; why it failed, else ""."""
        study = self.study
        overrides = self.overrides(random_seed)
        settings = compose_settings(study.experiment, overrides)
        if finished_accuracy(RunFolder(self.folder(random_seed)), settings) is not None:
            return ""
        with import_guard():
            from esper_soa.training.start.runs import train_in_folder
        experiment = [f"+experiment={study.experiment}"] * bool(study.experiment)
        try:
            make_folder(self.folder(random_seed))  # by no link of the study's
            folder = make_run_folder(settings, settings.run_dir)
            train_in_folder(folder, settings, experiment + overrides, verbose=0)
        except KNOWN_ERRORS as error:
            return str(error)
        return ""

    def summary(self, random_seed: int) -> dict:
        """The content of summary.json of a run that has ended, with means over its tasks."""
        return _summary(self.folder(random_seed))

    def summaries(self, random_seed: int) -> list[dict]:
        """The same of each task of a run."""
        folder = self.folder(random_seed)
        tasks = self.study.settings[self.group].worlds
        return [_summary(folder / task) for task in tasks] or [_summary(folder)]

    def figures(
        self, random_seed: int, side: str, values: Configuration = ()
    ) -> dict[str, dict[str, float]]:
        """Means over the hosts of `side` in a run that have the tuned `values`, and env-steps per
        second, by the name of the side; of a group with lists, by name and configuration. With
        several tasks, means over them.
        """
        found: dict[str, list[dict[str, float]]] = {}
        for summary in self.summaries(random_seed):
            score = summary["grown"]
            if side in self.study.finals:
                score = next(control for control in summary["controls"] if control["name"] == FINAL)
            for name, wanted in self._settings_by_name(summary, side, values).items():
                found.setdefault(name, []).append(_figures(score, wanted))
        eps = {"eps": float(self.summary(random_seed)["speed"]["eps"])}
        return {name: _means(rows) | eps for name, rows in found.items()}

    def samples(
        self, random_seed: int, side: str, values: Configuration = ()
    ) -> dict[str, np.ndarray | None]:
        """By the names of `figures`, the percent that their hosts have right of each test sample;
        None where it is not known, and with several tasks, which have different ones.
        """
        if self.study.settings[self.group].worlds:
            return {side: None}
        answers = read_answers(RunFolder(self.folder(random_seed)).answers)
        array = FINAL if side in self.study.finals else GROWN
        summary = self.summary(random_seed)
        named = self._settings_by_name(summary, side, values)
        masks = {name: _hosts(summary["grown"], wanted) for name, wanted in named.items()}
        return {name: answers.means(array, np.array(mask)) for name, mask in masks.items()}

    def _settings_by_name(
        self, summary: Mapping, side: str, values: Configuration
    ) -> dict[str, dict[str, float | str]]:
        """The settings of the hosts of `figures`, by its names."""
        if self.group in self.study.listed:
            rows = [dict(part["settings"]) for part in summary["configurations"]]
            return {_label(side, row): row for row in rows}
        return {side: dict(values) if len(self.values) > 1 else {}}


def _tuned(values: Sequence[Configuration]) -> list[str]:
    """Overrides that give envs the values in turn."""
    columns: dict[str, list[str]] = {}
    for configuration in values:
        for name, value in configuration:
            columns.setdefault(name, []).append(format_value(value))
    texts = {name: ",".join(column) for name, column in columns.items()}
    return [f"{name}={f'[{text}]' if len(values) > 1 else text}" for name, text in texts.items()]


def _summary(folder: Path) -> dict:
    return dict(json.loads(read_text(RunFolder(folder).summary)))


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


def _label(side: str, settings: Mapping[str, object]) -> str:
    return " ".join([side, *(f"{name}={value}" for name, value in settings.items())])


def _hosts(score: Mapping, wanted: Mapping[str, float | str]) -> list[list[bool]]:
    """Whether hosts have the settings `wanted`, by episode."""
    return [
        [
            all(episode["settings"][name][env] == wanted[name] for name in wanted)
            for env in range(len(episode["parameters"]))
        ]
        for episode in score["episodes"]
    ]


def _figures(score: Mapping, wanted: Mapping[str, float | str]) -> dict[str, float]:
    """The means of FIGURES over hosts with the settings `wanted` and a number that is finite."""
    means = {}
    hosts = _hosts(score, wanted)
    for name, key in FIGURES.items():
        found = [
            value
            for episode, mask in zip(score["episodes"], hosts, strict=True)
            for value in compress(episode[key], mask)
        ]
        known = [float(value) for value in found if value is not None]
        means[name] = fmean(known) if known else math.nan
    return means


def tuning_runs(study: Study, group: str, gflop: float, steps: int) -> Runs:
    """The first runs of a tuning: of all values of the grid."""
    values = tuple(configurations_of(study.grid))
    place = "/".join(["tuning", group, *_budget_words(gflop, steps)])
    runs = Runs(study, group, place, gflop=gflop, steps=steps, values=values)
    return runs._replace(planned=len(values))


def table_runs(
    study: Study, group: str, gflop: float, steps: int, values: tuple[Configuration, ...]
) -> Runs:
    """The runs of a table. Their folder has their length and values in its name."""
    texts = [format_value(value) for row in values for _, value in row]
    words = [*_budget_words(gflop, steps), *(NOT_IN_FOLDERS.sub("-", text) for text in texts)]
    place = f"{group}/{'_'.join(words)}" if words else group
    return Runs(study, group, place, gflop=gflop, steps=steps, values=values)


def _budget_words(gflop: float, steps: int) -> list[str]:
    lengths = [f"{steps}steps"] * (steps > 0)
    return ["_".join([f"{gflop:g}gflop", *lengths])] if gflop else []


def planned_runs(study: Study) -> list[tuple[Runs, tuple[int, ...]]]:
    """All runs that the study is known to need, but for lengths and values, with random seeds."""
    planned = []
    for gflop in study.budgets or (0.0,):
        for group in study.settings:
            if study.grid:
                planned.append((tuning_runs(study, group, gflop, steps=0), study.tune_seeds))
            runs = table_runs(study, group, gflop, steps=0, values=())
            planned.append((runs, study.random_seeds))
    return planned
