"""Gymnasium's checks, wrappers and loops on our envs; the simulator's rewards to the bit."""

import numpy as np
import pytest
import torch

from tests.builders.adapter_sizes import (
    ENVS,
    EXPERIMENT,
    IMAGES,
    PLATEAU,
    SEED,
    SIZES,
    STEPS,
    Case,
    Played,
)
from tests.builders.lanes import some_of

gymnasium = pytest.importorskip("gymnasium")
adapter = pytest.importorskip("esper_soa.adapters.gymnasium")
ID = f"esper_soa/{EXPERIMENT}-v0"


def vector(case: Case = IMAGES, **more: object):
    return gymnasium.make_vec(
        f"esper_soa/{case.experiment}-v0",
        num_envs=ENVS,
        vectorization_mode="vector_entry_point",
        seed=SEED,
        **case.sizes,
        **more,
    )


def single(case: Case = IMAGES, **more: object):
    return gymnasium.make(f"esper_soa/{case.experiment}-v0", **case.sizes, **more).unwrapped


@pytest.mark.filterwarnings("ignore:.*Box observation space m.* value is -?infinity")
@pytest.mark.parametrize("actions", some_of(["joint", "heads"], "heads"))
def test_gymnasium_finds_no_fault_in_a_single_env(actions: str, case: Case) -> None:
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    checker.check_env(single(case, actions=actions), skip_render_check=True)


def test_the_same_actions_give_the_rewards_of_the_simulator_to_the_bit(
    case: Case, played: Played
) -> None:
    envs = vector(case)
    observation, _ = envs.reset()
    for step in range(STEPS):
        assert envs.observation_space.contains(observation)
        mask = observation["action_mask"]
        assert mask[np.arange(ENVS), played.actions[step]].all()
        assert np.array_equal(
            observation["features"][:, : played.features.shape[2]], played.features[step]
        )
        observation, reward, terminated, truncated, info = envs.step(played.actions[step].numpy())
        assert np.array_equal(reward, played.rewards[step])
        assert not terminated.any()
        assert not info["illegal"].any()
        assert truncated.all() == (step == STEPS - 1)
    last = info["final_obs"]["features"]
    for marks in (info["_final_obs"], info["_final_info"]):
        assert marks.tolist() == [True] * ENVS
    for name in ("_features", "_action_mask"):
        assert info["final_obs"][name].tolist() == [True] * ENVS
    told = {name: values.tolist() for name, values in info["final_info"].items()}
    assert told == {
        "accuracy": played.accuracy.tolist(),
        "illegal": [False] * ENVS,
        "round": [0] * ENVS,
        "env_step": [STEPS] * ENVS,
    }
    assert info["round"].tolist() == [1] * ENVS
    assert not np.array_equal(last, observation["features"])  # that of the next round
    again, _ = envs.reset(seed=SEED)
    assert np.array_equal(again["features"][:, : played.features.shape[2]], played.features[0])


def test_a_breakdown_ends_one_trajectory_which_goes_on_from_its_snapshot() -> None:
    envs = vector()
    envs.reset()
    envs.flat.sim.world.weights["host", "params"][1] = torch.nan
    ends = []
    wait = np.zeros(ENVS, dtype=np.int64)
    for _ in range(STEPS - 1):
        observation, reward, terminated, truncated, info = envs.step(wait)
        ends.append(terminated.tolist())
        assert np.isfinite(reward).all()
        assert np.isfinite(observation["features"]).all()
        assert not truncated.any()
        if terminated.any():
            last = info["final_obs"]["features"]
            assert info["_final_obs"].tolist() == [False, True, False]
            assert np.array_equal(last[0], observation["features"][0])
            assert not np.array_equal(last[1], observation["features"][1])
    assert ends[1] == [False, True, False]
    assert sum(map(sum, ends)) == 1


def test_what_the_library_asks_of_an_env() -> None:
    spec = gymnasium.spec(ID)
    assert spec.disable_env_checker
    envs = vector()
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    assert envs.metadata == {"autoreset_mode": same_step, "render_modes": []}
    assert (envs.num_envs, adapter.GrowthVectorEnv(EXPERIMENT, **SIZES).num_envs) == (ENVS, 1)
    number = len(envs.flat.sim.joint)
    assert envs.single_action_space == single().action_space == gymnasium.spaces.Discrete(number)
    assert envs.action_space == gymnasium.spaces.MultiDiscrete([number] * ENVS)
    envs.reset(seed=5)
    assert envs.np_random_seed == 5
    assert single().metadata == {"render_modes": []}


@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes")
def test_a_mode_of_drawing_that_a_library_hands_to_every_env_is_passed_over() -> None:
    single(render_mode="rgb_array")  # as make_vec_env of stable-baselines3 does
    vector(render_mode="rgb_array")


def test_a_single_env_goes_on_after_a_breakdown_and_begins_anew_after_its_last_env_step() -> None:
    env = single()
    env.reset()
    env.flat.sim.world.weights["host", "params"][0] = torch.nan
    terminated = False
    steps = 0
    while not terminated:
        _, _, terminated, truncated, info = env.step(0)
        steps += 1
        assert not truncated
    _, after = env.reset()
    assert (after["round"], after["env_step"]) == (0, steps)
    while not truncated:
        truncated = env.step(0)[3]
        steps += 1
    assert steps == STEPS
    assert env.reset()[1]["round"] == 1
    env.flat.sim.world.weights["host", "params"][0] = torch.nan
    while not env.step(0)[2]:
        pass
    _, anew = env.reset(seed=SEED)  # with a seed nothing goes on
    assert (anew["round"], anew["env_step"]) == (0, 0)


def test_a_rollback_at_an_early_end_is_followed_by_a_fresh_host() -> None:
    env = single(**{"early_stop.rollbacks": 1, "early_stop.min_steps": 1})
    env.reset()
    env.flat.sim.world.weights["host", "params"][0] = torch.nan
    terminated = False
    while not terminated:
        _, _, terminated, truncated, _ = env.step(0)
        assert not truncated
    assert env.reset()[1]["round"] == 1


def test_single_envs_in_the_librarys_own_vector_env_begin_anew_one_by_one() -> None:
    """The second env has an episode of full length beside the first one's early ends."""
    plain = {name: value for name, value in PLATEAU.items() if name != "early_stop.patience"}
    kinds = [
        lambda: gymnasium.make(ID, **SIZES, **PLATEAU),
        lambda: gymnasium.make(ID, **SIZES, **plain),
    ]
    envs = gymnasium.vector.SyncVectorEnv(kinds)
    ends = []
    envs.reset()
    for _ in range(STEPS + 1):
        _, _, terminated, truncated, _ = envs.step(np.zeros(2, dtype=np.int64))
        assert not terminated.any()
        ends.append(truncated.tolist())
    cut = [step for step, (first, _) in enumerate(ends, 1) if first]
    assert cut == [3, 7]  # reset at an env-step of its own, which this library does by default
    assert [second for _, second in ends] == [False] * (STEPS - 1) + [True, False]


def test_a_single_env_has_the_mask_of_its_observation_for_agents_that_ask_for_it() -> None:
    env = single()
    before = env.action_masks()
    observation, _ = env.reset()
    assert np.array_equal(env.action_masks(), before)
    space = env.observation_space["action_mask"]
    told = observation["action_mask"]
    assert (told.dtype, told.shape) == (space.dtype, space.shape)
    mask = env.action_masks()
    assert (mask.dtype, mask.shape) == (np.bool_, space.shape)
    assert np.array_equal(mask, told)
    assert 0 < mask.sum() < mask.size


def test_what_is_asked_before_reset_is_refused() -> None:
    env = single()
    with pytest.raises(RuntimeError, match="^call reset first$"):
        env.step(0)
    with pytest.raises(Exception, match="actions=both: must be joint or heads"):
        adapter.GrowthEnv(EXPERIMENT, actions="both")
