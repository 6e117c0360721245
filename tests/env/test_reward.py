"""The wiring of the reward: what it reads from which field of the env state, last-step reckonings,
what is remembered, fossils settled.
"""

import pytest
import torch
from torch import Tensor

from esper_soa.config.env import REWARD_MODES, TERM_NAMES, LossRewardConfig, RewardConfig
from esper_soa.env.reward import germination_refund, reward, reward_inputs, settle_fossils
from esper_soa.env.reward_modes import RewardTerms
from esper_soa.env.reward_records import RewardInputs
from esper_soa.state import ActionOutcome, EnvState
from esper_soa.system.errors import SettingError
from esper_soa.vocabulary import Blend, Op, Stage
from tests.builders.env_records import empty_state, numbers, with_values
from tests.builders.reward_cases import make_action, make_attribution, make_settings
from tests.builders.tiny_world import play_state, tiny_rules

STEPS = 6
FOSSILIZE = (Op.FOSSILIZE, Op.FOSSILIZE)


def two_envs(step: int, **slots: object) -> EnvState:
    """Two envs of 2 slots at env-step `step`, alike, at accuracy 65, with these slot fields."""
    state = empty_state(2, 2, STEPS)
    signals = with_values(state.signals, step=step, val_accuracy=65.0).replace(
        accuracy_history=torch.full((2, 10), 65.0).double()
    )
    return state.replace(slots=with_values(state.slots, **slots), signals=signals)


def ask(state, contribution=(0.0, 0.0), measured=(False, False), op=(Op.WAIT, Op.WAIT), **config):
    """Reward of two envs whose actions target slot 0."""
    contribution = numbers(*contribution).expand(2, 2)
    measured = torch.tensor(measured).expand(2, 2)
    attribution = make_attribution(contribution, measured, contribution.sum(1))
    op = torch.tensor(op)
    settings = make_settings(STEPS, 2, **config)
    return reward(state, attribution, make_action(torch.zeros_like(op), op), op, settings)


def settled(state: EnvState, fossilized: list[bool]) -> EnvState:
    """After fossils were made of the seeds in slot 0 of these envs."""
    flags = torch.tensor(fossilized)
    op = torch.full((2,), Op.FOSSILIZE)
    outcome = ActionOutcome(
        effective_op=op,
        success=flags,
        germinated=torch.zeros_like(flags),
        fossilized=flags,
        batch_size=[2],
    )
    return settle_fossils(state, make_action(torch.zeros_like(op), op), outcome)


@pytest.mark.parametrize("mode", REWARD_MODES)
def test_the_terms_sum_to_what_an_episode_is_paid_in_every_mode(mode: str) -> None:
    for step in play_state(tiny_rules(3, 6, RewardConfig(mode=mode)), 8, seed=3):
        terms = step.result.terms
        paid = step.result.state.totals.reward - step.view.state.totals.reward
        parts = torch.stack([terms.get(name) for name in TERM_NAMES])
        torch.testing.assert_close(parts.sum(0), terms.total, rtol=0, atol=1e-12)
        torch.testing.assert_close(paid, terms.total, rtol=0, atol=1e-9)


# --- what is read from which field


def numbered() -> EnvState:
    """An env state, no two numbers alike; stages HOLDING and FOSSILIZED, EMPTY and TRAINING."""
    state = empty_state(2, 2, STEPS)
    counter = iter(range(2, 10_000))

    def fill(value: Tensor) -> Tensor:
        if value.dtype == torch.bool:
            return value
        found = [next(counter) for _ in range(value.numel())]
        return torch.tensor(found, dtype=value.dtype).view_as(value)

    slots, signals, totals = (
        part.replace(**{name: fill(value) for name, value in part.items()})
        for part in (state.slots, state.signals, state.totals)
    )
    slots = with_values(
        slots,
        stage=[[Stage.HOLDING, Stage.FOSSILIZED], [Stage.EMPTY, Stage.TRAINING]],
        blueprint=[[1, 2], [-1, 3]],
        blend=Blend.ADD,
        germination_known=[[True, False], [False, True]],
        drip_live=[[False, True], [False, False]],
    )
    return state.replace(slots=slots, signals=with_values(signals, step=[3, 5]), totals=totals)


def inputs_of(state: EnvState, **config: object) -> RewardInputs:
    """With slot 1 of env 0 and slot 0 of env 1 as targets; one contribution is measured."""
    contribution = numbers([1.5, 0.0], [0.0, 0.0])
    measured = torch.tensor([[True, False], [False, False]])
    attribution = make_attribution(contribution, measured, numbers(7.5, 0.0)).replace(
        committed=numbers(61.5, 62.5), interaction_sum=numbers([11.5, 12.5], [13.5, 14.5])
    )
    action = make_action(torch.tensor([1, 0]), torch.tensor([Op.PRUNE, Op.ADVANCE]))
    effective = torch.tensor([Op.PRUNE, Op.WAIT])
    return reward_inputs(state, attribution, action, effective, make_settings(STEPS, 2, **config))


def test_every_field_is_read_from_its_place() -> None:
    state = numbered()
    inputs = inputs_of(state)
    slots = state.slots
    signals = state.signals
    totals = state.totals
    same = ("seed_age", "stage", "stage_age", "previous_stage", "previous_stage_age", "escrow")
    for name in (*same, "drip_scale", "drip_live", "germination_known"):
        assert torch.equal(inputs.get(name), slots.get(name)), name
    for name in ("val_accuracy", "accuracy_delta", "val_loss", "step"):
        assert torch.equal(inputs.get(name), signals.get(name)), name
    assert torch.equal(inputs.loss_delta, -signals.loss_delta)
    assert torch.equal(inputs.num_fossilized, totals.fossilized)
    assert torch.equal(inputs.num_contributing, totals.contributing)
    assert torch.equal(inputs.improvement, slots.accuracy_current - slots.accuracy_stage_start)
    assert torch.equal(inputs.drip_left, slots.drip_total - slots.drip_paid)
    known = torch.where(slots.germination_known, slots.accuracy_germination, 0.0)
    assert torch.equal(inputs.accuracy_germination, known)  # what is unknown reads 0
    live = [[True, True], [False, True]]
    expected = {
        "has_seed": live,
        "improvement_known": live,
        "target": [[False, True], [True, False]],
        "op": [Op.PRUNE, Op.WAIT],
        "contribution": [[1.5, 0.0], [0.0, 0.0]],
        "drip_contribution": [[1.5, 0.0], [0.0, 0.0]],
        "contribution_known": [[True, False], [False, False]],
        "interaction_sum": [[11.5, 12.5], [13.5, 14.5]],
        "total": [7.5, 0.0],
        "total_known": [True, False],
        "committed_accuracy": [61.5, 62.5],
        "max_steps": [STEPS] * 2,
        "host_params": [1000.0] * 2,
        # host 1000; seed of slot s and blueprint b: 100 (s + 1) + b
        "total_params": [1000.0 + 101 + 202, 1000.0 + 203],
        "fossilized_params": [202.0, 0.0],
        "num_active": [1, 1],
    }
    assert {name: inputs.get(name).tolist() for name in expected} == expected


@pytest.mark.parametrize(("known", "window"), [(1, 3), (3, 2), (3, 10)])
def test_the_stable_accuracy_looks_as_far_back_as_is_set(known: int, window: int) -> None:
    state = empty_state(2, 2, STEPS)
    history = numbers([5.0] * 7 + [51.0, 53.0, 52.0]).expand(2, 10)
    signals = with_values(state.signals, step=known).replace(accuracy_history=history)
    found = inputs_of(state.replace(signals=signals), escrow_stable_window=window)
    assert found.stable_accuracy.tolist() == [min([51.0, 53.0, 52.0][-min(known, window) :])] * 2


@pytest.mark.parametrize("stage", range(2, 12))
def test_every_stage_occupies_its_slot_but_a_fossil_a_pruned_seed_and_an_empty_slot(
    stage: int,
) -> None:
    free = (5, Stage.FOSSILIZED, Stage.PRUNED, Stage.EMPTY)  # 5 is retired
    inputs = inputs_of(two_envs(3, stage=[stage, Stage.BLENDING]))
    assert inputs.num_active.tolist() == [1 + (stage not in free)] * 2


# --- rents and shocks


def test_rent_weights_parameters_with_alpha_and_shock_weights_alpha_moves_with_size() -> None:
    # host 1000; slot 0: conv_light in BLENDING with GATE: 100 + 1 + 7 at alpha .5; slot 1: norm in
    # TRAINING: no rent. effective = 3.9 + .5 * 108 = 57.9; shock = (.5 - .3)^2 * 101 / 1000 from
    # the reading before
    given = {"blueprint": [1, 3], "blend": Blend.GATE, "alpha": [0.5, 0.0]}
    state = two_envs(
        3,
        stage=[Stage.BLENDING, Stage.TRAINING],
        rent_alpha=[0.3, 0.0],
        rent_params=[101.0, 203.0],
        **given,
    )
    inputs = inputs_of(state)
    assert inputs.effective_params.tolist() == pytest.approx([57.9, 57.9])
    assert inputs.alpha_delta_sq.tolist() == pytest.approx([0.04 * 0.101] * 2)
    assert inputs.total_params.tolist() == [1000 + 108 + 203] * 2  # no gate yet in TRAINING
    _, after = ask(state)
    assert after.slots.rent_alpha.tolist() == [[0.5, 0.0]] * 2
    assert after.slots.rent_params.tolist() == [[108.0, 203.0]] * 2


def rented(stage: int, floor: int = 200, **slots: float) -> RewardTerms:
    """Terms of an env with a conv_light seed (101 parameters) in `stage`; a host of 1000."""
    given = {name: [value, 0.0] for name, value in slots.items()}
    state = two_envs(3, stage=[stage, Stage.EMPTY], blueprint=[1, -1], **given)
    return ask(state, rent_host_params_floor=floor)[0][0]


@pytest.mark.parametrize("stage", [code for code in range(2, 12) if code != 5])
def test_seeds_pay_rent_from_blending_on(stage: int) -> None:
    pays = stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
    # 3.9 for the slot and half of 101, over 1000: -0.5 ln(1.0544)
    expected = -0.5 * numbers(0.0544).log1p().item() if pays else 0.0
    assert rented(stage, alpha=0.5).compute_rent.item() == pytest.approx(expected)


@pytest.mark.parametrize(("floor", "size"), [(200, 1000), (5000, 5000)])
def test_alpha_moves_are_weighed_by_the_size_at_the_last_reading(floor: int, size: int) -> None:
    moved = {"alpha": 0.75, "rent_alpha": 0.25}
    shock = rented(Stage.BLENDING, floor, rent_params=400.0, **moved).alpha_shock
    assert shock.item() == pytest.approx(-0.1958 * 0.25 * 400 / size)
    assert rented(Stage.BLENDING, floor, rent_params=-5.0, **moved).alpha_shock == 0.0


def test_a_removed_seed_is_charged_its_shock_once() -> None:
    stage = [Stage.EMBARGOED, Stage.EMPTY]
    state = two_envs(3, stage=stage, rent_alpha=[0.5, 0.0], rent_params=[400.0, 0.0])
    terms, after = ask(state)  # .1958 * .5^2 * 400 / 1000
    assert terms.alpha_shock.tolist() == pytest.approx([-0.01958] * 2)
    assert ask(after)[0].alpha_shock.tolist() == [0.0, 0.0]


def test_slots_in_use_are_counted_without_fossils_and_just_pruned_ones() -> None:
    state = two_envs(3, stage=[Stage.EMBARGOED, Stage.PRUNED])
    state = state.replace(totals=with_values(state.totals, fossilized=[0, 2]))
    terms, _ = ask(state)  # one free slot; .01 each beyond, .002 per fossil
    assert terms.occupancy_rent.tolist() == pytest.approx([0.0, -0.02])
    assert terms.fossilized_rent.tolist() == pytest.approx([0.0, -0.004])


# --- last-step reckonings and what is due


@pytest.mark.parametrize(("age", "refund"), [(1, 0.3), (5, 0.306075756615), (50, 0.383522014760)])
def test_the_clawback_undoes_the_germination_bonus(age: int, refund: float) -> None:
    assert 0.3 * germination_refund(torch.tensor(age)).item() == pytest.approx(refund, abs=1e-11)


def test_seeds_that_came_to_nothing_are_clawed_back_at_the_last_env_step_only() -> None:
    fields = {"stage": [Stage.TRAINING, Stage.GERMINATED], "seed_age": [5, 1], "stage_age": 1}
    clawback = ask(two_envs(STEPS, **fields))[0].clawback
    assert clawback.tolist() == pytest.approx([-0.606075756615] * 2)
    assert not ask(two_envs(STEPS - 1, **fields))[0].clawback.any()
    assert not ask(two_envs(STEPS, **fields), mode="basic")[0].clawback.any()


def test_a_seed_fossilized_at_the_last_env_step_keeps_its_escrow() -> None:
    # both slots hold 1.5; env 0 waits and loses both credits, env 1 fossilizes slot 0 and loses
    # that of slot 1
    fields = {"stage": Stage.HOLDING, "stage_age": 5, "escrow": 1.5}
    terms, _ = ask(two_envs(STEPS, **fields), op=(Op.WAIT, Op.FOSSILIZE), mode="escrow")
    assert terms.escrow_forfeit.tolist() == [-3.0, -1.5]
    assert not ask(two_envs(STEPS - 1, **fields), mode="escrow")[0].escrow_forfeit.any()


def test_escrow_follows_the_smallest_of_the_last_accuracies() -> None:
    # germinated at 60; accuracies 62, 64, 65 in a window of 3: progress 2; contribution 9: sqrt(2 *
    # 9) = 4.24
    germinated = {"accuracy_germination": [60.0, 0.0], "germination_known": [1, 0]}
    state = two_envs(3, stage=[Stage.BLENDING, Stage.EMPTY], **germinated)
    history = numbers([0.0] * 7 + [62.0, 64.0, 65.0]).expand(2, 10)
    state = state.replace(signals=state.signals.replace(accuracy_history=history))
    _, after = ask(state, (9.0, 0.0), (True, False), mode="escrow", escrow_delta_clip=0.0)
    assert after.slots.escrow[0].tolist() == pytest.approx([18**0.5, 0.0])


def test_pending_payments_are_paid_once() -> None:
    state = two_envs(2)
    pending = {"pending_penalty": [-0.2, 0.0], "pending_hindsight": [0.0, 0.07]}
    state = state.replace(totals=with_values(state.totals, **pending))
    terms, after = ask(state, mode="sparse")
    assert terms.total.tolist() == pytest.approx([-0.2, 0.07])
    assert ask(after, mode="sparse")[0].total.tolist() == [0.0, 0.0]


# --- fossils


def test_a_drip_pool_opens_when_the_seed_became_a_fossil_and_is_emptied_but_not_overdrawn() -> None:
    # full = (.3 + .5 * 2) * 5/5 = 1.3 at totals of 2 and 2; pool .91 over max(6 - 2, 5) env-steps:
    # scale .182; drip_paid is of pools before
    state = two_envs(2, stage=[Stage.HOLDING, Stage.EMPTY], stage_age=[5, 0], drip_paid=0.5)
    known = {"contribution": (2.0, 0.0), "measured": (True, False), "mode": "basic_plus"}
    _, state = ask(state, op=FOSSILIZE, max_drip_per_step=0.5, **known)
    assert state.slots.drip_total[0].tolist() == pytest.approx([0.91, 0.0])
    assert not state.slots.drip_live.any()
    stages = [[Stage.FOSSILIZED, Stage.EMPTY], [Stage.HOLDING, Stage.EMPTY]]
    state = settled(state.replace(slots=with_values(state.slots, stage=stages)), [True, False])
    assert state.slots.drip_live.tolist() == [[True, False], [False, False]]
    paid = []
    for _ in range(4):  # .364 each, until .91 are paid
        terms, state = ask(state, max_drip_per_step=0.5, **known)
        paid.append(terms.drip.tolist())
    assert [env[0] for env in paid] == pytest.approx([0.364, 0.364, 0.182, 0.0])
    assert [env[1] for env in paid] == [0.0] * 4


def test_a_second_attempt_without_bonus_leaves_no_pool_behind() -> None:
    state = two_envs(2, stage=[Stage.HOLDING, Stage.EMPTY], stage_age=[5, 0])
    for contribution in (2.0, -2.0):
        _, state = ask(state, (contribution, 0.0), (True, False), FOSSILIZE, mode="basic_plus")
    assert not state.slots.drip_total.any()
    assert not settled(state, [True, True]).slots.drip_live.any()


def test_fossils_are_counted_and_their_scaffolds_credited_with_the_next_reward() -> None:
    # boosts of 2 and 3 between the slots at env-steps 1 and 3; slot 0 gained 4 points, settled at
    # env-step 3: .1 tanh(.1 * 2 * 4) .995^2 + .1 tanh(.1 * 3 * 4)
    stage = [Stage.FOSSILIZED, Stage.TRAINING]
    state = two_envs(3, stage=stage, accuracy_initial=[61.0, 60.0], accuracy_current=65.0)
    boosts = state.boosts.clone()
    boosts[:, 0, 0] = 2.0
    boosts[:, 0, 2] = 3.0
    after = settled(state.replace(boosts=boosts), [True, False])
    first, second = 0.1 * numbers(0.8, 1.2).tanh()
    credit = (first * 0.995**2 + second).item()
    assert after.totals.pending_hindsight.tolist() == pytest.approx([credit, 0.0])
    assert after.totals.fossilized.tolist() == [1, 0]
    assert after.totals.contributing.tolist() == [1, 0]
    terms, _ = ask(after, mode="sparse")
    assert terms.hindsight_credit.tolist() == pytest.approx([credit, 0.0])


def test_a_fossil_contributes_from_a_gain_of_one_point_on() -> None:
    initial = [[64.0, 60.0], [64.001, 60.0]]
    state = two_envs(3, stage=Stage.FOSSILIZED, accuracy_initial=initial, accuracy_current=65.0)
    after = settled(state, [True, True])
    assert after.totals.fossilized.tolist() == [1, 1]
    assert after.totals.contributing.tolist() == [1, 0]


def test_settings_that_do_not_go_together_are_refused() -> None:
    """Ranges of single settings: tests/config."""
    with pytest.raises(SettingError, match="drip_fraction=0.25: must be 0 with reward.mode"):
        RewardConfig(drip_fraction=0.25)
    with pytest.raises(SettingError, match=r"reward\.loss\.baseline_loss=0\.2"):
        LossRewardConfig(baseline_loss=0.2)
