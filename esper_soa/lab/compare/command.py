"""The command line that compares settings: `esper-compare a="reward=shaped" b="" seeds=10`.

Also `python -m esper_soa.lab.compare.command`. Every group plays every seed on the same hosts and
data order, in a run folder of its own. The same command with the same `out` goes on where it was
cut off. Exit status: 0 done, 1 a run that failed or a file that could not be written, 2 a mistake
that we found.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from esper_soa.config.arguments import options
from esper_soa.config.compose import compose_settings
from esper_soa.config.lab import find_in_lab
from esper_soa.config.paths import user_path
from esper_soa.config.ranges import LIST_PATTERN
from esper_soa.config.settings import TrainConfig
from esper_soa.lab.compare import comparison
from esper_soa.lab.compare.comparison import CONFIDENCE, MeasureComparison, Numbers
from esper_soa.lab.run_folders import COMPARISON_FILE, MEASURES, finished_accuracy
from esper_soa.system.console import KNOWN_ERRORS, ending_with_status, parser
from esper_soa.system.errors import UserError, check
from esper_soa.system.files import write_text
from esper_soa.system.json_lines import Json, json_line
from esper_soa.system.plain_files import make_folder, read_text
from esper_soa.system.signals import import_guard
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.results.statistics import mean_interval
from esper_soa.training.start.begin import make_run_folder

GROUP_NAME = re.compile(r"[A-Za-z]\w{0,30}")
# Places in summary.json; numbers of grown hosts are means over the hosts of the last rounds.
SUMMARY_NUMBERS = {
    "test_accuracy": ("grown", "test_accuracy"),
    "validation_accuracy": ("grown", "validation_accuracy"),
    "net": ("grown", "net"),
    "parameters": ("grown", "size"),
    "train_flop": ("grown", "flop"),
    "eps": ("speed", "eps"),
}
LEVEL_COLUMNS = ("group", *MEASURES.values(), "parameters", "training GFLOP", "EPS")
DIFFERENCE_COLUMNS = (f"difference [{CONFIDENCE:.0%}]", "won", "effect", "p", "Holm")
TEXT_COLUMNS = ("group", "measure", "verdict")
HELP = """\
  NAME="setting=value ..."  a group of runs by a name of your own and the overrides that make it;
                            "" changes nothing. Two or more; the others are compared with the first.
                            With a list for envs, task.host_lr=[0.01,0.02], each value is a group
  +experiment=NAME          as with esper-train; so all other settings, which hold for every group
  seeds=10                  how many, from the setting `seed` on, or which: seeds=[101,102,103]
  out=FOLDER                where the runs go (runs/compare/<time>); the same folder goes on where
                            it was cut off

  esper-compare +experiment=cifar_3seed a="reward=shaped" b="reward=simplified" seeds=10 rounds=2
"""


class Study(NamedTuple):
    """The groups, seeds and folder of a comparison."""

    experiment: str
    common: tuple[str, ...]  # overrides of all groups
    groups: dict[str, tuple[str, ...]]  # overrides by name, the reference first
    seeds: tuple[int, ...]
    out: Path
    # Groups in which envs have lists of settings: each configuration is compared by itself.
    listed: frozenset[str] = frozenset()

    def overrides(self, group: str, seed: int) -> list[str]:
        """The overrides of a run."""
        run_dir = f"run_dir='{self.folder(group, seed)}'"
        group_overrides = (*self.common, *self.groups[group])
        return ["report=false", *group_overrides, f"seed={seed}", run_dir, "resume=auto"]

    def folder(self, group: str, seed: int) -> Path:
        """The folder of a run."""
        return self.out / group / f"seed_{seed}"


def main(arguments: Sequence[str] | None = None) -> None:
    usage = 'esper-compare a="..." b="..." [seeds=10] [out=FOLDER] [setting=value ...]'
    words = parser(usage, "Compare settings over seeds.", HELP)
    words.add_argument("given", nargs="+", help=argparse.SUPPRESS)
    words_given = words.parse_args(arguments).given
    with ending_with_status():
        failed = compare(study_of(words_given), Console())
        if failed:
            print("failed runs:", *failed, sep="\n  ", file=sys.stderr)
            sys.exit(1)


def study_of(arguments: Sequence[str]) -> Study:
    """The study that the arguments describe; raises UserError for invalid settings of any group."""
    chosen = dict[str, str]()
    groups = dict[str, tuple[str, ...]]()
    common = list[str]()
    experiment = ""
    known = {*(field.name for field in fields(TrainConfig)), *options()}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == "+experiment":
            experiment = value
        elif name in ("seeds", "out"):
            chosen[name] = value
        elif not equals or name in known or not GROUP_NAME.fullmatch(name):
            common.append(argument)
        else:
            check(name not in groups, name, value, allowed="a group of its own: the name is taken")
            words = 'a setting of esper-train, or a group: NAME="setting=value ..."'
            check(all("=" in part for part in value.split()), name, value, allowed=words)
            groups[name] = tuple(value.split())
    reserved = [arg for arg in common if arg.partition("=")[0] in ("seed", "run_dir", "resume")]
    check(not reserved, "setting", ", ".join(reserved), allowed="left to seeds= and out=")
    settings = [
        compose_settings(experiment, [*common, *overrides]) for overrides in groups.values()
    ]
    words = 'two or more, such as a="reward=shaped" b="", or one with a list for envs'
    several = frozenset(name for name, cfg in zip(groups, settings, strict=True) if listed(cfg))
    check(len(groups) >= 2 or bool(several), "groups", ", ".join(groups) or "none", allowed=words)
    seeds = _seeds(chosen.get("seeds", "10"), settings[0].seed)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    out = user_path("out", chosen.get("out") or f"runs/compare/{stamp}").resolve()
    return Study(experiment, tuple(common), groups, seeds=seeds, out=out, listed=several)


def _seeds(text: str, first: int) -> tuple[int, ...]:
    """The seeds that `text` stands for: a number of them, or a list in brackets."""
    words = "a number from 1 to 10000, or a list such as [101,102,103] without a seed twice"
    is_list = re.fullmatch(r"\[\s*\d+(\s*,\s*\d+)*\s*\]", text) is not None
    check(is_list or text.isdecimal(), "seeds", text, allowed=words)
    numbers = [int(digits) for digits in re.findall(r"\d+", text)]
    seeds = tuple(numbers if is_list else range(first, first + min(*numbers, 10_001)))
    check(1 <= len(seeds) <= 10_000 and len(set(seeds)) == len(seeds), "seeds", text, allowed=words)
    return seeds


def listed(settings: TrainConfig) -> bool:
    """Whether envs have configurations that do not change with the seed."""
    if settings.worlds:
        return False  # summary.json has means over all tasks
    texts = [str(attrgetter(name)(settings)) for name in settings.differing]
    return bool(texts) and all(map(LIST_PATTERN.fullmatch, texts))


def numbers_of(study: Study, group: str, seed: int) -> dict[str, dict[str, float]]:
    """SUMMARY_NUMBERS of a run by its group; where envs have lists, by group and configuration."""
    summary = json.loads(read_text(RunFolder(study.folder(group, seed)).summary))
    configurations = summary["configurations"] if group in study.listed else [{"settings": {}}]
    found = {}
    for configuration in configurations:
        values = summary | configuration
        label = [group, *(f"{name}={value}" for name, value in configuration["settings"].items())]
        numbers = {name: float(values[part][key]) for name, (part, key) in SUMMARY_NUMBERS.items()}
        found[" ".join(label)] = numbers
    return found


def compare(study: Study, console: Console) -> list[str]:
    """Play what is missing, print the table, write compare.json; returns failed runs, in words."""
    accuracies: dict[str, dict[int, dict[str, float]]] = {}
    failed = list[str]()
    for number, seed in enumerate(study.seeds):
        # the order and its reverse, so that a machine that gets busy favours no group
        reasons = play_seed(study, seed, list(study.groups)[:: -1 if number % 2 else 1])
        failed += [f"{group} seed {seed}: {reason}" for group, reason in reasons.items()]
        for group in study.groups:
            if group not in study.listed:
                accuracies.setdefault(group, {})
            for name, found in ({} if group in reasons else numbers_of(study, group, seed)).items():
                accuracies.setdefault(name, {})[seed] = found
        played = {name: runs[seed] for name, runs in accuracies.items() if seed in runs}
        values = [f"{name} {found['test_accuracy']:.2f}" for name, found in played.items()]
        told = ", ".join(values) or "of none"
        console.print(f"seed {seed}: test accuracy {told}", highlight=False)
    complete = [seed for seed in study.seeds if all(seed in runs for runs in accuracies.values())]
    if complete and len(accuracies) > 1:
        numbers = {
            group: {name: [runs[seed][name] for seed in complete] for name in SUMMARY_NUMBERS}
            for group, runs in accuracies.items()
        }
        rows = comparison.compare_groups(numbers)
        report(console, numbers, rows)
        place = study.out / COMPARISON_FILE
        write_text(place, json_line(record(study, complete, numbers, rows=rows)) + "\n")
        console.print(f"written to {place}; runs by group and seed beside it", highlight=False)
        console.print(f"report   {leave_report(study.out)}", highlight=False, soft_wrap=True)
    return failed


def leave_report(folder: Path) -> str:
    """Where the report of the runs in `folder` is now, or why there is none."""
    try:
        missing = find_in_lab("report of a study", "it")(folder)
    except UserError as error:
        return f"none: {error}"
    return str(missing or RunFolder(folder).report)


def play_seed(study: Study, seed: int, groups: Sequence[str]) -> dict[str, str]:
    """Play a seed's runs that have not ended, in the order of `groups`; why runs failed, by group.

    A run that fails does not end the others.
    """
    with import_guard():
        from esper_soa.training.start.runs import train_in_folder
    failed = {}
    for group in groups:
        overrides = study.overrides(group, seed)
        settings = compose_settings(study.experiment, overrides)
        if finished_accuracy(RunFolder(study.folder(group, seed)), settings) is not None:
            continue
        experiment = [f"+experiment={study.experiment}"] * bool(study.experiment)
        try:
            make_folder(study.folder(group, seed))  # by no link of the study's
            folder = make_run_folder(settings, settings.run_dir)
            train_in_folder(folder, settings, experiment + overrides, verbose=0)
        except KNOWN_ERRORS as error:
            failed[group] = str(error)
    return failed


def report(console: Console, numbers: Numbers, rows: Sequence[MeasureComparison]) -> None:
    """Print what the groups came to and how they compare."""
    levels = _table(f"means over seeds [{CONFIDENCE:.0%}]", LEVEL_COLUMNS)
    for group, values in numbers.items():
        measured = [mean_interval(values[name], CONFIDENCE) for name in MEASURES]
        size, flop, eps = (fmean(values[name]) for name in ("parameters", "train_flop", "eps"))
        texts = [interval.text(".2f") for interval in measured]
        levels.add_row(group, *texts, f"{size:,.0f}", f"{flop / 1e9:,.3g}", f"{eps:.1f}")
    title = f"against {rows[0].reference}, paired by seed, percent points"
    table = _table(title, ["group", "measure", *DIFFERENCE_COLUMNS, "verdict"])
    for row in rows:
        table.add_row(
            row.group,
            MEASURES[row.measure],
            row.interval.text(),
            f"{row.wins}/{len(row.differences)}",
            f"{row.effect:+.2f}" if math.isfinite(row.effect) else "–",
            f"{row.p:.3f}",
            f"{row.corrected:.3f}",
            row.verdict,
        )
    family = f"{comparison.SIGNIFICANCE:.0%}, {rows[0].comparisons} comparisons"
    tests = f"exact two-sided signed rank tests at {family}, Holm's correction"
    notes = [f"{row.group}, {MEASURES[row.measure]}: {row.power}" for row in rows if row.power]
    console.print(levels, table)
    console.print(tests, *notes, sep="\n", highlight=False, soft_wrap=True)


def _table(title: str, headings: Sequence[str]) -> Table:
    """A table whose words stand left and whose numbers stand right."""
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in TEXT_COLUMNS else "right")
    return table


def record(
    study: Study, seeds: Sequence[int], numbers: Numbers, rows: Sequence[MeasureComparison]
) -> dict[str, Json]:
    """compare.json."""
    return {
        "experiment": study.experiment,
        "common": list(study.common),
        "seeds": list(seeds),
        "groups": {
            name: {"overrides": list(study.groups[name.split()[0]])} | dict(values)
            for name, values in numbers.items()
        },
        "confidence": CONFIDENCE,
        "significance": comparison.SIGNIFICANCE,
        "comparisons": [row.record() for row in rows],
    }


if __name__ == "__main__":
    main()
