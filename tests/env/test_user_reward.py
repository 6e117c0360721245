"""A reward of a user's own is paid as it is, told by its name, and compiled; what is none is
refused while building.
"""

from dataclasses import replace

import pytest
import torch
from parts_of_users import gain, parts

from esper_soa.config.env import TERM_NAMES, GovernorConfig, RewardConfig
from esper_soa.env.reward_records import RewardInputs, UserReward
from esper_soa.env.step import EnvRules, apply_action
from esper_soa.env.user_reward import sample_inputs, user_terms
from esper_soa.state import STATE_FLOAT
from esper_soa.system.errors import SettingError, UserError
from esper_soa.training.results.metrics import MetricsAccumulator
from tests.builders.tiny_world import CPU, play_state, rules_from, tiny_rules, tiny_settings

HERE = "parts_of_users"
NUM_ENVS = 4
NUM_SLOTS = 3
STEPS = 25


def rules_of(name: str, **reward: object) -> EnvRules:
    return tiny_rules(NUM_SLOTS, STEPS, RewardConfig(mode=f"{HERE}:{name}", **reward))  # type: ignore[arg-type]


def test_an_own_reward_is_paid_as_it_is_at_every_env_step() -> None:
    rules = rules_of("gain")
    paid = 0
    for step in play_state(rules, NUM_ENVS, seed=5):
        state = step.view.state
        terms = step.result.terms
        signals = state.signals
        calm = ~state.guard.panic
        wanted = signals.accuracy_delta + torch.where(
            signals.step == STEPS, signals.val_accuracy, 0.0
        )
        assert torch.equal(terms.own[calm], wanted[calm])
        assert torch.equal(terms.total[calm], (wanted + state.totals.pending_penalty)[calm])
        assert not any(
            terms.get(name)[calm].any() for name in TERM_NAMES if name != "auto_prune_penalty"
        )
        paid += int(calm.sum())
    assert paid > 50
    assert step.result.state.totals.fossilized.sum() + step.result.state.totals.germinated.sum() > 0


def test_what_a_seed_has_done_for_a_fossil_is_no_part_of_an_own_reward() -> None:
    paid = []
    for rules in (rules_of("gain"), tiny_rules(NUM_SLOTS, STEPS)):
        step = next(play_state(rules, NUM_ENVS, seed=5))
        totals = step.view.state.totals
        waiting = totals.replace(pending_hindsight=totals.pending_hindsight + 3)
        state = step.view.state.replace(totals=waiting)
        paid.append(
            (
                apply_action(rules, state, step.observed.attribution, step.action).terms.total
                - step.result.terms.total
            ).tolist()
        )
    assert paid == [[0.0] * NUM_ENVS, [3.0] * NUM_ENVS]


def test_terms_of_an_own_reward_are_told_under_its_name_and_those_of_the_package() -> None:
    rules = rules_of("parts")
    assert rules.reward.user_reward is not None
    metrics = MetricsAccumulator(rules, NUM_ENVS, 7)
    totals = torch.zeros(NUM_ENVS, dtype=STATE_FLOAT)
    for step in play_state(rules, NUM_ENVS, seed=5):
        metrics.add_(step.observed, step.result)
        totals += step.result.terms.total
    told = metrics.read(step.result.state).record["reward_terms"]
    assert isinstance(told, dict)
    assert list(told) == [*TERM_NAMES, "parts"]
    assert told["parts"] != 0
    assert told["occupancy_rent"] < 0
    assert sum(told.values()) == pytest.approx(float(totals.mean()))


def test_settings_that_make_the_inputs_apply_to_an_own_reward_and_those_of_modes_do_not() -> None:
    def episode(**reward: object) -> list[list[float]]:
        rules = rules_of("parts", **reward)
        rules = rules._replace(governor=GovernorConfig(enabled=False))
        return [step.result.terms.total.tolist() for step in play_state(rules, NUM_ENVS, seed=2)]

    plain = episode()
    assert episode(pbrs_weight=2.0, scored_slots="target", disable_terminal_reward=True) == plain
    rented = [
        step.view.state.slots.alpha.sum()
        for step in play_state(rules_of("parts"), NUM_ENVS, seed=2)
    ]  # an episode in which there is something to be paid for
    assert sum(map(float, rented)) > 0


SHAPED = "is of shape [5, 2], not [5]"
FAULTS = {
    "per_slot": f"a reward. the reward {SHAPED}.",
    "spread": f"a reward. the reward {SHAPED}; its term drip {SHAPED}; its term clawback is a "
    "float, not a tensor.",
    "strange": "a reward. it gives the terms bonus, tip, which RewardTerms lacks.",
    "misspelt": "a reward. it raises AttributeError: ",
    "twofold": "a reward. it is not called with the inputs alone.",
    "pbrs_bonus": "of another name than the terms of the package. Records tell both by name.",
    "careless": "a reward. it changes its input val_accuracy in place.",
    "eager": "a reward that parts_of_users registers (branching, careless, count, divided, gain, ",
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("given", ["{}", "[shaped,{}]"])
def test_what_is_no_reward_is_refused_while_building(name: str, given: str) -> None:
    mode = f"{HERE}:{name}"
    cfg = replace(tiny_settings(2, 2, 5), reward=RewardConfig(mode=given.format(mode)))
    with pytest.raises(SettingError) as error:
        rules_from(cfg, CPU)
    told = f"reward.mode={mode}: must be {FAULTS[name]}"
    assert str(error.value)[: len(told) if told[-1] != "." else None] == told


def test_a_reward_that_writes_into_the_state_later_ends_the_run() -> None:
    writes = list[bool]()
    kept = torch.zeros(3, dtype=STATE_FLOAT)

    def late(inputs: RewardInputs) -> torch.Tensor:
        if writes:
            inputs.stage[:] = 0
        return kept

    inputs = sample_inputs(3, 2, 5, CPU)
    paid = user_terms(UserReward("late", late), inputs)["own"]
    kept += 1  # a buffer that it pays from
    assert not paid.any()
    writes.append(True)
    with pytest.raises(UserError, match="late changes its inputs in place"):
        user_terms(UserReward("late", late), inputs)


def test_an_own_reward_has_no_drip() -> None:
    with pytest.raises(
        SettingError,
        match="reward.drip_fraction=0.5: must be 0 with reward.mode=parts_of_users:gain",
    ):
        RewardConfig(mode=f"{HERE}:gain", drip_fraction=0.5)


def test_rewards_of_several_users_are_told_under_all_their_names() -> None:
    reward = RewardConfig(mode=f"[net,{HERE}:parts,{HERE}:gain]")
    rules = rules_from(replace(tiny_settings(4, 2, 5), reward=reward), CPU)
    assert rules.reward.user_name == "parts+gain"


def test_made_up_inputs_are_such_as_a_run_gives() -> None:
    made = sample_inputs(6, 3, 20, CPU)
    assert (made.target.sum(1) == 1).all()
    assert (made.contribution[~made.contribution_known] == 0).all()
    assert made.step.min() >= 1
    assert made.step[-1] == made.max_steps[-1] == 20
    for name in RewardInputs.__annotations__:
        value = made.get(name)
        assert value.shape in ((6,), (6, 3)), name
        assert value.dtype in (torch.bool, torch.int64, STATE_FLOAT), name
    assert gain(made).shape == parts(made)["own"].shape == (6,)
