"""How rows of parameters move: rates of an env-step, clipping and SGD with momentum, row by row.

Given to the engines by the task (config.py); the function here is the meaning, kernels do the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.config.nets import TaskConfig

CLIP_EPS = 1e-6


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


def rules_of(task: TaskConfig, lr: LearningRates) -> tuple[UpdateRule, UpdateRule]:
    """The rules of hosts and of seeds, which have no weight decay."""
    host = UpdateRule(task.max_grad_norm, CLIP_EPS, lr.host, task.momentum, task.weight_decay)
    return host, host._replace(lr=lr.seed, weight_decay=0.0)


def sgd_(params: Tensor, momentum: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    """Clip each row's gradient to its own norm, then SGD with momentum, in place; all [n, P]."""
    if rule.max_norm > 0:
        norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        grad = grad * (rule.max_norm / (norm + rule.eps)).clamp(max=1.0)
    if rule.weight_decay > 0:
        grad = grad.add(params, alpha=rule.weight_decay)
    momentum.mul_(rule.momentum).add_(grad)
    # not with alpha=lr, which rounds once less than a rate on the device can
    params.sub_(momentum * rule.lr)
