"""What the accuracies of subsets of seeds say about each seed: contributions, interactions, Shapley
values.

Plain Python over dictionaries, the oracle of esper_soa/env/attribution.py.
"""

import itertools
import math
from typing import NamedTuple

EXACT_SEEDS = 4  # up to this many ablated seeds every subset is evaluated


class ValidationReading(NamedTuple):
    """One validation pass. Subsets are bit masks over slot numbers, 1 = this ablated seed is on."""

    loss: float  # of the first subset, mean of batch means
    accuracy: dict[int, float]  # percent, by subset; the first has every ablated seed on
    ablated: tuple[int, ...]  # slot numbers
    fossils: tuple[int, ...]  # those among them that are fossils


class AttributionReading(NamedTuple):
    """What the subsets say; dictionaries by slot number, named as in state.Attribution."""

    contribution: dict[int, float]
    interaction_sum: dict[int, float]
    pair_boost: dict[tuple[int, int], float]
    shapley: dict[int, float]  # empty beyond EXACT_SEEDS seeds
    total: float
    committed: float


def code_of(slots: tuple[int, ...]) -> int:
    """The bit mask over slot numbers in which `slots` are 1."""
    return sum(1 << slot for slot in slots)


def subset_codes(ablated: tuple[int, ...], fossils: tuple[int, ...] = ()) -> list[int]:
    """Subsets to evaluate, the one with every seed on first: all for up to EXACT_SEEDS seeds;
    beyond, that one, each leave-one-out, each alone, none, the fossils alone, and each pair.
    """
    full = code_of(ablated)
    if len(ablated) <= EXACT_SEEDS:
        chosen = [
            subset
            for size in range(len(ablated) + 1)
            for subset in itertools.combinations(ablated, size)
        ]
        return sorted((code_of(subset) for subset in chosen), reverse=True)
    without = [full - (1 << slot) for slot in ablated]
    alone = [1 << slot for slot in ablated]
    pairs = [code_of(pair) for pair in itertools.combinations(ablated, 2)]
    return list(dict.fromkeys([full, *without, *alone, 0, code_of(fossils), *pairs]))


def attribute(reading: ValidationReading) -> AttributionReading:
    """Contributions, interactions and Shapley values from the accuracies of the subsets.

    The interaction of two seeds is f(ij) - f(i) - f(j) + f(0) with all other ablated seeds off,
    where f(ij) is known.
    """
    f = reading.accuracy
    ablated = reading.ablated
    full = code_of(ablated)
    interaction = dict.fromkeys(ablated, 0.0)
    pair_boost = {}
    for i, j in itertools.combinations(ablated, 2):
        if (1 << i) + (1 << j) in f:
            value = f[(1 << i) + (1 << j)] - f[1 << i] - f[1 << j] + f[0]
            pair_boost[i, j] = pair_boost[j, i] = max(0.0, value)
            for slot in (i, j):
                interaction[slot] += value
    return AttributionReading(
        contribution={slot: f[full] - f[full - (1 << slot)] for slot in ablated},
        interaction_sum=interaction,
        pair_boost=pair_boost,
        shapley=shapley_values(f, ablated) if len(ablated) <= EXACT_SEEDS else {},
        total=f[full] - f[0],
        committed=f[code_of(reading.fossils)],
    )


def shapley_values(accuracy: dict[int, float], ablated: tuple[int, ...]) -> dict[int, float]:
    """Exact Shapley values: a seed's gain when switched on, averaged over all orders."""
    total = dict.fromkeys(ablated, 0.0)
    for order in itertools.permutations(ablated):
        code = 0
        for slot in order:
            total[slot] += accuracy[code + (1 << slot)] - accuracy[code]
            code += 1 << slot
    return {slot: value / math.factorial(len(ablated)) for slot, value in total.items()}
