"""Newborn seeds by one masked launch: rows of pools.claim_ to the bit, no read by the host."""

import pytest
import torch
from torch import Tensor

from benchmarks.sync_guard import SyncGuard
from esper_soa.config.nets import TaskConfig, host_slots
from esper_soa.env.step import initial_state
from esper_soa.nets.model.blueprints import BLUEPRINTS
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.seeds.pools import allocate, claim_, claims_of, read_active_seeds, slot_seeds
from esper_soa.system.transfers import move_records
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend, Stage
from tests.builders.gpu_mixtures import DEVICE, ODD
from tests.builders.tiny_world import tiny_rules

pytest.importorskip("triton", reason="the package triton is not installed (extra: test)")

from esper_soa.nets.engines.gpu.kernels import newborn

NUM_ENVS = 12


@pytest.mark.filterwarnings("ignore:overflow")
def test_rows_of_newborn_seeds_are_those_of_torch_to_the_bit() -> None:
    task = TaskConfig(name="two", base_channels=8, num_blocks=2, num_pools=0)
    shape = host_shape(task, host_slots(task), BLUEPRINTS + ODD)
    state = initial_state(tiny_rules(2, 4, device=DEVICE), NUM_ENVS, DEVICE)
    g = torch.Generator().manual_seed(1)

    def choice(*values: int) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (NUM_ENVS, 2), generator=g)].to(
            DEVICE
        )

    slots = state.slots.replace(
        stage=choice(Stage.TRAINING, Stage.EMPTY),
        newborn=choice(0, 1).bool(),
        fresh_momentum=choice(0, 1).bool(),
        blueprint=choice(*CNN_BLUEPRINTS, *(one.code for one in ODD)),
        blend=choice(Blend.ADD, Blend.MULTIPLY, Blend.GATE),
    )
    wanted = allocate(shape, NUM_ENVS, DEVICE, torch.float32).apply(torch.ones_like)
    found = wanted.clone()
    keys = torch.randint(-(2**62), 2**62, (NUM_ENVS,), generator=g).to(DEVICE)
    seeds = slot_seeds(slots, state.ramp, ablate_fossils=False)
    claims = move_records(claims_of(shape, read_active_seeds(seeds)), DEVICE)
    claim_(wanted, shape, claims, keys)
    nurseries = newborn.seed_inits(found, shape)
    with SyncGuard():
        newborn.begin_(nurseries, seeds, keys)
    for name, rows in wanted.flatten_keys(".").items():
        assert torch.equal(found.flatten_keys(".")[name], rows), name
    assert (wanted["seeds", "r0c0", "params"] != 1).any()
