"""How rows of parameters move: rates of an env-step, clipping, SGD with momentum or AdamW, row by
row.

Given to the engines by the task (config.py); the function here is the meaning, kernels do the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.config.nets import TaskConfig

CLIP_EPS = 1e-6
SECOND_DECAY = 0.999  # of AdamW's second moment
ADAM_EPS = 1e-8  # beside its root


class LearningRates(NamedTuple):
    """Of one env-step; numbers, or tensors [] where steps are kept on static buffers."""

    host: float | Tensor
    seed: float | Tensor

    @classmethod
    def of(cls, task: TaskConfig, factor: float = 1.0) -> "LearningRates":
        """Those of the task, times `factor`."""
        return cls(task.host_lr * factor, task.seed_lr * factor)


class UpdateRule(NamedTuple):
    """How a row moves."""

    max_norm: float  # of its gradient; 0 for no limit
    eps: float  # beside that norm
    lr: float | Tensor
    momentum: float
    weight_decay: float
    optimizer: str = "sgd"


def state_width(optimizer: str, width: int) -> int:
    """Numbers that the optimizer keeps for rows of so many parameters: their momentum; AdamW keeps
    two moments and the number of updates.
    """
    return 2 * width + 1 if optimizer == "adamw" else width


def rules_of(task: TaskConfig, lr: LearningRates) -> tuple[UpdateRule, UpdateRule]:
    """The rules of hosts and of seeds, which have no weight decay."""
    moving = (task.momentum, task.weight_decay, task.optimizer)
    host = UpdateRule(task.max_grad_norm, CLIP_EPS, lr.host, *moving)
    return host, host._replace(lr=lr.seed, weight_decay=0.0)


def update_(params: Tensor, state: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    """Clip each row's gradient to its own norm, then move the row, in place; params, grad [n, P],
    state [n, state_width].
    """
    if rule.max_norm > 0:
        norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        grad = grad * (rule.max_norm / (norm + rule.eps)).clamp(max=1.0)
    if rule.optimizer == "adamw":
        _adamw_(params, state, grad, rule)
    else:
        _sgd_(params, state, grad, rule)


def _sgd_(params: Tensor, momentum: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    if rule.weight_decay > 0:
        grad = grad.add(params, alpha=rule.weight_decay)
    momentum.mul_(rule.momentum).add_(grad)
    # not with alpha=lr, which rounds once less than a rate on the device can
    params.sub_(momentum * rule.lr)


def _adamw_(params: Tensor, state: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    width = params.shape[1]
    first, second, count = state.split([width, width, 1], dim=1)
    count += 1
    first.lerp_(grad, 1 - rule.momentum)
    second.mul_(SECOND_DECAY).addcmul_(grad, grad, value=1 - SECOND_DECAY)
    root = (second / (1 - SECOND_DECAY**count)).sqrt_().add_(ADAM_EPS)
    if rule.weight_decay > 0:
        params.mul_(1 - rule.lr * rule.weight_decay)
    params.sub_(rule.lr * (first / (1 - rule.momentum**count)) / root)
