"""The wiring of the reward: inputs from the env state, last-step reckonings, what is remembered,
fossils settled.
"""

import re

import pytest
import torch
from reward_cases import empty_state, make_action, make_attribution, make_settings, random_play

from esper_soa.env.config import REWARD_MODES, LossRewardConfig, RewardConfig
from esper_soa.env.reward import germination_refund, reward, reward_inputs, settle_fossils
from esper_soa.env.reward_terms import TERM_NAMES
from esper_soa.errors import SettingError
from esper_soa.state import ActionOutcome, EnvState
from esper_soa.vocabulary import Blend, Op, Stage

STEPS = 6


def two_envs(step: int, **slots: list) -> EnvState:
    """Two envs of 2 slots at env-step `step`, alike, at accuracy 65, with these slot fields."""
    state = empty_state(2, 2, STEPS)
    fields = {
        name: torch.tensor(value, dtype=state.slots.get(name).dtype).expand(2, 2).clone()
        for name, value in slots.items()
    }
    signals = state.signals.replace(
        step=torch.full((2,), step),
        val_accuracy=torch.full((2,), 65.0).double(),
        accuracy_history=torch.full((2, 10), 65.0).double(),
    )
    return state.replace(slots=state.slots.replace(**fields), signals=signals)


def ask(
    state: EnvState,
    settings,
    contribution=(0.0, 0.0),
    measured=(False, False),
    op=(Op.WAIT, Op.WAIT),
):
    """Reward of two envs whose actions target slot 0."""
    contribution = torch.tensor(contribution, dtype=torch.float64).expand(2, 2)
    total = contribution.sum(1)
    attribution = make_attribution(contribution, torch.tensor(measured).expand(2, 2), total)
    op = torch.tensor(op)
    return reward(state, attribution, make_action(torch.zeros_like(op), op), op, settings)


def outcome(fossilized: list[bool]) -> ActionOutcome:
    flags = torch.tensor(fossilized)
    none = torch.zeros_like(flags)
    return ActionOutcome(
        effective_op=torch.full((2,), Op.FOSSILIZE),
        success=flags,
        germinated=none,
        fossilized=flags,
        batch_size=[2],
    )


@pytest.mark.parametrize("scored", ["all", "target"])
@pytest.mark.parametrize("mode", REWARD_MODES)
def test_the_terms_sum_to_the_total_and_are_finite_in_every_mode(mode, scored):
    state, attribution, action = random_play(300, STEPS, seed=3)
    settings = make_settings(STEPS, mode=mode, scored_slots=scored)
    terms, after = reward(state, attribution, action, action.op, settings)
    parts = torch.stack([terms.get(name) for name in TERM_NAMES])
    assert parts.isfinite().all()
    torch.testing.assert_close(parts.sum(0), terms.total, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.totals.reward, terms.total)


def test_the_reward_needs_no_values_on_the_host():
    state, attribution, action = random_play(4, STEPS, seed=7)
    on_meta = [record.to("meta") for record in (state, attribution, action)]
    for mode in REWARD_MODES:
        settings = make_settings(STEPS, mode=mode)
        counts = settings.counts._replace(
            seed=settings.counts.seed.to("meta"), gate=settings.counts.gate.to("meta")
        )
        terms, _ = reward(*on_meta, on_meta[2].op, settings._replace(counts=counts))
        assert terms.total.shape == (4,)


def test_one_env_is_paid_the_same_alone_and_among_others():
    state, attribution, action = random_play(7, STEPS, seed=8)
    settings = make_settings(STEPS, mode="escrow")
    together, _ = reward(state, attribution, action, action.op, settings)
    alone, _ = reward(state[4:5], attribution[4:5], action[4:5], action.op[4:5], settings)
    assert torch.equal(together.total[4:5], alone.total)


def test_rent_weights_parameters_with_alpha_and_shock_weights_alpha_moves_with_size():
    # host 1000; slot 0: conv_light in BLENDING with GATE: 100 + 1 + 7 at alpha .5; slot 1: norm in
    # TRAINING: no rent. effective = 3.9 + .5 * 108 = 57.9; shock = (.5 - .3)^2 * 101 / 1000 from
    # the reading before
    state = two_envs(
        3,
        stage=[Stage.BLENDING, Stage.TRAINING],
        blueprint=[1, 3],
        blend=[Blend.GATE, Blend.GATE],
        alpha=[0.5, 0.0],
        rent_alpha=[0.3, 0.0],
        rent_params=[101.0, 203.0],
    )
    settings = make_settings(STEPS, num_slots=2)
    attribution = make_attribution(
        torch.zeros(2, 2).double(), torch.zeros(2, 2).bool(), torch.zeros(2).double()
    )
    action = make_action(torch.tensor([1, 0]), torch.tensor([Op.WAIT, Op.WAIT]))
    inputs = reward_inputs(state, attribution, action, action.op, settings)
    assert inputs.effective_params.tolist() == pytest.approx([57.9, 57.9])
    assert inputs.alpha_delta_sq.tolist() == pytest.approx([0.04 * 0.101] * 2)
    assert inputs.total_params.tolist() == [1000 + 108 + 203] * 2  # no gate yet in TRAINING
    assert inputs.target.tolist() == [[False, True], [True, False]]
    _, after = ask(state, settings)
    assert after.slots.rent_alpha.tolist() == [[0.5, 0.0]] * 2
    assert after.slots.rent_params.tolist() == [[108.0, 203.0]] * 2


def test_a_removed_seed_is_charged_its_shock_once():
    state = two_envs(
        3, stage=[Stage.EMBARGOED, Stage.EMPTY], rent_alpha=[0.5, 0.0], rent_params=[400.0, 0.0]
    )
    settings = make_settings(STEPS, num_slots=2)
    terms, after = ask(state, settings)  # .1958 * .5^2 * 400 / 1000
    assert terms.alpha_shock.tolist() == pytest.approx([-0.01958] * 2)
    assert ask(after, settings)[0].alpha_shock.tolist() == [0.0, 0.0]


def test_slots_in_use_are_counted_without_fossils_and_just_pruned_ones():
    state = two_envs(3, stage=[Stage.EMBARGOED, Stage.PRUNED])
    state = state.replace(totals=state.totals.replace(fossilized=torch.tensor([0, 2])))
    # one free slot; .01 each beyond, .002 per fossil
    terms, _ = ask(state, make_settings(STEPS, num_slots=2))
    assert terms.occupancy_rent.tolist() == pytest.approx([0.0, -0.02])
    assert terms.fossilized_rent.tolist() == pytest.approx([0.0, -0.004])


@pytest.mark.parametrize(
    ("age", "refund"), [(1, 0.3), (5, 0.306075756615), (10, 0.313843781533), (50, 0.383522014760)]
)
def test_the_clawback_undoes_the_germination_bonus(age, refund):
    assert 0.3 * germination_refund(torch.tensor(age)).item() == pytest.approx(refund, abs=1e-11)


def test_seeds_that_came_to_nothing_are_clawed_back_at_the_last_env_step_only():
    fields = {"stage": [Stage.TRAINING, Stage.GERMINATED], "seed_age": [5, 1], "stage_age": [1, 1]}
    settings = make_settings(STEPS, num_slots=2)
    assert ask(two_envs(STEPS, **fields), settings)[0].clawback[0].item() == pytest.approx(
        -0.606075756615
    )
    assert ask(two_envs(STEPS - 1, **fields), settings)[0].clawback.tolist() == [0.0, 0.0]
    basic = make_settings(STEPS, num_slots=2, mode="basic")
    assert ask(two_envs(STEPS, **fields), basic)[0].clawback.tolist() == [0.0, 0.0]


def test_a_seed_fossilised_at_the_last_env_step_keeps_its_escrow():
    # both slots hold 1.5; env 0 waits and loses both credits, env 1 fossilises slot 0 and loses
    # that of slot 1
    state = two_envs(
        STEPS, stage=[Stage.HOLDING, Stage.HOLDING], stage_age=[5, 5], escrow=[1.5, 1.5]
    )
    settings = make_settings(STEPS, num_slots=2, mode="escrow")
    terms, _ = ask(state, settings, op=(Op.WAIT, Op.FOSSILIZE))
    assert terms.escrow_forfeit.tolist() == [-3.0, -1.5]
    earlier = two_envs(
        STEPS - 1, stage=[Stage.HOLDING, Stage.HOLDING], stage_age=[5, 5], escrow=[1.5, 1.5]
    )
    assert ask(earlier, settings)[0].escrow_forfeit.tolist() == [0.0, 0.0]


def test_escrow_follows_the_smallest_of_the_last_accuracies_and_ends_with_its_seed():
    # germinated at 60; accuracies 62, 64, 65 in a window of 3: progress 2; contribution 9: sqrt(2 *
    # 9) = 4.24, of which a first move pays 2; slot 1 lost its seed and its credit
    state = two_envs(
        3,
        stage=[Stage.BLENDING, Stage.EMBARGOED],
        accuracy_germination=[60.0, 0.0],
        germination_known=[1, 0],
        escrow=[0.0, 5.0],
    )
    history = torch.tensor([0.0] * 7 + [62.0, 64.0, 65.0]).double().expand(2, 10)
    state = state.replace(signals=state.signals.replace(accuracy_history=history))
    settings = make_settings(STEPS, num_slots=2, mode="escrow", escrow_delta_clip=0.0)
    _, after = ask(state, settings, contribution=(9.0, 0.0), measured=(True, False))
    assert after.slots.escrow[0].tolist() == pytest.approx([18**0.5, 0.0])


def test_pending_payments_are_paid_once():
    state = two_envs(2)
    pending = {
        "pending_penalty": torch.tensor([-0.2, 0.0]),
        "pending_hindsight": torch.tensor([0.0, 0.07]),
    }
    state = state.replace(
        totals=state.totals.replace(**{name: value.double() for name, value in pending.items()})
    )
    terms, after = ask(state, make_settings(STEPS, num_slots=2, mode="sparse"))
    assert terms.total.tolist() == pytest.approx([-0.2, 0.07])
    assert ask(after, make_settings(STEPS, num_slots=2, mode="sparse"))[0].total.tolist() == [
        0.0,
        0.0,
    ]


def test_the_loss_reward_rises_when_the_loss_fell():
    # Signals keep previous - current: +.02 is an improvement: .02 / .05 * 5 = 2
    state = two_envs(2)
    state = state.replace(
        signals=state.signals.replace(loss_delta=torch.tensor([0.02, 0.0]).double())
    )
    terms, _ = ask(state, make_settings(STEPS, num_slots=2, mode="loss"))
    assert terms.total.tolist() == pytest.approx([2.0, 0.0])


def test_a_drip_pool_opens_when_the_seed_became_a_fossil_and_is_emptied_but_not_overdrawn():
    # full = (.3 + .5 * 2) * 5/5 = 1.3 at totals of 2 and 2; pool .91 over max(6 - 2, 5) env-steps:
    # scale .182
    state = two_envs(2, stage=[Stage.HOLDING, Stage.EMPTY], stage_age=[5, 0])
    # of pools before
    state = state.replace(slots=state.slots.replace(drip_paid=torch.full((2, 2), 0.5).double()))
    settings = make_settings(STEPS, num_slots=2, mode="basic_plus", max_drip_per_step=0.5)
    known = {"contribution": (2.0, 0.0), "measured": (True, False)}
    _, state = ask(state, settings, op=(Op.FOSSILIZE, Op.FOSSILIZE), **known)
    assert state.slots.drip_total[0].tolist() == pytest.approx([0.91, 0.0])
    assert not state.slots.drip_live.any()
    fossil = state.slots.replace(
        stage=torch.tensor([[Stage.FOSSILIZED, Stage.EMPTY], [Stage.HOLDING, Stage.EMPTY]])
    )
    action = make_action(torch.zeros(2).long(), torch.full((2,), Op.FOSSILIZE))
    state = settle_fossils(state.replace(slots=fossil), action, outcome([True, False]))
    assert state.slots.drip_live.tolist() == [[True, False], [False, False]]
    paid = []
    for _ in range(4):  # .364 each, until .91 are paid
        terms, state = ask(state, settings, **known)
        paid.append(terms.drip.tolist())
    assert [env[0] for env in paid] == pytest.approx([0.364, 0.364, 0.182, 0.0])
    assert [env[1] for env in paid] == [0.0] * 4


def test_a_second_attempt_without_bonus_leaves_no_pool_behind():
    state = two_envs(2, stage=[Stage.HOLDING, Stage.EMPTY], stage_age=[5, 0])
    settings = make_settings(STEPS, num_slots=2, mode="basic_plus")
    fossilise = (Op.FOSSILIZE, Op.FOSSILIZE)
    _, state = ask(state, settings, (2.0, 0.0), (True, False), fossilise)
    _, state = ask(state, settings, (-2.0, 0.0), (True, False), fossilise)
    assert state.slots.drip_total.tolist() == [[0.0, 0.0]] * 2
    action = make_action(torch.zeros(2).long(), torch.full((2,), Op.FOSSILIZE))
    assert not settle_fossils(state, action, outcome([True, True])).slots.drip_live.any()


def test_fossils_are_counted_and_their_scaffolds_credited_with_the_next_reward():
    # boosts of 2 and 3 between the slots at env-steps 1 and 3; slot 0 gained 4 points, settled at
    # env-step 3: .1 tanh(.1 * 2 * 4) .995^2 + .1 tanh(.1 * 3 * 4)
    state = two_envs(3, stage=[Stage.FOSSILIZED, Stage.TRAINING], accuracy_initial=[61.0, 60.0])
    state = state.replace(
        slots=state.slots.replace(accuracy_current=torch.full((2, 2), 65.0).double())
    )
    boosts = state.boosts.clone()
    boosts[:, 0, 0] = 2.0
    boosts[:, 0, 2] = 3.0
    state = state.replace(boosts=boosts)
    action = make_action(torch.zeros(2).long(), torch.full((2,), Op.FOSSILIZE))
    after = settle_fossils(state, action, outcome([True, False]))
    first, second = 0.1 * torch.tensor([0.8, 1.2]).double().tanh()
    credit = (first * 0.995**2 + second).item()
    assert after.totals.pending_hindsight.tolist() == pytest.approx([credit, 0.0])
    assert after.totals.fossilized.tolist() == [1, 0]
    assert after.totals.contributing.tolist() == [1, 0]
    terms, _ = ask(after, make_settings(STEPS, num_slots=2, mode="sparse"))
    assert terms.hindsight_credit.tolist() == pytest.approx([credit, 0.0])


def test_a_gain_of_one_point_is_enough_to_contribute():
    state = two_envs(3, stage=[Stage.FOSSILIZED, Stage.TRAINING], accuracy_initial=[64.0, 60.0])
    state = state.replace(
        slots=state.slots.replace(accuracy_current=torch.full((2, 2), 65.0).double())
    )
    action = make_action(torch.zeros(2).long(), torch.full((2,), Op.FOSSILIZE))
    assert settle_fossils(state, action, outcome([True, True])).totals.contributing.tolist() == [
        1,
        1,
    ]


@pytest.mark.parametrize("stage", range(2, 12))
def test_every_stage_occupies_its_slot_but_a_fossil_a_pruned_seed_and_an_empty_slot(stage):
    settings = make_settings(STEPS, num_slots=2)
    state = two_envs(3, stage=[stage, Stage.BLENDING])
    attribution = make_attribution(
        torch.zeros(2, 2).double(), torch.zeros(2, 2, dtype=torch.bool), torch.zeros(2)
    )
    action = make_action(torch.zeros(2).long(), torch.zeros(2).long())
    inputs = reward_inputs(state, attribution, action, action.op, settings)
    occupied = stage in (
        Stage.GERMINATED,
        Stage.TRAINING,
        Stage.BLENDING,
        Stage.HOLDING,
        Stage.EMBARGOED,
        Stage.RESETTING,
    )
    assert inputs.num_active.tolist() == [1 + occupied] * 2


def test_a_fossil_that_gained_less_than_a_point_does_not_contribute():
    state = two_envs(3, stage=[Stage.FOSSILIZED, Stage.EMPTY], accuracy_initial=[64.5, 0.0])
    state = state.replace(
        slots=state.slots.replace(accuracy_current=torch.full((2, 2), 65.0).double())
    )
    action = make_action(torch.zeros(2).long(), torch.full((2,), Op.FOSSILIZE))
    after = settle_fossils(state, action, outcome([True, True]))
    assert after.totals.fossilized.tolist() == [1, 1]
    assert after.totals.contributing.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"param_budget": 0}, "reward.param_budget=0: must be in [1, 1000000000]"),
        ({"mode": "basic", "drip_fraction": 1.5}, "reward.drip_fraction=1.5: must be in"),
        ({"drip_fraction": 0.25}, "reward.drip_fraction=0.25: must be 0 with reward.mode=shaped"),
        ({"negative_drip_ratio": -0.1}, "reward.negative_drip_ratio=-0.1"),
        ({"escrow_stable_window": 11}, "reward.escrow_stable_window=11: must be in [1, 10]"),
        (
            {"prune_good_seed_penalty": 0.3},
            "reward.prune_good_seed_penalty=0.3: must be in [-1000000, 0]",
        ),
        ({"max_rent": -1.0}, "reward.max_rent=-1.0: must be in [0, 1000000]"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        RewardConfig(**config)


def test_a_target_loss_above_the_baseline_is_refused():
    with pytest.raises(SettingError, match=r"reward\.loss\.baseline_loss=0\.2"):
        LossRewardConfig(baseline_loss=0.2)
