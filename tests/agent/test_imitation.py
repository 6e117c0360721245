"""What a round of imitation teaches: cross-entropy of the policy as it plays, on its own states."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.agent.lstm import segment_starts
from esper_soa.agent.objective import Batch, Coefficients, imitation_loss
from esper_soa.agent.optimizer import flatten
from esper_soa.agent.policy import Evaluation
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout, new_rollout
from esper_soa.agent.scripted import uniform_choice
from esper_soa.config.agent import ImitationConfig, PPOConfig
from esper_soa.env.legal import first_choice, head_masks, relevant_heads
from esper_soa.nets.graphs import StepCache
from esper_soa.state import Action
from esper_soa.vocabulary import HEAD_NAMES, Op
from tests.builders.agent_world import LISTED, kind, noise_of_heads, random_rollout, small_policy

CPU = torch.device("cpu")
# Names of what only PPO has: the surrogate, entropies, and the distance from the policy that
# played.
PPO_ALONE = {
    "policy_loss",
    "entropy_loss",
    "floor_penalty",
    "approx_kl",
    "kl_last",
    "kl_epoch/<epoch>",
    "kl/<head>",
    "clip_fraction",
    "clip_fraction/<head>",
    "ratio_max",
    "ratio_min",
    "ratio_error_first",
    "entropy/<head>",
    "head_share/<head>",
}
NO_CRITICS = {"value_coef": 0.0, "value_coef_start": 0.0, "contribution_coef": 0.0}


def learner_of(imitation: ImitationConfig | None = None, **ppo: object) -> Learner:
    policy = small_policy(2, 5, **ppo)
    return Learner(
        policy, PPOConfig(**ppo), 100, 0, imitation=imitation or ImitationConfig(rounds=9, epochs=1)
    )


def taught_rollout(
    learner: Learner, seed: int = 1, num_steps: int = 6, num_envs: int = 4
) -> Rollout:
    """Random play, a teacher whose legal choices are random too, env-steps without a choice and
    such that do not count.

    The op that was played is the teacher's on about every third env-step.
    """
    rollout = random_rollout(learner.policy, num_steps, num_envs, seed)
    rows = rollout.rows
    generator = torch.Generator().manual_seed(seed)
    rows.masks.op[1, 0] = torch.tensor([True, False, False, False, False, False])
    rows.action.op[1, 0] = rows.effective_op[1, 0] = Op.WAIT
    rows.valid[3:5, 2] = False
    noise = noise_of_heads(num_steps, num_envs, generator=generator)
    op = uniform_choice(rows.masks.op, noise[..., HEAD_NAMES.index("op")])
    offered = head_masks(rows.masks, op)
    choices = {
        name: uniform_choice(offered[name], noise[..., i]) for i, name in enumerate(HEAD_NAMES)
    }
    return rollout._replace(
        taught=Action.from_dict(choices | {"op": op}, batch_size=[num_steps, num_envs])
    )


def only_waiting(rollout: Rollout) -> Rollout:
    """The same with a teacher that always waits, so that the op head alone matters."""
    op = torch.zeros_like(rollout.rows.effective_op)
    choices = {
        name: first_choice(mask) for name, mask in head_masks(rollout.rows.masks, op).items()
    }
    return rollout._replace(taught=Action.from_dict(choices | {"op": op}, batch_size=op.shape))


def gradient_of_one_step(learner: Learner, rollout: Rollout) -> Tensor:
    """The gradient [P] that Adam was given, by its first moment after a step, no clipping."""
    report = learner.imitate(rollout)
    assert report["steps"] == 1
    return learner.adam.first / 0.1


def test_the_gradient_is_that_of_a_plain_cross_entropy_with_the_floors_of_play() -> None:
    learner = learner_of(max_grad_norm=0.0, **NO_CRITICS)
    policy = learner.policy
    rollout = only_waiting(taught_rollout(learner))
    rows = rollout.rows
    logits = []
    watching = policy.heads["op"].register_forward_hook(
        lambda module, given, out: logits.append(out)
    )
    policy.evaluate(rows, segment_starts(rows.reset), torch.zeros(6, 4, 16))
    watching.remove()
    entropies = []
    floor = policy.floors[HEAD_NAMES.index("op"), 0]
    for t in range(6):
        for env in range(4):
            mask = rows.masks.op[t, env]
            if bool(rows.valid[t, env]) and int(mask.sum()) > 1:
                played = (1 - mask.sum() * floor) * logits[0][t, env][mask].softmax(-1) + floor
                # WAIT is the first choice
                entropies.append(F.nll_loss(played.log().unsqueeze(0), torch.tensor([0])))
    assert floor == 0.15
    assert len(entropies) < 24 - 2, "nothing was left out"
    loss = torch.stack(entropies).mean()
    expected = flatten(torch.autograd.grad(loss, learner.parameters, materialize_grads=True))
    assert expected.norm() > 1e-3
    torch.testing.assert_close(
        gradient_of_one_step(learner, rollout), expected, rtol=1e-4, atol=1e-7
    )


def example() -> tuple[Evaluation, Batch]:
    """Four env-steps of one env; the third is forced and the last does not count."""
    rows = new_rollout(4, 1, 1, 1, CPU).rows
    rows.action.op.copy_(torch.tensor([[Op.WAIT], [Op.GERMINATE], [Op.WAIT], [Op.PRUNE]]))
    rows.effective_op.copy_(torch.tensor([[Op.WAIT], [Op.PRUNE], [Op.WAIT], [Op.PRUNE]]))
    rows.masks.op.fill_(True)
    rows.masks.op[2, 0, 1:] = False
    rows.valid.copy_(torch.tensor([[True], [True], [True], [False]]))
    likeliest = torch.ones(4, 1, len(HEAD_NAMES), dtype=torch.bool)
    likeliest[1, 0, HEAD_NAMES.index("blueprint")] = False  # matters for a germination
    likeliest[0, 0, HEAD_NAMES.index("slot")] = False  # does not matter for waiting
    log_probs = torch.tensor([-0.5, -0.25, -4.0, -9.0])
    evaluation = Evaluation(
        log_probs=log_probs.reshape(4, 1, 1).expand(likeliest.shape),
        entropies=torch.zeros(likeliest.shape),
        likeliest=likeliest,
        value=torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        q=torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        contribution=torch.zeros(4, 1, 1),
        hidden=torch.zeros(4, 1, 1, 8),
        cell=torch.zeros(1, 1, 1, 8),
    )
    return evaluation, Batch(rows, torch.zeros(4, 1), torch.zeros(4, 1))


def test_loss_agreement_and_critics_by_hand() -> None:
    evaluation, batch = example()
    weights = Coefficients(entropy=9.0, value=0.5, q=0.25, floor_penalty=9.0, contribution=0.05)
    loss, metrics = imitation_loss([(evaluation, batch)], PPOConfig(), weights)
    heads = int(relevant_heads(torch.tensor(Op.GERMINATE)).sum())
    # waiting asks the op head alone; two env-steps have a choice and count
    cross_entropy = (0.5 + 0.25 * heads) / 2
    value = 0.5 * (1 + 4 + 0.2 * 9) / 2.2  # the forced env-step weighs 0.2
    # at the second the policy did something else, of whose return the row tells
    q = 0.5 * (1 + 0.2 * 9) / 1.2
    expected = {
        "cross_entropy": cross_entropy,
        "agreement": 0.5,
        "agreement/blueprint": 0.0,
        "agreement/op": 1.0,
        "agreement/slot": 1.0,
        "value_loss": value,
        "q_loss": q,
        "loss": cross_entropy + 0.5 * value + 0.25 * q,
    }
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected)
    assert loss.item() == metrics["loss"].item()


def test_the_report_is_what_the_lists_explain() -> None:
    learner = learner_of(ImitationConfig(rounds=1, epochs=3, lr=0.01), minibatches=2)
    report = learner.imitate(taught_rollout(learner))
    assert {kind(name) for name in report} == LISTED - PPO_ALONE
    assert {name for name in report if name.startswith("agreement/")} == {
        f"agreement/{name}" for name in HEAD_NAMES
    }
    assert (
        report["steps"],
        report["epochs_done"],
        report["early_stop"],
        report["learning_rate"],
    ) == (6, 3, 0, 0.01)
    assert report["coefficient/entropy"] == report["coefficient/floor_penalty"] == 0.0
    assert report["coefficient/value"] == 0.05  # the first of a warm-up


def test_what_was_played_is_told_and_not_what_was_taught() -> None:
    learner = learner_of()
    rollout = only_waiting(taught_rollout(learner))
    waited = (rollout.rows.effective_op == Op.WAIT) & rollout.rows.valid
    report = learner.imitate(rollout)
    assert report["op_share/wait"] == pytest.approx(
        int(waited.sum()) / int(rollout.rows.valid.sum())
    )
    assert report["op_share/wait"] < 1
    assert report["vetoed_share"] == 0.0


def test_imitation_drives_the_loss_down_and_moves_the_statistics_of_observations() -> None:
    learner = learner_of(ImitationConfig(rounds=1, epochs=25, lr=1e-2))
    before = learner.policy.mean.clone()
    rollout = taught_rollout(learner)
    first = learner_of().imitate(rollout)["cross_entropy"]
    for _ in range(2):
        last = learner.imitate(rollout)
    assert last["cross_entropy"] < 0.7 * first
    assert last["agreement"] > 0.9
    assert not torch.equal(learner.policy.mean, before)
    assert (learner.rounds, learner.train_steps) == (2, 2)


def test_adam_starts_afresh_with_the_first_round_of_ppo_and_only_then() -> None:
    learner = learner_of(ImitationConfig(rounds=2, epochs=3), epochs=2, target_kl=0.0)
    steps = []
    for taught in (True, True, False, False):
        rollout = taught_rollout(learner)
        learner.imitate(rollout) if taught else learner.update(rollout._replace(taught=None))
        steps.append(int(learner.adam.steps))
    assert steps == [3, 6, 2, 4]


def test_a_rollout_without_a_teacher_cannot_be_imitated() -> None:
    learner = learner_of()
    with pytest.raises(ValueError, match="without a teacher"):
        learner.imitate(random_rollout(learner.policy, 2, 2, seed=1))


def test_steps_on_fixed_memory_do_the_same_and_are_kept_apart_from_those_of_ppo() -> None:
    plain = learner_of(ImitationConfig(rounds=2, epochs=2))
    still = learner_of(ImitationConfig(rounds=2, epochs=2))
    still.steps = StepCache(capture=False)
    for taught in (True, True, False):
        rollout = taught_rollout(plain)
        if not taught:
            rollout = rollout._replace(taught=None)
        reports = [
            one.imitate(rollout) if taught else one.update(rollout) for one in (plain, still)
        ]
        assert reports[0] == reports[1]
    assert torch.equal(flatten(plain.parameters), flatten(still.parameters))
