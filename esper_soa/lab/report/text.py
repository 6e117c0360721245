"""The sentence at the head of a report, and the numbers beside it. Needs no torch."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from esper_soa.lab.report.groups import (
    SIGNIFICANCE,
    FinishedGroup,
    RunGroup,
    pairs,
    standings,
    study_of,
)
from esper_soa.lab.report.run_files import Cell, RunRecord, listed, number, part
from esper_soa.training.results.progress import duration
from esper_soa.training.results.verdict import control_text

UNKNOWN_NUMBER = "–"  # stands where a number is not known
UNIT_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


class Highlight(NamedTuple):
    title: str
    value: str
    note: str = ""


def verdict_of(groups: Sequence[RunGroup]) -> str:
    """Result of the runs, in one or two sentences."""
    runs = [run for group in groups for run in group.runs]
    if len(runs) == 1:
        return _of_one(runs[0])
    if budgets := listed(study_of(groups), "budgets"):
        return str(part({"": budgets[-1]}, "").get("sentence", ""))
    rows = standings(groups)
    if not rows:
        return f"None of {len(runs)} runs has come to its end: what follows is how far they are."
    return _of_seeds(rows[0]) if len(groups) == 1 else _of_groups(rows, groups)


def _of_one(run: RunRecord) -> str:
    sentences = [str(control["verdict"]) for control in run.controls if "verdict" in control]
    if sentences:
        return " ".join(sentences)
    if run.accuracy is not None:
        return f"The hosts end at {run.accuracy:.2f} %; there is no control to set them beside."
    if not run.rounds:
        return "Not finished: no round has come to its end yet."
    first, last = (number(line, "accuracy", "mean") for line in (run.rounds[0], run.rounds[-1]))
    words = f"Not finished: {len(run.rounds)} of {run.planned} rounds are played"
    if first is None or last is None:
        return f"{words}."
    return f"{words}; hosts ended the first at {first:.2f} % and the last at {last:.2f} %."


def _of_seeds(group: FinishedGroup) -> str:
    ended = f"{group.runs} runs end at {group.accuracy.text('.2f')} %"
    if group.gain is None:
        return f"{ended}; not all of them have a control to be set beside."
    gain = group.gain.text(unit="points")
    if group.gain.low <= 0 <= group.gain.high:
        return f"No difference from the control that {group.runs} runs could show: {gain}; {ended}."
    side = "ahead of" if group.gain.low > 0 else "behind"
    return f"Grown hosts end {side} the control: {gain}, mean of {group.runs} runs; {ended}."


def _of_groups(rows: Sequence[FinishedGroup], groups: Sequence[RunGroup]) -> str:
    best, *others = rows
    ends = best.accuracy.text(".2f")
    if not others:
        return f"Only “{best.label}” of {len(groups)} groups has runs at their end: {ends} %."
    second = others[0]
    if best.accuracy.mean == second.accuracy.mean:
        return f"“{best.label}” and “{second.label}” end highest, and alike: {ends} %."
    ahead = f"“{best.label}” ends highest, {ends} %"
    behind = f"“{second.label}” at {second.accuracy.text('.2f')} %"
    if study_of(groups):
        return f"{ahead}, then {behind}. The comparisons of the study say what is sure."
    compared = pairs(groups)
    both = {best.label, second.label}
    pair = next((pair for pair in compared if {pair.label, pair.other} == both), None)
    if pair is None:
        return f"{ahead}, then {behind}. Without two random seeds in common they are not compared."
    lead = pair.found.interval.mean * (1 if pair.label == best.label else -1)
    certainty = "clearly" if pair.adjusted < SIGNIFICANCE and lead > 0 else "not surely"
    tests = f"{len(compared)} comparison{'s' if len(compared) > 1 else ''}"
    p = f"p = {p_value(pair.adjusted)}, paired t test, corrected for {tests}"
    return f"{ahead}, {certainty} ahead of {behind} ({p})."


def p_value(p: float) -> str:
    """Text of a p-value; small ones as an upper bound."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def state_of(runs: Sequence[RunRecord]) -> tuple[str, bool]:
    """A text that says whether the runs have come to their end, and whether all have."""
    ended = sum(run.finished for run in runs)
    if len(runs) == 1:
        run = runs[0]
        words = f"{len(run.rounds)} of {run.planned} rounds so far"
        return ("finished" if ended else words), bool(ended)
    return f"{ended} of {len(runs)} runs finished", ended == len(runs)


def tiles_of(groups: Sequence[RunGroup]) -> list[Highlight]:
    """The numbers that stand beside the verdict."""
    runs = [run for group in groups for run in group.runs]
    tiles = _tiles_of_one(runs[0]) if len(runs) == 1 else _tiles_of_several(groups, runs)
    return [tile for tile in tiles if tile.value != UNKNOWN_NUMBER]


def _tiles_of_one(run: RunRecord) -> list[Highlight]:
    """Numbers of the final table, else of the last round; beside them those of the control."""
    last = run.rounds[-1] if run.rounds else {}
    grown = part(run.summary, "grown") or {
        "validation_accuracy": number(last, "accuracy", "mean"),
        "size": last.get("parameters"),
        "flop": last.get("train_flop"),
    }
    control = run.control
    name = control_text(str(control["name"])) if "name" in control else ""

    def tile(title: str, field: str, form: Callable[[float], str]) -> Highlight:
        plain = number(control, field)
        note = "" if plain is None else f"{form(plain)} {name}"
        return Highlight(title, format_number(number(grown, field), form), note)

    germinated, fossilized, pruned = (
        sum(int(number(line, "seeds", outcome) or 0) for line in run.rounds)
        for outcome in ("germinated", "fossilized", "pruned")
    )
    fates = f"{fossilized:,} fossilized, {pruned:,} pruned"
    eps = number(run.summary, "speed", "eps") or number(last, "eps")
    wall = number(run.summary, "wall_seconds")
    work = f"{run.settings.get('envs', '?')} hosts x {run.settings.get('steps', '?')} env-steps"
    pace = "env-steps/s" + (f"; {duration(wall)} in all" if wall else "")
    return [
        *([tile("test accuracy", "test_accuracy", "{:.2f} %".format)] if run.finished else []),
        tile("validation accuracy", "validation_accuracy", "{:.2f} %".format),
        tile("parameters of a host", "size", "{:,.0f}".format),
        tile("training of a host", "flop", flop_in_words),
        Highlight("rounds", str(len(run.rounds)), f"of {run.planned}; {work}"),
        Highlight("seeds germinated", f"{germinated:,}", fates),
        Highlight("speed", format_number(eps, "{:,.1f}".format), pace),
    ]


def _tiles_of_several(groups: Sequence[RunGroup], runs: Sequence[RunRecord]) -> list[Highlight]:
    rows = standings(groups)
    tiles = [
        Highlight("runs", str(len(runs)), f"{sum(run.finished for run in runs)} finished"),
        Highlight("groups", str(len(groups)), "as named" if study_of(groups) else "by overrides"),
    ]
    if rows:
        best = rows[0]
        name = best.label if len(groups) > 1 else "mean over runs"
        title = "highest test accuracy" if len(groups) > 1 else "test accuracy"
        tiles.append(Highlight(title, f"{best.accuracy.mean:.2f} %", name))
        if best.gain is not None:
            tiles.append(Highlight("over the control", f"{best.gain.mean:+.2f} points", name))
        parameters = format_number(best.parameters, "{:,.0f}".format)
        tiles.append(Highlight("parameters of a host", parameters, "mean"))
    return tiles


def flop_in_words(value: float) -> str:
    """FLOP with the prefix that leaves a number of 1 to 999."""
    power = min(int(math.log10(value)) // 3, len(UNIT_PREFIXES) - 1) if value >= 1 else 0
    return f"{value / 1000**power:,.3g} {UNIT_PREFIXES[power]}FLOP"


def format_number(value: Cell, form: Callable[[float], str]) -> str:
    """A number in its form; NOTHING for what is none."""
    return form(value) if isinstance(value, int | float) else UNKNOWN_NUMBER
