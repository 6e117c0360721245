"""How rows of parameters move: rates of an env-step, clipping, SGD with momentum or AdamW, row by
row.

Given to the engines by the task (config.py); the function here is the meaning, kernels do the same.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.config.nets import ENV_SETTINGS, TaskConfig
from esper_soa.config.ranges import EnvNumber, env_numbers

CLIP_EPS = 1e-6
SECOND_DECAY = 0.999  # of AdamW's second moment
ADAM_EPS = 1e-8  # beside its root


class LearningRates(NamedTuple):
    """Of one env-step; numbers, or tensors [] where steps are kept on static buffers."""

    host: float | Tensor
    seed: float | Tensor

    @classmethod
    def of(cls, task: TaskConfig, factor: float = 1.0, env: int = 0) -> "LearningRates":
        """Those of the task for this env, times `factor`."""
        return cls(number_of(task.host_lr, env) * factor, number_of(task.seed_lr, env) * factor)


class UpdateRule(NamedTuple):
    """How rows move: by numbers, or, each by its own, by tensors float64 [n, 1]."""

    max_norm: float | Tensor  # of its gradient; 0 for no limit
    eps: float  # beside that norm
    lr: float | Tensor
    momentum: float | Tensor
    weight_decay: float | Tensor
    optimizer: str = "sgd"

    def of_nets(self, nets: Tensor | None) -> "UpdateRule":
        """The rule of rows that belong to these networks of the n; None: one row each."""
        if nets is None:
            return self
        own = {name: one for name, one in self._asdict().items() if isinstance(one, Tensor)}
        return self._replace(**{name: one[nets] for name, one in own.items()})  # type: ignore[arg-type]


class Rules(NamedTuple):
    """How hosts and seeds of N envs move: env n by rule n, modulo how many there are."""

    hosts: tuple[UpdateRule, ...]
    seeds: tuple[UpdateRule, ...]


def rules_of_envs(task: TaskConfig, lr_factor: float, first_env: int) -> Rules:
    """Rules of envs from the run's env `first_env` on; one where all move alike."""
    count = num_rules(task)
    envs = [(first_env + place) % count for place in range(count)]
    both = [rules_of(task, LearningRates.of(task, lr_factor, env), env) for env in envs]
    hosts, seeds = zip(*both, strict=True)
    return Rules(hosts, seeds)


def num_rules(task: TaskConfig) -> int:
    """After how many envs their settings are the same again; 1: all have the same."""
    return math.lcm(*(len(env_numbers(vars(task)[name])) for name in ENV_SETTINGS))


def number_of(value: EnvNumber, env: int) -> float:
    """The number of a setting for this env of the run."""
    numbers = env_numbers(value)
    return numbers[env % len(numbers)]


def rule_of_rows(rules: Sequence[UpdateRule], envs: Tensor) -> UpdateRule:
    """The rule of rows of the envs int64 [n] out of `rules`, as those of Rules."""
    if len(rules) == 1:
        return rules[0]
    places = envs % len(rules)

    def column(name: str) -> Tensor:
        numbers = [rule._asdict()[name] for rule in rules]
        return torch.tensor(numbers, dtype=torch.float64, device=envs.device)[places, None]

    names = [
        name for name in UpdateRule._fields if len({rule._asdict()[name] for rule in rules}) > 1
    ]
    return rules[0]._replace(**{name: column(name) for name in names})  # type: ignore[arg-type]


def state_width(optimizer: str, width: int) -> int:
    """Numbers that the optimizer keeps for rows of so many parameters: their momentum; AdamW keeps
    two moments and the number of updates.
    """
    return 2 * width + 1 if optimizer == "adamw" else width


def rules_of(task: TaskConfig, lr: LearningRates, env: int = 0) -> tuple[UpdateRule, UpdateRule]:
    """The rules of the host and the seeds of an env; seeds have no weight decay."""
    momentum, decay, limit = (
        number_of(one, env) for one in (task.momentum, task.weight_decay, task.max_grad_norm)
    )
    host = UpdateRule(limit, CLIP_EPS, lr.host, momentum, decay, task.optimizer)
    return host, host._replace(lr=lr.seed, weight_decay=0.0)


def update_(params: Tensor, state: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    """Clip each row's gradient to its own norm, then move the row, in place; params, grad [n, P],
    state [n, state_width].
    """
    limited = rule.max_norm > 0
    if isinstance(limited, Tensor) or limited:
        norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        # as a number over a tensor is computed
        limit = (norm + rule.eps).reciprocal() * like(rule.max_norm, grad)
        grad = choose(limited, grad * limit.clamp(max=1.0), grad)
    if rule.optimizer == "adamw":
        _adamw_(params, state, grad, rule)
    else:
        _sgd_(params, state, grad, rule)


def _sgd_(params: Tensor, momentum: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    grad = _decayed(params, grad, rule.weight_decay)
    momentum.mul_(like(rule.momentum, grad)).add_(grad)
    # not with alpha=lr, which rounds once less than a rate on the device can
    params.sub_(momentum * like(rule.lr, grad))


def _decayed(params: Tensor, grad: Tensor, decay: float | Tensor) -> Tensor:
    if isinstance(decay, Tensor):  # rounds as add with alpha does
        return torch.where(decay > 0, torch.addcmul(grad, params, decay.to(grad.dtype)), grad)
    return grad.add(params, alpha=decay) if decay > 0 else grad


def like(value: float | Tensor, rows: Tensor) -> float | Tensor:
    """The number, or the numbers of rows in their dtype."""
    return value.to(rows.dtype) if isinstance(value, Tensor) else value


def choose(where: bool | Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Rows of one where `where` holds, of the other elsewhere."""
    return torch.where(where, one, other) if isinstance(where, Tensor) else one


def _adamw_(params: Tensor, state: Tensor, grad: Tensor, rule: UpdateRule) -> None:
    width = params.shape[1]
    first, second, count = state.split([width, width, 1], dim=1)
    count += 1
    first.lerp_(grad, 1 - rule.momentum)
    second.mul_(SECOND_DECAY).addcmul_(grad, grad, value=1 - SECOND_DECAY)
    root = (second / (1 - SECOND_DECAY**count)).sqrt_().add_(ADAM_EPS)
    params.mul_(like(1 - rule.lr * rule.weight_decay, params))
    params.sub_(like(rule.lr, params) * (first / (1 - rule.momentum**count)) / root)
