"""What a rollback does to the env state of its env and not to others', on made-up measurements; and
the settings.
"""

import math

import pytest
import torch

from esper_soa.agent.scripted import RandomPolicy, WaitPolicy
from esper_soa.config.env import GovernorConfig
from esper_soa.env.governor import PanicReason, discard_panicked, watch
from esper_soa.env.step import EnvRules, StepResult, apply_action, guard_, record_and_observe
from esper_soa.state import EnvState, Masks, Measurements
from esper_soa.vocabulary import Op, Stage
from tests.builders.env_records import with_values
from tests.builders.tiny_world import made_up, play_state, tiny_rules, tiny_world, view_of

STAGES = (Stage.TRAINING, Stage.FOSSILIZED, Stage.BLENDING, Stage.EMBARGOED)
ALPHAS = (0.0, 1.0, 0.5, 0.0)


def grown_state(rules: EnvRules, num_envs: int) -> EnvState:
    """Envs alike, at env-step 1, with one slot in each of STAGES."""
    state = next(play_state(rules, num_envs, seed=3, agent=WaitPolicy())).result.state
    slots = with_values(
        state.slots,
        stage=STAGES,
        alpha=ALPHAS,
        blueprint=1,
        seed_age=7,
        rent_alpha=ALPHAS,
        rent_params=50.0,
        escrow=0.5,
    )
    return state.replace(slots=slots)


def env_step(
    rules: EnvRules, state: EnvState, losses: list[float], seed: int = 5
) -> tuple[Measurements, StepResult, Masks]:
    """One env-step with the validation losses given; random play."""
    measured = made_up(rules, state, seed).replace(
        val_loss=torch.tensor(losses, dtype=torch.float64)
    )
    state, _ = watch(state, measured.val_loss, 10, rules.governor)
    measured = discard_panicked(measured, state)
    recorded = record_and_observe(rules, state, measured)
    decision, _ = RandomPolicy().act(view_of(recorded, seed), ())
    return measured, apply_action(rules, *recorded[:2], decision.action), recorded[2]


def test_a_rollback_prunes_every_seed_but_fossils_and_lets_no_time_pass() -> None:
    rules = tiny_rules(4, 20)
    state = grown_state(rules, 2)
    _, result, masks = env_step(rules, state, [math.nan, 1.0])
    after = result.state.slots[0]
    totals = result.state.totals[0]
    assert after.stage.tolist() == [Stage.PRUNED, Stage.FOSSILIZED, Stage.PRUNED, Stage.EMBARGOED]
    assert after.alpha.tolist() == [0.0, 1.0, 0.0, 0.0]
    # the embargo does not count at this env-step
    assert after.stage_age[3] == state.slots.stage_age[0, 3]
    assert masks.op[0].tolist() == [True] + [False] * 5
    assert totals.rollbacks.tolist() == [0, 1, 0, 0]
    assert totals.pruned == 2
    assert totals.reward == state.totals.reward[0] - 10
    assert totals.pending_penalty == pytest.approx(-0.4)  # two seeds, -0.2 each
    outcome = result.outcome[0]
    assert not any(flag for flag in (outcome.success, outcome.germinated, outcome.fossilized))
    terms = {name: value for name, value in result.terms[0].to_dict().items() if value != 0}
    assert terms == {"rollback_penalty": -10.0, "total": -10.0}
    assert result.state.signals[0].last_op == Op.WAIT
    assert not result.state.signals[0].last_success


def test_fossils_go_back_to_their_rows_of_the_last_healthy_env_step() -> None:
    """Env 0 is no number, env 1 diverges, env 2 is healthy; the snapshot is of the first step."""
    world = tiny_world(3, 2, 20)
    fussy = dict.fromkeys(("sensitivity", "multiplier", "absolute_threshold"), 0.0)
    governor = GovernorConfig(**fussy, min_panics=1, min_samples=1, snapshot_steps=1000)
    rules = world.rules._replace(governor=governor)
    state = world.start_round(0)
    weights = world.weights
    signals = with_values(state.signals, val_accuracy=7.0)
    state = state.replace(guard=with_values(state.guard, snapshot_due=True), signals=signals)
    rising = Stage.FOSSILIZED, Stage.HOLDING
    steps = [
        (rising, [1.0] * 3),
        (rising, [1.0] * 3),
        ([Stage.FOSSILIZED] * 2, [math.nan, 9.0, 1.0]),
    ]
    for number, (stages, losses) in enumerate(steps, start=1):
        for part in ("host", "seeds"):
            weights[part].apply_(lambda leaf, number=number: leaf.fill_(number))
        state = state.replace(slots=with_values(state.slots, stage=stages, alpha=1.0))
        given = made_up(rules, state, number)
        given = given.replace(
            val_loss=torch.tensor(losses, dtype=torch.float64),
            ablated=torch.ones_like(given.ablated),
            gradients=with_values(given.gradients, measured=True),
        )
        state, trusted = guard_(rules, weights, state, given)
    rows = [weights["host", "params"], *(seed["params"] for seed in weights["seeds"].values())]
    assert [row[:, 0].tolist() for row in rows] == [[1, 1, 3], [1, 1, 3], [2, 3, 3]]
    assert state.guard.reason.tolist() == [PanicReason.NOT_FINITE, PanicReason.DIVERGED, 0]
    for name in ("train_loss", "train_accuracy", "val_loss"):
        assert trusted.get(name).isnan().tolist() == [True, True, False]
    assert (trusted.accuracy[:2] == 7).all()
    assert (trusted[2] == given[2]).all()
    for flags in (trusted.ablated, trusted.gradients.measured):
        assert flags.tolist() == [[False] * 2] * 2 + [[True] * 2]


def test_the_pruned_seeds_are_paid_for_with_the_next_reward_and_not_as_an_alpha_move() -> None:
    rules = tiny_rules(4, 20)
    _, first, _ = env_step(rules, grown_state(rules, 2), [math.nan, 1.0])
    _, second, _ = env_step(rules, first.state, [1.0, 1.0], seed=6)
    assert second.terms.auto_prune_penalty.tolist() == [pytest.approx(-0.4), 0.0]
    assert second.terms.alpha_shock[0] == 0
    assert second.terms.rollback_penalty.tolist() == [0.0, 0.0]
    assert second.state.totals.pending_penalty.tolist() == [0.0, 0.0]
    assert second.state.slots.stage[0].tolist()[:3] == [
        Stage.EMBARGOED,
        Stage.FOSSILIZED,
        Stage.EMBARGOED,
    ]


def test_a_panicking_env_shows_the_last_recorded_numbers_and_measures_nothing() -> None:
    rules = tiny_rules(4, 20)
    state = grown_state(rules, 2)
    measured, result, _ = env_step(rules, state, [math.inf, 1.0])
    signals = result.state.signals
    before = state.signals
    assert measured.ablated.any(1).tolist() == [False, True]
    assert not measured.gradients.measured[0].any()
    assert signals.step.tolist() == [2, 2]
    for name in ("val_loss", "val_accuracy", "train_loss", "train_accuracy"):
        assert signals.get(name)[0].isfinite(), name
    assert signals.val_loss[0] == before.val_loss[0]
    assert signals.val_accuracy[0] == before.val_accuracy[0]
    assert signals.val_loss[1] == 1.0


def test_a_fossilization_asks_for_a_snapshot() -> None:
    steps = list(play_state(tiny_rules(3, 40), 16, seed=13))
    fossilized = torch.stack([step.result.outcome.fossilized for step in steps])
    asked = torch.stack([step.result.state.guard.snapshot_due for step in steps])
    assert fossilized.any()
    assert asked[fossilized].all()
    assert not asked[fossilized.cumsum(0) == 0].all()
