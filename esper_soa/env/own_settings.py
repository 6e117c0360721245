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
    """`cfg` with tensors, by dotted name, in place of its own fields that differ by env."""
    fields = {name.removeprefix(cfg.path): value for name, value in values.items()}
    own = {name: value for name, value in fields.items() if "." not in name}
    if own:
        cfg = copy(cfg)
        vars(cfg).update(own)
    return cfg
