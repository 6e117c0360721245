"""Advantages and losses against torchrl's, an implementation that is not ours."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from esper_soa.agent import losses
from esper_soa.agent.advantages import gae
from esper_soa.env.legal import relevant_heads
from esper_soa.vocabulary import HEAD_NAMES, Op

functional = pytest.importorskip(
    "torchrl.objectives.value.functional", reason="torchrl is not installed"
)
objectives = pytest.importorskip("torchrl.objectives", reason="torchrl is not installed")
modules = pytest.importorskip("torchrl.modules", reason="torchrl is not installed")

OP = HEAD_NAMES.index("op")
CLIP = 0.2


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("end", ["truncated", "terminal"])
@pytest.mark.parametrize(
    ("gamma", "lam"), [(255 / 256, 63 / 64), (0.875, 0.0), (1.0, 1.0)]
)  # exact in float32
def test_advantages_and_returns_are_torchrls(end: str, gamma: float, lam: float) -> None:
    steps = 40
    envs = 5
    rewards = numbers(steps, envs, seed=0)
    values = numbers(steps, envs, seed=1)
    bootstrap = numbers(envs, seed=2)
    terminal = numbers(steps, envs, seed=3) > 1.2  # rollbacks inside the rollout
    terminal[-1] = end == "terminal"
    truncated = torch.zeros_like(terminal)
    truncated[-1] = ~terminal[-1]
    assert terminal[:-1].any()
    advantages, returns, _ = gae(
        rewards, values, terminal, torch.ones_like(terminal), bootstrap, gamma, lam
    )
    following = torch.cat([values[1:], bootstrap.unsqueeze(0)])
    expected = functional.generalized_advantage_estimate(
        gamma,
        lam,
        *(x.T.unsqueeze(-1) for x in (values, following, rewards, terminal | truncated, terminal)),
    )
    for actual, theirs in zip((advantages, returns), expected, strict=True):
        torch.testing.assert_close(actual, theirs.squeeze(-1).T, rtol=1e-12, atol=1e-12)


class Actor(nn.Module):
    """Logits that are parameters, one row per env-step."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def forward(self, index: Tensor) -> Tensor:
        return self.logits[index]


class Critic(nn.Module):
    """Values that are parameters, one per env-step."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self, index: Tensor) -> Tensor:
        return self.values[index].unsqueeze(-1)


def torchrl_losses(
    logits: Tensor, values: Tensor, played: TensorDict
) -> tuple[TensorDict, Tensor, Tensor]:
    """ClipPPOLoss of one categorical head, with the gradients of logits and values."""
    actor = modules.ProbabilisticActor(
        TensorDictModule(Actor(logits), in_keys=["index"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictModule(Critic(values), in_keys=["index"], out_keys=["state_value"])
    loss = objectives.ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=CLIP,
        entropy_bonus=True,
        entropy_coeff=1.0,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=False,
    )
    result = loss(played)
    (result["loss_objective"] + result["loss_critic"]).backward()
    gradients = [p.grad for p in loss.parameters() if p.grad is not None]
    (of_logits,) = [g for g in gradients if g.ndim == 2]
    (of_values,) = [g for g in gradients if g.ndim == 1]
    return result, of_logits, of_values


def test_clipped_loss_value_loss_entropy_and_clip_fraction_are_torchrls_for_one_head() -> None:
    steps = 64
    logits = numbers(steps, 6, seed=0)
    old_logits = numbers(steps, 6, seed=1)
    action = numbers(steps, 6, seed=2).argmax(-1)
    values, targets, advantages = (numbers(steps, seed=seed) for seed in (3, 4, 5))
    stored = torch.log_softmax(old_logits, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    played = TensorDict(
        {
            "index": torch.arange(steps),
            "action": action,
            "action_log_prob": stored,
            "sample_log_prob": stored,
            "advantage": advantages.unsqueeze(-1),
            "value_target": targets.unsqueeze(-1),
        },
        [steps],
    )
    theirs, of_logits, of_values = torchrl_losses(logits, values, played)

    mine = logits.clone().requires_grad_()
    critic = values.clone().requires_grad_()
    distribution = torch.log_softmax(mine, -1)
    log_ratio = torch.zeros(steps, 8, dtype=torch.float64)
    chosen = distribution.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    log_ratio = torch.cat(
        [log_ratio[:, :OP], losses.clamped_log_ratio(chosen, stored).unsqueeze(-1)], dim=-1
    )
    counted = relevant_heads(torch.full((steps,), Op.WAIT))  # the op head alone
    assert counted.sum(0).tolist() == [0] * 7 + [steps]
    policy = -losses.surrogate(log_ratio, advantages, counted, CLIP).value.sum()
    value = losses.half_squared_error(critic, targets, torch.ones(steps, dtype=torch.float64)).value
    entropies = torch.zeros(steps, 8, dtype=torch.float64)
    entropies[:, OP] = -(distribution.exp() * distribution).sum(-1).detach()
    bonus = -losses.masked(entropies, counted).value.sum()
    clipped = losses.ratio_means(log_ratio.detach(), counted, torch.ones(steps).bool(), CLIP)[
        "clip_fraction"
    ].value
    (policy + value).backward()

    ratio = log_ratio[:, OP].exp()
    assert (ratio > 1 + CLIP).any()
    assert (ratio < 1 - CLIP).any()
    torch.testing.assert_close(policy, theirs["loss_objective"])
    torch.testing.assert_close(value, theirs["loss_critic"])  # half the mean squared error
    torch.testing.assert_close(bonus, theirs["loss_entropy"])
    torch.testing.assert_close(clipped.double(), theirs["clip_fraction"].double())
    torch.testing.assert_close(mine.grad, of_logits)
    torch.testing.assert_close(critic.grad, of_values)
