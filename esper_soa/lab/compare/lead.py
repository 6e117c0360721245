"""Who is ahead of all others in a table of a study, and a sentence that says so. Needs no torch."""

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from esper_soa.lab.compare.comparison import CONFIDENCE, SIGNIFICANCE, Numbers, SampleMeans
from esper_soa.system.json_lines import Json
from esper_soa.training.results.statistics import (
    Interval,
    estimate,
    holm,
    paired_answers,
    source_words,
)

ACCURACY = "test_accuracy"
LOSS = "test_loss"  # where perplexity is a figure of the samples; less is better


class RankedPair(NamedTuple):
    """Two groups, the one with the better mean first."""

    group: str
    other: str
    measure: str
    interval: Interval  # by how much the group is better, percent points or nats
    p: float  # two-sided, of the same t
    corrected: float  # p by Holm, for all pairs of the table
    sampled: bool  # whether test samples are a source of chance beside random seeds

    def record(self) -> dict[str, Json]:
        """The fields in compare.json."""
        fields = self._asdict() | self.interval._asdict()
        del fields["interval"]
        return fields


def rank_pairs(numbers: Numbers, measure: str, samples: SampleMeans) -> list[RankedPair]:
    """All pairs of groups, those of the best group first, in the order of their means: whichever
    group is the best, its p holds.
    """
    sign = -1.0 if measure == LOSS else 1.0
    means = {group: sign * fmean(values[measure]) for group, values in numbers.items()}
    known = {group: -math.inf if math.isnan(mean) else mean for group, mean in means.items()}
    pairs = list(combinations(sorted(known, key=lambda group: -known[group]), 2))
    found = []
    for group, other in pairs:
        columns = zip(numbers[group][measure], numbers[other][measure], strict=True)
        answers = paired_answers(samples.get(group), samples.get(other))
        differences = [sign * (value - beside) for value, beside in columns]
        found.append(estimate(differences, CONFIDENCE, answers if measure == ACCURACY else None))
    corrected = holm([pair.p for pair in found])
    return [
        RankedPair(
            group,
            other,
            measure,
            interval=pair.interval,
            p=pair.p,
            corrected=p,
            sampled=pair.sampled,
        )
        for (group, other), pair, p in zip(pairs, found, corrected, strict=True)
    ]


def lead_sentence(pairs: Sequence[RankedPair], at: str) -> str:
    """Whether the best group was shown to be ahead of all others, and by how much of the next.

    at: at what the groups are equal, in words. A group is ahead of another where the corrected p is
    below SIGNIFICANCE.
    """
    lead = pairs[0]
    is_shown = all(pair.corrected < SIGNIFICANCE for pair in pairs if pair.group == lead.group)
    form, unit = ("z.4f", "nats") if lead.measure == LOSS else ("z.2f", "points")
    by = lead.interval.text(form, unit)
    test = f"p = {lead.corrected:.2g} of {len(pairs)} pairs together"
    source = source_words("random seeds", lead.sampled and "samples")
    what = f"{by} over {lead.other}, the next ({test}, over {source})"
    if is_shown:
        return f"{at}, {lead.group} is ahead of all others: by {what}."
    return f"{at}, no group was shown ahead of all others; {lead.group} is first, by {what}."
