"""Distributions, advantages and normalisers against the recorded vectors of the reference."""

import torch

from esper_soa.agent import normalize
from esper_soa.agent.advantages import gae, normalize_advantages
from esper_soa.agent.distribution import entropy, masked_log_probs
from esper_soa.state import chosen
from tests.parity.parity_vectors import load

CPU = torch.device("cpu")
SINGLE = {"atol": 1e-5, "rtol": 1e-5}
DOUBLE = {"atol": 1e-9, "rtol": 1e-9}


def test_masked_categorical_without_a_floor():
    arrays = {name: torch.from_numpy(array) for name, array in load("masked_categorical").items()}
    logits = arrays["logits"]
    mask = arrays["mask"]
    log_probs = masked_log_probs(logits, mask, 0.0)
    torch.testing.assert_close(log_probs.exp(), arrays["probs_none"], **SINGLE)
    torch.testing.assert_close(
        chosen(log_probs, arrays["action"]), arrays["log_prob_none"], **SINGLE
    )
    torch.testing.assert_close(entropy(log_probs, mask), arrays["entropy_none"], **SINGLE)


def test_gae_and_its_normalisation():
    arrays = {name: torch.from_numpy(array) for name, array in load("gae").items()}
    groups, envs, steps = arrays["rewards"].shape

    def by_time(name: str) -> torch.Tensor:
        return arrays[name].reshape(groups * envs, steps).T

    count = arrays["step_counts"].reshape(-1)
    valid = torch.arange(steps).unsqueeze(1) < count
    last = (count - 1).clamp(min=0).unsqueeze(0)
    gamma, lam, scale = arrays["gamma_lambda_valuescale"].repeat_interleave(envs, dim=0).unbind(-1)
    scale = torch.where(scale == 0, 1.0, scale)
    cut = by_time("truncated").gather(0, last)[0]
    bootstrap = torch.where(
        cut, by_time("bootstrap_values").double().gather(0, last)[0] * scale, 0.0
    )
    terminal = by_time("dones") & ~by_time("truncated")
    actual = gae(
        by_time("rewards"),
        by_time("values").double() * scale,
        terminal,
        valid,
        bootstrap,
        gamma,
        lam,
    )
    for name, ours in zip(("advantages", "returns", "td_errors"), actual, strict=True):
        torch.testing.assert_close(ours.float(), torch.where(valid, by_time(name), 0.0), **SINGLE)
    # every group of envs was one rollout and is normalised by itself
    normalise = torch.vmap(normalize_advantages)
    grouped = normalise(*(x.T.reshape(groups, envs, steps) for x in (actual[0], valid)))
    expected = torch.where(
        valid.T.reshape(groups, envs, steps), arrays["advantages_normalized"], 0.0
    )
    torch.testing.assert_close(grouped.float(), expected, **SINGLE)


def test_observation_statistics_and_normalisation():
    arrays = {name: torch.from_numpy(array) for name, array in load("normalizers").items()}
    moving = exact = normalize.observation_moments(20, CPU)
    for k, rows in enumerate(arrays["rms_batches"]):
        valid = ~rows.isnan().any(-1)
        moving = normalize.update_observation(
            moving, [(rows.unsqueeze(0), valid.unsqueeze(0))], 0.99
        )
        exact = normalize.merge(exact, normalize.batch_moments(rows, valid))
        for moments, name in ((moving, "ema"), (exact, "welford")):
            torch.testing.assert_close(
                torch.stack([moments.mean, moments.var]), arrays[f"rms_stats_{name}"][k], **SINGLE
            )
        probe = normalize.normalize_observation(moving, arrays["rms_probe"], 10.0)
        torch.testing.assert_close(probe, arrays["rms_probe_normalized_ema"][k], **SINGLE)


def test_rewards_one_at_a_time():
    arrays = {name: torch.from_numpy(array) for name, array in load("normalizers").items()}
    stats = normalize.reward_stats(CPU)
    yes = torch.tensor([True])
    for reward, expected, numbers in zip(
        arrays["reward_in"], arrays["reward_out"], arrays["reward_stats"], strict=True
    ):
        stats = normalize.update_reward(stats, reward.reshape(1), yes)
        scaled = normalize.normalize_reward(stats, reward.reshape(1), 10.0)
        torch.testing.assert_close(scaled[0], expected, **DOUBLE)
        torch.testing.assert_close(torch.stack(list(stats)), numbers, **DOUBLE)


def test_value_statistics():
    arrays = {name: torch.from_numpy(array) for name, array in load("normalizers").items()}
    moments = normalize.value_moments(CPU)
    for returns, expected in zip(arrays["value_batches"], arrays["value_stats"], strict=True):
        moments = normalize.update_value(moments, returns, ~returns.isnan())
        scale = normalize.value_scale(moments)
        actual = torch.stack([moments.mean, moments.var, moments.seen, 2.5 / scale, 2.5 * scale])
        torch.testing.assert_close(actual, expected, **SINGLE)
