"""What an adapter adds to the env-steps of the simulator behind it, at the sizes of work a.

    python -m benchmarks.adapters [--turns 5] [--results benchmarks/results]

Random legal actions are played through each adapter in turns; what is timed is a step of the
adapter and, within it, that of the simulator. Prints a table and appends a JSON line to the
results, but not where files differ from the commit. Needs the extra `envs`.
"""

import statistics
import sys
import time
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.records import Line, Record, command_line, finish, markdown, origin
from esper_soa.actions import Given
from esper_soa.adapters.flat import FlatEnvs
from esper_soa.adapters.gymnasium import GrowthVectorEnv
from esper_soa.adapters.sb3 import GrowthVecEnv
from esper_soa.adapters.torchrl import GrowthEnv
from esper_soa.errors import UserError
from esper_soa.simulator import Info, Simulator, Value
from esper_soa.state import Observation

EXPERIMENT = "cifar_3seed"
SIZES: dict[str, Value] = {
    "batch_size": 125,
    "train_samples": 500,
    "val_samples": 125,
    "steps": 150,
}
ENVS = 16  # of a turn
STEPS = 4


class TimedSimulator(Simulator):
    """Adds up what its steps take, in seconds."""

    seconds = 0.0

    def step(self, action: Given) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """As the simulator's."""
        begun = time.perf_counter()
        result = super().step(action)
        self.seconds += time.perf_counter() - begun
        return result


class Adapted(Protocol):
    """An adapter under measurement."""

    flat: FlatEnvs

    def play(self, action: Tensor) -> None:
        """A step with joint actions int64 [N]."""
        ...


class Gymnasium(GrowthVectorEnv):
    def play(self, action: Tensor) -> None:
        self.step(action.numpy())


class StableBaselines(GrowthVecEnv):
    def play(self, action: Tensor) -> None:
        self.step(action.numpy())


class TorchRL(GrowthEnv):
    def play(self, action: Tensor) -> None:
        self.step(TensorDict({"action": action}, batch_size=[ENVS]))


def timed(adapter: Adapted) -> TimedSimulator:
    """A simulator of the same settings behind the adapter, at the start of a round."""
    sim = TimedSimulator(adapter.flat.sim.settings)
    adapter.flat.sim = sim
    adapter.flat.reset(seed=1)
    return sim


def added(adapter: Adapted, sim: TimedSimulator, rng: np.random.Generator) -> float:
    """What the adapter adds to the time of the simulator in a turn, as a share of that."""
    sim.seconds = total = 0.0
    for _ in range(STEPS):
        shown = adapter.flat.shown
        assert shown is not None
        legal = [np.flatnonzero(row) for row in shown.action_mask.numpy()]
        action = torch.tensor([int(rng.choice(row)) for row in legal])
        begun = time.perf_counter()
        adapter.play(action)
        total += time.perf_counter() - begun
    return total / sim.seconds - 1


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and keep; exit status."""
    parser = command_line(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(arguments)
    adapters: dict[str, Adapted] = {
        "gymnasium": Gymnasium(EXPERIMENT, ENVS, "joint", **SIZES),
        "stable-baselines3": StableBaselines(EXPERIMENT, ENVS, "joint", **SIZES),
        "torchrl": TorchRL(EXPERIMENT, ENVS, **SIZES),
    }
    sims = {name: timed(adapter) for name, adapter in adapters.items()}
    rng = np.random.default_rng(0)
    shares = {name: list[float]() for name in adapters}
    for turn in range(-1, options.turns):  # the first warms up
        for name, adapter in adapters.items():
            share = added(adapter, sims[name], rng)
            if turn >= 0:
                shares[name].append(share)
    rows: list[Line] = [("adapter", "added", "lowest", "highest")]
    for name, found in shares.items():
        figures = statistics.median(found), min(found), max(found)
        rows.append((name, *(f"{one:.2%}" for one in figures)))
    print("\n".join(markdown(rows)))
    record: Record = origin("adapters", torch.device("cpu")) | {
        "envs": ENVS,
        "sizes": SIZES,
        "steps": STEPS,
        "turns": options.turns,
        "added": shares,
    }
    finish(record, options.results, "adapters")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
