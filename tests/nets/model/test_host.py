"""How hosts, seeds and gates start: as torch modules of that shape do, each env on its own."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.baseline_modules import FlatModule, Gate, Host, make_seed
from esper_soa.config.nets import TaskConfig, host_slots, sort_slots
from esper_soa.nets.model import parts
from esper_soa.nets.model.blueprints import (
    BLUEPRINTS,
    SEQUENCE_BLUEPRINTS,
    gate_table,
    initial_seeds,
    seed_table,
)
from esper_soa.nets.model.host import HostShape, host_shape
from esper_soa.nets.model.parts import Parameter, Table
from esper_soa.nets.seeds import pools
from esper_soa.system import streams
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend, Blueprint, Stage
from tests.builders.tiny_world import CPU, seeds_where

QUANTILES = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
TASKS = {
    "cifar_baseline": TaskConfig(),
    "impaired": TaskConfig(base_channels=2, kernel_size=1, num_pools=0),
    "deep": TaskConfig(base_channels=2, num_blocks=4, num_classes=7),
}


def env_keys(purpose: int, count: int, turn: int = 0) -> Tensor:
    return streams.stream_keys(11, purpose, (turn,), torch.arange(count))


def fresh(task: TaskConfig, count: int, turn: int = 0) -> tuple[HostShape, TensorDict]:
    """Weights of `count` envs at the start of round `turn`, in memory that was full of others."""
    shape = host_shape(task, host_slots(task)[:2])
    weights = pools.allocate(shape, count, CPU, torch.float64)
    weights.apply_(lambda rows: rows.fill_(5.0))
    pools.initialise_hosts_(weights, shape, env_keys(streams.HOST_INIT, count, turn))
    return shape, weights


def as_torch_starts(rows: Tensor, modules: list[FlatModule], table: Table) -> None:
    """Every parameter tensor of `rows` [n, total] is distributed as that of the modules, in shape
    and place.
    """
    theirs = torch.stack([module.flat() for module in modules]).double()
    assert rows.shape[1] == theirs.shape[1]
    for parameter, ours, torches in zip(
        table.parameters, table.unpack(rows), table.unpack(theirs), strict=True
    ):
        if torches.unique().numel() == 1:
            assert torch.equal(ours, torches[:1].expand_as(ours)), parameter
            continue
        # Of the 600 numbers and more of every tensor here the largest is above 0.98 of the bound.
        bound = torches.abs().max()
        assert float(ours.abs().max() / bound) == pytest.approx(1, abs=0.02), parameter
        found = ours.flatten().quantile(QUANTILES) / bound
        torch.testing.assert_close(found, 2 * QUANTILES - 1, rtol=0, atol=0.07)


@pytest.mark.parametrize("name", TASKS)
def test_hosts_start_as_torch_modules_do(name: str) -> None:
    task = TASKS[name]
    shape, weights = fresh(task, 200)
    torch.manual_seed(0)
    as_torch_starts(weights["host", "params"], [Host(task) for _ in range(60)], shape.parameters)


@pytest.mark.parametrize("blend", [Blend.ADD, Blend.MULTIPLY])
@pytest.mark.parametrize("blueprint", CNN_BLUEPRINTS)
def test_seeds_start_as_torch_modules_do(blueprint: int, blend: int) -> None:
    table = seed_table(BLUEPRINTS[blueprint], 8)
    multiply = torch.full((400,), blend == Blend.MULTIPLY)
    keys = env_keys(streams.SEED_INIT, 400)
    rows = initial_seeds(BLUEPRINTS[blueprint], 8, keys, multiply, torch.float64)
    torch.manual_seed(0)
    as_torch_starts(rows, [make_seed(blueprint, 8, blend) for _ in range(60)], table)


def test_gates_start_as_torch_modules_do() -> None:
    rows = gate_table(16).initial(env_keys(streams.SEED_INIT, 1000), torch.float64)
    torch.manual_seed(0)
    as_torch_starts(rows, [Gate(16) for _ in range(600)], gate_table(16))


def test_running_statistics_start_at_mean_0_and_variance_1_and_all_else_at_0() -> None:
    shape, weights = fresh(TaskConfig(base_channels=4), 3)
    parts = shape.statistics.unpack(weights["host", "statistics"])
    assert all((mean == 0).all() for mean in parts[::2])
    assert all((variance == 1).all() for variance in parts[1::2])
    assert (weights["host", "momentum"] == 0).all()
    for pool in weights["seeds"].values():
        assert (pool["params"] == 0).all()
        assert (pool["momentum"] == 0).all()


def kernels(shape: HostShape, weights: TensorDict) -> Tensor:
    """All convolution kernels of the hosts as one row each."""
    parts = shape.parameters.unpack(weights["host", "params"])
    return torch.cat([part.flatten(1) for part in parts if part.ndim == 5], dim=1)


def test_hosts_of_envs_and_rounds_are_independent_and_every_weight_has_its_own_number() -> None:
    first, second = (kernels(*fresh(TaskConfig(base_channels=4), 20, turn)) for turn in (0, 1))
    assert first.unique().numel() == first.numel()
    # 1,404 weights each: a correlation has a standard deviation of 0.027; the largest of 780 stays
    # below 5 of them
    together = torch.corrcoef(torch.cat((first, second)))
    assert float((together - torch.eye(40)).abs().max()) < 0.135
    assert torch.equal(first, kernels(*fresh(TaskConfig(base_channels=4), 20, 0)))


def born(
    shape: HostShape, weights: TensorDict, rows: list[list[int]], blend: int, keys: Tensor
) -> None:
    """Germinate a conv_light seed in the slots where `rows` [N, S] has 1."""
    flags = {"newborn": np.array(rows, bool), "fresh_momentum": np.array(rows, bool)}
    seeds = seeds_where(rows, Stage.GERMINATED, Blueprint.CONV_LIGHT, blend, **flags)
    pools.claim_(weights, shape, pools.claims_of(shape, seeds), keys)


def test_a_seed_of_another_kind_of_features_is_refused() -> None:
    shape, _ = fresh(TaskConfig(base_channels=4), 1)
    seeds = seeds_where(
        [[True, False]], Stage.GERMINATED, Blueprint.LORA, Blend.ADD, newborn=[[True, False]]
    )
    with pytest.raises(ValueError, match="lora takes sequences: slot r0c0 has images"):
        pools.claims_of(shape._replace(blueprints=SEQUENCE_BLUEPRINTS), seeds)


def test_a_birth_fills_its_own_row_alone_with_a_seed_a_gap_of_zeros_and_a_gate() -> None:
    shape, weights = fresh(TaskConfig(base_channels=4), 3)
    for pool in weights["seeds"].values():
        pool["params"].fill_(7.0)
        pool["momentum"].fill_(7.0)
    born(shape, weights, [[1, 0], [0, 0], [0, 1]], Blend.ADD, env_keys(streams.SEED_INIT, 3))
    for slot, env in ((0, 0), (1, 2)):
        pool = weights["seeds", shape.slots[slot].name]
        others = [number for number in range(3) if number != env]
        for kind in ("params", "momentum"):
            assert (pool[kind][others] == 7).all()
        assert (pool["momentum"][env] == 0).all()
        channels = shape.slots[slot].channels
        layout = pools.row_layout(shape, slot)
        size = seed_table(BLUEPRINTS[Blueprint.CONV_LIGHT], channels).total
        row = pool["params"][env]
        assert (row[size : layout.seed] == 0).all()
        assert row[: size - channels].all()  # kernel and scale
        assert row[layout.seed :].unique().numel() == layout.gate


def test_seeds_of_all_envs_slots_and_births_differ_and_the_same_birth_gives_the_same_seed() -> None:
    task = TaskConfig(base_channels=4)
    shape = host_shape(task, sort_slots(task, ["r0c0", "r1c0"]))  # both of 4 channels
    weights = pools.allocate(shape, 2, CPU, torch.float64)
    # Kernel 4 x 4 x 3 x 3, and the gate's first layer 8 x 4, of 49 numbers: in units of their
    # bounds 1/6 and 1/2.
    keys = env_keys(streams.SEED_INIT, 2)
    seen = []
    for step in (0, 1, 0):
        born(shape, weights, [[1, 1], [1, 1]], Blend.ADD, streams.fold(keys, step))
        found = torch.stack([weights["seeds", spec.name, "params"] for spec in shape.slots])
        seen.append(torch.cat((6 * found[..., :144], 2 * found[..., -49:-17]), -1))
    assert torch.equal(seen[0], seen[2])
    both = torch.stack(seen[:2])
    assert both.unique().numel() == both.numel()
    # equal up to rounding, were they one stream
    assert ((both[..., :32] - both[..., 144:]).abs().amax(-1) > 0.1).all()


def test_rows_drawn_in_pieces_are_those_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Parameter((7, 5), bound=0.3), Parameter((11,), value=1.0), Parameter((13, 3), std=0.7)
    table = Table(shapes)
    keys = env_keys(streams.HOST_INIT, 3)
    whole = table.initial(keys, torch.float32)
    for drawn in (12, 2):  # four columns, which end within parameters, and one
        monkeypatch.setattr(parts, "DRAWN_AT_ONCE", drawn)
        assert torch.equal(table.initial(keys, torch.float32), whole)
