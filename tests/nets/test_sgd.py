"""Numbers of a training step worked out by hand: clipping, SGD, batch norm, gradient statistics at
their limits.
"""

import math

import pytest
import torch
from torch import Tensor

from esper_soa.config.nets import TaskConfig
from esper_soa.nets import batched
from esper_soa.nets.gradients import gradient_statistics
from esper_soa.nets.model.parts import norm_groups
from esper_soa.nets.sgd import rules_of, state_width, update_

CPU = torch.device("cpu")


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# --- one optimiser step


def test_a_step_clips_every_row_by_its_own_norm_then_decays_then_remembers() -> None:
    # Norms 5, 1 and 0.5 against 1: 5 is scaled by 1 / (5 + 1e-6); 1 by 1 / (1 + 1e-6); 0.5 stays.
    grad = doubles([3.0, 4.0], [0.6, 0.8], [0.3, 0.4])
    params = doubles([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    momentum = doubles([10.0, 20.0], [0.0, 0.0], [1.0, 1.0])
    task = TaskConfig(host_lr=0.1, momentum=0.5, max_grad_norm=1.0, weight_decay=0.01)
    rule, _ = rules_of(task)
    update_(params, momentum, grad, rule)
    first = 5 + 1e-6
    second = 1 + 1e-6
    kept = [
        [5 + 3 / first + 0.01, 10 + 4 / first + 0.02],
        [0.6 / second + 0.01, 0.8 / second + 0.02],
        [0.5 + 0.3 + 0.01, 0.5 + 0.4 + 0.02],
    ]
    torch.testing.assert_close(momentum, doubles(*kept), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        params, doubles(*[[1 - 0.1 * a, 2 - 0.1 * b] for a, b in kept]), rtol=1e-12, atol=0
    )


def test_a_limit_of_0_does_not_clip_and_no_decay_leaves_the_gradient_alone() -> None:
    params = doubles([1.0, 2.0])
    momentum = doubles([0.0, 0.0])
    # that of seeds
    _, rule = rules_of(TaskConfig(seed_lr=0.5, max_grad_norm=0.0, weight_decay=0.1))
    update_(params, momentum, doubles([300.0, 400.0]), rule)
    assert momentum.tolist() == [[300.0, 400.0]]
    assert params.tolist() == [[-149.0, -198.0]]


# --- gradient statistics


def statistics(
    seed: list[float], sizes: list[int], host: list[float] | None = None
) -> dict[str, float | bool]:
    found = gradient_statistics(doubles(host or [1.0]), doubles(seed), sizes)
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize(
    ("norm", "vanishing"), [(0.999999e-7, True), (1.000001e-7, False), (0.0, True)]
)
def test_a_tensor_vanishes_below_a_norm_of_1e_minus_7(norm: float, vanishing: bool) -> None:
    found = statistics([norm, 1.0, 2.0], [1, 2])
    assert found["vanishing"] is vanishing
    assert found["health"] == (0.75 if vanishing else 1.0)  # one of two tensors costs half of 0.5


@pytest.mark.parametrize(
    ("seed", "exploding"),
    [([6.0, 8.0], False), ([6.0, 8.0 + 1e-9], True), ([9.0, 9.0], True), ([math.nan, 1.0], True)],
)
def test_a_tensor_explodes_above_a_norm_of_10(seed: list[float], exploding: bool) -> None:
    found = statistics([*seed, 1.0], [2, 1])
    assert found["exploding"] is exploding
    # one of two tensors costs half of 0.8
    wanted = 0.6 if exploding else 1.0
    assert found["health"] == pytest.approx(wanted if math.isfinite(seed[0]) else 0.0)


def test_health_is_never_below_0_and_counts_shares_of_tensors() -> None:
    assert statistics([0.0, 0.0], [1, 1])["health"] == 0.5
    assert statistics([20.0, 20.0], [1, 1])["health"] == pytest.approx(0.2)
    one_of_each = statistics([0.0, 20.0, 1.0, 1.0], [1, 1, 1, 1])
    assert one_of_each["health"] == pytest.approx(1 - 0.125 - 0.2)
    assert statistics([20.0], [1])["health"] == pytest.approx(0.2)


def test_the_ratio_is_of_root_mean_squares_and_the_norm_of_all_tensors_together() -> None:
    # Seed (1, 2, 2, 4): norm 5, root mean square 2.5. Host (3, 4, 0): norm 5, root mean square 5 /
    # sqrt(3).
    found = statistics([1.0, 2.0, 2.0, 4.0], [1, 3], [3.0, 4.0, 0.0])
    assert found["l2"] == pytest.approx(5.0)
    assert found["ratio"] == pytest.approx(2.5 / (5 / math.sqrt(3) + 1e-8), rel=1e-12)


@pytest.mark.parametrize(
    ("seed", "host", "known"),
    [
        (1.1e-8, 1.0, True),
        (0.9e-8, 1.0, False),
        (1.0, 1.1e-8, True),
        (1.0, 0.9e-8, False),
        (1.0, math.inf, False),
    ],
)
def test_no_ratio_is_of_gradients_below_1e_minus_8(seed: float, host: float, known: bool) -> None:
    ratio = statistics([seed], [1], [host])["ratio"]
    assert ratio == (pytest.approx(seed / (host + 1e-8)) if known else 0.0)


# --- batch norm


def test_the_epsilon_of_batch_norm_counts_where_a_channel_hardly_varies() -> None:
    x = torch.tensor([-0.001, 0.001], dtype=torch.float64).view(2, 1, 1, 1)
    one = torch.ones(1, 1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    out = batched.batch_norm(x, one, one * 0, zero.clone(), zero.clone())
    # 1e-3 / sqrt(1e-6 + 1e-5)
    assert out.flatten().tolist() == pytest.approx([-(11**-0.5), 11**-0.5])


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(2, 2), (3, 1), (8, 8), (16, 1), (24, 1), (48, 2), (32, 2), (64, 4), (1024, 32)],
)
def test_group_norm_has_the_most_groups_of_16_channels_else_any(channels: int, groups: int) -> None:
    assert norm_groups(channels) == groups


def test_adamw_moves_rows_as_the_optimizer_of_torch_does() -> None:
    """Row by row, from a row's own first update on, which the second row has two steps later."""
    task = TaskConfig(host_lr=0.02, optimizer="adamw", weight_decay=0.1, max_grad_norm=0.5)
    rule, seed_rule = rules_of(task)
    assert seed_rule.weight_decay == 0
    start = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    params = start.clone()
    state = torch.zeros(2, state_width("adamw", 4), dtype=torch.float64)
    grads = torch.linspace(-3, 2, 40, dtype=torch.float64).view(5, 2, 4).sin()
    for step, grad in enumerate(grads):
        if step == 2:
            state[1] = 0.0
            params[1] = start[1]
        update_(params, state, grad, rule)
    for row, first in ((0, 0), (1, 2)):
        expected = start[row].clone().requires_grad_()
        optimizer = torch.optim.AdamW([expected], lr=0.02, betas=(0.9, 0.999), weight_decay=0.1)
        for grad in grads[first:, row]:
            expected.grad = grad.clone()
            torch.nn.utils.clip_grad_norm_([expected], 0.5)
            optimizer.step()
        torch.testing.assert_close(params[row], expected.detach(), rtol=1e-12, atol=1e-12)
