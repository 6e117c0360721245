"""Gradient steps of an update against torch's Adam and clipping, and their random numbers."""

import copy

import pytest
import torch
from torch import Tensor

from esper_soa.agent.lstm import segment_starts
from esper_soa.agent.objective import coefficients, head_tables, total_loss
from esper_soa.agent.optimizer import flatten
from esper_soa.agent.policy import ContributionPredictor
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.env.reduction import Reduction
from esper_soa.vocabulary import HEAD_NAMES
from tests.builders.agent_world import learner_of, random_rollout, small_policy

CPU = torch.device("cpu")
NUM_STEPS = 4
NUM_ENVS = 3


def library_update(learner: Learner, rollout: Rollout, adam: torch.optim.Adam) -> None:
    """What `learner.update` should do to the policy that `adam` has, by torch's optimiser."""
    config = learner.config
    policy = learner.policy
    before = copy.copy(learner)  # prepare_ replaces the normalisers of the copy alone
    (batch,), _ = before.prepare_(rollout)
    weights = coefficients(config, learner.train_steps, learner.total_updates)
    for epoch in range(config.epochs):
        for (envs,) in learner.minibatches([NUM_ENVS], learner.config.minibatches, epoch):
            rows = batch.of(envs)
            noise = learner.dropout_noise(rollout, envs, epoch)
            evaluation = policy.evaluate(rows.rows, segment_starts(rollout.rows.reset), noise)
            loss, _ = total_loss([(evaluation, rows)], config, weights, head_tables(config, CPU))
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            adam.step()


def test_both_passes_multiply_as_precisely_as_play(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of()
    seen = []
    rollout = random_rollout(learner.policy, NUM_STEPS, NUM_ENVS, seed=0)
    kernel = torch.lstm

    def note(*_: object) -> None:
        seen.append(torch.backends.cudnn.rnn.fp32_precision)

    monkeypatch.setattr(torch, "lstm", lambda *given: note() or kernel(*given))
    for parameter in learner.parameters:
        parameter.register_hook(note)
    before = torch.backends.cudnn.rnn.fp32_precision
    learner.update(rollout)
    assert set(seen) == {"ieee"}
    assert before == torch.backends.cudnn.rnn.fp32_precision != "ieee"


@pytest.mark.parametrize("limit", [5.0, 0.01])
def test_two_updates_are_those_of_the_library_optimiser_with_the_settings(limit: float) -> None:
    ppo = {
        "lr": 7e-4,
        "adam_eps": 1e-3,
        "max_grad_norm": limit,
        "epochs": 2,
        "minibatches": 2,
        "target_kl": 0.0,
    }
    learner = learner_of(**ppo)
    theirs = learner_of(**ppo)
    adam = torch.optim.Adam(theirs.policy.parameters(), lr=7e-4, betas=(0.9, 0.999), eps=1e-3)
    for number in range(2):
        rollout = random_rollout(learner.policy, NUM_STEPS, NUM_ENVS, seed=number)
        theirs.rounds = learner.rounds
        theirs.train_steps = learner.train_steps
        theirs.value = learner.value
        library_update(theirs, rollout, adam)
        report = learner.update(rollout)
        assert report["gradient_norm"] > 2 * 0.01, "nothing is clipped"
        torch.testing.assert_close(
            flatten(learner.parameters), flatten(theirs.policy.parameters()), rtol=0, atol=2e-6
        )
        theirs.policy.update_observations_([(rollout.rows.features, rollout.rows.valid)], 0.99)
        assert torch.equal(learner.policy.mean, theirs.policy.mean)
        assert torch.equal(learner.policy.var, theirs.policy.var)
    torch.testing.assert_close(learner.adam.steps, torch.tensor(8.0, dtype=torch.float64))


def test_the_observation_follows_only_after_the_update_and_as_fast_as_the_settings_say() -> None:
    learner = learner_of(observation_momentum=0.75, epochs=2)
    rollout = random_rollout(learner.policy, NUM_STEPS, NUM_ENVS, seed=0)
    assert learner.update(rollout)["ratio_error_first"] < 1e-5
    rows = rollout.rows.features.flatten(0, 1)
    of_slots = torch.stack([rows[:, 23:54], rows[:, 54:85]]).mean((0, 1))
    torch.testing.assert_close(
        learner.policy.mean, 0.25 * torch.cat([rows[:, :23].mean(0), of_slots])
    )


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_entropy_multiplier_floor_and_penalty_belong_to_their_head(head: str) -> None:
    nothing = dict.fromkeys(HEAD_NAMES, 0.0)
    plain = {
        "entropy_multiplier": nothing,
        "entropy_floor": nothing,
        "entropy_floor_penalty": nothing,
    }
    for name in ("entropy_multiplier", "entropy_floor_penalty"):
        floor = nothing | {head: 0.9999}
        learner = learner_of(
            epochs=1, **(plain | {"entropy_floor": floor, name: nothing | {head: 2.0}})
        )
        with torch.no_grad():  # sure of itself in every head, by a different amount
            for place, (head_name, part) in enumerate(learner.policy.heads.items()):
                if head_name == "slot":
                    part.score.weight.mul_(1e4)
                else:
                    part[-1].bias[0] = 1.0 + 0.25 * place
        report = learner.update(random_rollout(learner.policy, 8, NUM_ENVS, seed=0))
        if name == "entropy_multiplier":
            assert report["entropy_loss"] < 0
            assert report["floor_penalty"] == 0.0
        else:
            assert report["entropy_loss"] == 0.0
            assert report["floor_penalty"] > 0


def noise_of(learner: Learner, rounds: int, epoch: int, envs: list[int]) -> Tensor:
    learner.rounds = rounds
    rollout = random_rollout(learner.policy, NUM_STEPS, NUM_ENVS, seed=0)
    return learner.dropout_noise(rollout, torch.tensor(envs), epoch)


def test_dropout_never_repeats_over_rounds_epochs_envs_env_steps_and_units() -> None:
    learner = learner_of()
    other = learner_of(seed=1)
    draws = [
        noise_of(learner, number, epoch, [0, 1, 2]) for number in range(3) for epoch in range(2)
    ]
    draws.append(noise_of(other, 0, 0, [0, 1, 2]))
    numbers = torch.stack(draws)
    assert numbers.shape == (7, NUM_STEPS, NUM_ENVS, 16)
    # 1,344 of 2**24 numbers: 0.05 chance repetitions are expected; a forgotten coordinate repeats a
    # third or more
    assert len(numbers.unique()) > numbers.numel() - 4
    # an env's own, whichever minibatch it is in
    assert torch.equal(draws[0][:, [2, 0]], noise_of(learner, 0, 0, [2, 0]))


def test_an_update_draws_its_dropout_by_the_round_and_the_epoch() -> None:
    """The contribution loss of a policy that stands still differs between epochs and rounds by its
    dropout alone.
    """
    nothing = {"contribution_warmup": 0, "lr": 1e-30, "target_kl": 0.0}
    rollout = random_rollout(small_policy(2), NUM_STEPS, NUM_ENVS, seed=0)
    losses = []
    for rounds, epochs in ((0, 1), (0, 2), (1, 1)):
        learner = learner_of(epochs=epochs, **nothing)
        learner.rounds = rounds
        losses.append(learner.update(rollout)["contribution_loss"])
    first, both, later = losses
    assert len({round(first, 6), round(2 * both - first, 6), round(later, 6)}) == 3


def test_minibatches_are_drawn_anew_in_every_epoch_and_round_and_by_the_seed() -> None:
    orders = set()
    for seed, rounds, epoch in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        learner = learner_of(seed, minibatches=3)
        learner.rounds = rounds
        pieces = [piece for (piece,) in learner.minibatches([10], 3, epoch)]
        assert [len(piece) for piece in pieces] == [4, 3, 3]
        order = torch.cat(pieces).tolist()
        assert sorted(order) == list(range(10))
        orders.add(tuple(order))
    assert len(orders) == 4


class LaterHalf(Reduction):
    """Of a process that has the envs from 5 on."""

    def local_envs(self, envs: Tensor) -> Tensor:
        return envs[envs >= 5]


def test_the_envs_of_a_process_are_counted_without_a_read_of_the_device() -> None:
    learner = learner_of(0, minibatches=2)
    learner.reduction = LaterHalf()
    wanted = torch.cat([piece for (piece,) in learner.minibatches([10], 2, 0)])
    learner.device = torch.device("meta")  # where every read raises
    found = [piece for (piece,) in learner.minibatches([10], 2, 0)]
    assert sum(len(piece) for piece in found) == len(wanted) == 5
    assert {piece.device.type for piece in found} == {"meta"}


def test_a_unit_is_dropped_below_a_tenth_and_kept_from_there_on() -> None:
    torch.manual_seed(0)
    predictor = ContributionPredictor(16, 8)
    slots = torch.randn(1, 8)
    x = torch.randn(1, 16)
    all_kept = predictor.output(predictor.trunk(x) / 0.9, slots)

    def told(noise: float) -> Tensor:
        return predictor(x, slots, torch.full((1, 8), noise))

    torch.testing.assert_close(told(0.1), all_kept)
    torch.testing.assert_close(told(1.0), all_kept)
    torch.testing.assert_close(told(0.0999), predictor.output(torch.zeros(1, 8), slots))
