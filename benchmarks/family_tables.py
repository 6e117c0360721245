"""The tables of a record of benchmarks/studies/family.py."""

from collections.abc import Mapping
from statistics import fmean

from benchmarks.intervals import mean_interval
from benchmarks.records import CONFIDENCE, Line, bounds, markdown, paired_cells, place

NAMES = {
    "learned": "learned policy",
    "teacher": "its teacher",
    "best_of_price": "best schedule for each fifth of the rent weights",
    "single": "best single schedule",
    "heuristic": "heuristic",
    "random": "random",
    "wait": "no growth",
}
TITLES = {"held_out": "Held-out draws", "beyond": "Draws beyond the training ranges"}


def family(record: Mapping) -> list[str]:
    """All tables, and where they were measured."""
    return [*family_lines(record), f"{place(record)}."]


def family_lines(record: Mapping) -> list[str]:
    """All tables in markdown."""
    seeds = len(record["scores"]["held_out"]["learned"])
    lines = [f"Best single schedule on training draws: {record['schedule']}.", ""]
    for part, title in TITLES.items():
        lines += [
            f"{title}, {seeds} random seeds of {record['envs']} envs:",
            "",
            *_players(record["scores"][part]),
        ]
    lines += _oracles(record["scores"]["held_out"])
    return [*lines, *_curve(record["curve"]), *_regions(record)]


def _players(scores: Mapping) -> list[str]:
    rows: list[Line] = []
    for name, words in NAMES.items():
        single = paired_cells(scores[name], scores["single"])
        cells = ("", "", "") if name == "single" else single
        rows.append((words, bounds(mean_interval(scores[name], CONFIDENCE)), *cells))
    heads = "policy | test accuracy - rent | minus the best single schedule | random seeds won | p"
    return markdown(heads, rows)


def _oracles(scores: Mapping) -> list[str]:
    """How far the learned policy comes from the single schedule to the oracles."""
    seeds = len(scores["oracle"])
    learned, single, oracle = (
        fmean(scores[name][:seeds]) for name in ("learned", "single", "oracle")
    )
    repeated, again = (fmean(scores[name]) for name in ("repeated", "single_repeated"))
    gain = learned - single
    return [
        f"On the first {seeds} random seeds, where all schedules were played, the learned policy "
        f"is {gain:+.2f} points over the single schedule. The best schedule of each env is "
        f"{oracle - single:+.2f} points over it in the episodes by which it is chosen, luck "
        f"included, and {repeated - again:+.2f} in the same envs with other weights and images. "
        f"The policy comes {gain / (oracle - single):.0%} and {gain / (repeated - again):.0%} "
        "of the way.",
        "",
    ]


def _curve(curve: Mapping) -> list[str]:
    """What the policy makes of the held-out envs as one price for all moves."""
    rows: list[Line] = []
    for price, numbers in curve.items():
        means = (mean_interval(numbers[name], CONFIDENCE) for name in ("accuracy", "growth"))
        rows.append((price, *map(bounds, means)))
    heads = "rent weight of all envs | accuracy of the policy (%) | parameters over the host's own"
    return markdown(heads, rows)


def _regions(record: Mapping) -> list[str]:
    prices, rate = record["classes"]
    edges = [f"below {prices[0]:g}"]
    edges += [f"{low:g} to {high:g}" for low, high in zip(prices, prices[1:], strict=False)]
    edges += [f"above {prices[-1]:g}"]
    rows: list[Line] = [
        (
            edges[region["prices"]],
            f"{'above' if region['rate'] else 'at most'} {rate:g}",
            region["best"],
            f"{region['score']:.2f}",
            f"{region['single']:.2f}",
            f"{region['training']}, {region['held_out']}",
        )
        for region in record["regions"]
    ]
    heads = "rent weight | learning rate of hosts | best schedule on training draws"
    scores = "held-out score | single schedule | draws, training and held-out"
    return markdown(f"{heads} | {scores}", rows)
