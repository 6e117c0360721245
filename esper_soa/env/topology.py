"""Topologies: the seeds in a host's slots at the end of an episode, as the start of another.

`state_with_topology` makes the control that trains a grown network from its first env-step on.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.state import EnvState, select, set_where
from esper_soa.vocabulary import Blend, Blueprint, Stage


class Topology(NamedTuple):
    """The seeds that take part in the forward pass of N hosts, [N, S]."""

    blueprint: Tensor  # int64, Blueprint, -1 = no seed
    blend: Tensor  # int64, Blend; ADD where there is no seed
    alpha: Tensor  # float64, (0, 1]; 0 where there is no seed


class HostStates(NamedTuple):
    """N hosts as last measured, before the last actions took effect; weights still the same.

    A host that was rolled back at the last env-step stands as that left it, unmeasured.
    """

    stage: Tensor  # int64 [N, S], Stage
    blueprint: Tensor  # int64 [N, S], Blueprint
    blend: Tensor  # int64 [N, S], Blend
    alpha: Tensor  # float64 [N, S]
    accuracy: Tensor  # float64 [N], percent; NaN where it was rolled back, and so the next
    loss: Tensor  # float64 [N]


def host_states(before: EnvState, after: EnvState) -> HostStates:
    """The hosts at an env-step: state before the actions, measurements in it, and after them."""
    panic = before.guard.panic
    slots = select(panic, after.slots, before.slots)
    accuracy = torch.where(panic, torch.nan, before.signals.val_accuracy)
    loss = torch.where(panic, torch.nan, before.signals.val_loss)
    return HostStates(
        slots.stage, slots.blueprint, slots.blend, alpha=slots.alpha, accuracy=accuracy, loss=loss
    )


def topology_of(state: EnvState) -> Topology:
    """The topology of an env state: every running seed whose alpha is above 0, mid-ramp or not."""
    slots = state.slots
    is_present = slots.running & (slots.alpha > 0)
    return Topology(
        torch.where(is_present, slots.blueprint, Blueprint.NONE),
        torch.where(is_present, slots.blend, Blend.ADD),
        torch.where(is_present, slots.alpha, 0.0),
    )


def state_with_topology(state: EnvState, topology: Topology) -> EnvState:
    """A fresh state with the seeds of `topology` in its slots, as fossils of this env-step.

    Weights are set before the first training pass, as those of any newborn. Each counts as one
    germinated and fossilized. A fossil of an alpha below 1 keeps it, its ramp at rest there. Style,
    tempo and goal, by which seeds blend, stay those of an empty slot. Raises ValueError where the
    topology is of other hosts.
    """
    slots = state.slots
    blueprint, blend, alpha = (part.to(slots.stage.device) for part in topology)
    if blueprint.shape != slots.stage.shape:
        shape = list(slots.stage.shape)
        raise ValueError(f"a topology of {list(blueprint.shape)} for hosts and slots of {shape}")
    has_seed = blueprint != Blueprint.NONE
    stages = {"stage": Stage.FOSSILIZED, "previous_stage": Stage.HOLDING, "newborn": True}
    fossil = stages | {"blueprint": blueprint, "blend": blend, "alpha": alpha}
    resting = dict.fromkeys(("alpha", "start", "target"), alpha)
    count = has_seed.sum(1)
    counts = {name: state.totals.get(name) + count for name in ("germinated", "fossilized")}
    return state.replace(
        slots=set_where(slots, has_seed, fossil),
        ramp=set_where(state.ramp, has_seed, resting),
        totals=state.totals.replace(**counts),
    )
