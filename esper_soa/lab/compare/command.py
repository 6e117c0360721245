"""The command line that compares settings: `esper-compare a="reward=shaped" b="" random_seeds=10`.

Also `python -m esper_soa.lab.compare.command`. Every group plays every random seed on the same
hosts and data order, in a run folder of its own. The same command with the same `out` goes on where
it was cut off. Exit status: 0 done, 1 a run that failed or a file that could not be written, 2 a
mistake that we found.
"""

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from esper_soa.config.arguments import options
from esper_soa.config.compose import compose_settings
from esper_soa.config.lab import find_in_lab
from esper_soa.config.paths import user_path
from esper_soa.config.settings import MAX_SEED, TrainConfig
from esper_soa.lab.compare.estimate import show_plan
from esper_soa.lab.compare.grid import grid_of
from esper_soa.lab.compare.lengths import check_runs
from esper_soa.lab.compare.play import StudyPlayer
from esper_soa.lab.compare.study import Study, is_listed
from esper_soa.lab.compare.tables import record, report
from esper_soa.lab.run_folders import COMPARISON_FILE
from esper_soa.system.console import ending_with_status, parser
from esper_soa.system.errors import UserError, check
from esper_soa.system.files import write_text
from esper_soa.system.json_lines import json_line
from esper_soa.training.files.run_folder import RunFolder

GROUP_NAME = re.compile(r"[A-Za-z]\w{0,30}")
WORDS = ("random_seeds", "gflop", "tune", "tune_seeds", "out")  # names that no group can have
FINAL_OF = "final_of="
FIRST_TUNE_SEED = 1_000_000
MOST_BUDGETS = 64
HELP = """\
  NAME="setting=value ..."  a group of runs by a name of your own and the overrides that make it;
                            "" changes nothing. Two or more; the others are compared with the first.
                            With a list for envs, task.host_lr=[0.01,0.02], each value is a group
  NAME="final_of=GROUP"     the networks that hosts of GROUP end with, trained from the first
                            env-step on, at the same training FLOP
  +experiment=NAME          as with esper-train; so all other settings, which hold for every group
  random_seeds=10           how many, from the setting `seed` on, or which: [101,102,103]
  gflop=[200,600]           budgets: training GFLOP of a host. All groups are played at each, with
                            as many env-steps as that buys them; without, at equal env-steps.
                            policy.schedule.germinate=[20%,10%] gives times as shares of them
  tune="task.host_lr=[0.02,0.04,0.08]"  the values of which each group takes its best at each
                            budget on tune_seeds=2 other random seeds, by validation accuracy
                            (text: validation loss); log(a,b) is a, 2a, 4a, ... up to b
  --plan                    print what the study takes, and play nothing
  out=FOLDER                where the runs go (runs/compare/<time>); the same folder goes on where
                            it was cut off

  esper-compare +experiment=cifar_3seed a="reward=shaped" b="reward=simplified" random_seeds=10
"""


def main(arguments: Sequence[str] | None = None) -> None:
    usage = 'esper-compare a="..." b="..." [random_seeds=10] [out=FOLDER] [setting=value ...]'
    words = parser(usage, "Compare settings over random seeds.", HELP)
    words.add_argument("given", nargs="+", help=argparse.SUPPRESS)
    words.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    asked = words.parse_args(arguments)
    with ending_with_status():
        study = study_of(asked.given)
        if asked.plan:
            show_plan(study, Console())
            return
        failed = compare(study, Console())
        if failed:
            print("failed runs:", *failed, sep="\n  ", file=sys.stderr)
            sys.exit(1)


class CommandWords(NamedTuple):
    """The arguments of the command, sorted."""

    experiment: str
    chosen: Mapping[str, str]  # by name of WORDS
    groups: Mapping[str, tuple[str, ...]]
    common: tuple[str, ...]  # overrides of all groups

    @property
    def finals(self) -> dict[str, str]:
        """By name of a group, the one whose final networks it is."""
        first = {name: "".join(overrides[:1]) for name, overrides in self.groups.items()}
        return {
            name: text.removeprefix(FINAL_OF)
            for name, text in first.items()
            if text.startswith(FINAL_OF)
        }


def sort_words(arguments: Sequence[str]) -> CommandWords:
    """Groups, words of the command and settings; raises UserError for what is none."""
    chosen = dict[str, str]()
    groups = dict[str, tuple[str, ...]]()
    common = list[str]()
    experiment = ""
    known = {*(field.name for field in fields(TrainConfig)), *options()}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == "+experiment":
            experiment = value
        elif name == "seeds" and equals:
            raise UserError(
                f"{argument}: random seeds are random_seeds= now. Give random_{argument}"
            )
        elif not equals and Path(argument).is_dir():
            raise UserError(f"{argument}: for runs that are there, give esper-report all of them")
        elif name in WORDS:
            chosen[name] = value
        elif not equals or name in known or not GROUP_NAME.fullmatch(name):
            common.append(argument)
        else:
            check(name not in groups, name, value, allowed="a group of its own: the name is taken")
            words = 'a setting of esper-train, or a group: NAME="setting=value ..."'
            check(all("=" in part for part in value.split()), name, value, allowed=words)
            groups[name] = tuple(value.split())
    return CommandWords(experiment, chosen, groups, common=tuple(common))


def study_of(arguments: Sequence[str]) -> Study:
    """The study that the arguments describe; raises UserError for invalid settings of any group."""
    words = sort_words(arguments)
    finals = words.finals
    for name, grown in finals.items():
        known = grown in words.groups and grown not in finals and len(words.groups[name]) == 1
        allowed = "final_of= alone, with a group that grows"
        check(known, name, " ".join(words.groups[name]), allowed=allowed)
    check_reserved(words)
    settings = {
        name: compose_settings(words.experiment, [*words.common, *overrides])
        for name, overrides in words.groups.items()
        if name not in finals
    }
    several = [name for name, cfg in settings.items() if is_listed(cfg)]
    names = ", ".join(words.groups) or "none"
    allowed = 'two or more, such as a="reward=shaped" b="", or one with a list for envs'
    check(len(words.groups) >= 2 or bool(several), "groups", names, allowed=allowed)
    first = next(iter(settings.values())).seed
    study = Study(
        words.experiment,
        words.common,
        words.groups,
        finals=finals,
        settings=settings,
        random_seeds=seeds_of(words, "random_seeds", first, default="10"),
        budgets=budgets_of(words.chosen["gflop"]) if "gflop" in words.chosen else (),
        grid=grid_of(words.chosen["tune"]) if "tune" in words.chosen else {},
        tune_seeds=seeds_of(words, "tune_seeds", FIRST_TUNE_SEED, default="2"),
        out=user_path("out", words.chosen.get("out") or f"runs/compare/{stamp()}").resolve(),
    )
    check_study(study)
    return study


def check_reserved(words: CommandWords) -> None:
    """Raise UserError for settings that words of the command take the place of."""
    given = [*words.common, *(text for texts in words.groups.values() for text in texts)]
    taken = dict.fromkeys(("seed", "run_dir", "resume"), "random_seeds= and out=")
    taken |= {"steps": "gflop="} if "gflop" in words.chosen else {}
    taken |= dict.fromkeys(("control", "control_budget"), "final_of=") if words.finals else {}
    refused = [text for text in given if text.partition("=")[0] in taken]
    instead = dict.fromkeys(taken[text.partition("=")[0]] for text in refused)
    check(not refused, "setting", ", ".join(refused), allowed=f"left to {' and '.join(instead)}")


def seeds_of(words: CommandWords, name: str, first: int, default: str) -> tuple[int, ...]:
    """The random seeds that a word stands for: so many from `first` on, or a list in brackets."""
    text = words.chosen.get(name, default)
    allowed = "a number from 1 to 10000, or a list such as [101,102,103] without any twice"
    is_list = re.fullmatch(r"\[\s*\d+(\s*,\s*\d+)*\s*\]", text) is not None
    check(is_list or text.isdecimal(), name, text, allowed=allowed)
    numbers = [int(digits) for digits in re.findall(r"\d+", text)]
    seeds = tuple(numbers if is_list else range(first, first + min(*numbers, 10_001)))
    different = 1 <= len(seeds) <= 10_000 and len(set(seeds)) == len(seeds)
    check(different and max(seeds) <= MAX_SEED, name, text, allowed=allowed)
    return seeds


def budgets_of(text: str) -> tuple[float, ...]:
    """The budgets that gflop= names, in rising order."""
    allowed = "a number above 0, or a list such as [200,600,1800] without a number twice"
    try:
        numbers = sorted(float(part) for part in text.strip("[] ").split(","))
    except ValueError:
        numbers = []
    valid = 0 < len({*numbers}) == len(numbers) <= MOST_BUDGETS
    valid = valid and all(0 < number < 1e12 for number in numbers)
    check(valid, "gflop", text, allowed=allowed)
    return tuple(numbers)


def stamp() -> str:
    """The time, as the name of a folder."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def check_study(study: Study) -> None:
    """Raise UserError for groups that cannot be played as the study asks; nothing is played."""
    both = [*study.random_seeds, *study.tune_seeds]
    allowed = "random seeds that random_seeds= does not have"
    apart = not study.grid or len({*both}) == len(both)
    check(apart, "tune_seeds", list(study.tune_seeds), allowed=allowed)
    for name, cfg in study.settings.items() if not study.is_plain else ():
        allowed = "of one task, without a list for envs, with gflop=, tune= or final_of="
        text = " ".join(study.groups[name])
        check(not cfg.worlds and name not in study.listed, name, text, allowed=allowed)
    for group in {*study.finals.values()}:
        allowed = "a policy that grows, for its final networks"
        check(study.settings[group].policy.name != "wait", group, "wait", allowed=allowed)
    check_runs(study)
    old = [path for group in study.settings for path in (study.out / group).glob("seed_*")]
    allowed = "a folder of this version"
    remedy = f"Rename folders such as {old[0]} to random_{old[0].name}." if old else ""
    check(not old, "out", study.out, allowed=allowed, remedy=remedy)


def compare(study: Study, console: Console) -> list[str]:
    """Play what is missing, print the tables, write compare.json; returns failed runs, in words."""
    player = StudyPlayer(study, console)
    place = study.out / COMPARISON_FILE
    tables = []
    for gflop in study.budgets or (0.0,):
        table = player.table(gflop)
        if table.complete and len(table.figures) > 1:
            tables.append(table)
            report(console, study, table)
            write_text(place, json_line(record(study, tables)) + "\n")
    if tables:
        words = f"written to {place}; runs by group and random seed beside it"
        console.print(words, highlight=False, soft_wrap=True)
        files = {"report": RunFolder(study.out).report.name}
        files |= {"figure": "frontier.svg"} if study.budgets else {}
        for kind, name in files.items():
            where = leave_file(f"{kind} of a study", study.out) or study.out / name
            console.print(f"{kind:8} {where}", highlight=False, soft_wrap=True)
    return [f"{name}: {reason}" for name, reason in player.failed.items()]


def leave_file(key: str, folder: Path) -> str:
    """Have the lab's `key` write its file in `folder`; why there is none, or ""."""
    try:
        return str(find_in_lab(key, "it")(folder))
    except UserError as error:
        return f"none: {error}"


if __name__ == "__main__":
    main()
