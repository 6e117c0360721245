"""The tables of a record of benchmarks/studies/price_curve.py: the networks of every set, and the
measure of the sets. Needs no torch.

The measure of a set of networks is the mean, over budgets from 1 to MOST_TIMES times the host's own
cost on a logarithmic scale, of the accuracy that the set has within the budget (chance where
nothing is cheap enough): the hypervolume below its curve over that range. Which network of a set
serves a budget is decided by the other random seeds, so that luck does not count.
"""

from collections.abc import Mapping

import numpy as np

from benchmarks.intervals import mean_interval
from benchmarks.records import CONFIDENCE, Line, bounds, markdown, paired_cells, place

MOST_TIMES = 8.0  # budgets end here
CHANCE = 10.0  # percent, of ten classes
LEARNED, FINAL, SCHEDULE, WIDTH = "learned", "static_final", "schedule", "width"
SETS = {
    LEARNED: "one policy, by price",
    SCHEDULE: "fixed schedules",
    WIDTH: "plain hosts, by width",
    FINAL: "final networks of the policy, from scratch",
}
COSTS = {"size": "parameters", "flop": "training FLOP"}


def result(record: Mapping) -> list[str]:
    """The measure of every set, by parameters and by FLOP, and what the policy is over each."""
    rows: list[Line] = []
    found = {cost: by_set(record, cost) for cost in COSTS}
    for name, words in SETS.items():
        cells = [words]
        for values in found.values():
            cells.append(bounds(mean_interval(values[name], CONFIDENCE)))
            less, _, p = paired_cells(values[LEARNED], values[name])
            cells.append("" if name == LEARNED else f"{less}, p {p}")
        rows.append(tuple(cells))
    over = "policy minus this"
    heads = f"networks | by parameters (%) | {over} | by training FLOP (%) | {over}"
    return markdown(heads, rows)


def by_set(record: Mapping, cost: str) -> dict[str, list[float]]:
    """The measure of every set by random seed, over budgets of `cost`."""
    host = np.array(record["sets"][WIDTH]["1"][cost])
    return {
        name: measure(
            np.array([network[cost] for network in networks.values()]) / host,
            np.array([network["accuracy"] for network in networks.values()]),
        ).tolist()
        for name, networks in record["sets"].items()
    }


def table(record: Mapping) -> list[str]:
    """Every network of every set."""
    host = record["sets"][WIDTH]["1"]
    titles = {
        LEARNED: "policy at price ",
        FINAL: "its final networks, price ",
        SCHEDULE: "",
        WIDTH: "plain, base channels ",
    }
    rows: list[Line] = []
    for name, networks in record["sets"].items():
        for text, network in networks.items():
            accuracy = bounds(mean_interval(network["accuracy"], CONFIDENCE))
            costs = (f"{np.mean(network[cost]) / np.mean(host[cost]):.2f}" for cost in COSTS)
            rows.append((titles[name] + text, accuracy, *costs))
    heads = "network | test accuracy (%) | parameters over the host's"
    heads += " | training FLOP over the host's"
    return [
        *markdown(heads, rows),
        f"{len(record['seeds'])} random seeds of 32 envs, 95 % t intervals; {place(record)}.",
        "",
    ]


def measure(costs: np.ndarray, accuracies: np.ndarray) -> np.ndarray:
    """Mean accuracy over budgets [seeds], from costs over the host's own and accuracies, both
    [networks, seeds]; networks are chosen by the other random seeds.
    """
    seeds = costs.shape[1]
    found = np.empty(seeds)
    for seed in range(seeds):
        cost = costs[:, seed]
        edges = np.unique(np.clip([1.0, *cost, MOST_TIMES], 1.0, MOST_TIMES))
        fits = cost[:, None] <= edges[:-1]  # [networks, stretches of budgets]
        ranking = np.delete(accuracies, seed, 1).mean(1)
        served = np.where(fits, ranking[:, None], -np.inf).argmax(0)
        best = np.where(fits.any(0), accuracies[served, seed], CHANCE)
        found[seed] = np.average(best, weights=np.diff(np.log(edges)))
    return found
