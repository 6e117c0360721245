"""A sweep over a setting inside one run, against a run of one env for each of its envs.

At commit 9481a612:

    python -m benchmarks.env_sweep
    python -m benchmarks.env_sweep --setting task.host_lr --values 0.005,0.01,0.02,0.04 envs=16

Both sides play a schedule, which no env learns from, on the same hosts and data: what every env
ends with, weights included, has to be the same to the bit. They take turns in this process; the
seconds are of one episode of all envs, once everything is built, so that the second side is spared
the start of its programs. Prints a table and appends a JSON line to the results.
"""

import io
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import machine
from benchmarks.records import Record, check_folder, command_line, finish, markdown, origin
from benchmarks.timing import BenchmarkError, in_turns
from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import TrainConfig
from esper_soa.env.reduction import Reduction
from esper_soa.env.world import World
from esper_soa.system.errors import UserError
from esper_soa.training.loop.build import build_world, rule_player
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.results.progress import Progress

WORK = ["+experiment=cifar_3seed", "policy.name=schedule", "policy.init=none", "device=cpu"]
SIDES = ("one run", "a run for each env")


class SingleEnv(Reduction):
    """That of a process with one env of a run of so many."""

    def __init__(self, env: int, num_envs: int) -> None:
        self.first_env = env
        self.num_envs = num_envs

    def all_envs(self, own: int) -> int:
        return self.num_envs

    def own(self, entries: Tensor, dim: int = 0) -> Tensor:
        return entries.narrow(dim, self.first_env, 1)


def single_world(cfg: TrainConfig, env: int) -> World:
    """The world of one env of the run `cfg`, whose settings are numbers."""
    built = build_world(replace(cfg, envs=1), torch.device("cpu"))
    reduction = SingleEnv(env, cfg.envs)
    return World(built.rules, built.data, built.sizes, cfg.data, cfg.seed, built.kernels, reduction)


def worlds_of(overrides: list[str], setting: str, values: list[str]) -> dict[str, list[World]]:
    """The worlds of each side."""
    cfg = compose_settings("", [*WORK, *overrides, f"{setting}=[{','.join(values)}]"])
    singles = [compose_settings("", [*WORK, *overrides, f"{setting}={value}"]) for value in values]
    apart = [single_world(singles[env % len(values)], env) for env in range(cfg.envs)]
    return dict(zip(SIDES, ([build_world(cfg, torch.device("cpu"))], apart), strict=True))


def play(world: World, cfg: TrainConfig) -> list[list[float]]:
    """An episode: by env, accuracy, reward, and weights."""
    request = Round(0, Progress(1, Console(file=io.StringIO()), "off"))
    agent = rule_player(cfg, "schedule", "policy.name")
    result, _ = play_round(world, Player(agent, None), request)
    ended = world.weights.select("host", "seeds").flatten_keys().values()
    weights = torch.cat([one.flatten(1) for one in ended], 1).tolist()
    return [[*one] for one in zip(result.accuracies, result.rewards, weights, strict=True)]


def benchmark(overrides: list[str], setting: str, values: list[str], turns: int) -> Record:
    """Both sides in turns, as one record; BenchmarkError where an env differs by a bit."""
    worlds = worlds_of(overrides, setting, values)
    cfg = compose_settings("", [*WORK, *overrides])
    one, other = ([env for world in worlds[side] for env in play(world, cfg)] for side in SIDES)
    if one != other:
        raise BenchmarkError(f"{setting}: envs of one run are not those of runs of their own")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in in_turns(SIDES, turns):
        begun = time.perf_counter()
        for world in worlds[side]:
            play(world, cfg)
        seconds[side].append(time.perf_counter() - begun)
    work = {"work": [*WORK, *overrides], "setting": setting, "values": values, "envs": cfg.envs}
    record = origin("env_sweep", torch.device("cpu")) | work
    return record | {"load": machine.load(), "env_steps": cfg.envs * cfg.steps, "seconds": seconds}


def table(record: Mapping) -> list[str]:
    """The record in markdown."""
    first = record["seconds"][SIDES[0]]
    rows = []
    for side, own in record["seconds"].items():
        ratios = [one / base for one, base in zip(own, first, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((side, f"{statistics.median(own):.2f}", spread))
    return markdown("side | episode of all envs (s) | over one run", rows)


def main() -> None:
    """The command line; ends with status 2 for what cannot be measured."""
    parser = command_line(__doc__)
    parser.add_argument("--setting", default="task.host_lr")
    parser.add_argument("--values", default="0.005,0.01,0.02,0.04", help="between commas")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="settings beside those of the work")
    given = parser.parse_args()
    try:
        check_folder(given.results)
        values = given.values.split(",")
        record = benchmark(given.overrides, given.setting, values, given.turns)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(table(record)))
    finish(record, given.results, "env_sweep")


if __name__ == "__main__":
    main()
