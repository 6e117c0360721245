"""Snapshots of weights: masked copies that touch the chosen envs and nothing else."""

import math

import pytest
import torch
from tensordict import TensorDict

from esper_soa.config.nets import TaskConfig, sort_slots
from esper_soa.nets.model.host import HostShape, host_shape
from esper_soa.nets.seeds.pools import allocate
from esper_soa.nets.seeds.snapshot import add_snapshot_, restore_where_, snapshot_where_

NUM_ENVS = 3
NONE = torch.zeros(NUM_ENVS, 2, dtype=torch.bool)
ALL = torch.ones(NUM_ENVS, dtype=torch.bool)
FIRST = torch.tensor([True, False, False])


def tiny_shape() -> HostShape:
    task = TaskConfig(base_channels=1, num_blocks=2, num_pools=2, kernel_size=1)
    return host_shape(task, sort_slots(task, ["r0c0", "r0c1"]))


def filled(value: float) -> TensorDict:
    """Weights of three envs, all `value` + the number of the env, with an empty snapshot."""
    weights = allocate(tiny_shape(), NUM_ENVS, torch.device("cpu"), torch.float32)
    rows = (value + torch.arange(3.0)).unsqueeze(1)
    weights.apply_(lambda leaf: leaf.copy_(rows.expand_as(leaf)))
    add_snapshot_(weights)
    return weights


def fill_(weights: TensorDict, value: float) -> None:
    for part in ("host", "seeds"):
        weights[part].apply_(lambda leaf: leaf.fill_(value))


def firsts(weights: TensorDict, *key: str) -> list[float]:
    """The one number that the row of every env consists of."""
    rows = weights[key]
    assert ((rows == rows[:, :1]) | rows.isnan()).all()
    return rows[:, 0].tolist()


def test_hosts_and_fossils_go_back_where_asked_and_momentum_is_cleared() -> None:
    weights = filled(10.0)
    shape = tiny_shape()
    fossil = torch.tensor([[True, False]] * 3)
    snapshot_where_(weights, shape, ALL, fossil, NONE)
    fill_(weights, 5.0)
    restore_where_(weights, shape, torch.tensor([False, True, True]), fossil, ~ALL)
    assert firsts(weights, "host", "params") == [5.0, 11.0, 12.0]
    assert firsts(weights, "host", "statistics") == [5.0, 11.0, 12.0]
    assert firsts(weights, "host", "momentum") == [5.0, 0.0, 0.0]
    assert firsts(weights, "seeds", "r0c0", "params") == [5.0, 11.0, 12.0]
    assert firsts(weights, "seeds", "r0c0", "momentum") == [5.0, 0.0, 0.0]
    # no fossil: it does not outlive the rollback
    assert firsts(weights, "seeds", "r0c1", "params") == [5.0, 0.0, 0.0]


def test_where_nothing_was_snapshotted_there_is_no_fossil() -> None:
    assert not any(leaf.any() for leaf in filled(10.0)["snapshot"].flatten_keys(".").values())


def test_where_no_env_goes_back_nothing_is_written() -> None:
    weights = filled(10.0)
    before = [leaf._version for leaf in weights.flatten_keys(".").values()]
    restore_where_(weights, tiny_shape(), ~ALL, NONE, ~ALL)
    assert [leaf._version for leaf in weights.flatten_keys(".").values()] == before


def test_only_the_chosen_envs_are_snapshotted() -> None:
    weights = filled(10.0)
    shape = tiny_shape()
    snapshot_where_(weights, shape, ALL, NONE, NONE)
    fill_(weights, 5.0)
    snapshot_where_(weights, shape, FIRST, NONE, NONE)
    restore_where_(weights, shape, ALL, NONE, ~ALL)
    assert firsts(weights, "host", "params") == [5.0, 11.0, 12.0]


@pytest.mark.parametrize(("broken", "expected"), [(False, 5.0), (True, 10.0)])
def test_a_fossil_younger_than_the_snapshot_stays_unless_broken(
    broken: bool, expected: float
) -> None:
    weights = filled(10.0)
    shape = tiny_shape()
    rising = torch.tensor([[False, True]] * 3)
    snapshot_where_(weights, shape, ALL, NONE, NONE)
    snapshot_where_(weights, shape, ~ALL, NONE, rising)  # the seed is about to become a fossil
    fill_(weights, 5.0)
    restore_where_(weights, shape, FIRST, rising, ALL & broken)
    assert firsts(weights, "seeds", "r0c1", "params") == [expected, 5.0, 5.0]
    assert firsts(weights, "host", "params") == [10.0, 5.0, 5.0]


@pytest.mark.parametrize("part", ["params", "statistics"])
def test_a_host_with_anything_not_finite_is_not_snapshotted(part: str) -> None:
    weights = filled(10.0)
    shape = tiny_shape()
    snapshot_where_(weights, shape, ALL, NONE, NONE)
    fill_(weights, 5.0)
    weights["host", part][1, 2] = math.inf
    snapshot_where_(weights, shape, ALL, NONE, NONE)
    restore_where_(weights, shape, ALL, NONE, ALL)
    assert firsts(weights, "host", "params") == [5.0, 11.0, 5.0]


def test_nan_does_not_leak_through_a_mask_and_leaves_no_sleeping_row_behind() -> None:
    weights = filled(10.0)
    shape = tiny_shape()
    snapshot_where_(weights, shape, ALL, NONE, NONE)
    for leaf in (*weights["host"].values(), *weights["seeds"].flatten_keys(".").values()):
        leaf[0] = math.nan
    restore_where_(weights, shape, FIRST, NONE, FIRST)
    assert all(leaf.isfinite().all() for leaf in weights.flatten_keys(".").values())
    assert firsts(weights, "host", "momentum") == [0.0, 11.0, 12.0]


def test_nothing_is_allocated() -> None:
    weights = filled(10.0)
    shape = tiny_shape()
    places = [leaf.data_ptr() for leaf in weights.flatten_keys(".").values()]
    snapshot_where_(weights, shape, ALL, ~NONE, NONE)
    restore_where_(weights, shape, ALL, ~NONE, ALL)
    assert [leaf.data_ptr() for leaf in weights.flatten_keys(".").values()] == places


def test_a_device_that_would_have_to_be_waited_for_is_asked_nothing() -> None:
    weights = filled(10.0).to("meta")  # where every read of a value raises
    shape = tiny_shape()
    everyone = ALL.to("meta")
    none = NONE.to("meta")
    snapshot_where_(weights, shape, everyone, none, none)
    restore_where_(weights, shape, everyone, none, everyone)
