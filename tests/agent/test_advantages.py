import torch

from esper_soa.agent.advantages import gae, normalize_advantages


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


def test_a_truncated_episode_goes_on_with_the_bootstrap_value():
    # delta_1 = 0 + 0.995 * 0.4 - 0.25 = 0.148; delta_0 = 1 + 0.995 * 0.25 - 0.5 = 0.74875
    # A_0 = 0.74875 + 0.995 * 0.98 * 0.148 = 0.8930648
    advantages, returns, differences = gae(
        column(1, 0), column(0.5, 0.25), flags(0, 0), flags(1, 1), torch.tensor([0.4]), 0.995, 0.98
    )
    torch.testing.assert_close(advantages, column(0.8930648, 0.148))
    torch.testing.assert_close(returns, column(1.3930648, 0.398))
    torch.testing.assert_close(differences, column(0.74875, 0.148))
    torch.testing.assert_close(normalize_advantages(advantages, flags(1, 1)), column(1, -1))


def test_nothing_flows_back_across_a_terminal_row_inside_a_rollout():
    # rows 0, 1 end with -10; row 2 is a new trajectory: A_2 = 5 - 3, A_1 = -10 - 2, A_0 = 1 + 2 - 1
    # + 0.5 * -12
    advantages, _, _ = gae(
        column(1, -10, 5),
        column(1, 2, 3),
        flags(0, 1, 0),
        flags(1, 1, 1),
        torch.tensor([0.0]),
        1.0,
        0.5,
    )
    torch.testing.assert_close(advantages, column(-4, -12, 2))


def test_a_terminal_last_row_ignores_the_bootstrap_value():
    advantages, _, _ = gae(
        column(2), column(0.5), flags(1), flags(1), torch.tensor([99.0]), 1.0, 1.0
    )
    torch.testing.assert_close(advantages, column(1.5))


def test_rows_that_are_not_valid_change_nothing_even_with_nan_in_them():
    nan = float("nan")
    args = (torch.tensor([0.4]), 0.995, 0.98)
    short = gae(column(1, 0), column(0.5, 0.25), flags(0, 0), flags(1, 1), *args)
    padded = gae(
        column(1, nan, 0, nan),
        column(0.5, nan, 0.25, nan),
        flags(0, 1, 0, 1),
        flags(1, 0, 1, 0),
        *args,
    )
    for whole, part in zip(padded, short, strict=True):
        assert torch.equal(whole[[0, 2]], part)
        assert torch.equal(whole[[1, 3]], torch.zeros(2, 1))


def test_envs_do_not_mix():
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(5, 3, generator=generator)
    values = torch.randn(5, 3, generator=generator)
    terminal = torch.rand(5, 3, generator=generator) < 0.3
    valid = torch.ones(5, 3).bool()
    bootstrap = torch.randn(3, generator=generator)
    together = gae(rewards, values, terminal, valid, bootstrap, 0.99, 0.9)
    one = slice(1, 2)
    alone = gae(
        rewards[:, one], values[:, one], terminal[:, one], valid[:, one], bootstrap[one], 0.99, 0.9
    )
    for all_envs, env in zip(together, alone, strict=True):
        assert torch.equal(all_envs[:, one], env)
