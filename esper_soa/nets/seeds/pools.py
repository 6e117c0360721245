"""Memory for the seeds of every slot of every env, allocated once, and the list of active seeds.

A slot's row is wide enough for its largest blueprint; the blueprint in residence decides what the
numbers mean, and the gate network lies at the end. Germination re-initialises a row in place;
nothing is ever allocated for it. Which seeds are active is the one read of the env state by the
host, for engines that launch nothing for the others.
"""

from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.model.blueprints import gate_table, initial_seeds, parameter_counts
from esper_soa.nets.model.host import HostShape, initial_hosts
from esper_soa.nets.sgd import state_width
from esper_soa.state import Costs, Ramp, Slots
from esper_soa.system import streams
from esper_soa.system.transfers import staged, upload
from esper_soa.vocabulary import AlphaMode, Blend, Stage

Values = TypeVar("Values")


class RowLayout(NamedTuple):
    """Columns of a slot's row: a seed in [0, seed), a gate in [seed, seed + gate)."""

    seed: int
    gate: int


@lru_cache(maxsize=64)  # groups of seeds ask for it, pass by pass
def row_layout(shape: HostShape, slot: int) -> RowLayout:
    """Widths of the rows of `slot`."""
    spec = shape.slots[slot]
    return RowLayout(max(parameter_counts(shape.blueprints, spec)), gate_table(spec.channels).total)


def allocate(
    shape: HostShape, envs: int, device: torch.device, dtype: torch.dtype, optimizer: str = "sgd"
) -> TensorDict:
    """Weights of N envs: host and seeds, each parameters and momentum, which is all that the
    optimizer keeps (sgd.state_width); of hosts running statistics too.
    """

    def rows(width: int) -> Tensor:
        return torch.zeros(envs, width, device=device, dtype=dtype)

    def learning(width: int) -> dict[str, Tensor]:
        return {"params": rows(width), "momentum": rows(state_width(optimizer, width))}

    seeds = {
        spec.name: learning(sum(row_layout(shape, slot))) for slot, spec in enumerate(shape.slots)
    }
    host = learning(shape.parameters.total)
    host["statistics"] = rows(shape.statistics.total)
    return TensorDict({"host": host, "seeds": seeds}, batch_size=[envs])


def initialise_hosts_(weights: TensorDict, shape: HostShape, keys: Tensor) -> None:
    """Fresh hosts from streams `keys` (int64 [N]); every seed row and all momentum become zero."""
    weights.zero_()
    params = weights["host", "params"]
    fresh, statistics = initial_hosts(shape, keys, params.dtype)
    params.copy_(fresh)
    weights["host", "statistics"].copy_(statistics)


def parameter_table(shape: HostShape, device: torch.device) -> Costs:
    """Numbers of trainable parameters that rents and reports are computed from."""
    seed = [parameter_counts(shape.blueprints, spec) for spec in shape.slots]
    gate = [gate_table(spec.channels).total for spec in shape.slots]
    return Costs(
        shape.parameters.total,
        torch.tensor(seed, dtype=torch.float64, device=device),
        torch.tensor(gate, dtype=torch.float64, device=device),
    )


class Seeds(NamedTuple, Generic[Values]):
    """Contents of the slots and the active rows, [N, S]."""

    running: Values  # bool, takes part in the forward pass
    stage: Values  # int64
    blueprint: Values  # int64
    blend: Values  # int64
    frozen: Values  # bool, the ramp goes down: weights stay
    visible: Values  # bool, alpha above 0
    ablated: Values  # bool, takes part in subset rows
    newborn: Values  # bool, row is to be initialised
    fresh_momentum: Values  # bool, momentum row is to be cleared
    # Bool, of the whole env: passes leave it out, no row of it runs; None = there is none.
    over: Values | None = None

    def resident(self: "ActiveSeeds", device: torch.device) -> "SlotSeeds":  # type: ignore[misc]
        """The same seeds on `device`."""
        return Seeds(*upload([values for values in self if values is not None], device))

    def playing(self: "ActiveSeeds", envs: np.ndarray) -> np.ndarray:  # type: ignore[misc]
        """The env numbers among `envs` that passes do not leave out."""
        return envs if self.over is None else envs[~self.over[envs, 0]]


SlotSeeds = Seeds[Tensor]  # where the env state lies
ActiveSeeds = Seeds[np.ndarray]  # on the host


def slot_seeds(
    slots: Slots, ramp: Ramp, ablate_fossils: bool, over: Tensor | None = None
) -> SlotSeeds:
    """The seeds of an env state.

    ablate_fossils: fossils take part in subset rows too, as rewards that pay drip need it; over:
    bool [N], envs that are left out, of which no row runs.
    """
    running = slots.running
    visible = running & (slots.alpha > 0)
    ablated = visible if ablate_fossils else visible & (slots.stage != Stage.FOSSILIZED)
    seeds = SlotSeeds(
        running,
        slots.stage,
        slots.blueprint,
        slots.blend,
        frozen=ramp.mode == AlphaMode.DOWN,
        visible=visible,
        ablated=ablated,
        newborn=slots.newborn,
        fresh_momentum=slots.fresh_momentum,
    )
    if over is None:
        return seeds
    left_out = over[:, None].expand_as(running)
    playing = (flags & ~left_out if flags.dtype == torch.bool else flags for flags in seeds[:-1])
    return SlotSeeds._make((*playing, left_out))


def read_active_seeds(seeds: SlotSeeds) -> ActiveSeeds:
    """One packed device-to-host copy: the one read of an env-step."""
    present = [column for column in seeds if column is not None]
    columns = torch.stack([column.long() for column in present]).cpu().numpy()
    pairs = zip(columns, [column.dtype == torch.bool for column in present], strict=True)
    return ActiveSeeds(*(values.astype(bool) if flag else values for values, flag in pairs))


class Birth(NamedTuple):
    """Newborn seeds of a slot that share their blueprint."""

    slot: int
    code: int  # of the blueprint
    rows: Tensor  # int64 [n], env numbers
    multiply: Tensor  # bool [n], whether they blend by multiplying


class Claims(NamedTuple):
    """Rows that an env-step begins anew."""

    births: list[Birth]
    cleared: list[Tensor]  # int64, by slot: envs whose momentum starts afresh


def claims_of(shape: HostShape, active_seeds: ActiveSeeds) -> Claims:
    """The claims of an env-step in which these seeds run, with their numbers on the host."""
    births = []
    for slot, spec in enumerate(shape.slots):
        newborn = active_seeds.newborn[:, slot]
        for code in np.unique(active_seeds.blueprint[newborn, slot]).tolist():
            kind = shape.blueprint(code)
            if kind.topology != spec.topology:
                message = f"{kind.name} takes {kind.topology}: slot {spec.name} has {spec.topology}"
                raise ValueError(message)
            rows = np.flatnonzero(newborn & (active_seeds.blueprint[:, slot] == code))
            multiply = active_seeds.blend[rows, slot] == Blend.MULTIPLY
            births.append(Birth(slot, code, staged(rows), multiply=staged(multiply)))
    cleared = [staged(np.flatnonzero(fresh)) for fresh in active_seeds.fresh_momentum.T]
    return Claims(births, cleared)


def claim_(weights: TensorDict, shape: HostShape, claims: Claims, keys: Tensor) -> None:
    """Initialise the rows of newborn seeds and clear the momentum rows that must start afresh, by
    the streams `keys` (int64 [N]) of this env-step; every slot takes a sub-stream of its own.
    """
    for slot, code, rows, multiply in claims.births:
        spec = shape.slots[slot]
        kind = shape.blueprint(code)
        params = weights["seeds", spec.name, "params"]
        slot_keys = streams.fold(keys[rows], slot)
        seed_keys = streams.fold(slot_keys, 0)
        seed = initial_seeds(kind, spec.channels, seed_keys, multiply=multiply, dtype=params.dtype)
        gap = seed.new_zeros(len(seed), row_layout(shape, slot).seed - seed.shape[1])
        gate = gate_table(spec.channels).initial(streams.fold(slot_keys, 1), params.dtype)
        params.index_copy_(0, rows, torch.cat([seed, gap, gate], dim=1))
    for spec, rows in zip(shape.slots, claims.cleared, strict=True):
        if rows.numel():
            weights["seeds", spec.name, "momentum"].index_fill_(0, rows, 0.0)
