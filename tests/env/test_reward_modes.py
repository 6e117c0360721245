"""What each mode pays: the reference's golden numbers; scored slots, loss, drip by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import make_inputs

from esper_soa.env.config import LossRewardConfig, RewardConfig
from esper_soa.env.reward_modes import collect, score
from esper_soa.env.reward_terms import PBRS_GAMMA, seed_potential, seed_shaping
from esper_soa.vocabulary import Op, Stage

EMPTY = {"op": Op.GERMINATE, "val_accuracy": 40.0}
BLENDING = {
    "op": Op.WAIT,
    "stage": Stage.BLENDING,
    "stage_age": 3,
    "previous_stage": Stage.TRAINING,
    "previous_stage_age": 4,
    "seed_age": 15,
    "contribution": 2.0,
    "total": 2.0,
    "val_accuracy": 63.0,
    "accuracy_germination": 60.0,
    "step": 20,
    "effective_params": 5390.0,
    "num_active": 1,
}
HOLDING = {
    "op": Op.WAIT,
    "stage": Stage.HOLDING,
    "stage_age": 4,
    "previous_stage": Stage.BLENDING,
    "previous_stage_age": 4,
    "seed_age": 20,
    "contribution": 3.0,
    "total": 3.0,
    "val_accuracy": 65.0,
    "accuracy_germination": 60.0,
    "step": 30,
    "effective_params": 10390.0,
    "num_active": 1,
}
PRUNE = {
    **BLENDING,
    "op": Op.PRUNE,
    "stage_age": 6,
    "seed_age": 18,
    "step": 30,
    "effective_params": 10390.0,
}
TRAINING = {
    "stage": Stage.TRAINING,
    "stage_age": 1,
    "seed_age": 3,
    "previous_stage": Stage.GERMINATED,
    "previous_stage_age": 2,
    "step": 6,
    "num_active": 1,
}
FOSSIL = {
    "stage": Stage.FOSSILIZED,
    "stage_age": 40,
    "seed_age": 80,
    "step": 150,
    "val_accuracy": 70.0,
    "effective_params": 10390.0,
    "num_fossilized": 1,
}
DAMAGED = {"contribution": -1.0, "total": -1.0}

SHAPED = {
    "S1": (EMPTY, -0.01269, {"action_shaping": -0.01269}),
    "S2": ({**EMPTY, "step": 10}, 0.1485, {}),
    "S3": ({**EMPTY, "step": 150}, 1.85, {"action_shaping": -0.15, "terminal_bonus": 2.0}),
    "S4": (TRAINING, 0.08655, {"pbrs_bonus": 0.08655}),
    "S5": (
        {**BLENDING, "alpha_delta_sq": 0.002},
        1.456759615521,
        {
            "attribution": 1.4,
            "pbrs_bonus": 0.0834,
            "compute_rent": -0.026249,
            "alpha_shock": -0.000392,
        },
    ),
    "S6": (
        {**BLENDING, "contribution": 6.0, "total": 0.5, "num_active": 2},
        2.707151215521,
        {"attribution": 2.8, "ratio_penalty": -0.14, "occupancy_rent": -0.01},
    ),
    "S7": (
        {**BLENDING, "contribution": 3.0, "total": -0.5},
        0.190244815514,
        {"attribution": 0.3830936, "blending_warning": -0.25},
    ),
    "S8": (
        {**HOLDING, "interaction_sum": 1.2},
        2.884230274679,
        {
            "attribution": 3.0,
            "holding_warning": -0.2,
            "pbrs_bonus": 0.07995,
            "synergy_bonus": 0.053705,
        },
    ),
    "S9": ({**HOLDING, "op": Op.FOSSILIZE}, 4.432155888055, {"action_shaping": 1.401630570}),
    "S10": (
        {**HOLDING, "op": Op.FOSSILIZE, "contribution": 2.0, "total": -1.0},
        -0.979474682021,
        {"attribution": 0.0, "action_shaping": -1.01},
    ),
    "S11": (
        {**PRUNE, **DAMAGED, "val_accuracy": 58.0},
        -0.812374682021,
        {"attribution": 1.0, "blending_warning": -0.4, "action_shaping": -1.445},
    ),
    "S12": (PRUNE, -3.962374682021, {"attribution": -2.0, "action_shaping": -1.995}),
    "S13": (
        FOSSIL,
        3.436575317979,
        {"pbrs_bonus": -0.012, "fossilized_rent": -0.002, "terminal_bonus": 3.5},
    ),
}
ESCROW = {
    "E1": ({"contribution": 4.0, "total": 4.0, "stable_accuracy": 61.0}, 2.057151215521, 2.0, 2.0),
    "E2": (
        {
            "contribution": 9.0,
            "total": 9.0,
            "val_accuracy": 65.0,
            "stable_accuracy": 64.0,
            "escrow": 1.0,
        },
        2.057151215521,
        2.0,
        3.0,
    ),
    "E3": (
        {**DAMAGED, "val_accuracy": 59.0, "stable_accuracy": 59.0, "escrow": 1.5},
        -2.692848784479,
        -1.5,
        0.0,
    ),
    "E4": ({**PRUNE, "stable_accuracy": 62.0, "escrow": 1.5}, -3.462374682021, -1.5, 0.0),
}


@pytest.mark.parametrize("case", SHAPED)
def test_shaped_pays_the_golden_numbers(case):
    fields, total, parts = SHAPED[case]
    terms, _ = score(make_inputs(**fields), RewardConfig())
    assert terms.total.item() == pytest.approx(total, abs=1e-11)
    for name, value in parts.items():
        assert terms.get(name).item() == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("case", ESCROW)
def test_escrow_pays_the_golden_numbers_and_moves_its_credit(case):
    fields, total, delta, credit = ESCROW[case]
    terms, readings = score(make_inputs(**{**BLENDING, **fields}), RewardConfig(mode="escrow"))
    assert terms.total.item() == pytest.approx(total, abs=1e-11)
    assert readings.escrow_delta.item() == pytest.approx(delta)
    assert readings.escrow_next.item() == pytest.approx(credit)


def test_loss_pays_the_golden_numbers():
    cfg = RewardConfig(mode="loss", loss=LossRewardConfig(typical_loss_delta_std=0.1))
    first, _ = score(make_inputs(loss_delta=torch.inf), cfg)
    assert first.total.item() == -12.5
    last = {
        "loss_delta": -0.05,
        "val_loss": 1.5,
        "step": 10,
        "max_steps": 10,
        "total_params": 120,
        "host_params": 100,
    }
    assert score(make_inputs(**last), cfg)[0].total.item() == pytest.approx(
        2.890883922160302, abs=1e-12
    )


def test_a_young_seed_that_is_not_scored_spares_its_host_no_rent():
    inputs = make_inputs(
        2, stage=[Stage.TRAINING] * 2, seed_age=[10.0, 1.0], total_params=120, host_params=100
    )
    every, target = (
        score(inputs, RewardConfig(mode="loss", scored_slots=rule))[0].compute_rent.item()
        for rule in ("all", "target")
    )
    assert target < 0 == every


def test_simplified_pays_the_golden_number():
    fields = {
        **TRAINING,
        "op": Op.PRUNE,
        "stage_age": 2,
        "previous_stage_age": 1,
        "step": 5,
        "max_steps": 10,
    }
    terms, _ = score(make_inputs(**fields), RewardConfig(mode="simplified"))
    assert terms.total.item() == pytest.approx(0.0761, abs=1e-12)


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


def test_all_live_slots_are_scored_and_only_the_target_with_the_reference_rule():
    # slot 0: 2 points, less than the 5 since germination, age 15 at germination: all of it; slot 1:
    # -1 point.
    # pbrs of each: .3 * (.995 * (3.5 + .9) - (3.5 + .6)) = .0834
    inputs = make_inputs(**TWO_SEEDS, op=Op.WAIT)
    every, _ = score(inputs, RewardConfig(scored_slots="all"))
    target, _ = score(inputs, RewardConfig(scored_slots="target"))
    assert every.attribution.item() == pytest.approx(2.0 - 1.0)
    assert every.pbrs_bonus.item() == pytest.approx(2 * 0.0834)
    assert target.attribution.item() == pytest.approx(2.0)
    assert target.pbrs_bonus.item() == pytest.approx(0.0834)


def test_an_op_acts_on_its_target_and_other_slots_are_scored_as_under_wait():
    # PRUNE of slot 0 turns its 2 points around; slot 1 keeps its -1. Judgement of slot 0, age 5 and
    # contribution 2:
    # -.3 - .05 * 2 = -.4, cost -.005, potential given back .3 * 4.4 = 1.32
    terms, _ = score(make_inputs(**TWO_SEEDS, op=Op.PRUNE), RewardConfig())
    assert terms.attribution.item() == pytest.approx(-2.0 - 1.0)
    assert terms.action_shaping.item() == pytest.approx(-0.4 - 0.005 - 1.32)


def test_the_escrow_of_every_scored_slot_advances():
    # goals: slot 0 2 points by 5 of progress: 2; slot 1 harmful: gives its credit of .5 back
    inputs = make_inputs(**TWO_SEEDS, stable_accuracy=65.0, escrow=[0.25, 0.5], op=Op.WAIT)
    _, every = score(inputs, RewardConfig(mode="escrow"))
    assert every.escrow_next.tolist() == [[2.0, 0.0]]
    _, target = score(inputs, RewardConfig(mode="escrow", scored_slots="target"))
    assert target.escrow_next.tolist() == [[2.0, 0.5]]


def test_a_dead_slot_that_is_no_target_is_not_scored():
    fields = {**TWO_SEEDS, "has_seed": [1, 0], "contribution": [2.0, -7.0]}
    terms, _ = score(make_inputs(**fields, op=Op.WAIT), RewardConfig())
    assert terms.attribution.item() == pytest.approx(2.0)


def test_drip_pays_no_more_than_its_pool_holds():
    # raw .2 * 3 = .6, capped at .1 per env-step, of which the pool still holds .03
    fields = {**FOSSIL, "op": Op.WAIT, "drip_live": 1, "drip_scale": 0.2, "drip_contribution": 3.0}
    cfg = RewardConfig(mode="basic_plus")
    assert score(make_inputs(**fields, drip_left=0.03), cfg)[0].drip.item() == pytest.approx(0.03)
    assert score(make_inputs(**fields, drip_left=0.5), cfg)[0].drip.item() == pytest.approx(0.1)
    assert score(make_inputs(**fields, drip_left=0.0), cfg)[0].drip.item() == 0.0
    harmful = {**fields, "drip_contribution": -3.0, "drip_left": 0.0}
    assert score(make_inputs(**harmful), cfg)[0].drip.item() == pytest.approx(-0.05)


@pytest.mark.parametrize(("contribution", "bonus"), [(0.1, -0.2), (0.101, -0.5)])
def test_basic_calls_it_invalid_to_fossilise_a_seed_that_gained_from_a_host_without_gain(
    contribution, bonus
):
    inputs = make_inputs(
        **(HOLDING | {"op": Op.FOSSILIZE, "contribution": contribution, "total": 0.0})
    )
    terms, _ = score(inputs, RewardConfig(mode="basic"))
    assert terms.fossilize_bonus.tolist() == pytest.approx([bonus])


def test_fossilising_in_basic_plus_pays_a_part_and_puts_the_rest_into_a_pool():
    # harmonic mean of 3 and 3 is 3: full = (.3 + .5 * 3) * 4/5 = 1.44; 30 % now, 1.008 over the 120
    # env-steps left
    terms, readings = score(
        make_inputs(**{**HOLDING, "op": Op.FOSSILIZE}), RewardConfig(mode="basic_plus")
    )
    assert terms.fossilize_bonus.item() == pytest.approx(0.432)
    assert readings.drip_total.item() == pytest.approx(1.008)
    assert readings.drip_scale.item() == pytest.approx(0.0084)


def test_a_falling_loss_is_a_gain_and_a_rising_one_costs_half():
    cfg = RewardConfig(mode="loss")  # typical change .05, weight 5
    assert score(make_inputs(loss_delta=-0.02), cfg)[0].total.item() == pytest.approx(2.0)
    assert score(make_inputs(loss_delta=0.02), cfg)[0].total.item() == pytest.approx(-1.0)
    assert score(make_inputs(loss_delta=0.0), cfg)[0].total.item() == 0.0


def test_sparse_and_minimal_pay_for_what_fossils_alone_achieve():
    # .62 - .1 * 50000 / 500000 = .61 at the end; minimal takes .1 for pruning at age 3
    fields = {"committed_accuracy": 62.0, "fossilized_params": 50_000, "step": 150}
    assert score(make_inputs(**fields), RewardConfig(mode="sparse"))[
        0
    ].total.item() == pytest.approx(0.61)
    assert (
        score(make_inputs(**{**fields, "step": 149}), RewardConfig(mode="sparse"))[0].total.item()
        == 0.0
    )
    young = {**fields, **TRAINING, "step": 150, "op": Op.PRUNE}
    assert score(make_inputs(**young), RewardConfig(mode="minimal"))[
        0
    ].total.item() == pytest.approx(0.51)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.sampled_from([0, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING]), min_size=1, max_size=30
    )
)
def test_shaping_telescopes_along_any_path(moves):
    """The sum of gamma * after - before is gamma^T * last potential - first potential."""
    stage = [Stage.GERMINATED]
    age = [0]
    previous = [Stage.DORMANT]
    previous_age = [0]
    for move in moves:
        stays = move in (0, stage[-1])
        previous.append(previous[-1] if stays else stage[-1])
        previous_age.append(previous_age[-1] if stays else age[-1])
        stage.append(stage[-1] if stays else move)
        age.append(age[-1] + 1 if stays else 0)
    cfg = RewardConfig()
    count = len(moves)
    inputs = make_inputs(
        num_slots=count,
        stage=stage[1:],
        stage_age=age[1:],
        previous_stage=previous[1:],
        previous_stage_age=previous_age[1:],
    )
    discounts = PBRS_GAMMA ** torch.arange(count, dtype=torch.float64)
    paid = (discounts * seed_shaping(inputs, cfg)[0]).sum().item()
    potential = cfg.pbrs_weight * seed_potential(torch.tensor(stage), torch.tensor(age), cfg)
    assert paid == pytest.approx(
        (PBRS_GAMMA**count * potential[-1] - potential[0]).item(), abs=1e-9
    )


def test_a_term_that_the_record_lacks_is_refused_instead_of_paid_unseen() -> None:
    inputs = make_inputs()
    paid = torch.ones_like(inputs.val_accuracy)
    assert collect({"drip": paid, "compute_rent": -3 * paid}, inputs).total.tolist() == [-2.0]
    with pytest.raises(ValueError, match="tip: the total"):
        collect({"drip": paid, "tip": paid}, inputs)


def test_net_pays_every_change_of_accuracy_and_charges_the_rent_of_the_final_size_at_the_end():
    cfg = RewardConfig(mode="net")
    given = {"accuracy_delta": -1.5, "host_params": 6000, "total_params": 18000, "max_steps": 6}
    first, _ = score(make_inputs(step=1, **given), cfg)
    later, _ = score(make_inputs(step=5, **given), cfg)
    last, _ = score(make_inputs(step=6, **given), cfg)
    assert float(first.total) == 0.0  # no action came before it
    assert float(later.total) == float(later.accuracy_change) == -1.5
    assert float(last.compute_rent) == pytest.approx(-0.5 * math.log(3))
    assert float(last.total) == pytest.approx(-1.5 - 0.5 * math.log(3))


def test_the_rent_of_net_is_capped_and_never_a_gift_and_small_hosts_count_as_larger_ones():
    at_end = {"step": 6, "max_steps": 6}

    def rent(host: int, total: int) -> float:
        return float(
            score(
                make_inputs(host_params=host, total_params=total, **at_end),
                RewardConfig(mode="net"),
            )[0].total
        )

    assert rent(6000, 6000_000) == -1.5
    assert rent(6000, 5000) == 0.0
    assert rent(77, 577) == pytest.approx(
        -0.5 * math.log1p(500 / RewardConfig().rent_host_params_floor)
    )


def test_an_episode_of_net_sums_to_its_final_accuracy_minus_rent_less_its_first_accuracy():
    accuracies = [20.0, 31.5, 28.25, 40.0]
    total = 0.0
    for step, accuracy in enumerate(accuracies, start=1):
        delta = accuracy - (accuracies[step - 2] if step > 1 else 0.0)
        inputs = make_inputs(
            step=step, max_steps=4, accuracy_delta=delta, host_params=1000, total_params=2000
        )
        total += float(score(inputs, RewardConfig(mode="net"))[0].total)
    assert total == pytest.approx(40.0 - 0.5 * math.log(2) - 20.0)
