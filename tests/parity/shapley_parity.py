"""Attribution from coalition tables: interactions and Shapley values against the recordings.

The reference estimates Shapley values from random permutations even where the whole table is known;
ours are exact on purpose. So they must share out the same total as every recorded estimate, equal
it where it has no spread, and lie within its error elsewhere.
"""

import pytest
import torch

from esper_soa.env.attribution import pair_interactions, shapley_values
from esper_soa.nets.seeds.subsets import subset_codes
from tests.parity.parity_vectors import load

ORDERS = 100  # permutations behind a recorded estimate
ERRORS = 6.0  # standard errors that an estimate may be off; chance leaves this range once in 10**8


def table(recorded, players):
    """(subset, accuracy, ablated) of the coalitions evaluated, as rows of our attribution."""
    subset = torch.from_numpy(recorded[f"n{players}_configs"])
    values = torch.from_numpy(recorded[f"n{players}_table"])
    accuracy = values.gather(1, subset.clamp(min=0))
    return subset, accuracy, torch.ones(len(subset), players, dtype=torch.bool)


@pytest.mark.parametrize("players", [2, 3])
def test_pair_interactions_of_whole_tables(players):
    recorded = load("shapley")
    subset, accuracy, _ = table(recorded, players)
    ours = pair_interactions(subset, accuracy, players)
    pairs = [(0, 1), (0, 2), (1, 2)][: 1 if players == 2 else 3]
    ours = torch.stack([ours[:, i, j] for i, j in pairs], dim=1)
    torch.testing.assert_close(
        ours, torch.from_numpy(recorded[f"n{players}_interactions"]), rtol=1e-9, atol=1e-9
    )


def test_pair_interaction_of_four_accuracies():
    recorded = load("shapley")
    accuracy = torch.from_numpy(recorded["pair_in"])  # both, first, second, none
    subset = torch.tensor([3, 1, 2, 0]).expand(len(accuracy), 4)
    ours = pair_interactions(subset, accuracy, 2)
    expected = torch.from_numpy(recorded["pair_interaction"])
    torch.testing.assert_close(ours[:, 0, 1], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[:, 1, 0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("players", range(1, 5))
def test_exact_shapley_values_agree_with_the_sampled_ones(players):
    recorded = load("shapley")
    ours, complete = shapley_values(*table(recorded, players))
    assert complete.all()
    mean, deviation = torch.from_numpy(recorded[f"n{players}_shapley100"])[..., :2].unbind(-1)
    torch.testing.assert_close(ours.sum(1), mean.sum(1), rtol=1e-9, atol=1e-9)
    error = deviation / ORDERS**0.5
    assert ((ours - mean).abs() <= ERRORS * error + 1e-9).all()


@pytest.mark.parametrize("players", range(1, 5))
def test_every_coalition_of_the_recorded_ablations_is_among_our_rows(players):
    wanted = torch.from_numpy(load("shapley")[f"ablation_configs_n{players}"])
    codes = (wanted.long() << torch.arange(players)).sum(1)
    ours = subset_codes(tuple(range(players)), ())
    assert codes[0] == ours[0]
    assert set(codes.tolist()) <= set(ours)
