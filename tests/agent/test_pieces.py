"""A gradient step in pieces of envs: the numbers of the whole, and the same bits on any threads."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from esper_soa.agent import pieces
from esper_soa.agent.lstm import segment_starts
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.config.agent import PPOConfig
from esper_soa.state import same_bits
from esper_soa.system.threads import run_pieces
from tests.builders.agent_world import random_rollout, small_policy

STEPS = 5
DIFFERENTIABLE = ("log_probs", "entropies", "value", "q", "contribution")


def both_passes(
    policy: RecurrentPolicy, rollout: Rollout, workers: int, fields: Sequence[str] = DIFFERENTIABLE
) -> tuple[list[Tensor], list[Tensor]]:
    """What `pieces.evaluate` gives, and gradients of the squares of some of it."""
    rows = rollout.rows
    noise = torch.rand(*rows.shape, 16, generator=torch.Generator().manual_seed(1))
    found = pieces.evaluate(policy, rows, segment_starts(rows.reset), noise, workers)
    loss = torch.stack([getattr(found, name).square().sum() for name in fields]).sum()
    gradients = torch.autograd.grad(loss, list(policy.parameters()), materialize_grads=True)
    assert [one.requires_grad for one in found] == [
        name in DIFFERENTIABLE for name in found._fields
    ]
    return [*found], [*gradients]


@pytest.mark.parametrize("fields", [DIFFERENTIABLE, ("log_probs", "q")])
def test_pieces_give_what_the_whole_gives_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, fields: Sequence[str]
) -> None:
    policy = small_policy(2, layers=2)
    rollout = random_rollout(policy, STEPS, 37, seed=0)
    whole = both_passes(policy, rollout, 1, fields)
    monkeypatch.setattr(pieces, "MIN_CUT_WORK", 1)
    by_workers = [both_passes(policy, rollout, workers, fields) for workers in (1, 2, 3)]
    for one, other in zip(sum(whole, []), sum(by_workers[0], []), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for other in by_workers[1:]:
        assert same_bits(sum(by_workers[0], []), sum(other, []))


@pytest.mark.parametrize(
    ("envs", "sizes"), [(1, []), (2, [1, 1]), (5, [3, 2]), (32, [16, 16]), (37, [13, 12, 12])]
)
def test_pieces_have_at_most_16_envs_and_are_two_at_least(
    monkeypatch: pytest.MonkeyPatch, envs: int, sizes: list[int]
) -> None:
    policy = small_policy(2)
    rollout = random_rollout(policy, STEPS, envs, seed=0)
    taken = list[tuple[int, list[int]]]()

    def note(todo: list, workers: int) -> list:
        results = run_pieces(todo, workers)
        taken.append((workers, [one.value.shape[1] for one in results]))
        return results

    work = STEPS * envs * sum(one.numel() for one in policy.parameters())
    rows = rollout.rows
    given = policy, rows, segment_starts(rows.reset), torch.rand(*rows.shape, 16), 3
    monkeypatch.setattr(pieces, "run_pieces", note)
    monkeypatch.setattr(pieces, "MIN_CUT_WORK", work + 1)
    pieces.evaluate(*given)
    assert taken == []
    monkeypatch.setattr(pieces, "MIN_CUT_WORK", work)
    pieces.evaluate(*given)
    assert taken == [(3, sizes)] * bool(sizes)


def test_a_policy_learns_the_same_bits_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "MIN_CUT_WORK", 1)
    learned = []
    for workers in (1, 2):
        policy = small_policy(2)
        learner = Learner(policy, PPOConfig(epochs=2, minibatches=2), total_updates=9, seed=0)
        learner.workers = workers
        learner.update(random_rollout(policy, STEPS, 9, seed=0))
        learned.append([one.detach() for one in policy.parameters()])
    assert same_bits(*learned)
    assert not same_bits(learned[0], [*small_policy(2).parameters()])


def test_a_gradient_step_leaves_the_precision_of_products_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that each changed and restored it would restore what another has set."""
    kernel = torch.backends.cudnn.rnn
    before = kernel.fp32_precision  # type: ignore[attr-defined]
    seen = set()
    plain = RecurrentPolicy.evaluate

    def note(self: RecurrentPolicy, *given: object) -> object:
        seen.add(kernel.fp32_precision)  # type: ignore[attr-defined]
        return plain(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(RecurrentPolicy, "evaluate", note)
    policy = small_policy(2)
    learner = Learner(policy, PPOConfig(epochs=1), total_updates=9, seed=0)
    learner.update(random_rollout(policy, STEPS, 2, seed=0))
    assert (seen, kernel.fp32_precision) == ({"ieee"}, before)  # type: ignore[attr-defined]
    assert before != "ieee"
