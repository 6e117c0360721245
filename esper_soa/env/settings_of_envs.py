"""Settings of which each env has its own value: lists in turn, ranges drawn by env and round.

Given the settings, the seed and the round, it says what every env of a run has.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from zlib import crc32

import torch
from torch import Tensor

from esper_soa.config.ranges import EnvDraw, EnvNumber, env_numbers
from esper_soa.nets.data import streams
from esper_soa.state import STATE_FLOAT

# By dotted name of a setting that differs: the value of every env of the run in a round.
EnvSettings = Mapping[str, Sequence[float]]
NO_SETTINGS: EnvSettings = MappingProxyType({})


def values_of_envs(
    settings: Mapping[str, object], names: Iterable[str], seed: int, number: int, num_envs: int
) -> dict[str, Tensor]:
    """Values float64 [N] of the settings `names` in round `number`, on the host.

    settings: by the first part of their dotted names. A draw follows from seed, round, env and
    name, and from nothing else.
    """
    envs = torch.arange(num_envs)
    keys = streams.stream_keys(seed, streams.ENV_SETTINGS, (number,), envs)
    groups = SimpleNamespace(**settings)
    return {
        name: _values(attrgetter(name)(groups), streams.fold(keys, crc32(name.encode())), envs)
        for name in sorted(names)
    }


def _values(value: EnvNumber, keys: Tensor, envs: Tensor) -> Tensor:
    numbers = env_numbers(value)
    if isinstance(numbers, EnvDraw):
        shares = streams.uniform(keys, torch.zeros_like(keys), STATE_FLOAT)
        # one by one, as a vector of powers may round by where it is cut
        return torch.tensor([numbers.at(share) for share in shares.tolist()], dtype=STATE_FLOAT)
    return torch.tensor(numbers, dtype=STATE_FLOAT)[envs % len(numbers)]
