"""The random streams: known values, uniformity, and draws that depend on nothing but their
coordinates.
"""

import itertools

import torch

from esper_soa.system import streams
from esper_soa.system.streams import (
    AUGMENTATION,
    DATA_ORDER,
    fold,
    integers,
    mix,
    stream_keys,
    uniform,
)

ENVS = torch.arange(6)


def test_mix_equals_splitmix64_in_python_integers() -> None:
    mask = (1 << 64) - 1

    def reference(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    values = [0, 1, 2**63 - 1, -1, -(2**63), 123456789012345]
    expected = [reference(value & mask) for value in values]
    assert [value & mask for value in mix(torch.tensor(values)).tolist()] == expected


def test_first_output_of_splitmix64_with_seed_0_is_the_published_one() -> None:
    # fold(0, 0) = mix(0 + 1 * weyl), the first output of the generator with state 0
    assert int(fold(torch.tensor(0), 0)) & ((1 << 64) - 1) == 0xE220A8397B1DCDAF


def test_keys_of_some_envs_equal_the_same_envs_among_all() -> None:
    whole = stream_keys(5, AUGMENTATION, (2,), ENVS)
    assert torch.equal(stream_keys(5, AUGMENTATION, (2,), ENVS[4:]), whole[4:])


def test_every_purpose_has_a_number_of_its_own() -> None:
    purposes = {name: number for name, number in vars(streams).items() if name.isupper()}
    own = {name: number for name, number in purposes.items() if not name.startswith("_")}
    assert sorted(own.values()) == list(range(1, 1 + len(own)))
    assert list(own.values()) == sorted(own.values())


def test_seed_purpose_round_and_env_each_change_the_keys() -> None:
    ways = itertools.product((0, 1), (DATA_ORDER, AUGMENTATION), (0, 1))
    keys = torch.cat([stream_keys(seed, purpose, (turn,), ENVS) for seed, purpose, turn in ways])
    assert keys.unique().numel() == 2 * 2 * 2 * 6


def test_numbers_drawn_in_chunks_equal_numbers_drawn_together() -> None:
    keys = stream_keys(5, AUGMENTATION, (), ENVS)[:, None]
    parts = [uniform(keys, places) for places in torch.arange(100).split((37, 63))]
    assert torch.equal(torch.cat(parts, 1), uniform(keys, torch.arange(100)))


def test_uniform_numbers_are_uniform_and_uncorrelated_between_neighbours() -> None:
    keys = stream_keys(0, AUGMENTATION, (), torch.arange(100))[:, None]
    for dtype in (torch.float32, torch.float64):
        values = uniform(keys, torch.arange(1000), dtype)
        assert values.dtype == dtype
        assert 0 <= float(values.min()) < float(values.max()) < 1
        # 100,000 numbers in 20 bins: 5,000 each with standard deviation 69; chi-square(19) stays
        # below 44 in 99.9 %
        counts = values.double().histc(20, 0, 1)
        assert float(((counts - 5000) ** 2 / 5000).sum()) < 44
        # a correlation of 99,000 pairs has standard deviation 0.0032
        for one, two in ((values[:, 1:], values[:, :-1]), (values[1:], values[:-1])):
            pair = torch.stack((one.flatten(), two.flatten())).double()
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.013


def test_integers_reach_every_value_equally_often() -> None:
    keys = stream_keys(0, DATA_ORDER, (), torch.arange(10))[:, None]
    counts = integers(keys, torch.arange(7000), 7).flatten().bincount()
    assert counts.numel() == 7
    # 10,000 each with standard deviation 93; chi-square(6) stays below 22.5 in 99.9 %
    assert float(((counts - 10000) ** 2 / 10000).sum()) < 22.5
