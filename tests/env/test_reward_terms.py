"""The terms of the reward one by one, at the edges of their rules; worked out by hand."""

import math

import pytest
import torch
from reward_cases import make_inputs

from esper_soa.env import reward_terms as term
from esper_soa.env.config import RewardConfig
from esper_soa.vocabulary import Op, Stage

CFG = RewardConfig()
OLD = {"seed_age": 20, "stage": Stage.HOLDING, "stage_age": 6}


def number(value: torch.Tensor) -> float:
    return value.squeeze().item()


def float64(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_the_potential_of_a_stage_is_the_references() -> None:
    potential = {stage: number(term.stage_potential(torch.tensor(stage))) for stage in range(12)}
    known = {
        Stage.GERMINATED: 1.0,
        Stage.TRAINING: 2.0,
        Stage.BLENDING: 3.5,
        Stage.HOLDING: 5.5,
        Stage.FOSSILIZED: 6.0,
    }
    assert potential == dict.fromkeys(range(12), 0.0) | known


def test_a_germination_is_discounted_until_the_warm_up_is_over() -> None:
    ages = torch.tensor([0, 5, 9, 10, 11])
    expected = [0.4, 0.7, 0.94, 1.0, 1.0]  # 0.4 + 0.6 age / 10
    assert term.timing_discount(ages, CFG).tolist() == pytest.approx(expected)
    one_step = RewardConfig(germination_warmup_steps=1)
    assert term.timing_discount(torch.tensor([0, 1]), one_step).tolist() == pytest.approx(
        [0.4, 1.0]
    )
    assert term.timing_discount(
        torch.tensor([0]), RewardConfig(germination_warmup_steps=0)
    ).tolist() == [1.0]


@pytest.mark.parametrize(
    ("formula", "expected"), [("harmonic", 1.5), ("minimum", 1.0)]
)  # 2 * 1 * 3 / (1 + 3)
def test_two_readings_of_a_gain_agree_on_nothing_unless_both_are_positive(
    formula, expected
) -> None:
    cfg = RewardConfig(attribution_formula=formula)
    assert number(term.joint_gain(float64(1.0), float64(3.0), cfg)) == expected
    for progress, contribution in ((0.0, 3.0), (3.0, 0.0), (-1.0, 3.0), (3.0, -1.0), (-1.0, -3.0)):
        assert number(term.joint_gain(float64(progress), float64(contribution), cfg)) == 0.0
    assert number(term.joint_gain(float64(0.5), float64(0.5), cfg)) == 0.5  # also below 1 point


@pytest.mark.parametrize(
    ("contribution", "total", "penalty"),
    [
        (1.0, 0.1, 0.0),  # of no more than a point nothing is suspected
        (1.02, 0.1, -0.0306),  # the total is not above 0.1: -0.3 * 1.02 / 10
        (5.0, 0.1, -0.15),
        (30.0, 0.1, -0.3),  # a contribution counts up to 10 points
        (5.0, 1.0, 0.0),  # five times the total is fair
        (6.0, 1.0, -0.02),  # -0.1 * (6 - 5) / 5
        (50.0, 1.0, -0.3),  # -0.1 * 45 / 5 = -0.9, capped
        (5.0, -1.0, 0.0),  # the sigmoid deals with this already
    ],
)
def test_a_contribution_that_the_total_does_not_support_is_suspect(
    contribution, total, penalty
) -> None:
    inputs = make_inputs(stage=Stage.BLENDING, contribution=contribution, total=total)
    assert number(
        term.ratio_penalty(inputs, term.attribution_discount(inputs, CFG), CFG)
    ) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("progress", "known", "expected"),
    [
        (0.0, True, 0.0),
        (-1.0, True, 0.0),
        (1.0, True, 1.5),
        (3.0, True, 1.5),
        (5.0, True, 3.0),
        (0.0, False, 1.5),
    ],
)
def test_only_progress_makes_a_contribution_of_three_points_credible(
    progress, known, expected
) -> None:
    """The joint gain is given as 1.5; a seed of unknown birth gets half of its contribution."""
    inputs = make_inputs(stage=Stage.BLENDING, contribution=3.0, germination_known=float(known))
    gain = term.credible_gain(
        inputs, torch.full((1, 1), progress).double(), torch.full((1, 1), 1.5).double()
    )
    assert number(gain) == expected


@pytest.mark.parametrize(("age", "warning"), [(0, -0.1), (1, -0.15), (6, -0.4), (7, -0.4)])
def test_blending_in_a_harmed_host_costs_more_with_every_env_step(age, warning) -> None:
    inputs = make_inputs(stage=Stage.BLENDING, stage_age=age, total=-0.1)
    assert number(term.blending_warning(inputs)) == pytest.approx(warning)
    assert (
        number(term.blending_warning(inputs.replace(total=torch.zeros_like(inputs.total)))) == 0.0
    )
    assert (
        number(
            term.blending_warning(
                inputs.replace(stage=torch.full_like(inputs.stage, Stage.HOLDING))
            )
        )
        == 0.0
    )


@pytest.mark.parametrize(
    ("age", "warning"), [(1, 0.0), (2, -0.1), (3, -0.15), (6, -0.3), (9, -0.3)]
)
def test_holding_a_useful_seed_costs_more_with_every_env_step(age, warning) -> None:
    useful = torch.full((1, 1), 0.01).double()
    inputs = make_inputs(stage=Stage.HOLDING, stage_age=age)
    assert number(term.holding_warning(inputs, useful)) == pytest.approx(warning)
    assert number(term.holding_warning(inputs, 0 * useful)) == 0.0
    for op in (Op.FOSSILIZE, Op.PRUNE):
        assert number(term.holding_warning(inputs.replace(op=torch.tensor([op])), useful)) == 0.0


def test_seeds_that_help_each_other_earn_a_bonus() -> None:
    one = torch.ones(1, 1).double()
    inputs = make_inputs(stage=Stage.BLENDING, interaction_sum=0.8)
    assert number(term.synergy_bonus(inputs, one, one)) == pytest.approx(0.1 * math.tanh(0.4))
    for discount, attribution in ((0.49, 1.0), (1.0, 0.0)):
        assert number(term.synergy_bonus(inputs, discount * one, attribution * one)) == 0.0
    assert (
        number(
            term.synergy_bonus(make_inputs(stage=Stage.BLENDING, interaction_sum=-0.8), one, one)
        )
        == 0.0
    )


@pytest.mark.parametrize(
    ("host", "effective", "ratio"),
    [
        (0, 50, 0.0),
        (1, 1, 0.005),
        (100, 50, 0.25),
        (1000, 50, 0.05),
        (1000, 0, 0.0),
    ],  # hosts count 200 at least
)
def test_rent_is_due_on_the_growth_of_the_host(host, effective, ratio) -> None:
    inputs = make_inputs(host_params=host, effective_params=effective)
    assert number(term.growth_ratio(inputs, CFG)) == pytest.approx(ratio)
    assert number(term.compute_rent(inputs, CFG)) == pytest.approx(-0.5 * math.log1p(ratio))


def test_rents_and_the_alpha_shock_are_capped() -> None:
    assert (
        number(term.compute_rent(make_inputs(effective_params=1e9), CFG)) == -1.5
    )  # 0.5 ln(10001) = 4.6
    for coef, moved, shock in (
        (0.1958, 0.5, -0.0979),
        (0.1958, 9.0, -1.0),
        (1.0, 0.5, -0.5),
        (0.0, 0.5, 0.0),
    ):
        inputs = make_inputs(alpha_delta_sq=moved)
        assert number(
            term.alpha_shock(inputs, RewardConfig(alpha_shock_coef=coef))
        ) == pytest.approx(shock)


def test_the_first_occupied_slot_is_free() -> None:
    for active, fossilized, rent in ((0, 0, 0.0), (1, 0, 0.0), (1, 1, -0.01), (2, 1, -0.02)):
        inputs = make_inputs(num_active=active, num_fossilized=fossilized)
        assert number(term.occupancy_rent(inputs, CFG)) == pytest.approx(rent)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {},
            -0.15 + 0.3 * 0.995 * 0.46,
        ),  # the newborn's shaping at env-step 1, discounted by 0.4 + 0.06
        ({"step": 150}, -0.15),  # nothing is to come after the last env-step
        ({"stage": Stage.TRAINING}, -0.45),  # there is a seed already
    ],
)
def test_germinating_pays_the_shaping_to_come_and_its_cost(given, expected) -> None:
    assert number(
        term.germinate_shaping(make_inputs(op=Op.GERMINATE, **given), CFG)
    ) == pytest.approx(expected)


FULL = 0.5 + 3 * math.tanh(1 / 3)  # base and quality


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"contribution": 1.0, "total": 1.0},
            FULL + 0.1,
        ),  # one point is enough, six env-steps count as five
        ({"contribution": 1.0, "total": 1.0, "stage_age": 2}, 0.4 * (FULL + 0.1)),
        ({"contribution": 1.0, "total": 0.0}, FULL + 0.1),  # no harm done
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
def test_fossilising_pays_for_a_proven_seed_and_punishes_every_other(given, expected) -> None:
    inputs = make_inputs(op=Op.FOSSILIZE, **(OLD | given))
    assert number(term.fossilize_shaping(inputs, CFG)) == pytest.approx(expected - 0.01)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"contribution": -0.51}, 0.15),  # hurting
        ({"contribution": -0.5}, 0.1),  # acceptable
        ({"contribution": 0.0}, -0.3),  # a seed that does no harm is a good seed
        ({"contribution": 2.0}, -0.4),  # -0.3 - 0.05 * 2
        ({"contribution": 50.0}, -0.9),
        ({}, 0.0),  # never measured
        ({"contribution": -1.0, "seed_age": 5}, 0.15),
        ({"contribution": -1.0, "seed_age": 4}, -0.3),  # one env-step too young
        ({"contribution": -1.0, "seed_age": 1}, -1.2),
        ({"contribution": -1.0, "stage": Stage.FOSSILIZED}, -1.0),
        ({"contribution": -1.0, "has_seed": 0.0}, -0.2),
    ],
)
def test_pruning_is_praised_for_harmful_seeds_and_blamed_for_young_and_good_ones(
    given, expected
) -> None:
    assert number(
        term.prune_judgement(make_inputs(op=Op.PRUNE, **(OLD | given)), CFG)
    ) == pytest.approx(expected)


def test_ages_that_bring_no_praise_can_be_set() -> None:
    """Both defaults lie within the age at which pruning is blamed anyway."""
    cfg = RewardConfig(min_prune_bonus_age=8, early_prune_threshold=8)
    for age, hurting, unmeasured in ((7, -0.1, -0.1), (8, 0.15, 0.0)):
        young = OLD | {"seed_age": age}
        assert number(
            term.prune_judgement(make_inputs(contribution=-1.0, **young), cfg)
        ) == pytest.approx(hurting)
        assert number(term.prune_judgement(make_inputs(**young), cfg)) == pytest.approx(unmeasured)


def test_a_pruned_seed_gives_its_potential_back() -> None:
    # HOLDING 5.5 and 6 env-steps of 0.3; a slot without a seed has nothing to give.
    assert number(term.forfeited_potential(make_inputs(**OLD), CFG)) == pytest.approx(-0.3 * 7.3)
    assert number(term.forfeited_potential(make_inputs(**OLD, has_seed=0.0), CFG)) == 0.0
