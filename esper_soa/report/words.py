"""The sentence at the head of a report, and the numbers beside it.

Given groups of runs by page.py. A run that has not come to its end is told as such. Needs no torch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from esper_soa.ops.progress import duration
from esper_soa.ops.statistics import Interval
from esper_soa.ops.verdict import control_words, shown
from esper_soa.report.groups import Group
from esper_soa.report.run_files import RunRecord, number, part
from esper_soa.report.standings import LEVEL, Pair, Standing, pairs, standings

NOTHING = "–"  # what is told where a number is not known
PREFIXES = ("", "k", "M", "G", "T", "P", "E")


class Tile(NamedTuple):
    """A number that stands out."""

    title: str
    value: str
    note: str = ""


def verdict_of(groups: Sequence[Group]) -> str:
    """What came of the runs, in a sentence or two."""
    runs = [run for group in groups for run in group.runs]
    if len(runs) == 1:
        return _of_one(runs[0])
    found = standings(groups)
    if not found:
        return f"None of {len(runs)} runs has come to its end: what follows is how far they are."
    return (
        _of_seeds(found[0]) if len(groups) == 1 else _of_groups(found, pairs(groups), len(groups))
    )


def _of_one(run: RunRecord) -> str:
    said = run.summary.get("verdict")
    if isinstance(said, str):
        return said
    accuracy = number(run.summary, "grown", "accuracy")
    if accuracy is not None:
        return f"The hosts end at {accuracy:.2f} %; there is no control to set them beside."
    if not run.rounds:
        return "Not finished: no round has come to its end yet."
    first, last = (number(line, "accuracy", "mean") for line in (run.rounds[0], run.rounds[-1]))
    told = f"Not finished: {len(run.rounds)} of {run.planned} rounds are played"
    if first is None or last is None:
        return f"{told}."
    return f"{told}; hosts ended the first at {first:.2f} % and the last at {last:.2f} %."


def _of_seeds(one: Standing) -> str:
    """Several runs of the same settings."""
    ended = f"{one.runs} runs end at {bounded(one.accuracy)} %"
    if one.gain is None:
        return f"{ended}; not all of them have a control to be set beside."
    if one.gain.low > 0:
        return (
            f"Growth paid: {shown(one.gain, 'points')} over the control, mean of {one.runs} "
            f"runs; {ended}."
        )
    if one.gain.high < 0:
        return (
            f"Growth cost accuracy: {shown(one.gain, 'points')} against the control, mean of "
            f"{one.runs} runs; {ended}."
        )
    return (
        f"No difference from the control that {one.runs} runs could show: "
        f"{shown(one.gain, 'points')}; {ended}."
    )


def _of_groups(found: Sequence[Standing], compared: Sequence[Pair], given: int) -> str:
    best, *others = found
    if not others:
        return (
            f"Only “{best.label}” of {given} groups has runs at their end: "
            f"{bounded(best.accuracy)} %."
        )
    second = others[0]
    if best.accuracy.mean == second.accuracy.mean:
        return (
            f"“{best.label}” and “{second.label}” end highest, and alike: "
            f"{bounded(best.accuracy)} %."
        )
    pair = next(pair for pair in compared if {pair.label, pair.other} == {best.label, second.label})
    sure = "clearly" if pair.adjusted < LEVEL else "not surely"
    tests = "1 comparison" if len(compared) == 1 else f"{len(compared)} comparisons"
    return (
        f"“{best.label}” ends highest, {bounded(best.accuracy)} %, {sure} ahead of "
        f"“{second.label}” at "
        f"{bounded(second.accuracy)} % (p = {p_value(pair.adjusted)}, exact, corrected for "
        f"{tests})."
    )


def bounded(interval: Interval, digits: int = 2) -> str:
    """'81.34 [80.66, 82.02]'; without bounds where they are not finite."""
    if abs(interval.low) == float("inf") or abs(interval.high) == float("inf"):
        return f"{interval.mean:.{digits}f}"
    return f"{interval.mean:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def p_value(p: float) -> str:
    """Small ones by their order."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def state_of(runs: Sequence[RunRecord]) -> tuple[str, bool]:
    """Whether the runs have come to their end, in words, and whether all have."""
    ended = sum(run.finished for run in runs)
    if len(runs) == 1:
        run = runs[0]
        words = f"{len(run.rounds)} of {run.planned} rounds: stopped, killed or still going on"
        return ("finished" if ended else words), bool(ended)
    return f"{ended} of {len(runs)} runs finished", ended == len(runs)


def tiles_of(groups: Sequence[Group]) -> list[Tile]:
    """The numbers that stand beside the verdict."""
    runs = [run for group in groups for run in group.runs]
    return _tiles_of_one(runs[0]) if len(runs) == 1 else _tiles_of_several(groups, runs)


def _tiles_of_one(run: RunRecord) -> list[Tile]:
    last = run.rounds[-1] if run.rounds else {}
    control = part(run.summary, "control")
    name = control_words(str(control.get("name", "")))
    accuracy = _first(number(run.summary, "grown", "accuracy"), number(last, "accuracy", "mean"))
    size = _first(number(run.summary, "grown", "size"), number(last, "parameters"))
    flop = _first(number(run.summary, "grown", "flop"), number(last, "train_flop"))
    seeds = {
        key: sum(int(number(line, "seeds", key) or 0) for line in run.rounds)
        for key in ("germinated", "fossilized", "pruned")
    }
    eps = _first(number(run.summary, "speed", "eps"), number(last, "eps"))
    wall = number(run.summary, "wall_seconds")
    work = f"{run.settings.get('envs', '?')} hosts x {run.settings.get('steps', '?')} env-steps"
    fates = f"{seeds['fossilized']:,} fossilised, {seeds['pruned']:,} pruned"
    plain = number(control, "accuracy")
    its_flop = number(control, "flop")
    beside = "" if its_flop is None else f"{flop_in_words(its_flop)} {name}"
    return [
        Tile(
            "accuracy, mean over hosts",
            _told(accuracy, "{:.2f} %"),
            _beside(plain, "{:.2f} %", name),
        ),
        Tile(
            "parameters of a host",
            _told(size, "{:,.0f}"),
            _beside(number(control, "size"), "{:,.0f}", name),
        ),
        Tile("training of a host", flop_in_words(flop), beside),
        Tile("rounds", f"{len(run.rounds)}", f"of {run.planned}; {work}"),
        Tile("seeds germinated", f"{seeds['germinated']:,}", fates),
        Tile(
            "speed",
            _told(eps, "{:,.1f}"),
            "env-steps/s" + (f"; {duration(wall)} in all" if wall else ""),
        ),
    ]


def _tiles_of_several(groups: Sequence[Group], runs: Sequence[RunRecord]) -> list[Tile]:
    found = standings(groups)
    seeds = {run.settings.get("seed") for run in runs}
    tiles = [
        Tile("runs", str(len(runs)), f"{sum(run.finished for run in runs)} finished"),
        Tile("groups", str(len(groups)), "by overrides"),
        Tile("seeds", str(len(seeds)), "of the random streams"),
    ]
    if found:
        best = found[0]
        name = best.label if len(groups) > 1 else "mean over runs"
        title = "highest accuracy" if len(groups) > 1 else "accuracy"
        tiles.append(Tile(title, f"{best.accuracy.mean:.2f} %", name))
        if best.gain is not None:
            tiles.append(Tile("over the control", f"{best.gain.mean:+.2f} points", name))
        if best.parameters is not None:
            tiles.append(Tile("parameters of a host", f"{best.parameters:,.0f}", "mean"))
    return tiles


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def flop_in_words(value: float | None) -> str:
    """With the prefix that leaves a number of 1 to 999."""
    if value is None:
        return NOTHING
    power = min(int(math.log10(value)) // 3, len(PREFIXES) - 1) if value >= 1 else 0
    return f"{value / 1000**power:,.3g} {PREFIXES[power]}FLOP"


def _told(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _beside(value: float | None, form: str, name: str) -> str:
    return "" if value is None else f"{form.format(value)} {name}"
