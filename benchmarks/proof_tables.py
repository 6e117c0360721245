"""The proof in markdown: the lines of the console of benchmarks/proof.py and of the pages."""

from collections.abc import Mapping

from benchmarks.proof_statistics import (
    LEARNED,
    LEVELS,
    MEASURES,
    SIGNIFICANCE,
    Comparison,
    Level,
    comparisons,
    levels,
    main_runs,
    seed_means,
)
from benchmarks.records import CONFIDENCE, Line, Records, bounds, markdown, place

DECLARED = "proof"  # name of the record of the declared experiment, which the figure shows
FIGURE = "proof.svg"  # beside the page that the tables are written to
GIGA = 1e9
COST = "parameters | training GFLOP per host"


def proof(records: Records) -> list[str]:
    """All proofs, that of the declared experiment first, under its figure."""
    ordered = sorted(records, key=lambda record: (record["name"] != DECLARED, record["name"]))
    shown = [f"![Accuracy against parameters and against training FLOP]({FIGURE})", ""]
    lines = shown if ordered and ordered[0]["name"] == DECLARED else []
    return lines + [line for record in ordered for line in proof_lines(record)]


SHORT = {  # players of the README's table, in its words
    LEARNED: "grown by `grower`",
    "wait": "the same hosts, without growth",
    "static_large": "a plain host of the grown size",
    "static_final": "the final grown networks, trained from scratch",
    "random": "grown at random",
    "heuristic": "grown by hand-written rules (`heuristic`)",
}


def result(records: Records) -> list[str]:
    """The declared proof for a screen: accuracy by data set, size and cost on the first."""
    found: list[str] = []
    for record in filter(lambda record: record["name"] == DECLARED, records):
        by_data = [{row.player: row for row in levels(data["players"])} for data in record["data"]]
        lines: list[Line] = []
        for player, words in SHORT.items():
            accuracies = (bounds(rows[player].means["accuracy"]) for rows in by_data)
            lines.append((words, *accuracies, *cost(by_data[0][player], ",.0f")))
        titles = " | ".join(f"test accuracy on {data['name']} (%)" for data in record["data"])
        over = f"interquartile mean over {len(record['seeds'])} random seeds [95 % t interval]"
        found += markdown(f"{over} | {titles} | {COST}", lines)
    return found


def cost(level: Level, form: str) -> tuple[str, str]:
    """Mean size and training of a host."""
    sizes = level.sizes
    return f"{sizes['parameters'].mean:,.0f}", f"{sizes['train_flop'].mean / GIGA:{form}}"


def proof_lines(record: Mapping) -> list[str]:
    """Two tables per data set, and where they come from."""
    given = f" with {' '.join(record['settings_given'])}" if record["settings_given"] else ""
    lines = []
    for data in record["data"]:
        hosts = len(data["players"][LEARNED]["accuracy"][0])
        lines += [
            f"**{data['name']}** ({parts_words(data)}), "
            f"{record['experiment']}{given}: {len(record['seeds'])} random seeds of {hosts} hosts, "
            f"{record['train_images']:,} training images per host, accuracy on all test images, "
            f"validation accuracy on {data['val_images']:,} images.",
            "",
            *level_table(levels(data["players"])),
            *comparison_table(comparisons(data["players"])),
        ]
    policy = (
        f"policy.init={record['settings']['policy']['init']} (weights {record['weights']}), "
        "likeliest choices"
    )
    seeds = f"random seeds {record['seeds'][0]} to {record['seeds'][-1]}"
    return [
        *lines,
        (
            f"{policy}; {seeds}; {CONFIDENCE:.0%} t intervals, of P(better) by Newcombe; "
            f"{place(record)}."
        ),
        "",
    ]


def parts_words(data: Mapping) -> str:
    """The parts of a data set."""
    train, validation, test = (data[part] for part in ("train", "validation", "test"))
    return f"{train:,} training, {validation:,} validation and {test:,} test images"


def level_table(rows: list[Level]) -> list[str]:
    """Every player: interquartile means over seeds of what it reached, means of what it cost."""
    lines = [(row.player, *map(bounds, row.means.values()), *cost(row, ",.1f")) for row in rows]
    titles = (f"{title} (%)" if "accuracy" in key else title for key, title in LEVELS.items())
    return markdown(f"player | {' | '.join(titles)} | {COST}", lines)


def comparison_table(rows: list[Comparison]) -> list[str]:
    """The learned policy less every control."""
    heads = "learned against | in | difference | interquartile mean | Mann-Whitney p | P(better)"
    heads += " | random seeds won | hosts won | its parameters | its FLOP | learned is"
    lines: list[Line] = []
    for row in rows:
        lines.append(
            (
                row.control,
                MEASURES[row.measure],
                bounds(row.difference, "+.2f"),
                bounds(row.middle, "+.2f"),
                p_words(row.p),
                bounds(row.improvement),
                f"{row.seeds_won} of {row.seeds}",
                f"{row.hosts_won} of {row.hosts}",
                f"{row.shares['parameters']:.2f} times",
                f"{row.shares['train_flop']:.2f} times",
                row.verdict,
            )
        )
    return markdown(heads, lines)


def p_words(p: float) -> str:
    """Enough digits to tell it from the level of a verdict."""
    return f"{p:.4f}" if p >= SIGNIFICANCE / 100 else f"{p:.1e}"


def main_lines(record: Mapping) -> list[str]:
    """A row per seed and data set, and the means."""
    lines = []
    for data in record["data"]:
        runs = data["runs"]
        sides = [[run[side]["accuracies"] for run in runs] for side in ("grown", "control")]
        found = main_runs(*sides)
        titles = "grown (%) | without growth (%) | difference | parameters | wall time (s)"
        heads = f"random seed | {titles}"
        rows: list[Line] = []
        ours, others = (seed_means(side) for side in sides)
        for number, run in enumerate(runs):
            size = seed_means([run[side]["parameters"] for side in ("grown", "control")])
            accuracies = f"{ours[number]:.2f}", f"{others[number]:.2f}"
            difference = f"{found.differences[number]:+.2f}"
            facts = f"{size[0]:,.0f} / {size[1]:,.0f}", f"{run['seconds']:.0f}"
            rows.append((str(record["seeds"][number]), *accuracies, difference, *facts))
        lines += [
            f"**{data['name']}** ({parts_words(data)}), `{record['command']}`:",
            "",
            *markdown(heads, rows),
            f"Grown minus without growth, over {sum(map(len, sides[0]))} hosts "
            f"{bounds(found.over_hosts, '+.2f')}, over {len(runs)} random seeds "
            f"{bounds(found.over_seeds, '+.2f')} points; ahead with {found.ahead} of {len(runs)}. "
            f"The longest run took {max(run['seconds'] for run in runs):.0f} s, start and "
            "imports included.",
            "",
        ]
    return [*lines, f"Means with {CONFIDENCE:.0%} t intervals; {place(record)}.", ""]
