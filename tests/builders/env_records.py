"""Builders for the tests of the env state: records with a few fields set, envs before their first
env-step.
"""

from functools import cache

import torch
from torch import Tensor

from esper_soa.env.step import EnvRules, initial_state
from esper_soa.state import EnvState, Record
from tests.builders.tiny_world import CPU, tiny_rules

rules_of = cache(tiny_rules)


def numbers(*values: float | list[float]) -> Tensor:
    """The values as float64."""
    return torch.tensor(values, dtype=torch.float64)


def with_values(record: Record, **values: object) -> Record:
    """`record` with these fields, each a number for all places or a list that fits its shape."""
    fields = {}
    for name, value in values.items():
        old = record.get(name)
        fields[name] = torch.as_tensor(value, dtype=old.dtype).expand(old.shape).clone()
    return record.replace(**fields)


def empty_state(
    num_envs: int, num_slots: int, max_steps: int, device: torch.device = CPU
) -> EnvState:
    """Envs before their first env-step."""
    rules: EnvRules = rules_of(num_slots, max_steps)
    return initial_state(rules, num_envs, device)
