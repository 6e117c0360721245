import torch

from esper_soa.agent import normalize

CPU = torch.device("cpu")
NAN = float("nan")


def test_rows_that_do_not_count_never_enter_the_observation_moments():
    before = normalize.observation_moments(1, CPU)
    rows = torch.tensor([[[2.0], [NAN], [4.0]]])
    after = normalize.update_observation(
        before, [(rows, torch.tensor([[True, False, True]]))], 0.99
    )
    torch.testing.assert_close(after.var, torch.tensor([1.0891]))
    unchanged = normalize.update_observation(after, [(rows, torch.zeros(1, 3).bool())], 0.99)
    assert torch.equal(unchanged.mean, after.mean)
    assert torch.equal(unchanged.var, after.var)


def test_constant_rewards_are_clipped_instead_of_divided_by_zero():
    for number, wanted in ((1.0, [1.0, 10.0, 10.0]), (0.0, [0.0, 0.0, 0.0])):
        stats = normalize.reward_stats(CPU)
        scaled = []
        for _ in range(3):
            reward = torch.tensor([number])
            stats = normalize.update_reward(stats, reward, torch.tensor([True]))
            scaled.append(normalize.normalize_reward(stats, reward, 10.0).item())
        assert scaled == wanted


def test_a_batch_of_rewards_enters_at_once_whatever_its_order():
    rewards = torch.tensor([1.0, 3.0, NAN, -2.0], dtype=torch.float64)
    valid = torch.tensor([True, True, False, True])
    stats = normalize.update_reward(normalize.reward_stats(CPU), rewards, valid)
    flipped = normalize.update_reward(normalize.reward_stats(CPU), rewards.flip(0), valid.flip(0))
    # mean 2/3, squared deviations 1/9 + 49/9 + 64/9
    torch.testing.assert_close(stats.squares, torch.tensor(114 / 9, dtype=torch.float64))
    torch.testing.assert_close(flipped, stats)
    again = normalize.update_reward(stats, torch.tensor([5.0, 7.0]), torch.tensor([True, True]))
    everything = torch.tensor([1.0, 3.0, -2.0, 5.0, 7.0], dtype=torch.float64)
    torch.testing.assert_close(normalize.reward_scale(again), everything.std())


def test_the_thirty_second_return_sets_the_scale_and_the_next_ones_move_it_slowly():
    moments = normalize.value_moments(CPU)
    numbers = 1e7 + torch.arange(32.0)  # so large that their sum needs double precision
    moments = normalize.update_value(moments, numbers[:31], torch.ones(31).bool())
    assert normalize.value_scale(moments).item() == 1.0
    moments = normalize.update_value(moments, numbers[31:], torch.ones(1).bool())
    # mean 1e7 + 15.5 and variance (32**2 - 1) / 12 = 85.25, of a population
    assert moments.mean.item() == 1e7 + 15.5
    torch.testing.assert_close(normalize.value_scale(moments).item(), (85.25 + 1e-4) ** 0.5)
    moments = normalize.update_value(moments, torch.full((4,), 1e7), torch.ones(4).bool())
    torch.testing.assert_close(moments.mean.item() - 1e7, 0.99 * 15.5)
    torch.testing.assert_close(moments.var.item(), 0.99 * 85.25 + 0.99 * 0.01 * 15.5**2)
