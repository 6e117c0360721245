"""Settings as kernels read them: tensors in the place of numbers that differ by env, and of all
numbers in kernels that are compiled ahead of time.
"""

from collections.abc import Mapping
from copy import copy
from typing import TypeVar

from torch import Tensor

from esper_soa.config.ranges import EnvNumber, Settings

Config = TypeVar("Config", bound=Settings)


def amount(value: EnvNumber | Tensor) -> float | Tensor:
    """The number of a setting, or float64 [N] where it differs by env."""
    return value if isinstance(value, Tensor) else float(value)


def steps_by_slot(value: EnvNumber | Tensor) -> int | Tensor:
    """The whole number of a setting, or int64 [N, 1] where it differs by env, for slots [N, S]."""
    return value.long().unsqueeze(1) if isinstance(value, Tensor) else int(value)


def at_least(value: float | Tensor, least: float | Tensor) -> float | Tensor:
    """The larger of two numbers, either of them a tensor where kernels are given it."""
    return value.clamp(min=least) if isinstance(value, Tensor) else max(value, least)


def known_zero(value: float | Tensor) -> bool:
    """Whether a number is 0 in all runs that kernels are compiled for."""
    return not isinstance(value, Tensor) and value == 0


def config_of_envs(cfg: Config, values: Mapping[str, Tensor]) -> Config:
    """`cfg` with tensors, by dotted name, in place of numbers.

    Values of its parts are replaced too.
    """
    replaced: dict[str, object] = {}
    for name, value in vars(cfg).items():
        is_part = isinstance(value, Settings)
        new = config_of_envs(value, values) if is_part else values.get(cfg.path + name, value)
        if new is not value:
            replaced[name] = new
    if replaced:
        cfg = copy(cfg)
        vars(cfg).update(replaced)
    return cfg
