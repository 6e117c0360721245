"""The terms of the reward one by one, at the edges of their rules; worked out by hand."""

import math

import pytest
import torch
from env_records import numbers
from reward_cases import make_inputs

from esper_soa.env import reward_terms as term
from esper_soa.env.config import RewardConfig
from esper_soa.vocabulary import Op, Stage

CFG = RewardConfig()
OLD = {"seed_age": 20, "stage": Stage.HOLDING, "stage_age": 6}
BLENDING = {"stage": Stage.BLENDING}
ONE = numbers([1.0])


def paid(name: str, fields: dict, *more: object) -> float:
    """What the term of this name comes to for one env with one slot."""
    return getattr(term, name)(make_inputs(**fields), *more).squeeze().item()


def test_the_potential_of_a_stage_is_the_references() -> None:
    known = {
        Stage.GERMINATED: 1.0,
        Stage.TRAINING: 2.0,
        Stage.BLENDING: 3.5,
        Stage.HOLDING: 5.5,
        Stage.FOSSILIZED: 6.0,
    }
    potential = term.stage_potential(torch.arange(12)).tolist()
    assert dict(enumerate(potential)) == dict.fromkeys(range(12), 0.0) | known


@pytest.mark.parametrize(
    ("warm_up", "age", "share"),
    [
        (10, 0, 0.4),
        (10, 5, 0.7),
        (10, 9, 0.94),
        (10, 10, 1.0),
        (1, 0, 0.4),
        (1, 1, 1.0),
        (0, 0, 1.0),
    ],
)
def test_a_germination_is_discounted_until_the_warm_up_is_over(
    warm_up: int, age: int, share: float
) -> None:
    cfg = RewardConfig(germination_warmup_steps=warm_up)  # 0.4 + 0.6 age / 10
    assert term.timing_discount(torch.tensor(age), cfg).item() == pytest.approx(share)


@pytest.mark.parametrize(("formula", "joint"), [("harmonic", 1.5), ("minimum", 1.0)])
def test_two_readings_of_a_gain_agree_on_nothing_unless_both_are_positive(
    formula: str, joint: float
) -> None:
    cfg = RewardConfig(attribution_formula=formula)  # 2 * 1 * 3 / (1 + 3), below a point too
    pairs = numbers([1, 3], [0, 3], [3, 0], [-1, 3], [3, -1], [-1, -3], [0.5, 0.5])
    assert term.joint_gain(*pairs.T, cfg).tolist() == [joint, 0, 0, 0, 0, 0, 0.5]


@pytest.mark.parametrize(
    ("contribution", "total", "penalty"),
    [
        (1.0, 0.1, 0.0),  # of no more than a point nothing is suspected
        (1.02, 0.1, -0.0306),  # the total is not above 0.1: -0.3 * 1.02 / 10
        (30.0, 0.1, -0.3),  # a contribution counts up to 10 points
        (5.0, 1.0, 0.0),  # five times the total is fair
        (6.0, 1.0, -0.02),  # -0.1 * (6 - 5) / 5
        (50.0, 1.0, -0.3),  # -0.1 * 45 / 5 = -0.9, capped
        (5.0, -1.0, 0.0),  # the sigmoid deals with this already
    ],
)
def test_a_contribution_that_the_total_does_not_support_is_suspect(
    contribution: float, total: float, penalty: float
) -> None:
    fields = BLENDING | {"contribution": contribution, "total": total}
    discount = term.attribution_discount(make_inputs(**fields), CFG)
    assert paid("ratio_penalty", fields, discount, CFG) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("progress", "known", "expected"),
    [(0.0, True, 0.0), (-1.0, True, 0.0), (3.0, True, 1.5), (5.0, True, 3.0), (0.0, False, 1.5)],
)
def test_only_progress_makes_a_contribution_of_three_points_credible(
    progress: float, known: bool, expected: float
) -> None:
    """The joint gain is given as 1.5; a seed of unknown birth gets half of its contribution."""
    fields = BLENDING | {"contribution": 3.0, "germination_known": float(known)}
    assert paid("credible_gain", fields, progress * ONE[None], 1.5 * ONE[None]) == expected


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"stage_age": 0}, -0.1),
        ({"stage_age": 1}, -0.15),
        ({"stage_age": 7}, -0.4),
        ({"stage_age": 1, "total": 0.0}, 0.0),
        ({"stage_age": 1, "stage": Stage.HOLDING}, 0.0),
    ],
)
def test_blending_in_a_harmed_host_costs_more_with_every_env_step(
    fields: dict, warning: float
) -> None:
    assert paid("blending_warning", BLENDING | {"total": -0.1} | fields) == pytest.approx(warning)


@pytest.mark.parametrize(
    ("fields", "attribution", "warning"),
    [
        ({"stage_age": 1}, 0.01, 0.0),
        ({"stage_age": 2}, 0.01, -0.1),
        ({"stage_age": 3}, 0.01, -0.15),
        ({"stage_age": 9}, 0.01, -0.3),
        ({"stage_age": 9}, 0.0, 0.0),
        ({"stage_age": 9, "op": Op.FOSSILIZE}, 0.01, 0.0),
        ({"stage_age": 9, "op": Op.PRUNE}, 0.01, 0.0),
    ],
)
def test_holding_a_useful_seed_costs_more_with_every_env_step(
    fields: dict, attribution: float, warning: float
) -> None:
    fields = {"stage": Stage.HOLDING} | fields
    assert paid("holding_warning", fields, attribution * ONE[None]) == pytest.approx(warning)


@pytest.mark.parametrize(
    ("interaction", "discount", "attribution", "bonus"),
    [
        (0.8, 1.0, 1.0, 0.1 * math.tanh(0.4)),
        (0.8, 0.49, 1.0, 0.0),
        (0.8, 1.0, 0.0, 0.0),
        (-0.8, 1.0, 1.0, 0.0),
    ],
)
def test_seeds_that_help_each_other_earn_a_bonus(
    interaction: float, discount: float, attribution: float, bonus: float
) -> None:
    fields = BLENDING | {"interaction_sum": interaction}
    found = paid("synergy_bonus", fields, discount * ONE[None], attribution * ONE[None])
    assert found == pytest.approx(bonus)


@pytest.mark.parametrize(
    ("host", "effective", "ratio"),
    [(0, 50, 0.0), (1, 1, 0.005), (100, 50, 0.25), (1000, 50, 0.05), (1000, 0, 0.0)],
)
def test_rent_is_due_on_the_growth_of_the_host(host: int, effective: int, ratio: float) -> None:
    fields = {"host_params": host, "effective_params": effective}  # hosts count 200 at least
    assert paid("growth_ratio", fields, CFG) == pytest.approx(ratio)
    assert paid("compute_rent", fields, CFG) == pytest.approx(-0.5 * math.log1p(ratio))


@pytest.mark.parametrize(
    ("coef", "moved", "shock"), [(0.1958, 0.5, -0.0979), (0.1958, 9.0, -1.0), (0.0, 0.5, 0.0)]
)
def test_rents_and_the_alpha_shock_are_capped(coef: float, moved: float, shock: float) -> None:
    assert paid("compute_rent", {"effective_params": 1e9}, CFG) == -1.5  # 0.5 ln(10001) = 4.6
    cfg = RewardConfig(alpha_shock_coef=coef)
    assert paid("alpha_shock", {"alpha_delta_sq": moved}, cfg) == pytest.approx(shock)


@pytest.mark.parametrize(
    ("active", "fossilized", "rent"), [(0, 0, 0.0), (1, 0, 0.0), (1, 1, -0.01), (2, 1, -0.02)]
)
def test_the_first_occupied_slot_is_free(active: int, fossilized: int, rent: float) -> None:
    fields = {"num_active": active, "num_fossilized": fossilized}
    assert paid("occupancy_rent", fields, CFG) == pytest.approx(rent)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # the newborn's shaping at env-step 1, discounted by 0.4 + 0.06
        ({}, -0.15 + 0.3 * 0.995 * 0.46),
        ({"step": 150}, -0.15),  # nothing is to come after the last env-step
        ({"stage": Stage.TRAINING}, -0.45),  # there is a seed already
    ],
)
def test_germinating_pays_the_shaping_to_come_and_its_cost(fields: dict, expected: float) -> None:
    assert paid("germinate_shaping", fields, CFG) == pytest.approx(expected)


FULL = 0.5 + 3 * math.tanh(1 / 3)  # base and quality


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # one point is enough, six env-steps count as five, no harm is done
        ({"contribution": 1.0, "total": 0.0}, FULL + 0.1),
        ({"contribution": 1.0, "total": 1.0, "stage_age": 2}, 0.4 * (FULL + 0.1)),
        ({"contribution": 0.99, "total": 1.0}, -0.2),
        ({"total": 1.0}, -0.2),  # never measured
        ({"contribution": 0.1, "total": -1.0}, -0.7),  # -0.5 - 0.2
        ({"contribution": 0.101, "total": -1.0}, -1.0),  # and -0.3 as it gained from the harm
        ({"contribution": 5.0, "total": -0.2}, -0.54),  # -0.5 - 0.04: too little harm to blame it
        ({"contribution": 0.0, "total": -9.0}, -1.5),  # the harm counts for 1 at most
        ({"contribution": 3.0}, -1.0),  # nothing known about the host
        ({"contribution": 3.0, "total": 3.0, "stage": Stage.BLENDING}, -1.0),
    ],
)
def test_fossilising_pays_for_a_proven_seed_and_punishes_every_other(
    given: dict, expected: float
) -> None:
    assert paid("fossilize_shaping", OLD | given, CFG) == pytest.approx(expected - 0.01)


# both defaults lie within the age at which pruning is blamed anyway
LATER = RewardConfig(min_prune_bonus_age=8, early_prune_threshold=8)


@pytest.mark.parametrize(
    ("given", "expected", "cfg"),
    [
        ({"contribution": -0.51}, 0.15, CFG),  # hurting
        ({"contribution": -0.5}, 0.1, CFG),  # acceptable
        ({"contribution": 0.0}, -0.3, CFG),  # a seed that does no harm is a good seed
        ({"contribution": 2.0}, -0.4, CFG),  # -0.3 - 0.05 * 2
        ({"contribution": 50.0}, -0.9, CFG),
        ({}, 0.0, CFG),  # never measured
        ({"contribution": -1.0, "seed_age": 5}, 0.15, CFG),
        ({"contribution": -1.0, "seed_age": 4}, -0.3, CFG),  # one env-step too young
        ({"contribution": -1.0, "seed_age": 1}, -1.2, CFG),
        ({"contribution": -1.0, "stage": Stage.FOSSILIZED}, -1.0, CFG),
        ({"contribution": -1.0, "has_seed": 0.0}, -0.2, CFG),
        ({"contribution": -1.0, "seed_age": 7}, -0.1, LATER),
        ({"contribution": -1.0, "seed_age": 8}, 0.15, LATER),
        ({"seed_age": 7}, -0.1, LATER),
        ({"seed_age": 8}, 0.0, LATER),
    ],
)
def test_pruning_is_praised_for_harmful_seeds_and_blamed_for_young_and_good_ones(
    given: dict, expected: float, cfg: RewardConfig
) -> None:
    assert paid("prune_judgement", OLD | given, cfg) == pytest.approx(expected)


def test_a_pruned_seed_gives_its_potential_back() -> None:
    # HOLDING 5.5 and 6 env-steps of 0.3; a slot without a seed has nothing to give.
    assert paid("forfeited_potential", OLD, CFG) == pytest.approx(-0.3 * 7.3)
    assert paid("forfeited_potential", OLD | {"has_seed": 0.0}, CFG) == 0.0
