"""The command line that compares settings: `esper-compare a="reward=shaped" b="reward=simplified"
seeds=10`.

Also `python -m esper_soa.compare`. Every group plays every seed on the same hosts and data order,
in a run folder of its own; groups take turns round by round, in alternating order, and share
nothing. The same command with the same `out` goes on where it was cut off. Exit status: 0 done, 1 a
run that failed or a file that could not be written, 2 a mistake that we found.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from esper_soa.arguments import groups_in
from esper_soa.compose import compose_settings
from esper_soa.config import TrainConfig
from esper_soa.errors import check
from esper_soa.ops.command_line import ending_with_status, parser
from esper_soa.ops.comparison import (
    CONFIDENCE,
    MEASURES,
    RESULT,
    SIGNIFICANCE,
    Compared,
    Numbers,
    compared,
    power_note,
)
from esper_soa.ops.files import write_text
from esper_soa.ops.interrupt import importing
from esper_soa.ops.json_lines import Json, MetricsWriter, json_line
from esper_soa.ops.rundir import RunFolder
from esper_soa.ops.start import finished_accuracy
from esper_soa.ops.statistics import mean_interval
from esper_soa.paths import config_dir, user_path
from esper_soa.report.end import report_in
from esper_soa.report.page import NAME

GROUP = re.compile(r"[A-Za-z]\w{0,30}")
OWN = ("seeds", "out")  # settings of this command
# a line per seed and round, of the groups in the order in which they have played it
TURNS = "turns.jsonl"
# Of a run, by where they stand in summary.json; those of grown hosts are means over the hosts of
# its last rounds.
NUMBERS = {
    "accuracy": ("grown", "accuracy"),
    "net": ("grown", "net"),
    "parameters": ("grown", "size"),
    "train_flop": ("grown", "flop"),
    "eps": ("speed", "eps"),
}
HELP = """\
  NAME="setting=value ..."  a group of runs by a name of your own and the overrides that make it; "" changes nothing.
                            Two or more; the others are compared with the first
  +experiment=NAME          as with esper-train; so all other settings, which hold for every group
  seeds=10                  how many seeds, from the setting `seed` on, or which: seeds=[101,102,103]
  out=FOLDER                where the runs go; the same folder goes on where it was cut off (runs/compare/<time>)

  esper-compare +experiment=cifar_3seed a="reward=shaped" b="reward=simplified" seeds=10 rounds=2
"""  # noqa: E501


class Study(NamedTuple):
    """What is to be compared."""

    experiment: str
    common: tuple[str, ...]  # overrides of all groups
    groups: dict[str, tuple[str, ...]]  # overrides by name, the reference first
    seeds: tuple[int, ...]
    out: Path

    def overrides(self, group: str, seed: int) -> list[str]:
        """Of one run."""
        place = self.folder(group, seed)
        here = (f"seed={seed}", f"run_dir='{place}'", "resume=auto")
        return ["report=false", *self.common, *self.groups[group], *here]

    def folder(self, group: str, seed: int) -> Path:
        """Of one run."""
        return self.out / group / f"seed_{seed}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the interpreter with its status where that is not 0."""
    usage = 'esper-compare a="..." b="..." [seeds=10] [out=FOLDER] [setting=value ...]'
    words = parser(usage, "Compare settings over seeds.", HELP)
    words.add_argument("given", nargs="+", help=argparse.SUPPRESS)
    given = words.parse_args(arguments).given
    with ending_with_status():
        failed = compare(study_of(given), Console())
        if failed:
            print("failed runs:", *failed, sep="\n  ", file=sys.stderr)
            sys.exit(1)


def study_of(given: Sequence[str]) -> Study:
    """What the arguments ask for; raises UserError for what cannot be, of any group."""
    own = dict[str, str]()
    groups = dict[str, tuple[str, ...]]()
    common = list[str]()
    experiment = ""
    known = {*(one.name for one in fields(TrainConfig)), *groups_in(config_dir())}
    for argument in given:
        name, equals, value = argument.partition("=")
        if name == "+experiment":
            experiment = value
        elif name in OWN:
            own[name] = value
        elif not equals or name in known or not GROUP.fullmatch(name):
            common.append(argument)
        else:
            check(name not in groups, name, value, "a group of its own: the name is taken")
            groups[name] = _overrides(name, value)
    check(
        len(groups) >= 2,
        "groups",
        ", ".join(groups) or "none",
        'two or more, such as a="reward=shaped" b=""',
    )
    taken = [one for one in common if one.partition("=")[0] in ("seed", "run_dir", "resume")]
    check(not taken, "setting", ", ".join(taken), "left to seeds= and out=")
    settings = [
        compose_settings(experiment, [*common, *overrides]) for overrides in groups.values()
    ]
    place = own.get("out") or str(Path("runs", "compare", time.strftime("%Y-%m-%d_%H-%M-%S")))
    seeds = _seeds(own.get("seeds", "10"), settings[0].seed)
    return Study(experiment, tuple(common), groups, seeds, user_path("out", place).resolve())


def _overrides(name: str, value: str) -> tuple[str, ...]:
    """The overrides of a group; raises UserError where the argument is none."""
    parts = tuple(value.split())
    words = 'a setting of esper-train, or a group: NAME="setting=value ..."'
    check(all("=" in part for part in parts), name, value, words)
    return parts


def _seeds(text: str, first: int) -> tuple[int, ...]:
    """The seeds that `text` stands for: a number of them, or a list in brackets."""
    words = "a number from 1 to 10000, or a list such as [101,102,103] without a seed twice"
    numbers = re.findall(r"\d+", text)
    listed = re.fullmatch(r"\[\s*\d+(\s*,\s*\d+)*\s*\]", text) is not None
    check(listed or text.isdecimal(), "seeds", text, words)
    seeds = (
        tuple(map(int, numbers)) if listed else tuple(range(first, first + min(int(text), 10_001)))
    )
    check(1 <= len(seeds) <= 10_000 and len(set(seeds)) == len(seeds), "seeds", text, words)
    return seeds


class Played(NamedTuple):
    """What the runs of a study came to."""

    numbers: dict[str, dict[int, dict[str, float]]]  # the NUMBERS by group, then by seed
    failed: list[str]  # runs that failed, in words


def compare(study: Study, console: Console) -> list[str]:
    """Play what is missing, print the table and write compare.json; returns the runs that failed,
    in words.
    """
    played = Played({group: {} for group in study.groups}, [])
    for seed in study.seeds:
        play_seed(study, seed, played)
        values = [
            f"{group} {runs[seed]['accuracy']:.2f}"
            for group, runs in played.numbers.items()
            if seed in runs
        ]
        console.print(f"seed {seed}: accuracy {', '.join(values) or 'of none'}", highlight=False)
    whole = [seed for seed in study.seeds if all(seed in runs for runs in played.numbers.values())]
    if whole:
        numbers = {
            group: {name: [runs[seed][name] for seed in whole] for name in NUMBERS}
            for group, runs in played.numbers.items()
        }
        rows = compared(numbers)
        report(console, numbers, rows)
        write_text(study.out / RESULT, json_line(record(study, whole, numbers, rows)) + "\n")
        console.print(
            f"written to {study.out / RESULT}; runs by group and seed beside it", highlight=False
        )
        missing = report_in(study.out)
        console.print(f"report   {missing or study.out / NAME}", highlight=False, soft_wrap=True)
    return played.failed


def play_seed(study: Study, seed: int, played: Played) -> None:
    """Play the runs of a seed that have not ended, a round of each in turn, and note what all of
    them came to.
    """
    folders = {group: RunFolder(study.folder(group, seed)) for group in study.groups}
    asked = {group: study.overrides(group, seed) for group in study.groups}
    missing = {
        group: overrides
        for group, overrides in asked.items()
        if finished_accuracy(folders[group], compose_settings(study.experiment, overrides)) is None
    }
    with importing():
        from esper_soa.lockstep import train_in_turns
        from esper_soa.runs import RecordedRun
    study.out.mkdir(parents=True, exist_ok=True)
    with (
        open(os.devnull, "w", encoding="utf-8") as quiet,
        redirect_stdout(quiet),
        MetricsWriter(study.out / TURNS) as turns,
    ):
        failed = train_in_turns(
            missing,
            lambda number, order: turns.write({"seed": seed, "round": number, "order": order}),
            study.experiment,
        )
    played.failed.extend(f"{group} seed {seed}: {reason}" for group, reason in failed.items())
    for group in asked.keys() - failed.keys():
        summary = RecordedRun(folders[group].path).summary
        played.numbers[group][seed] = {
            name: float(summary[part][key]) for name, (part, key) in NUMBERS.items()
        }


def report(console: Console, numbers: Numbers, rows: Sequence[Compared]) -> None:
    """Print what the groups came to and how they compare."""
    levels = Table(
        box=box.SIMPLE, title=f"means over seeds [{CONFIDENCE:.0%}]", title_justify="left"
    )
    for heading in ("group", *MEASURES.values(), "parameters", "training GFLOP", "EPS"):
        levels.add_column(heading, justify="left" if heading == "group" else "right")
    for group, values in numbers.items():
        measured = [mean_interval(values[name], CONFIDENCE) for name in MEASURES]
        size, flop, eps = (fmean(values[name]) for name in ("parameters", "train_flop", "eps"))
        texts = [f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in measured]
        levels.add_row(group, *texts, f"{size:,.0f}", f"{flop / 1e9:,.3g}", f"{eps:.1f}")
    console.print(levels)
    title = f"against {rows[0].reference}, paired by seed, percent points"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for heading in (
        "group",
        "measure",
        f"difference [{CONFIDENCE:.0%}]",
        "won",
        "effect",
        "p",
        "Holm",
        "verdict",
    ):
        table.add_column(
            heading, justify="left" if heading in ("group", "measure", "verdict") else "right"
        )
    for row in rows:
        mean, low, high = row.interval
        table.add_row(
            row.group,
            MEASURES[row.measure],
            f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]",
            f"{row.won}/{len(row.differences)}",
            f"{row.effect:+.2f}",
            f"{row.p:.3f}",
            f"{row.corrected:.3f}",
            row.verdict,
        )
    console.print(table)
    tests = (
        f"exact two-sided signed rank tests at {SIGNIFICANCE:.0%}, {rows[0].comparisons} "
        "comparisons, Holm's correction"
    )
    console.print(tests, *notes(rows), sep="\n", highlight=False, soft_wrap=True)


def notes(rows: Sequence[Compared]) -> list[str]:
    """What the rows that show no difference leave open."""
    return [
        f"{row.group}, {MEASURES[row.measure]}: {power_note(row)}"
        for row in rows
        if power_note(row)
    ]


def record(
    study: Study, seeds: Sequence[int], numbers: Numbers, rows: Sequence[Compared]
) -> dict[str, Json]:
    """compare.json."""
    return {
        "experiment": study.experiment,
        "common": list(study.common),
        "seeds": list(seeds),
        "groups": {
            name: {"overrides": list(study.groups[name])} | dict(values)
            for name, values in numbers.items()
        },
        "confidence": CONFIDENCE,
        "significance": SIGNIFICANCE,
        "comparisons": [
            {
                "group": row.group,
                "reference": row.reference,
                "measure": row.measure,
                "differences": row.differences,
                "mean": row.interval.mean,
                "low": row.interval.low,
                "high": row.interval.high,
                "effect": row.effect,
                "won": row.won,
                "p": row.p,
                "corrected": row.corrected,
                "verdict": row.verdict,
                "power": power_note(row),
            }
            for row in rows
        ],
    }


if __name__ == "__main__":
    main()
