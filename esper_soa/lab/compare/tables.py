"""Tables of a study on the console and its record, compare.json. Needs no torch."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from esper_soa.lab.compare import comparison
from esper_soa.lab.compare.comparison import CONFIDENCE, MeasureComparison
from esper_soa.lab.compare.play import StudyTable
from esper_soa.lab.compare.study import GIGA, Study
from esper_soa.lab.run_folders import MEASURES
from esper_soa.system.json_lines import Json
from esper_soa.training.results.statistics import estimate, source_words

DIFFERENCE_COLUMNS = (f"difference [{CONFIDENCE:.0%}]", "won", "effect", "p", "Holm")
TEXT_COLUMNS = ("group", "measure", "verdict", "chosen")


def report(console: Console, study: Study, table: StudyTable) -> None:
    """Print what the groups came to and how they compare."""
    numbers = table.numbers
    answers = table.answers
    rows = comparison.compare_groups(numbers, answers)
    at = f" at {table.gflop:g} training GFLOP of a host" if table.gflop else ""
    levels = _table(f"means over random seeds [{CONFIDENCE:.0%}]{at}", level_columns(study))
    for group, values in numbers.items():
        chosen = table.choices[group].text if group in table.choices else ""
        cells = level_cells(study, group, values, chosen=chosen, answers=answers.get(group))
        levels.add_row(*cells)
    title = f"against {rows[0].reference}, paired by random seed, percent points{at}"
    differences = _table(title, ["group", "measure", *DIFFERENCE_COLUMNS, "verdict"])
    for row in rows:
        differences.add_row(
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
    tests = f"{test_of(rows)} at {family}, Holm's correction"
    notes = [f"{row.group}, {MEASURES[row.measure]}: {row.power}" for row in rows if row.power]
    console.print(levels, differences)
    console.print(tests, *notes, sep="\n", highlight=False, soft_wrap=True)


def test_of(rows: Sequence[MeasureComparison]) -> str:
    """The tests and the sources of chance that they are over, in words."""
    sampled = all(row.sampled for row in rows)
    return f"paired t tests over {source_words('random seeds', sampled and 'samples')}"


def level_columns(study: Study) -> list[str]:
    """Titles of the columns that show a group by itself."""
    chosen = ["chosen"] * bool(study.grid)
    cost = ["env-steps", "parameters", "training GFLOP", "all GFLOP"]
    return ["group", *chosen, *MEASURES.values(), *cost, "EPS"]


def level_cells(
    study: Study,
    group: str,
    values: Mapping[str, Sequence[float]],
    chosen: str,
    answers: np.ndarray | None,
) -> list[str]:
    """The texts of a row of `level_columns`; answers: of StudyTable."""
    found = [estimate(values[name], CONFIDENCE, answers).interval for name in MEASURES]
    measured = [interval.text(".2f") for interval in found]
    means = {name: fmean(column) for name, column in values.items()}
    cost = [f"{means[name] / GIGA:,.3g}" for name in ("train_flop", "all_flop")]
    counts = [f"{means[name]:,.0f}" for name in ("env_steps", "parameters")]
    row = [group, *[chosen] * bool(study.grid), *measured, *counts, *cost]
    return [*row, f"{means['eps']:.1f}"]


def _table(title: str, headings: Sequence[str]) -> Table:
    """A table whose words stand left and whose numbers stand right."""
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in TEXT_COLUMNS else "right")
    return table


def record(study: Study, tables: Sequence[StudyTable]) -> dict[str, Json]:
    """compare.json: with budgets, a record of each."""
    head: dict[str, Json] = {
        "experiment": study.experiment,
        "common": list(study.common),
        "confidence": CONFIDENCE,
        "significance": comparison.SIGNIFICANCE,
    }
    records = [table_record(study, table) for table in tables]
    return head | ({"budgets": records} if study.budgets else records[0])


def table_record(study: Study, table: StudyTable) -> dict[str, Json]:
    """The numbers of a table by random seed, comparisons, and how values were chosen."""
    numbers = table.numbers
    rows = comparison.compare_groups(numbers, table.answers)
    found: dict[str, Json] = {
        "random_seeds": list(table.complete),
        "groups": {
            name: {"overrides": list(study.groups[name.split()[0]])} | dict(values)
            for name, values in numbers.items()
        },
        "test": test_of(rows),
        "comparisons": [row.record() for row in rows],
    }
    if table.gflop:
        found["gflop"] = table.gflop
    if table.tunings:
        found["tuning"] = {
            "random_seeds": list(study.tune_seeds),
            "groups": {name: choice.record() for name, choice in table.choices.items()},
            "gflop": sum(tuning.flop for tuning in table.tunings.values()) / GIGA,
            "seconds": sum(tuning.seconds for tuning in table.tunings.values()),
        }
    return found
