"""The terms of the reward one by one, at the edges of their rules; worked out by hand."""

import math

import pytest
import torch

from esper_soa.config.env import RewardConfig
from esper_soa.env import reward_terms as term
from esper_soa.vocabulary import Stage
from tests.builders.env_records import numbers
from tests.builders.reward_cases import make_inputs

CFG = RewardConfig()
OLD = {"seed_age": 20, "stage": Stage.HOLDING, "stage_age": 6}
BLENDING = {"stage": Stage.BLENDING}
ONE = numbers([1.0])


def paid(name: str, fields: dict, *more: object) -> float:
    """What the term of this name comes to for one env with one slot."""
    return getattr(term, name)(make_inputs(**fields), *more).squeeze().item()


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
    ("total", "share"),
    [(0.0, 1.0), (-0.1, 1 / (1 + math.exp(0.3))), (-1e4, math.exp(-700))],  # never 0
)
def test_an_attribution_is_discounted_where_all_seeds_do_harm_and_keeps_its_sign(
    total: float, share: float
) -> None:
    given = BLENDING | {"contribution": 1.0, "total": total}
    assert paid("attribution_discount", given, CFG) == pytest.approx(share)


def test_seeds_that_help_each_other_earn_a_bonus_unless_all_do_harm() -> None:
    fields = BLENDING | {"interaction_sum": 0.8}
    found = [paid("synergy_bonus", fields, share * ONE[None], ONE[None]) for share in (0.5, 0.49)]
    assert found == pytest.approx([0.1 * math.tanh(0.4), 0.0])


FULL = 0.5 + 3 * math.tanh(1 / 3)  # base and quality
# both defaults lie within the age at which pruning is blamed anyway
LATER = RewardConfig(min_prune_bonus_age=8, early_prune_threshold=8)


@pytest.mark.parametrize(
    ("name", "given", "expected", "cfg"),
    [
        # the newborn's shaping at env-step 1, discounted by 0.4 + 0.06; none at the last env-step
        ("germinate_shaping", {"has_seed": 0.0}, -0.15 + 0.3 * 0.995 * 0.46, CFG),
        ("germinate_shaping", {"has_seed": 0.0, "step": 150}, -0.15, CFG),
        # one point is enough, two of five env-steps count as such
        ("fossilize_shaping", {"contribution": 1.0, "total": 0.0}, FULL + 0.09, CFG),
        (
            "fossilize_shaping",
            {"contribution": 1.0, "total": 1.0, "stage_age": 2},
            0.4 * (FULL + 0.1) - 0.01,
            CFG,
        ),
        # -0.5 - 0.2 and its cost; and -0.3 as it gained from the harm, which counts for 1 at most
        ("fossilize_shaping", {"contribution": 0.1, "total": -1.0}, -0.71, CFG),
        ("fossilize_shaping", {"contribution": 0.101, "total": -1.0}, -1.01, CFG),
        ("fossilize_shaping", {"contribution": 0.0, "total": -9.0}, -1.51, CFG),
        # -0.5 - 0.04: too little harm to blame it for
        ("fossilize_shaping", {"contribution": 5.0, "total": -0.2}, -0.55, CFG),
        ("prune_judgement", {"contribution": -0.51}, 0.15, CFG),  # hurting
        ("prune_judgement", {"contribution": -0.5}, 0.1, CFG),  # acceptable
        ("prune_judgement", {"contribution": 0.0}, -0.3, CFG),  # no harm makes a good seed
        ("prune_judgement", {"contribution": -1.0, "seed_age": 7}, -0.1, LATER),
        ("prune_judgement", {"contribution": -1.0, "seed_age": 8}, 0.15, LATER),
        ("prune_judgement", {"seed_age": 7}, -0.1, LATER),  # never measured
        ("prune_judgement", {"seed_age": 8}, 0.0, LATER),
    ],
)
def test_what_an_op_pays_at_the_edges_of_its_rules(
    name: str, given: dict, expected: float, cfg: RewardConfig
) -> None:
    """The recordings of tests/parity hold all between them."""
    assert paid(name, OLD | given, cfg) == pytest.approx(expected)
