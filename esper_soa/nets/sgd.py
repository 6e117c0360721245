"""How rows of parameters move: rates, clipping, SGD with momentum or AdamW; kernels do the same."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.config.nets import TaskConfig

CLIP_EPS = 1e-6
SECOND_DECAY = 0.999  # of AdamW's second moment
ADAM_EPS = 1e-8  # beside its root


class UpdateRule(NamedTuple):
    """How rows move: by numbers, or, each by its own, by tensors float64 [n, 1]."""

    max_norm: float | Tensor  # of its gradient; 0 for no limit
    eps: float  # beside that norm
    lr: float | Tensor
    momentum: float | Tensor
    weight_decay: float | Tensor
    optimizer: str = "sgd"

    def of(self, rows: Tensor | None) -> "UpdateRule":
        """The rule of some of the n rows, int64 [m]; None: of all."""
        if rows is None:
            return self
        values = (value[rows] if isinstance(value, Tensor) else value for value in self)
        return UpdateRule._make(values)


class Rules(NamedTuple):
    """How the hosts of N envs move, and their seeds, which have no weight decay."""

    host: UpdateRule
    seed: UpdateRule


def rules_of(
    task: TaskConfig,
    lr_factor: float | Tensor = 1.0,
    values: Mapping[str, Tensor] = MappingProxyType({}),
) -> Rules:
    """Rules of an env-step, with rates times `lr_factor`, a number or float64 [N, 1].

    values: float64 [N] by the dotted name of a setting that differs by env. SettingError where
    such a setting is missing.
    """

    def of(name: str) -> float | Tensor:
        by_env = values.get(f"task.{name}")
        return task.number(name) if by_env is None else by_env[:, None]

    host = UpdateRule(
        of("max_grad_norm"),
        CLIP_EPS,
        of("host_lr") * lr_factor,
        momentum=of("momentum"),
        weight_decay=of("weight_decay"),
        optimizer=task.optimizer,
    )
    return Rules(host, host._replace(lr=of("seed_lr") * lr_factor, weight_decay=0.0))


def state_width(optimizer: str, width: int) -> int:
    """Numbers kept for rows of so many parameters: momentum; of AdamW two moments and a count."""
    return 2 * width + 1 if optimizer == "adamw" else width


def update_(params: Tensor, state: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    """Clip the gradient of each row, move the row in place; params, grad [n, P], state [n, ...]."""
    limited = rule.max_norm > 0
    if isinstance(limited, Tensor) or limited:
        norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        # computed as a number over a tensor is
        limit = (norm + rule.eps).reciprocal() * like(rule.max_norm, grad)
        clipped = grad * limit.clamp(max=1.0)
        grad = torch.where(limited, clipped, grad) if isinstance(limited, Tensor) else clipped
    if rule.optimizer == "adamw":
        _adamw_(params, state, grad, rule=rule)
        return
    decay = rule.weight_decay
    if isinstance(decay, Tensor):  # rounds as add with alpha does
        grad = torch.where(decay > 0, torch.addcmul(grad, params, decay.to(grad.dtype)), grad)
    elif decay > 0:
        grad = grad.add(params, alpha=decay)
    state.mul_(like(rule.momentum, grad)).add_(grad)
    # not with alpha=lr, which rounds once less than a rate on the device can
    params.sub_(state * like(rule.lr, grad))


def like(value: float | Tensor, rows: Tensor) -> float | Tensor:
    """The number, or the numbers of rows in their dtype."""
    return value.to(rows.dtype) if isinstance(value, Tensor) else value


def _adamw_(params: Tensor, state: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    width = params.shape[1]
    first, second, count = state.split([width, width, 1], dim=1)
    count += 1
    first.lerp_(grad, 1 - rule.momentum)
    second.mul_(SECOND_DECAY).addcmul_(grad, grad, value=1 - SECOND_DECAY)
    root = (second / (1 - SECOND_DECAY**count)).sqrt_().add_(ADAM_EPS)
    params.mul_(like(1 - rule.lr * rule.weight_decay, params))
    params.sub_(like(rule.lr, params) * (first / (1 - rule.momentum**count)) / root)
