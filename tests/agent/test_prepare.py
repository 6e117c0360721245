"""What an update makes of a rollout before its first gradient step, with every number worked out by
hand.

Two env-steps of two envs: env 0 is cut at its end, env 1 is rolled back there. gamma = lambda =
0.5.
"""

import math

import pytest
import torch
from torch import Tensor

from esper_soa.agent import losses
from esper_soa.agent.advantages import gae, normalize_advantages
from esper_soa.agent.normalize import VARIANCE_EPSILON, Moments
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout, new_rollout
from esper_soa.config.agent import PPOConfig
from tests.builders.agent_world import small_policy, width_of

CPU = torch.device("cpu")


def doubles(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def learner_of(**ppo: object) -> Learner:
    return Learner(
        small_policy(1), PPOConfig(gamma=0.5, gae_lambda=0.5, **ppo), total_updates=100, seed=0
    )


def cut_and_rolled_back() -> Rollout:
    """Rewards 1, 3 and 2, -10; values 0.5, 0.25 and 1, -0.5; what follows the last env-step is
    worth 0.75 to both.
    """
    rollout = new_rollout(2, 2, 1, width_of(1), CPU)
    rows = rollout.rows
    rows.reward.copy_(torch.tensor([[1.0, 2.0], [3.0, -10.0]]))
    rows.value.copy_(torch.tensor([[0.5, 1.0], [0.25, -0.5]]))
    rows.truncated[1, 0] = rows.terminal[1, 1] = True
    rows.valid.fill_(True)
    rollout.bootstrap.fill_(0.75)
    return rollout


def known_scale(learner: Learner, mean: float, scale: float, seen: float = 1000.0) -> None:
    """Let the learner believe in returns with this mean and standard deviation."""
    learner.value = Moments(doubles(mean), doubles(scale**2 - VARIANCE_EPSILON), doubles(seen))


# Value scale 4: values 2, 1 and 4, -2; the state after env 0 is worth 3, that after env 1 nothing.
# env 0: d_1 = 3 + 0.5 * 3 - 1 = 3.5, d_0 = 1 + 0.5 * 1 - 2 = -0.5; A_1 = 3.5, A_0 = -0.5 + 0.25 *
# 3.5 = 0.375
# env 1: d_1 = -10 + 2 = -8, d_0 = 2 + 0.5 * -2 - 4 = -3; A_1 = -8, A_0 = -3 + 0.25 * -8 = -5
ADVANTAGES = torch.tensor([[0.375, -5.0], [3.5, -8.0]])
RETURNS = torch.tensor([[2.375, -1.0], [4.5, -10.0]])  # advantages plus values


def test_values_count_by_the_old_scale_and_targets_by_the_new_one() -> None:
    learner = learner_of()
    known_scale(learner, mean=1.0, scale=4.0)
    (batch,), summary = learner.prepare_(cut_and_rolled_back())
    # returns: mean -4.125 / 4, population variance 126.890625 / 4 - 1.0634766
    mean = -1.03125
    var = 30.6591797
    new_var = 0.99 * (16 - VARIANCE_EPSILON) + 0.01 * var + 0.99 * 0.01 * (mean - 1) ** 2
    new_scale = (new_var + VARIANCE_EPSILON) ** 0.5
    assert new_scale == pytest.approx(4.024, abs=1e-3)
    torch.testing.assert_close(batch.targets, RETURNS / new_scale)
    assert learner.value.mean.item() == pytest.approx(0.99 + 0.01 * mean)
    assert learner.value.var.item() == pytest.approx(new_var)
    assert learner.value.seen == 1004
    assert summary["value_scale"].item() == pytest.approx(new_scale)
    assert summary["bellman_error"].item() == pytest.approx((0.5 + 3 + 3.5 + 8) / 4)


def test_advantages_are_normalised_with_the_population_deviation_of_all_envs_together() -> None:
    learner = learner_of()
    known_scale(learner, mean=1.0, scale=4.0)
    (batch,), summary = learner.prepare_(cut_and_rolled_back())
    # mean -9.125 / 4 = -2.28125; squares 7.0556641 + 7.3916016 + 33.4228516 + 32.7041016, over 4
    deviation = (80.5742188 / 4) ** 0.5
    torch.testing.assert_close(batch.advantages, (ADVANTAGES + 2.28125) / deviation)
    assert summary["advantage_mean"].item() == pytest.approx(-2.28125)
    assert summary["advantage_std"].item() == pytest.approx(deviation)


def test_the_summary_judges_the_values_that_were_predicted() -> None:
    learner = learner_of()
    known_scale(learner, mean=1.0, scale=4.0)
    # deviation 3
    learner.reward = learner.reward._replace(squares=doubles(36.0), seen=doubles(5.0))
    _, summary = learner.prepare_(cut_and_rolled_back())
    values = torch.tensor([[2.0, 4.0], [1.0, -2.0]])
    assert summary["explained_variance"].item() == pytest.approx(
        1 - ((RETURNS - values).var() / RETURNS.var()).item()
    )
    assert summary["reward_scale"].item() == pytest.approx(3.0)
    assert summary["return_mean"].item() == pytest.approx(3 * -1.03125)
    assert summary["value_mean"].item() == pytest.approx(3 * 1.25)


def test_the_first_returns_are_neither_scaled_before_nor_after() -> None:
    learner = learner_of()
    # four returns are too few for a scale
    (batch,), summary = learner.prepare_(cut_and_rolled_back())
    # env 0: d_1 = 3 + 0.375 - 0.25, A_1 = 3.125, return 3.375; env 1: d_1 = -10 + 0.5, return -10
    torch.testing.assert_close(batch.targets[1], torch.tensor([3.375, -10.0]))
    assert summary["value_scale"].item() == 1.0
    assert learner.value.seen == 4


def test_the_value_after_a_rollback_counts_for_nothing_and_that_after_a_cut_counts_in_full() -> (
    None
):
    learner = learner_of()
    other = learner_of()
    rollout = cut_and_rolled_back()
    richer = Rollout(rollout.rows, rollout.bootstrap + torch.tensor([0.0, 50.0]))
    first = learner.prepare_(rollout)[0][0]
    second = other.prepare_(richer)[0][0]
    assert torch.equal(first.targets, second.targets)
    richer = Rollout(rollout.rows, rollout.bootstrap + torch.tensor([2.0, 0.0]))
    # 2 more for env 0: half of it one env-step before, and of that half a quarter's share again,
    # 0.5 * 0.25 * 2
    moved = learner_of().prepare_(richer)[0][0].targets - first.targets
    torch.testing.assert_close(moved, torch.tensor([[0.25, 0.0], [1.0, 0.0]]))


def test_an_episode_that_is_neither_cut_nor_ended_has_no_value_after_it() -> None:
    rollout = cut_and_rolled_back()
    rollout.rows.truncated.fill_(False)
    assert learner_of().prepare_(rollout)[0][0].targets[1, 0].item() == 3.0


def test_an_episode_that_is_cut_early_has_the_value_after_it_and_nothing_behind() -> None:
    rollout = cut_and_rolled_back()
    rollout.rows.truncated[:, 0] = torch.tensor([True, False])
    rollout.rows.valid[1, 0] = False
    # 1 + 0.5 * 0.75
    assert learner_of().prepare_(rollout)[0][0].targets[:, 0].tolist() == [1.375, 0.0]


def test_rows_without_a_return_leave_the_value_scale_alone() -> None:
    learner = learner_of()
    rollout = cut_and_rolled_back()
    rollout.rows.reward[0, 1] = float("inf")
    rollout.rows.valid[0, 0] = False
    learner.prepare_(rollout)
    assert learner.value.seen == 2
    # 3 + 0.5 * 0.75 and -10
    assert learner.value.mean.item() == pytest.approx((3.375 - 10) / 2)


def test_rewards_are_scaled_after_they_have_entered_and_clipped_as_the_settings_say() -> None:
    learner = learner_of(reward_clip=1.25)
    everyone = torch.ones(3, dtype=torch.bool)
    # 1, 2 and 6: mean 3, sample variance (4 + 1 + 9) / 2 = 7
    scaled = learner.scale_rewards_(torch.tensor([1.0, 2.0, 6.0]), everyone)
    assert scaled.tolist() == pytest.approx([1 / 7**0.5, 2 / 7**0.5, 1.25])
    assert scaled.dtype == torch.float32
    # with -3, 0 and 0 besides: mean 1, squares 0 + 1 + 25 + 16 + 1 + 1 over 5
    assert learner.scale_rewards_(torch.tensor([-3.0, 0.0, 0.0]), everyone)[
        0
    ].item() == pytest.approx(-3 / 8.8**0.5)


def test_explained_variance_takes_sample_variances_and_no_spread_below_one() -> None:
    # returns 0 and 1: variance 0.5, taken as 1; errors -1 and 1: variance 2, one degree less
    returns = torch.tensor([[0.0, 1.0, 9.0]])
    values = torch.tensor([[1.0, 0.0, 0.0]])
    valid = torch.tensor([[True, True, False]])
    assert losses.explained_variance(values, returns, valid).item() == pytest.approx(-1.0)
    assert (
        losses.explained_variance(values, returns, torch.tensor([[True, False, False]])).item()
        == 1.0
    )


def test_a_mean_with_weights_divides_by_their_sum_but_by_no_less_than_one() -> None:
    x = torch.tensor([4.0, 8.0, float("nan")])
    assert losses.weighted_mean(x, torch.tensor([1.0, 3.0, 0.0])).value.item() == 7.0
    assert losses.weighted_mean(x, torch.tensor([0.25, 0.25, 0.0])).value.item() == 3.0
    assert losses.half_squared_error(*torch.tensor([3.0, 1.0, 1.0])).value.item() == 2.0


def test_ratios_are_clamped_by_head_and_together() -> None:
    reference = torch.zeros(2, 8)
    log_ratio = losses.clamped_log_ratio(torch.tensor([[25.0], [-25.0]]).expand(2, 8), reference)
    assert log_ratio[:, 0].tolist() == [20.0, -20.0]
    highest, lowest = losses.joint_ratio(log_ratio)
    # eight times 20 counts as 30
    assert highest.item() == pytest.approx(math.exp(30.0))
    assert lowest.item() == pytest.approx(math.exp(-30.0))


def test_a_ratio_at_the_clip_is_not_clipped() -> None:
    log_ratio = torch.zeros(3, 8, dtype=torch.float64)
    log_ratio[:, 7] = torch.tensor([1.5, 1.5 + 1e-9, 0.25], dtype=torch.float64).log()
    means = losses.ratio_means(
        log_ratio, torch.ones(3, 8).bool(), torch.ones(3).bool(), 0.5 + 5e-10
    )
    assert means["clip_fraction"].value.item() == pytest.approx(2 / 3)
    assert means["head_clip_fraction"].value[7].item() == pytest.approx(2 / 3)
    assert means["head_clip_fraction"].value[0].item() == 0.0


def test_a_spread_of_exactly_a_tenth_is_the_least_that_advantages_are_divided_by() -> None:
    counted = torch.tensor([[True], [True], [False]])
    wide = normalize_advantages(torch.tensor([[0.2], [-0.2], [77.0]]), counted)
    narrow = normalize_advantages(torch.tensor([[1.05], [0.95], [77.0]]), counted)
    torch.testing.assert_close(wide, torch.tensor([[1.0], [-1.0], [0.0]]))
    torch.testing.assert_close(narrow, torch.tensor([[0.5], [-0.5], [0.0]]), atol=1e-5, rtol=0)


def test_advantages_are_added_up_in_double_precision() -> None:
    rewards, values = torch.randn(2, 400, 1, generator=torch.Generator().manual_seed(0))
    flags = torch.zeros(400, 1, dtype=torch.bool), torch.ones(400, 1, dtype=torch.bool)
    given = (rewards, values, *flags, torch.tensor([0.3]), 0.999, 1.0)
    exact = gae(*(one.double() for one in given[:2]), *given[2:])
    for one, other in zip(gae(*given), exact, strict=True):
        assert torch.equal(one, other.float())


def column(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


def test_rows_that_are_not_valid_change_no_advantage_even_with_nan_in_them() -> None:
    nan = float("nan")
    args = (torch.tensor([0.4]), 0.995, 0.98)
    short = gae(
        column(1.0, 0.0), column(0.5, 0.25), column(False, False), column(True, True), *args
    )
    padded = gae(
        column(1, nan, 0, nan),
        column(0.5, nan, 0.25, nan),
        column(False, True, False, True),
        column(True, False, True, False),
        *args,
    )
    assert {one.dtype for one in padded} == {torch.float32}
    for whole, part in zip(padded, short, strict=True):
        assert torch.equal(whole[[0, 2]], part)
        assert torch.equal(whole[[1, 3]], torch.zeros(2, 1))
