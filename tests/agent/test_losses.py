import math
from statistics import fmean

import pytest
import torch

from esper_soa.agent import losses
from esper_soa.agent.objective import Batch, Coefficients, coefficients, head_tables, total_loss
from esper_soa.agent.policy import Evaluation
from esper_soa.agent.rollout import new_rollout
from esper_soa.config.agent import PPOConfig
from esper_soa.env.legal import relevant_heads
from esper_soa.vocabulary import HEAD_NAMES, HEADS, Op

CPU = torch.device("cpu")
WAIT_ONLY = [True, False, False, False, False, False]


def of_every_head(*steps: float) -> torch.Tensor:
    """The numbers of T env-steps of an env, the same for each head."""
    return torch.tensor(steps).reshape(-1, 1, 1).expand(-1, 1, len(HEADS))


def sum_of_heads(numbers: dict[int, float], weights: dict[str, float] | None = None) -> float:
    """The sum over heads of the mean of `numbers`, by the ops with which the head matters."""
    means = {head.name: [numbers[op] for op in numbers if op in head.ops] for head in HEADS}
    return sum(fmean(own) * (weights or {}).get(name, 1.0) for name, own in means.items() if own)


def example() -> tuple[Evaluation, Batch]:
    """Four env-steps of an env, losses worked out with the reference; the last is forced."""
    rows = new_rollout(4, 1, 1, 1, CPU).rows
    rows.effective_op.copy_(torch.tensor([[Op.WAIT], [Op.GERMINATE], [Op.PRUNE], [Op.WAIT]]))
    rows.masks.op.fill_(True)
    rows.masks.op[3, 0] = torch.tensor(WAIT_ONLY)
    rows.valid.fill_(True)
    rows.log_probs.copy_(of_every_head(-1.0, -1.0, -1.0, -0.2))
    evaluation = Evaluation(
        log_probs=of_every_head(-0.9, -1.1, -0.5, -0.2),
        entropies=of_every_head(0.0, 0.4, 0.1, 0.0),
        likeliest=of_every_head(1.0, 1.0, 1.0, 1.0).bool(),
        value=torch.tensor([[0.1], [0.2], [0.3], [0.4]]),
        q=torch.zeros(4, 1),
        contribution=torch.zeros(4, 1, 1),
        hidden=torch.zeros(4, 1, 1, 8),
        cell=torch.zeros(1, 1, 1, 8),
    )
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [2.0]])
    targets = torch.tensor([[1.0], [0.0], [-1.0], [0.5]])
    return evaluation, Batch(rows, advantages, targets)


def test_the_loss_of_four_env_steps_is_that_of_the_reference():
    evaluation, batch = example()
    config = PPOConfig()
    weights = Coefficients(entropy=0.05, value=0.5, q=0.25, floor_penalty=1.5, contribution=0.05)
    loss, metrics = total_loss([(evaluation, batch)], config, weights, head_tables(config, CPU))
    # the reference's eight heads come to 2.304990, -2.656667 and a divergence of 0.0524233
    policy_loss = -sum_of_heads({Op.WAIT: 1.105171, Op.GERMINATE: -0.904837, Op.PRUNE: 0.6})
    entropies = {Op.WAIT: 0.0, Op.GERMINATE: 0.4, Op.PRUNE: 0.1}
    entropy_loss = -sum_of_heads(entropies, config.entropy_multiplier)
    # e^r - 1 - r of r = 0.1, -0.1, 0.5 and 0, of the env-steps on which each head mattered
    moved = [(Op.WAIT, 0.0051709), (Op.GERMINATE, 0.0048374), (Op.PRUNE, 0.1487213), (Op.WAIT, 0.0)]
    kl = fmean(one for head in HEADS for op, one in moved if op in head.ops)
    expected = {
        "approx_kl": kl,
        "clip_fraction": 0.75,
        "policy_loss": policy_loss,
        "value_loss": 0.3971875,
        "entropy_loss": entropy_loss,
        "floor_penalty": 0.009,
        "q_loss": 0.3203125,
        "loss": policy_loss + 0.5 * 0.3971875 + 0.05 * entropy_loss + 0.009 + 0.25 * 0.3203125,
        "clip_fraction/slot": 0.5,
        "clip_fraction/alpha_speed": 1.0,
        "clip_fraction/alpha_curve": 1.0,
        "clip_fraction/op": 0.25,
        "clip_fraction/blueprint": 0.0,
        "contribution_loss": 0.0,
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, abs=2e-6), name
    assert loss.item() == metrics["loss"].item()


def test_entropies_are_told_of_env_steps_on_which_the_head_had_a_choice():
    evaluation, batch = example()
    rows = batch.rows
    rows.effective_op[2] = Op.GERMINATE
    rows.action.op.copy_(rows.effective_op)
    rows.masks.blueprint[1, 0, :2] = True
    rows.masks.blueprint[2, 0, 1] = True
    weights = Coefficients(entropy=0.05, value=0.5, q=0.25, floor_penalty=1.5, contribution=0.05)
    _, metrics = total_loss(
        [(evaluation, batch)], PPOConfig(), weights, head_tables(PPOConfig(), CPU)
    )
    told = {"entropy/blueprint": 0.4, "head_share/blueprint": 1 / 4, "head_share/tempo": 0.0}
    told |= {"entropy/op": 0.5 / 3, "head_share/op": 3 / 4}
    for name, value in told.items():
        assert metrics[name].item() == pytest.approx(value), name


def test_the_extremes_of_the_ratio_are_of_env_steps_that_count():
    evaluation, batch = example()
    weights = Coefficients(entropy=0.05, value=0.5, q=0.25, floor_penalty=1.5, contribution=0.05)
    tables = head_tables(PPOConfig(), CPU)
    # all heads moved by 0.1, -0.1 and 0.5
    for valid, most in ((True, 0.5 * len(HEADS)), (False, 0.1 * len(HEADS))):
        batch.rows.valid[2] = valid
        _, metrics = total_loss([(evaluation, batch)], PPOConfig(), weights, tables)
        assert metrics["ratio_max"].item() == pytest.approx(math.exp(most), rel=1e-5)
        assert metrics["ratio_min"].item() == pytest.approx(math.exp(-0.1 * len(HEADS)), rel=1e-5)


def test_divergence_weighs_heads_by_the_env_steps_on_which_they_mattered():
    # op moves by log 2 on both steps: kl 1 - log 2 = 0.306853; slot by 0 on one step
    log_ratio = torch.zeros(2, len(HEADS))
    log_ratio[:, HEAD_NAMES.index("op")] = math.log(2)
    relevant = relevant_heads(torch.tensor([Op.WAIT, Op.ADVANCE]))
    means = losses.ratio_means(log_ratio, relevant, torch.ones(2).bool(), 0.2)
    found = losses.divergence(means["kl"].value, means["mattered"].value)
    shares = 1.5 + 0.5 * sum(Op.ADVANCE in head.ops for head in HEADS[8:])
    assert found.item() == pytest.approx(0.306853 / shares, abs=1e-6)


def test_contribution_targets_are_clipped_and_only_measured_slots_count():
    predicted = torch.tensor([[8.0, 3.0]])
    target = torch.tensor([[25.0, float("nan")]])
    loss = losses.contribution_error(predicted, target, torch.tensor([[True, False]]), 10.0).value
    assert loss.item() == 4.0


def test_schedules_start_hold_and_end_where_they_should():
    config = PPOConfig(
        entropy_coef=0.1, entropy_coef_end=0.0, entropy_anneal_rounds=10, value_warmup_rounds=10
    )
    assert coefficients(config, 0, 100) == Coefficients(0.1, 0.05, 0.025, 1.5, 0.0)
    middle = coefficients(config, 5, 10)
    assert middle.entropy == pytest.approx(0.05)
    assert middle.value == pytest.approx(0.275)
    assert middle.floor_penalty == 1.0
    late = coefficients(config, 1000, 1000)
    assert late == coefficients(config, 2000, 1000) == Coefficients(0.01, 0.5, 0.25, 0.5, 0.05)
    assert [losses.penalty_schedule(step, 8) for step in (1, 2, 6, 7)] == [1.5, 1.0, 1.0, 0.75]
    assert coefficients(PPOConfig(), 0, 100).entropy == 0.05
    assert coefficients(PPOConfig(), 25, 100).floor_penalty == 1.0
    assert losses.ramp(0, 0, 1.0, 3.0) == 3.0
    assert losses.largest_of([torch.zeros(0, 2)]).item() == -math.inf


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.5, 1.0, 1.2, 0.0),  # beyond the clip with the advantage: min(1.5, 1.2), no gradient
        (1.5, -1.0, -1.5, -1.5),  # min(-1.5, -1.2)
        (0.5, 1.0, 0.5, 0.5),  # min(0.5, 0.8)
        (0.5, -1.0, -0.8, 0.0),  # min(-0.5, -0.8), no gradient
        (1.1, 2.0, 2.2, 2.2),  # within the clip
        (0.9, -2.0, -1.8, -1.8),
    ],
)
def test_the_clip_works_on_both_sides(
    ratio: float, advantage: float, gain: float, slope: float
) -> None:
    log_ratio = torch.full((1, 8), math.log(ratio), requires_grad=True)
    only_op = torch.arange(8).reshape(1, 8) == 7
    loss = -losses.surrogate(log_ratio, torch.tensor([advantage]), only_op, 0.2).value.sum()
    assert loss.item() == pytest.approx(-gain)
    loss.backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0].tolist() == pytest.approx([0.0] * 7 + [-slope])


def gradients_of(
    evaluation: Evaluation, batch: Batch, weights: Coefficients
) -> dict[str, torch.Tensor]:
    """Gradient of the whole loss with respect to what the network said."""
    leaves = {
        name: getattr(evaluation, name).clone().requires_grad_()
        for name in ("log_probs", "entropies", "value")
    }
    config = PPOConfig()
    loss, metrics = total_loss(
        [(evaluation._replace(**leaves), batch)], config, weights, head_tables(config, CPU)
    )
    assert not any(one.requires_grad for one in metrics.values())
    loss.backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def test_heads_that_the_effective_op_does_not_use_get_no_gradient() -> None:
    evaluation, batch = example()
    # ratio 1: nothing is clipped
    evaluation = evaluation._replace(log_probs=batch.rows.log_probs.clone())
    gradients = gradients_of(evaluation, batch, Coefficients(0.05, 0.5, 0.25, 0.0, 0.0))
    used = relevant_heads(batch.rows.effective_op) & ~batch.rows.forced.unsqueeze(-1)
    assert torch.equal(gradients["log_probs"] != 0, used)
    assert torch.equal(gradients["entropies"] != 0, used)
    # the blueprint head is used once, by GERMINATE with advantage -1; the op head three times,
    # advantages 1, -1, 0.5
    heads = {name: gradients["log_probs"][:, 0, i].tolist() for i, name in enumerate(HEAD_NAMES)}
    assert heads["blueprint"] == pytest.approx([0, 1, 0, 0])
    assert heads["op"] == pytest.approx([-1 / 3, 1 / 3, -0.5 / 3, 0])


def test_forced_env_steps_teach_the_critic_with_a_fifth_of_the_weight_and_nobody_else() -> None:
    evaluation, batch = example()
    gradients = gradients_of(evaluation, batch, Coefficients(0.05, 0.5, 0.25, 1.5, 0.0))
    # coefficient 0.5 times w * (V - R) / (3 + 0.2)
    expected = [-0.9 / 6.4, 0.2 / 6.4, 1.3 / 6.4, 0.2 * -0.1 / 6.4]
    assert gradients["value"][:, 0].tolist() == pytest.approx(expected)
    assert (gradients["log_probs"][3] == 0).all()
    assert (gradients["entropies"][3] == 0).all()


def test_the_floor_penalty_takes_the_mean_over_env_steps_where_the_head_was_available() -> None:
    # entropy 0.4 where the head was used, 0 where only available: mean 0.2, 0.1 below the floor
    entropies = torch.zeros(2, 8)
    entropies[0] = 0.4
    available = torch.zeros(2, 8, dtype=torch.bool)
    available[:, 1] = True
    means = losses.mean_where(entropies, available)
    penalty = losses.floor_penalty(means, torch.full((8,), 0.3), torch.full((8,), 2.0))
    assert penalty.item() == pytest.approx(2 * 0.1**2)
    above = losses.floor_penalty(means, torch.full((8,), 0.1), torch.full((8,), 2.0))
    assert above.item() == 0.0
