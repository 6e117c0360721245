"""What adapters share, without a library: observations, masks, where trajectories end."""

import pytest
import torch

from esper_soa.adapters.flat import FlatEnvs, flat_envs
from esper_soa.system.errors import UserError
from esper_soa.vocabulary import HEAD_NAMES, Blueprint, Op
from tests.builders.adapter_sizes import ENVS, IMAGES, PLATEAU, STEPS, Case, Played

WAIT = torch.zeros(ENVS, dtype=torch.int64)
OP = HEAD_NAMES.index("op")


def envs_of(actions: str = "joint", case: Case = IMAGES, **more: object) -> FlatEnvs:
    return flat_envs(case.experiment, actions, case.sizes | {"envs": ENVS, "seed": 11} | more)


def test_a_round_is_that_of_the_simulator_and_the_next_begins_at_once(
    case: Case, played: Played
) -> None:
    envs = envs_of(case=case)
    assert envs.sim.settings.policy.name == "wait"  # none that would be built or learned with
    shown, info = envs.reset()
    for step, action in enumerate(played.actions):
        assert torch.equal(shown.features[:, : played.features.shape[2]], played.features[step])
        turn = envs.step(action)
        shown = turn.shown
        info = turn.info
        assert torch.equal(turn.reward, played.rewards[step])
        assert turn.truncated.tolist() == [step == STEPS - 1] * ENVS
        assert torch.equal(turn.last.features, shown.features) == (step < STEPS - 1)
    assert (info.round, info.env_step) == (1, 0)
    assert envs.shown is shown


def test_a_caller_may_begin_the_next_round_itself(case: Case, played: Played) -> None:
    envs = envs_of(case=case)
    envs.reset()
    for action in played.actions:
        turn = envs.step(action, go_on=False)
    assert torch.equal(turn.last.features, turn.shown.features)
    assert (turn.info.round, turn.info.env_step) == (0, STEPS)
    assert envs.reset()[1].round == 1
    assert envs.reset(seed=5)[1].round == 0


def test_an_illegal_last_action_is_told_with_the_next_round(played: Played) -> None:
    envs = envs_of("heads")
    envs.reset()
    for _ in range(STEPS - 1):
        envs.step(torch.zeros(ENVS, len(HEAD_NAMES), dtype=torch.int64))
    fossilize = torch.zeros(ENVS, len(HEAD_NAMES), dtype=torch.int64)
    fossilize[1, OP] = Op.FOSSILIZE
    assert envs.step(fossilize).info.illegal.tolist() == [False, True, False]


def test_features_say_which_blueprint_stands_where() -> None:
    envs = envs_of("heads", steps=3, **{"policy.observe": "[task.host_lr]"})
    shown, _ = envs.reset()
    standing = shown.features[:, -2 * len(envs.codes) :].reshape(ENVS, 2, -1)
    assert not standing.any()
    germinate = torch.zeros(ENVS, len(HEAD_NAMES), dtype=torch.int64)
    germinate[:, 0] = torch.tensor([0, 1, 0])
    germinate[:, 1] = torch.tensor([3, 1, 7])
    germinate[:, OP] = Op.GERMINATE
    shown = envs.step(germinate).shown
    standing = shown.features[:, -2 * len(envs.codes) :].reshape(ENVS, 2, -1)
    assert standing.nonzero().tolist() == [[0, 0, 2], [1, 1, 0], [2, 0, 6]]
    assert shown.features.shape[1] == envs.num_features


def test_head_masks_leave_a_choice_where_nothing_may_be_germinated() -> None:
    envs = envs_of("heads", steps=3, max_seeds=1)
    envs.reset()
    germinate = torch.zeros(ENVS, len(HEAD_NAMES), dtype=torch.int64)
    germinate[:, 1] = 1
    germinate[:, OP] = Op.GERMINATE
    masks = envs.step(germinate).shown.action_mask.split(envs.head_sizes, 1)
    assert masks[HEAD_NAMES.index("blueprint")][:, Blueprint.NOOP].all()
    assert all(part.any(1).all() for part in masks)


def test_a_breakdown_at_the_end_of_the_episode_is_a_breakdown() -> None:
    envs = envs_of()
    envs.reset()
    for number in range(STEPS):
        if number == STEPS - 2:
            envs.sim.world.weights["host", "params"][1] = torch.nan
        turn = envs.step(WAIT)
    assert turn.terminated.tolist() == [False, True, False]
    assert turn.truncated.tolist() == [True, False, True]
    assert turn.info.round == 1


def test_an_episode_that_is_paid_for_at_its_end_terminates_there_and_not_where_it_is_cut() -> None:
    envs = envs_of(**{"reward.episode_end": "auto"})
    envs.reset()
    ends = [envs.step(WAIT) for _ in range(STEPS)]
    assert [turn.terminated.tolist() for turn in ends] == [[False] * ENVS] * (STEPS - 1) + [
        [True] * ENVS
    ]
    assert not any(turn.truncated.any() for turn in ends)
    assert ends[-1].over
    alone = envs_of(**PLATEAU | {"envs": 1, "reward.episode_end": "auto"})
    alone.reset()
    cut = [alone.step(WAIT[:1]) for _ in range(3)][-1]
    assert (cut.over, bool(cut.terminated), bool(cut.truncated)) == (True, False, True)


def test_an_env_on_its_own_is_truncated_where_its_episode_ends_early_and_begins_anew() -> None:
    envs = envs_of(**PLATEAU | {"envs": 1})
    ends = []
    envs.reset()
    for step in range(1, 7):
        turn = envs.step(WAIT[:1])
        assert turn.over == bool(turn.truncated) == (step % 3 == 0)
        assert not turn.terminated.any()
        ends.append((turn.info.round, turn.info.env_step))
        if turn.over:
            assert not torch.equal(turn.last.features, turn.shown.features)
    assert ends == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_what_it_shows_last_is_what_its_value_is_read_on() -> None:
    """All legal choices, as behind a last env-step, though it would only wait."""
    short = envs_of(envs=1, steps=3)
    cut = envs_of(**PLATEAU | {"envs": 1})
    for envs in (short, cut):
        envs.reset()
        for _ in range(3):
            turn = envs.step(WAIT[:1], go_on=False)
        after = envs.sim.env.current_view()
        assert torch.equal(
            turn.last.features[:, : after.observation.features.shape[1]], after.observation.features
        )
        assert torch.equal(turn.last.action_mask, envs.sim.joint.mask(after.masks))
        assert int(turn.last.action_mask.sum()) > 1


def test_a_rollback_that_is_the_last_allowed_one_terminates_and_ends_the_episode() -> None:
    envs = envs_of(**{"early_stop.rollbacks": 1, "early_stop.min_steps": 1, "envs": 1})
    envs.reset()
    envs.sim.world.weights["host", "params"][0] = torch.nan
    while not (turn := envs.step(WAIT[:1])).terminated:
        assert not turn.over
    assert turn.over
    assert not turn.truncated
    assert (turn.info.round, turn.info.env_step) == (1, 0)


def test_several_envs_cannot_end_early() -> None:
    with pytest.raises(UserError) as caught:
        envs_of(**PLATEAU)
    assert str(caught.value) == (
        "early_stop=(patience=1, rollbacks=0): must be off in environments of other libraries with "
        "3 envs. There an env that has ended begins anew at once and alone, and the hosts of a "
        "simulator all begin together. Take one env, or several of one in the library's own "
        "vector env."
    )
