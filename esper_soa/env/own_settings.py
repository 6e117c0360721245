"""Settings of which each env has its own, as kernels read them: tensors in the place of numbers."""

from collections.abc import Mapping
from copy import copy
from typing import TypeVar

from torch import Tensor

from esper_soa.config.ranges import EnvNumber, Settings

Config = TypeVar("Config", bound=Settings)


def amount(value: EnvNumber | Tensor) -> float | Tensor:
    """The number of a setting, or those float64 [N] that envs have of their own."""
    return value if isinstance(value, Tensor) else float(value)


def steps_by_slot(value: EnvNumber | Tensor) -> int | Tensor:
    """The whole number of a setting, or those int64 [N, 1] of envs, to stand beside slots."""
    return value.long().unsqueeze(1) if isinstance(value, Tensor) else int(value)


def config_of_envs(cfg: Config, values: Mapping[str, Tensor]) -> Config:
    """`cfg` with tensors, by dotted name, in place of what differs by env, in its parts too."""
    own: dict[str, object] = {}
    for name, value in vars(cfg).items():
        is_part = isinstance(value, Settings)
        other = config_of_envs(value, values) if is_part else values.get(cfg.path + name, value)
        if other is not value:
            own[name] = other
    if own:
        cfg = copy(cfg)
        vars(cfg).update(own)
    return cfg
