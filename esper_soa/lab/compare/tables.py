"""Tables of a study on the console and its record, compare.json. Needs no torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from statistics import fmean

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from esper_soa.lab.compare import comparison
from esper_soa.lab.compare.comparison import CONFIDENCE, MeasureComparison
from esper_soa.lab.compare.lead import ACCURACY, LOSS, RankedPair, lead_sentence, rank_pairs
from esper_soa.lab.compare.lengths import misses
from esper_soa.lab.compare.play import StudyTable
from esper_soa.lab.compare.study import GIGA, Study
from esper_soa.lab.run_folders import MEASURES, by_value
from esper_soa.system.json_lines import Json
from esper_soa.training.results.final_table import as_text
from esper_soa.training.results.statistics import Interval, estimate, source_words
from esper_soa.training.results.verdict import exponential

DIFFERENCE_COLUMNS = (f"difference [{CONFIDENCE:.0%}]", "won", "effect", "p", "Holm")
COST_COLUMNS = ("env-steps", "parameters", "training GFLOP", "all GFLOP")
TEXT_COLUMNS = ("group", "runs", "measure", "verdict", "chosen")
FILE_WIDTH = 10_000  # columns: as many as any table needs
WORD_WIDTH = 14  # columns to which texts are folded, at words, where a terminal is too narrow
COLUMN_GAP = 3  # columns between two of a table


def report(console: Console, study: Study, table: StudyTable) -> None:
    """Print what the groups came to and how they compare."""
    numbers = table.numbers
    at = equal_words(table)
    columns = columns_of(study, table)
    levels = plain_table(f"means over random seeds [{CONFIDENCE:.0%}], {at}", columns)
    for group in by_value(numbers):
        values = numbers[group]
        row = level_row(values, table.answers.get(group))
        row |= {"group": group, "chosen": table.choices[group].text if table.choices else ""}
        levels.add_row(*(row[title] for title in columns))
    show(console, levels)
    if study.is_plain:
        _show_differences(console, comparison.compare_groups(numbers, table.answers), at)
    else:
        say(console, sentence_of(table))


def show(console: Console, table: Table) -> None:
    """Print a table as wide as it needs to be; on a terminal that has less room in several, one
    below the other, with whole words and numbers in each.
    """
    width = console.width if console.is_terminal else FILE_WIDTH
    for part in _fitting(table, width):
        console.print(as_text(part, width), highlight=False, soft_wrap=True)


def say(console: Console, *lines: str) -> None:
    """Print lines, on a terminal broken between words."""
    console.print(*lines, sep="\n", highlight=False, soft_wrap=not console.is_terminal)


def _fitting(table: Table, width: int) -> Iterator[Table]:
    """The table, where it is wider than `width` in parts that repeat its first texts."""
    columns = {str(column.header): [*map(str, column.cells)] for column in table.columns}
    sizes = [max(map(cell_len, (title, *cells))) for title, cells in columns.items()]
    if sum(sizes) + len(sizes) * COLUMN_GAP <= width:
        yield table
        return
    needed = {title: _least_width(title, cells) for title, cells in columns.items()}
    first = [*takewhile(TEXT_COLUMNS.__contains__, columns)]
    left = [*columns][len(first) :]
    title = table.title
    while left:
        sums = accumulate(needed[name] + COLUMN_GAP for name in (*first, *left))
        count = max(1, sum(total <= width for total in sums) - len(first))
        names = (*first, *left[:count])
        part = plain_table("", names)
        part.title = title
        for name, column in zip(names, part.columns, strict=True):
            column.min_width = needed[name]
            column.width = None if name in TEXT_COLUMNS else needed[name]
        for row in zip(*map(columns.__getitem__, names), strict=True):
            part.add_row(*row)
        yield part
        left = left[count:]
        title = None


def _least_width(title: str, cells: Sequence[str]) -> int:
    """Columns of a terminal that keep words of the title whole, and those of texts."""
    is_text = title in TEXT_COLUMNS
    words = [*title.split(), *(word for cell in cells for word in cell.split())]
    widest = max(map(cell_len, cells))
    return max(min(widest, WORD_WIDTH) if is_text else widest, *map(cell_len, words))


def equal_words(table: StudyTable) -> str:
    """The quantity that groups have as much of, in words."""
    if table.gflop:
        return f"at {table.gflop:g} training GFLOP of a host"
    lengths = {round(fmean(values["env_steps"])) for values in table.numbers.values()}
    return "at equal env-steps" if len(lengths) == 1 else "each with its own number of env-steps"


def sentence_of(table: StudyTable) -> str:
    """Who is ahead of all others, in a sentence, and which groups have missed the budget."""
    at = equal_words(table)
    lead = lead_sentence(ranked(table), f"{at[0].upper()}{at[1:]}")
    return " ".join([lead, *missed(table)])


def missed(table: StudyTable) -> list[str]:
    """A sentence for each group whose mean cost is not that of the budget."""
    sentences = []
    for group, values in table.numbers.items():
        flop = fmean(values["train_flop"])
        steps = round(fmean(values["env_steps"]))
        if table.gflop and misses(table.gflop, flop, steps):
            sentences.append(f"{group} has missed the budget with {flop / GIGA:.4g} GFLOP.")
    return sentences


def ranked(table: StudyTable) -> list[RankedPair]:
    """All pairs of groups, in the measure of the samples."""
    return rank_pairs(table.numbers, LOSS if table.by_loss else ACCURACY, table.answers)


def _show_differences(console: Console, rows: Sequence[MeasureComparison], at: str) -> None:
    title = f"against {rows[0].reference}, paired by random seed, percent points, {at}"
    differences = plain_table(title, ["group", "measure", *DIFFERENCE_COLUMNS, "verdict"])
    order = by_value(row.group for row in rows)
    measures = [*MEASURES]
    rows = sorted(rows, key=lambda row: (measures.index(row.measure), order.index(row.group)))
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
    show(console, differences)
    say(console, tests, *notes)


def test_of(rows: Sequence[MeasureComparison]) -> str:
    """The tests and the sources of chance that they are over, in words."""
    sampled = all(row.sampled for row in rows)
    return f"paired t tests over {source_words('random seeds', sampled and 'samples')}"


def columns_of(study: Study, table: StudyTable) -> tuple[str, ...]:
    """Titles of the columns that show a group by itself."""
    chosen = ("chosen",) * bool(study.grid)
    loss = ("test loss", "perplexity") * table.by_loss
    if study.is_plain:
        return ("group", *MEASURES.values(), *loss, *COST_COLUMNS, "EPS")
    return ("group", *chosen, *COST_COLUMNS, *loss, MEASURES[ACCURACY])


def level_row(values: Mapping[str, Sequence[float]], answers: np.ndarray | None) -> dict[str, str]:
    """The texts of a group's row by title, its name left out; answers: of StudyTable."""
    means = {name: fmean(column) for name, column in values.items()}
    found = {title: intervals_of(values, answers)[name] for name, title in MEASURES.items()}
    texts = {title: interval.text(".2f") for title, interval in found.items()}
    return texts | {
        "test loss": intervals_of(values, answers)[LOSS].text(".4f"),
        "perplexity": f"{exponential(means[LOSS]):.4g}",
        "env-steps": f"{means['env_steps']:,.0f}",
        "parameters": f"{means['parameters']:,.0f}",
        "training GFLOP": f"{means['train_flop'] / GIGA:,.4g}",
        "all GFLOP": f"{means['all_flop'] / GIGA:,.4g}",
        "EPS": f"{means['eps']:.1f}",
    }


def intervals_of(
    values: Mapping[str, Sequence[float]], answers: np.ndarray | None
) -> dict[str, Interval]:
    """The intervals of the means of accuracies and loss, of accuracies over test samples too."""
    found = {name: estimate(values[name], CONFIDENCE, answers).interval for name in MEASURES}
    return found | {LOSS: estimate(values[LOSS], CONFIDENCE).interval}


def plain_table(title: str, headings: Sequence[str]) -> Table:
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
    return head | (records[0] if study.is_plain else {"budgets": records})


def table_record(study: Study, table: StudyTable) -> dict[str, Json]:
    """The numbers of a table by random seed, comparisons, and how values were chosen."""
    numbers = table.numbers
    groups: dict[str, Json] = {}
    for name, values in numbers.items():
        known = intervals_of(values, table.answers.get(name))
        intervals: dict[str, Json] = {key: bounds._asdict() for key, bounds in known.items()}
        overrides = list(study.groups[name.split()[0]])
        groups[name] = {"overrides": overrides, "intervals": intervals, **values}
    found: dict[str, Json] = {"random_seeds": list(table.complete), "groups": groups}
    if study.is_plain:
        rows = comparison.compare_groups(numbers, table.answers)
        return found | {"test": test_of(rows), "comparisons": [row.record() for row in rows]}
    found |= {
        "gflop": table.gflop or None,
        "pairs": [pair.record() for pair in ranked(table)],
        "sentence": sentence_of(table),
    }
    if study.grid:
        found["tuning"] = {
            "random_seeds": list(study.tune_seeds),
            "groups": {name: chosen.record() for name, chosen in table.choices.items()},
            "gflop": sum(tuning.flop for tuning in table.tunings.values()) / GIGA,
            "seconds": sum(tuning.seconds for tuning in table.tunings.values()),
        }
    return found
