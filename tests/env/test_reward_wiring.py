"""What the reward reads from which field of the env state, and when modes pay or do not."""

import math

import pytest
import torch
from reward_cases import empty_state, make_action, make_attribution, make_inputs, make_settings
from torch import Tensor

from esper_soa.env.config import LossRewardConfig, RewardConfig
from esper_soa.env.reward import reward, reward_inputs, settle_fossils
from esper_soa.env.reward_modes import score
from esper_soa.env.reward_records import RewardInputs
from esper_soa.env.reward_terms import RewardTerms
from esper_soa.state import ActionOutcome, EnvState
from esper_soa.vocabulary import Op, Stage

STEPS = 6
ENVS = 2
SLOTS = 2
BORROWED = ("seed_age", "stage_age", "previous_stage_age", "escrow", "drip_scale", "drip_live")


def numbered() -> EnvState:
    """An env state, no two numbers alike; stages HOLDING and FOSSILIZED, EMPTY and TRAINING."""
    state = empty_state(ENVS, SLOTS, STEPS)
    counter = iter(range(2, 10_000))

    def fill(value: Tensor) -> Tensor:
        if value.dtype == torch.bool:
            return value
        return torch.tensor(
            [next(counter) for _ in range(value.numel())], dtype=value.dtype
        ).view_as(value)

    slots, signals, totals = (
        part.replace(**{name: fill(value) for name, value in part.items()})
        for part in (state.slots, state.signals, state.totals)
    )
    slots = slots.replace(
        stage=torch.tensor([[Stage.HOLDING, Stage.FOSSILIZED], [Stage.EMPTY, Stage.TRAINING]]),
        blueprint=torch.tensor([[1, 2], [-1, 3]]),
        blend=torch.ones(ENVS, SLOTS, dtype=torch.int64),
        germination_known=torch.tensor([[True, False], [False, True]]),
        drip_live=torch.tensor([[False, True], [False, False]]),
    )
    signals = signals.replace(step=torch.tensor([3, 5]))
    return state.replace(slots=slots, signals=signals, totals=totals)


@pytest.fixture(scope="module")
def state() -> EnvState:
    return numbered()


@pytest.fixture(scope="module")
def inputs(state: EnvState) -> RewardInputs:
    contribution = torch.tensor([[1.5, 2.5], [3.5, 4.5]], dtype=torch.float64)
    measured = torch.tensor([[True, False], [False, False]])
    attribution = make_attribution(
        contribution, measured, torch.tensor([7.5, 8.5], dtype=torch.float64)
    )
    attribution = attribution.replace(
        committed=torch.tensor([61.5, 62.5]).double(), interaction_sum=contribution + 10
    )
    action = make_action(torch.tensor([1, 0]), torch.tensor([Op.PRUNE, Op.ADVANCE]))
    return reward_inputs(
        state, attribution, action, torch.tensor([Op.PRUNE, Op.WAIT]), make_settings(STEPS, SLOTS)
    )


@pytest.mark.parametrize("name", BORROWED)
def test_fields_of_the_same_name_are_the_same(
    name: str, state: EnvState, inputs: RewardInputs
) -> None:
    assert torch.equal(inputs.get(name), state.slots.get(name))


def test_what_is_unknown_reads_0(state: EnvState, inputs: RewardInputs) -> None:
    slots = state.slots
    assert (
        inputs.contribution.tolist()
        == inputs.drip_contribution.tolist()
        == [[1.5, 0.0], [0.0, 0.0]]
    )
    assert inputs.contribution_known.tolist() == [[True, False], [False, False]]
    assert inputs.interaction_sum.tolist() == [[11.5, 12.5], [13.5, 14.5]]
    known = torch.where(slots.germination_known, slots.accuracy_germination, 0.0)
    assert torch.equal(inputs.accuracy_germination, known)
    assert torch.equal(inputs.germination_known, slots.germination_known)
    assert (inputs.total.tolist(), inputs.total_known.tolist()) == ([7.5, 0.0], [True, False])


def test_every_slot_shows_its_stages_gain_and_pool(state: EnvState, inputs: RewardInputs) -> None:
    slots = state.slots
    assert torch.equal(inputs.stage, slots.stage)
    assert torch.equal(inputs.previous_stage, slots.previous_stage)
    assert torch.equal(inputs.improvement, slots.accuracy_current - slots.accuracy_stage_start)
    assert torch.equal(inputs.drip_left, slots.drip_total - slots.drip_paid)
    assert (
        inputs.has_seed.tolist()
        == inputs.improvement_known.tolist()
        == [[True, True], [False, True]]
    )
    assert inputs.target.tolist() == [[False, True], [True, False]]
    assert inputs.op.tolist() == [Op.PRUNE, Op.WAIT]


def test_every_env_shows_its_signals_and_its_counts(state: EnvState, inputs: RewardInputs) -> None:
    signals = state.signals
    totals = state.totals
    assert torch.equal(inputs.val_accuracy, signals.val_accuracy)
    assert torch.equal(inputs.accuracy_delta, signals.accuracy_delta)
    assert torch.equal(inputs.val_loss, signals.val_loss)
    assert torch.equal(inputs.loss_delta, -signals.loss_delta)
    assert torch.equal(inputs.num_fossilized, totals.fossilized)
    assert torch.equal(inputs.num_contributing, totals.contributing)
    assert torch.equal(inputs.step, signals.step)
    assert inputs.committed_accuracy.tolist() == [61.5, 62.5]
    assert inputs.max_steps.tolist() == [STEPS] * ENVS
    assert inputs.host_params.tolist() == [1000.0] * ENVS
    # host 1000; seed of slot s and blueprint b: 100 (s + 1) + b
    assert inputs.total_params.tolist() == [1000 + 101 + 202, 1000 + 203]
    assert inputs.fossilized_params.tolist() == [202.0, 0.0]
    assert inputs.num_active.tolist() == [1, 1]


@pytest.mark.parametrize(("known", "window"), [(1, 3), (3, 2), (3, 3), (3, 10)])
def test_the_stable_accuracy_looks_as_far_back_as_is_set(known: int, window: int) -> None:
    state = empty_state(1, 1, STEPS)
    history = torch.tensor([[5.0] * 7 + [51.0, 53.0, 52.0]]).double()
    signals = state.signals.replace(accuracy_history=history, step=torch.tensor([known]))
    zero = torch.zeros(1, 1).double()
    attribution = make_attribution(zero, zero > 0, zero[:, 0])
    action = make_action(torch.tensor([0]), torch.tensor([0]))
    cfg = make_settings(STEPS, 1, escrow_stable_window=window)
    found = reward_inputs(
        state.replace(signals=signals), attribution, action, action.op, cfg
    ).stable_accuracy
    assert found.tolist() == [min([51.0, 53.0, 52.0][-min(known, window) :])]


# --- rents and shocks


def rented(stage: int, floor: int = 200, **slots: float) -> RewardTerms:
    """Terms of an env with one conv_light seed (101 parameters) in `stage`; a host of 1000."""
    state = empty_state(1, 1, STEPS)
    given = {name: torch.full_like(state.slots.get(name), value) for name, value in slots.items()}
    one = torch.ones(1, 1, dtype=torch.int64)
    state = state.replace(slots=state.slots.replace(stage=stage * one, blueprint=one, **given))
    zero = torch.zeros(1, 1).double()
    action = make_action(torch.tensor([0]), torch.tensor([Op.WAIT]))
    settings = make_settings(STEPS, 1, rent_host_params_floor=floor)
    return reward(state, make_attribution(zero, zero > 0, zero[:, 0]), action, action.op, settings)[
        0
    ]


@pytest.mark.parametrize("stage", range(2, 12))
def test_seeds_pay_rent_from_blending_on(stage: int) -> None:
    pays = stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
    # 3.9 for the slot and half of 101, over 1000: -0.5 ln(1.0544)
    expected = -0.5 * torch.tensor(0.0544).double().log1p().item() if pays else 0.0
    assert rented(stage, alpha=0.5).compute_rent.item() == pytest.approx(expected)


@pytest.mark.parametrize(("floor", "size"), [(200, 1000), (1000, 1000), (5000, 5000)])
def test_alpha_moves_are_weighed_by_the_size_at_the_last_reading(floor: int, size: int) -> None:
    terms = rented(Stage.BLENDING, floor, alpha=0.75, rent_alpha=0.25, rent_params=400.0)
    assert terms.alpha_shock.item() == pytest.approx(-0.1958 * 0.25 * 400 / size)
    assert (
        rented(
            Stage.BLENDING, floor, alpha=0.75, rent_alpha=0.25, rent_params=-5.0
        ).alpha_shock.item()
        == 0.0
    )


# --- edges of the modes


def total(mode: str, **given: float) -> float:
    return score(make_inputs(**given), RewardConfig(mode=mode))[0].total.item()


@pytest.mark.parametrize("op", range(6))
def test_simplified_costs_a_hundredth_for_every_op_but_waiting(op: int) -> None:
    assert total("simplified", op=op) == (0.0 if op == Op.WAIT else -0.01)


def test_simplified_pays_for_contributing_fossils_alone() -> None:
    last = {"step": 150, "val_accuracy": 70.0, "num_fossilized": 5}
    assert total("simplified", **last) == pytest.approx(2.1)  # 3 * 0.7
    assert total("simplified", **last, num_contributing=2) == pytest.approx(6.1)
    assert total("simplified", **(last | {"step": 149}), num_contributing=2) == 0.0


@pytest.mark.parametrize(
    ("accuracy", "params", "paid"),
    [
        (62.0, 0, 0.62),
        (0.0, 0, 0.0),
        (62.0, 500_000, 0.52),
        (0.0, 5_000_000, -1.0),
        (0.0, 6_000_000, -1.0),
        (250.0, 0, 1.0),
        (100.0, 0, 1.0),
    ],
)
def test_sparse_pays_between_minus_1_and_1_at_the_end(
    accuracy: float, params: int, paid: float
) -> None:
    given = {"committed_accuracy": accuracy, "fossilized_params": params, "step": 150}
    assert total("sparse", **given) == pytest.approx(paid)


@pytest.mark.parametrize(("age", "penalty"), [(4, -0.1), (5, 0.0)])
def test_minimal_blames_pruning_before_the_fifth_env_step_of_a_seed(
    age: int, penalty: float
) -> None:
    young = {"stage": Stage.TRAINING, "seed_age": age}
    assert total("minimal", op=Op.PRUNE, **young) == penalty
    assert total("minimal", op=Op.ADVANCE, **young) == 0.0
    assert total("minimal", op=Op.PRUNE, seed_age=age) == 0.0  # nothing there


@pytest.mark.parametrize(
    ("change", "paid"),
    [
        (-0.25, 25.0),  # 5 typical changes of 0.05 at weight 5
        (-0.3, 25.0),  # and no more
        (0.25, -12.5),  # half of it for a rise
        (0.3, -12.5),
    ],
)
def test_the_loss_mode_counts_changes_up_to_five_typical_ones(change: float, paid: float) -> None:
    assert total("loss", loss_delta=change) == pytest.approx(paid)


@pytest.mark.parametrize(("age", "free"), [(2, True), (3, False)])
def test_the_loss_mode_takes_no_rent_in_a_seeds_first_three_env_steps(age: int, free: bool) -> None:
    given = {
        "stage": Stage.TRAINING,
        "previous_stage": Stage.TRAINING,
        "seed_age": age,
        "stage_age": 1,
    }
    terms, _ = score(
        make_inputs(**given, total_params=2000, host_params=1000), RewardConfig(mode="loss")
    )
    assert terms.compute_rent.item() == pytest.approx(0.0 if free else -0.05 * math.log(2))


@pytest.mark.parametrize(
    ("loss", "paid"), [(2.3, 0.0), (2.4, 0.0), (1.3, 0.5), (0.3, 1.0), (0.1, 1.0)]
)
def test_the_loss_mode_pays_at_the_end_for_the_way_from_baseline_to_target(
    loss: float, paid: float
) -> None:
    assert total("loss", val_loss=loss, step=150) == pytest.approx(paid)
    assert total("loss", val_loss=loss, step=149) == 0.0


def test_the_rent_of_the_loss_mode_is_capped() -> None:
    cfg = RewardConfig(mode="loss", loss=LossRewardConfig(max_rent_penalty=0.01))
    terms, _ = score(make_inputs(total_params=2000, host_params=1000), cfg)
    assert terms.compute_rent.item() == -0.01


FOSSILISE = {"op": Op.FOSSILIZE, "stage": Stage.HOLDING, "stage_age": 5}


@pytest.mark.parametrize(
    ("given", "paid"),
    [
        ({"contribution": 1.0, "total": 1.0}, 0.8),  # 0.3 + 0.5 * 1: one point is proof
        ({"contribution": 1.0, "total": 1.0, "stage_age": 4}, 0.64),
        ({"contribution": 0.99, "total": 1.0}, -0.2),
        ({"contribution": 1.0, "total": 0.0}, -0.5),  # it holds its host to ransom
        ({"contribution": 0.1, "total": 0.0}, -0.2),
        ({"contribution": 1.0, "total": 1.0, "stage": Stage.BLENDING}, -0.5),
        ({"total": 1.0}, -0.2),
        ({"contribution": 1.0, "total": 1.0, "has_seed": 0.0}, 0.0),
    ],
)
def test_basic_pays_for_a_fossil_that_was_proven_while_it_was_held(
    given: dict[str, float], paid: float
) -> None:
    terms, _ = score(make_inputs(**(FOSSILISE | given)), RewardConfig(mode="basic"))
    assert terms.fossilize_bonus.item() == pytest.approx(paid)


@pytest.mark.parametrize(("step", "left"), [(100, 50), (145, 5), (146, 5), (150, 5)])
def test_a_drip_pool_lasts_for_the_env_steps_left_but_at_least_five(step: int, left: int) -> None:
    cfg = RewardConfig(mode="basic_plus")
    inputs = make_inputs(**FOSSILISE, contribution=1.0, total=1.0, step=step)
    readings = score(inputs, cfg)[1]
    assert readings.drip_total.item() == pytest.approx(0.7 * 0.8)
    assert readings.drip_scale.item() == pytest.approx(0.56 / left)


@pytest.mark.parametrize(
    ("contribution", "left", "paid"),
    [
        (2.0, 9.0, 0.02),
        (10.0, 9.0, 0.1),
        (11.0, 9.0, 0.1),
        (-5.0, 9.0, -0.05),
        (-6.0, 9.0, -0.05),
        (9.0, 0.03, 0.03),
        (9.0, 0.0, 0.0),
    ],
)
def test_a_drip_is_between_its_limits_and_what_is_left(
    contribution: float, left: float, paid: float
) -> None:
    given = {
        "drip_live": 1.0,
        "drip_scale": 0.01,
        "drip_left": left,
        "drip_contribution": contribution,
    }
    assert total("basic_plus", **given) == pytest.approx(paid)
    assert total("basic_plus", **(given | {"drip_live": 0.0})) == 0.0


def test_basic_pays_at_the_end_for_the_last_gain_and_takes_a_linear_rent() -> None:
    given = {"accuracy_delta": 2.0, "effective_params": 50_000.0}
    assert total("basic", **given, step=150) == pytest.approx(5 * 0.02 - 0.1 * 0.1)
    assert total("basic", **given, step=149) == pytest.approx(-0.01)


@pytest.mark.parametrize(
    ("escrow", "contribution", "move"),
    [(0.0, 9.0, 2.0), (4.0, 9.0, 0.242640687), (9.0, 9.0, -2.0), (5.0, -1.0, -5.0)],
)
def test_escrow_moves_by_two_at_most_but_a_harmful_seed_loses_all(
    escrow: float, contribution: float, move: float
) -> None:
    inputs = make_inputs(
        stage=Stage.BLENDING,
        contribution=contribution,
        total=9.0,
        stable_accuracy=62.0,
        accuracy_germination=60.0,
        escrow=escrow,
    )
    readings = score(inputs, RewardConfig(mode="escrow"))[1]  # sqrt(2 * 9) = 4.24
    assert readings.escrow_delta.item() == pytest.approx(move)
    assert readings.escrow_next.item() == pytest.approx(escrow + move)


@pytest.mark.parametrize("share", [0.999, 1.0])
def test_a_fossil_contributes_from_a_gain_of_one_point_on(share: float) -> None:
    state = empty_state(1, 1, STEPS)
    one = torch.ones(1, 1, dtype=torch.float64)
    slots = state.slots.replace(
        stage=torch.full((1, 1), Stage.FOSSILIZED),
        accuracy_initial=60 * one,
        accuracy_current=(60 + share) * one,
    )
    yes = torch.tensor([True])
    outcome = ActionOutcome(
        effective_op=torch.tensor([Op.FOSSILIZE]),
        success=yes,
        germinated=~yes,
        fossilized=yes,
        batch_size=[1],
    )
    after = settle_fossils(
        state.replace(slots=slots), make_action(torch.tensor([0]), torch.tensor([4])), outcome
    )
    assert after.totals.contributing.tolist() == [int(share >= 1)]


LIVE = {
    "stage": Stage.BLENDING,
    "total": 9.0,
    "accuracy_germination": 60.0,
    "step": 25,
    "seed_age": 15,
}


@pytest.mark.parametrize(
    ("given", "paid"),
    [
        ({"contribution": 0.5, "val_accuracy": 60.25}, 1 / 3),  # 2 * 0.5 * 0.25 / 0.75
        (
            {"contribution": 0.5, "val_accuracy": 60.25, "seed_age": 20},
            0.7 / 3,
        ),  # germinated at env-step 5
        ({"contribution": 0.5, "val_accuracy": 59.0}, 0.0),
        ({"contribution": 0.0, "val_accuracy": 63.0}, 0.0),
        ({"contribution": -0.5, "val_accuracy": 63.0, "seed_age": 20}, -0.5),
        ({"improvement": 0.5}, 0.15),  # unmeasured: three tenths of what the stage gained
        ({"improvement": -0.5}, 0.0),
        ({"improvement": 0.5, "stage": Stage.TRAINING}, 0.0),
        ({"improvement": 0.5, "stage": Stage.FOSSILIZED}, 0.0),
    ],
)
def test_shaped_attributes_small_contributions_by_the_same_rule(
    given: dict[str, float], paid: float
) -> None:
    terms, _ = score(make_inputs(**(LIVE | given)), RewardConfig())
    assert terms.attribution.item() == pytest.approx(paid)


@pytest.mark.parametrize(
    ("contribution", "escrow", "paid", "credit"),
    [(0.5, 0.0, 0.5, 0.5), (0.0, 5.0, -2.0, 3.0), (-0.5, 5.0, -5.5, 0.0), (-0.5, 0.0, -0.5, 0.0)],
)
def test_escrow_follows_small_contributions_and_blames_harm(
    contribution: float, escrow: float, paid: float, credit: float
) -> None:
    inputs = make_inputs(**LIVE, contribution=contribution, stable_accuracy=62.0, escrow=escrow)
    terms, readings = score(inputs, RewardConfig(mode="escrow"))
    assert terms.attribution.item() == pytest.approx(paid)
    assert readings.escrow_next.item() == pytest.approx(credit)
