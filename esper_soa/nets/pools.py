"""Sleeping seeds: memory for every slot of every env, allocated once, and which of them are active.

A slot's row is wide enough for its largest blueprint; the blueprint in residence decides what the numbers mean, and the
gate network lies at the end. Germination re-initialises a row in place; nothing is ever allocated for it. Which seeds
are active is the one read of the env state by the host: it decides which of them cost time at all.
"""

from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets import streams
from esper_soa.nets.host import HostShape, initial_hosts
from esper_soa.nets.model.blueprints import gate_table, initial_seeds, parameter_counts
from esper_soa.state import ParameterCounts, Ramp, Slots
from esper_soa.vocabulary import AlphaMode, Blend, Stage


class RowLayout(NamedTuple):
    """Columns of a slot's row: a seed in [0, seed), a gate in [seed, seed + gate)."""

    seed: int
    gate: int


def row_layout(shape: HostShape, slot: int) -> RowLayout:
    """Widths of the rows of `slot`."""
    channels = shape.slots[slot].channels
    return RowLayout(max(parameter_counts(shape.blueprints, channels)), gate_table(channels).total)


def allocate(shape: HostShape, num_envs: int, device: torch.device, dtype: torch.dtype) -> TensorDict:
    """All weights of N envs: host and seeds, each with parameters, momentum and (host) running statistics."""

    def rows(width: int) -> Tensor:
        return torch.zeros(num_envs, width, device=device, dtype=dtype)

    seeds = {}
    for slot, spec in enumerate(shape.slots):
        width = sum(row_layout(shape, slot))
        seeds[spec.name] = TensorDict({"params": rows(width), "momentum": rows(width)}, batch_size=[num_envs])
    width = shape.parameters.total
    host = TensorDict(
        {"params": rows(width), "momentum": rows(width), "statistics": rows(shape.statistics.total)},
        batch_size=[num_envs],
    )
    return TensorDict({"host": host, "seeds": TensorDict(seeds, batch_size=[num_envs])}, batch_size=[num_envs])


def initialise_hosts_(weights: TensorDict, shape: HostShape, keys: Tensor) -> None:
    """Fresh hosts from streams `keys` (int64 [N]); every seed row and all momentum become zero."""
    weights.zero_()
    params = weights["host", "params"]
    fresh, statistics = initial_hosts(shape, keys, params.dtype)
    params.copy_(fresh)
    weights["host", "statistics"].copy_(statistics)


def parameter_table(shape: HostShape, device: torch.device) -> ParameterCounts:
    """Numbers of trainable parameters that rents and reports are computed from."""
    seed = [parameter_counts(shape.blueprints, spec.channels) for spec in shape.slots]
    gate = [gate_table(spec.channels).total for spec in shape.slots]
    return ParameterCounts(
        shape.parameters.total,
        torch.tensor(seed, dtype=torch.float64, device=device),
        torch.tensor(gate, dtype=torch.float64, device=device),
    )


class ActiveSeeds(NamedTuple):
    """Which rows run, as numpy arrays [N, S] on the host."""

    running: np.ndarray  # bool, takes part in the forward pass
    stage: np.ndarray  # int64
    blueprint: np.ndarray  # int64
    blend: np.ndarray  # int64
    frozen: np.ndarray  # bool, the ramp goes down: weights stay
    visible: np.ndarray  # bool, alpha above 0
    ablated: np.ndarray  # bool, takes part in subset rows
    newborn: np.ndarray  # bool, row is to be initialised
    fresh_momentum: np.ndarray  # bool, momentum row is to be cleared


def read_active_seeds(slots: Slots, ramp: Ramp, ablate_fossils: bool) -> ActiveSeeds:
    """One packed device-to-host copy of what decides which rows run (the engine's only read per env-step).

    ablate_fossils: fossilised seeds take part in subset rows too (rewards that pay drip need it).
    """
    visible = slots.running & (slots.alpha > 0)
    ablated = visible if ablate_fossils else visible & (slots.stage != Stage.FOSSILIZED)
    frozen = ramp.mode == AlphaMode.DOWN
    flags = (slots.running, frozen, visible, ablated, slots.newborn, slots.fresh_momentum)
    columns = [slots.stage, slots.blueprint, slots.blend, *(flag.long() for flag in flags)]
    stage, blueprint, blend, *bits = torch.stack(columns).cpu().numpy()
    running, frozen_, visible_, ablated_, newborn, fresh = (bit.astype(bool) for bit in bits)
    return ActiveSeeds(running, stage, blueprint, blend, frozen_, visible_, ablated_, newborn, fresh)


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """`values` on the device; the host does not wait for the copy."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def claim_(weights: TensorDict, shape: HostShape, active_seeds: ActiveSeeds, keys: Tensor) -> None:
    """Initialise the rows of newborn seeds and clear the momentum rows that must start afresh.

    keys: int64 [N], streams of this env-step; every slot takes a sub-stream of its own.
    """
    for slot, spec in enumerate(shape.slots):
        pool = weights["seeds", spec.name]
        for code in np.unique(active_seeds.blueprint[active_seeds.newborn[:, slot], slot]):
            chosen = active_seeds.newborn[:, slot] & (active_seeds.blueprint[:, slot] == code)
            rows = upload(np.flatnonzero(chosen), keys.device)
            multiply = upload(active_seeds.blend[chosen, slot] == Blend.MULTIPLY, keys.device)
            pool["params"].index_copy_(0, rows, _newborn_rows(shape, slot, int(code), keys[rows], multiply, pool))
        cleared = np.flatnonzero(active_seeds.fresh_momentum[:, slot])
        if cleared.size:
            pool["momentum"].index_fill_(0, upload(cleared, keys.device), 0.0)


def _newborn_rows(
    shape: HostShape, slot: int, blueprint: int, keys: Tensor, multiply: Tensor, pool: TensorDict
) -> Tensor:
    """Whole rows [m, width]: the seed, zeros up to the gate, a fresh gate."""
    channels = shape.slots[slot].channels
    layout, dtype = row_layout(shape, slot), pool["params"].dtype
    own = streams.fold(keys, slot)
    seed = initial_seeds(shape.blueprint(blueprint), channels, streams.fold(own, 0), multiply, dtype)
    gap = seed.new_zeros(seed.shape[0], layout.seed - seed.shape[1])
    return torch.cat([seed, gap, gate_table(channels).initial(streams.fold(own, 1), dtype)], dim=1)
