"""Small simulators, and a round of random play that every adapter has to repeat."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.simulator import Simulator, make
from esper_soa.state import Action
from esper_soa.vocabulary import HEAD_NAMES

EXPERIMENT = "cifar_3seed"
Sizes = dict[str, str | int | float | bool]
ENVS = 3
STEPS = 7
SEED = 11
SIZES: Sizes = {
    "device": "cpu",
    "steps": STEPS,
    "batch_size": 4,
    "train_samples": 8,
    "val_samples": 20,
    "slots": "[r0c0,r0c1]",
    # As with rewards of every env-step: in the experiment's own mode nothing follows an end.
    "reward.episode_end": "truncated",
}


class Case(NamedTuple):
    """An experiment, and the settings that make it small."""

    experiment: str
    sizes: Sizes


IMAGES = Case(EXPERIMENT, SIZES)
TEXT = Case("text_3seed", SIZES | {"task.transformer.context": 8, "task.transformer.width": 8})
# episodes of 3 env-steps: after the first nothing is a gain
PLATEAU = {"early_stop.patience": 1, "early_stop.min_delta": 100, "early_stop.min_steps": 3}


class Played(NamedTuple):
    """Joint actions and rewards of a round, [T, N]."""

    actions: Tensor
    rewards: Tensor
    features: Tensor  # [T, N, F], what the actions were decided on
    accuracy: Tensor  # [N], percent, at the end


def rows_of(sim: Simulator, action: Action) -> Tensor:
    """int64 [N]: the joint actions that are these choices."""
    choices = torch.stack([action.get(name) for name in HEAD_NAMES], dim=1)
    return (choices[:, None] == sim.joint.rows).all(2).int().argmax(1)


def play(case: Case) -> Played:
    sim: Simulator = make(case.experiment, policy="random", envs=ENVS, seed=SEED, **case.sizes)
    steps = list(sim.episode())
    return Played(
        torch.stack([rows_of(sim, step.action) for step in steps]),
        torch.stack([step.reward for step in steps]),
        torch.stack([step.observation.features for step in steps]),
        steps[-1].state.signals.val_accuracy,
    )
