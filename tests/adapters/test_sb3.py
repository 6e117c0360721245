"""stable-baselines3 and sb3-contrib on our envs: check, masks, a thousand steps of learning."""

import numpy as np
import pytest
import torch

from tests.builders.adapter_sizes import ENVS, IMAGES, SEED, STEPS, Case, Played

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")
sb3 = pytest.importorskip("esper_soa.adapters.sb3")


def vec_env(envs: int = ENVS, case: Case = IMAGES):
    return sb3.GrowthVecEnv(case.experiment, envs=envs, seed=SEED, **case.sizes)


def test_stable_baselines_finds_no_fault_in_a_single_env(case: Case) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(gymnasium.make(f"esper_soa/{case.experiment}-v0", **case.sizes).unwrapped)


def test_the_same_actions_give_the_rewards_of_the_simulator(case: Case, played: Played) -> None:
    env = vec_env(case=case)
    observation = env.reset()
    for step in range(STEPS):
        assert np.array_equal(
            np.stack(env.env_method("action_masks")), observation["action_mask"].astype(bool)
        )
        assert np.array_equal(
            observation["features"][:, : played.features.shape[2]], played.features[step]
        )
        observation, reward, done, infos = env.step(played.actions[step].numpy())
        assert np.array_equal(reward, played.rewards[step].float())
        assert done.all() == (step == STEPS - 1)
    for env_number, info in enumerate(infos):
        assert info["TimeLimit.truncated"] is True
        assert (info["round"], info["env_step"]) == (0, STEPS)
        assert info["accuracy"] == played.accuracy[env_number]
        last = info["terminal_observation"]
        assert env.observation_space.contains(last)
        assert not np.array_equal(last["features"], observation["features"][env_number])
    assert env.seed(SEED) == [SEED] * ENVS
    for number, first in ((0, True), (1, False)):  # a seed is for one reset
        features = env.reset()["features"][:, : played.features.shape[2]]
        assert np.array_equal(features, played.features[0]) == first
        assert [info["round"] for info in env.reset_infos] == [number] * ENVS


def test_a_breakdown_ends_one_trajectory() -> None:
    env = vec_env()
    env.reset()
    env.flat.sim.world.weights["host", "params"][2] = torch.nan
    for step in range(3):
        _, reward, done, infos = env.step(np.zeros(ENVS, dtype=np.int64))
        assert np.isfinite(reward).all()
        assert done.tolist() == [False, False, step == 1]
        if step == 1:
            assert infos[2]["TimeLimit.truncated"] is False
            assert "terminal_observation" in infos[2]
            assert "terminal_observation" not in infos[0]
    for step in range(3, STEPS):
        if step == STEPS - 2:
            env.flat.sim.world.weights["host", "params"][1] = torch.nan
        infos = env.step(np.zeros(ENVS, dtype=np.int64))[3]
    assert [info["TimeLimit.truncated"] for info in infos] == [True, False, True]


def test_masked_ppo_learns_from_two_rollouts(case: Case) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    env = vec_env(4, case)
    model = contrib.MaskablePPO(
        "MultiInputPolicy", env, n_steps=12, batch_size=24, n_epochs=2, seed=0
    )
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(96)
    assert model.num_timesteps == 96
    assert any(
        not torch.equal(value, before[name]) for name, value in model.policy.state_dict().items()
    )
    observation = env.reset()
    actions, _ = model.predict(observation, action_masks=env.action_masks())
    assert observation["action_mask"][np.arange(4), actions].all()
