"""What each mode pays: the reference's golden numbers; scored slots, loss, drip by hand."""

import math

import pytest
import torch

from esper_soa.config.env import RewardConfig
from esper_soa.env.reward_modes import RewardTerms, add_terms, no_terms, score
from esper_soa.vocabulary import Op, Stage
from tests.builders.reward_cases import make_inputs


def terms_of(mode: str, fields: dict, **config: object) -> RewardTerms:
    return score(make_inputs(**fields), RewardConfig(mode=mode, **config))[0]


def credit_of(fields: dict, **config: object) -> list[float]:
    """The escrow of every slot after an env-step."""
    return (
        score(make_inputs(**fields), RewardConfig(mode="escrow", **config))[1]
        .escrow_next[0]
        .tolist()
    )


SMALL = {
    "stage": Stage.BLENDING,
    "total": 9.0,
    "accuracy_germination": 60.0,
    "stable_accuracy": 62.0,
    "step": 25,
    "seed_age": 15,
}


@pytest.mark.parametrize(
    ("given", "paid"),
    [
        ({"contribution": 0.5, "val_accuracy": 60.25}, 1 / 3),  # 2 * 0.5 * 0.25 / 0.75
        # germinated at env-step 5
        ({"contribution": 0.5, "val_accuracy": 60.25, "seed_age": 20}, 0.7 / 3),
        ({"contribution": 0.5, "val_accuracy": 59.0}, 0.0),
        ({"contribution": 0.0, "val_accuracy": 63.0}, 0.0),
        ({"contribution": -0.5, "val_accuracy": 63.0, "seed_age": 20}, -0.5),
        ({"improvement": 0.5}, 0.15),  # unmeasured: three tenths of what the stage gained
        ({"improvement": -0.5}, 0.0),
        ({"improvement": 0.5, "stage": Stage.TRAINING}, 0.0),
        ({"improvement": 0.5, "stage": Stage.FOSSILIZED}, 0.0),
        # refused where all seeds together do harm
        ({"contribution": 0.5, "val_accuracy": 60.25, "total": 0.0, "op": Op.FOSSILIZE}, 1 / 3),
        ({"contribution": 0.5, "val_accuracy": 60.25, "total": -1e-9, "op": Op.FOSSILIZE}, 0.0),
    ],
)
def test_shaped_attributes_small_contributions_by_the_same_rule(given: dict, paid: float) -> None:
    assert terms_of("shaped", SMALL | given).attribution.item() == pytest.approx(paid)


@pytest.mark.parametrize(
    ("contribution", "escrow", "paid", "credit"),
    [
        (0.5, 0.0, 0.5, 0.5),
        (0.0, 5.0, -2.0, 3.0),
        (-0.5, 5.0, -5.5, 0.0),  # harm is blamed, and takes the whole credit
        (-0.5, 0.0, -0.5, 0.0),
        (9.0, 0.0, 2.0, 2.0),  # sqrt(2 * 9) = 4.24, by two at most
        (9.0, 4.0, 0.242640687, 4.242640687),
        (9.0, 9.0, -2.0, 7.0),
    ],
)
def test_escrow_moves_towards_its_goal(
    contribution: float, escrow: float, paid: float, credit: float
) -> None:
    fields = SMALL | {"contribution": contribution, "escrow": escrow}
    assert terms_of("escrow", fields).attribution.item() == pytest.approx(paid)
    assert credit_of(fields) == pytest.approx([credit])


# --- which slots are scored

TWO_SEEDS = {
    "num_slots": 2,
    "stage": [Stage.BLENDING, Stage.BLENDING],
    "stage_age": 3,
    "seed_age": [5, 15],
    "previous_stage": Stage.TRAINING,
    "previous_stage_age": 4,
    "contribution": [2.0, -1.0],
    "total": 1.5,
    "accuracy_germination": 60.0,
    "val_accuracy": 65.0,
    "step": 20,
    "num_active": 2,
}


def test_all_live_slots_are_scored_and_only_the_target_with_the_reference_rule() -> None:
    # slot 0: 2 points, less than the 5 since germination, age 15 at germination: all of it; slot 1:
    # -1 point.
    # pbrs of each: .3 * (.995 * (3.5 + .9) - (3.5 + .6)) = .0834
    every = terms_of("shaped", TWO_SEEDS)
    target = terms_of("shaped", TWO_SEEDS, scored_slots="target")
    assert every.attribution.item() == pytest.approx(2.0 - 1.0)
    assert every.pbrs_bonus.item() == pytest.approx(2 * 0.0834)
    assert target.attribution.item() == pytest.approx(2.0)
    assert target.pbrs_bonus.item() == pytest.approx(0.0834)
    dead = TWO_SEEDS | {"has_seed": [1, 0], "contribution": [2.0, -7.0]}
    assert terms_of("shaped", dead).attribution.item() == pytest.approx(2.0)


def test_an_op_acts_on_its_target_and_other_slots_are_scored_as_under_wait() -> None:
    # PRUNE of slot 0 turns its 2 points around; slot 1 keeps its -1. Judgement of slot 0, age 5 and
    # contribution 2:
    # -.3 - .05 * 2 = -.4, cost -.005, potential given back .3 * 4.4 = 1.32
    terms = terms_of("shaped", TWO_SEEDS | {"op": Op.PRUNE})
    assert terms.attribution.item() == pytest.approx(-2.0 - 1.0)
    assert terms.action_shaping.item() == pytest.approx(-0.4 - 0.005 - 1.32)


def test_the_escrow_of_every_scored_slot_advances() -> None:
    # goals: slot 0 2 points by 5 of progress: 2; slot 1 harmful: gives its credit of .5 back
    fields = TWO_SEEDS | {"stable_accuracy": 65.0, "escrow": [0.25, 0.5]}
    assert credit_of(fields) == [2.0, 0.0]
    assert credit_of(fields, scored_slots="target") == [2.0, 0.5]


def test_a_young_seed_that_is_not_scored_spares_its_host_no_rent() -> None:
    fields = {"num_slots": 2, "stage": [Stage.TRAINING] * 2, "seed_age": [10.0, 1.0]}
    fields |= {"total_params": 120, "host_params": 100}
    every, target = (
        terms_of("loss", fields, scored_slots=rule).compute_rent.item()
        for rule in ("all", "target")
    )
    assert target < 0 == every


# --- the other modes: mode, what it is given, and one term of what it pays, where the recordings of
# tests/parity have no row

LAST = {"step": 150}
FOSSILIZE = {"op": Op.FOSSILIZE, "stage": Stage.HOLDING, "stage_age": 5}
GAIN = {"contribution": 1.0, "total": 1.0}
DRIP = {"drip_live": 1.0, "drip_scale": 0.01, "drip_left": 9.0}
YOUNG = {"stage": Stage.TRAINING, "seed_age": 4}
COMMITTED = {"committed_accuracy": 62.0, "fossilized_params": 50_000}
NET = {"accuracy_delta": -1.5, "host_params": 6000, "total_params": 18_000, "max_steps": 6}


@pytest.mark.parametrize(
    ("mode", "fields", "term", "paid"),
    [
        # between -1 and 1, at the end: what fossils alone achieve, less their parameters
        ("sparse", LAST | COMMITTED, "total", 0.61),
        ("sparse", LAST | {"fossilized_params": 6_000_000}, "total", -1.0),
        ("sparse", LAST | {"committed_accuracy": 250.0}, "total", 1.0),
        # the same, and blame for pruning before the fifth env-step of a seed
        ("minimal", LAST | COMMITTED | YOUNG | {"op": Op.PRUNE}, "total", 0.51),
        ("minimal", YOUNG | {"op": Op.PRUNE, "seed_age": 5}, "total", 0.0),
        # five typical changes of 0.05 count, of weight 5; a rise costs half
        ("loss", {"loss_delta": torch.inf}, "total", -12.5),
        # a seed proven while it was held, 0.3 + 0.5 * 1; not one that holds its host to ransom
        ("basic", FOSSILIZE | GAIN, "fossilize_bonus", 0.8),
        ("basic", FOSSILIZE | GAIN | {"contribution": 0.99}, "fossilize_bonus", -0.2),
        ("basic", FOSSILIZE | {"contribution": 0.101, "total": 0.0}, "fossilize_bonus", -0.5),
        ("basic", FOSSILIZE | {"contribution": 0.1, "total": 0.0}, "fossilize_bonus", -0.2),
        # a drip is between its limits and what is left
        ("basic_plus", DRIP | {"drip_contribution": 2.0}, "total", 0.02),
        ("basic_plus", DRIP | {"drip_contribution": 11.0}, "total", 0.1),
        ("basic_plus", DRIP | {"drip_contribution": -6.0}, "total", -0.05),
        ("basic_plus", DRIP | {"drip_contribution": 9.0, "drip_left": 0.03}, "total", 0.03),
        ("basic_plus", DRIP | {"drip_contribution": -6.0, "drip_left": 0.0}, "total", -0.05),
        ("basic_plus", DRIP | {"drip_contribution": 9.0, "drip_live": 0.0}, "total", 0.0),
        # every change of accuracy; the rent of the final size, within limits
        ("net", NET | {"step": 1}, "total", 0.0),  # no action came before it
        ("net", NET | {"step": 5}, "total", -1.5),
        ("net", NET | {"step": 6}, "total", -1.5 - 0.5 * math.log(3)),
        ("net", LAST | {"host_params": 6000, "total_params": 6_000_000}, "total", -1.5),
        ("net", LAST | {"host_params": 6000, "total_params": 5000}, "total", 0.0),
        (  # small hosts count as larger ones
            "net",
            LAST | {"host_params": 77, "total_params": 577},
            "total",
            -0.5 * math.log1p(500 / RewardConfig().rent_host_params_floor),
        ),
    ],
)
def test_a_mode_pays_by_hand(mode: str, fields: dict, term: str, paid: float) -> None:
    assert terms_of(mode, fields).get(term).item() == pytest.approx(paid, abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "paid"),
    [
        ({"step": 1}, 0.0),
        ({"step": 5}, 3.0),  # a fall by 0.03 nats
        ({"step": 6}, 3.0 - 0.5 * math.log(3)),
        ({"step": 5, "loss_delta": torch.inf}, -1000.0),
    ],
)
def test_net_pays_by_the_loss_where_it_is_told_to(fields: dict, paid: float) -> None:
    given = NET | {"loss_delta": -0.03} | fields
    found = terms_of("net", given, net_measure="loss")
    assert found.total.item() == pytest.approx(paid, abs=1e-12)
    assert found.accuracy_change.item() == 0.0


@pytest.mark.parametrize(
    ("step", "given", "paid"),
    [
        (6, {}, 0.0),  # training has no price by default
        (5, {"flop_weight": 1.0}, 0.0),
        (6, {"flop_weight": 1.0}, -math.log(3)),
        (6, {"flop_weight": 2.0}, -1.5),  # max_rent
    ],
)
def test_net_takes_a_price_of_training_at_the_end(step: int, given: dict, paid: float) -> None:
    fields = NET | {"step": step, "train_flop": 300.0, "host_flop": 100.0}
    assert terms_of("net", fields, **given).flop_rent.item() == pytest.approx(paid, abs=1e-12)


def test_a_term_that_the_record_lacks_is_refused_instead_of_paid_unseen() -> None:
    one = torch.ones(1)
    assert add_terms(no_terms(one), {"drip": one, "compute_rent": -3 * one}).total.item() == -2.0
    told = "^RewardTerms has no bonus, tip: the total would pay what no table shows$"
    with pytest.raises(ValueError, match=told):
        add_terms(no_terms(one), {"tip": one, "drip": one, "bonus": one})
