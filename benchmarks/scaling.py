"""What a round costs at any number of ranks: a model with measured costs, checked against runs
here, and simulated.

    python -m benchmarks.scaling --measure          measures the costs and runs of 1, 2 and 4 ranks,
    and compares python -m benchmarks.scaling --envs 64          up to 1,000 ranks of 64 envs,
    simulated with costs measured last python -m benchmarks.scaling --speed-up 200     the same with
    env-steps that many times quicker, as on a GPU

A round is as long as its slowest rank collects, then its minibatches one after the other, each with
a reduction of the gradient and a small one of the means, then what is gathered. Ranks differ by
their hosts and machines; now and then one is a straggler, and now and then one is lost and all
begin again at the newest checkpoint. docs/scaling.md says what came of it.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing

from benchmarks.eps_config import cores
from benchmarks.ranks import WORK, Side, played
from benchmarks.records import RESULTS, Record, check_folder, keep, newest, origin
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.compose import compose_settings
from esper_soa.errors import UserError
from esper_soa.nets.own_hosts import task_slots

FLOAT = 4  # bytes
DOUBLE = 8
TOLD = 11  # numbers per env-step and env that every rank is told of all envs; see agent/rollout.py
MEANS = 128  # numbers of a minibatch's means and of their weights, in one sum
COUNTS = (1, 2, 4, 8, 32, 128, 512, 1000)
FEW = 4  # envs of the two runs from which the costs per env-step and per env are found
MANY = 16


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes that a round is made of."""

    step_seconds: float  # of an env-step, whatever the number of envs
    env_seconds: float  # of an env-step, per env of the rank
    pass_seconds: float  # of a minibatch, whatever the number of envs
    env_pass_seconds: float  # of a minibatch, per env of the rank in it
    latency: float  # seconds of a small reduction of two ranks
    bandwidth: float  # bytes per second between two ranks
    parameters: int  # of the policy
    steps: int = 150  # env-steps per episode
    passes: int = 16  # minibatches of an update: epochs x minibatches
    # Numbers per env-step and env for the tables, to the first rank; 0 = telemetry.level=rounds.
    packed: int = 0


# Of one core at work a, by the env-steps per second in the README, and a network of gloo on one
# machine.
ASSUMED = Costs(
    step_seconds=2e-3,
    env_seconds=45e-3,
    pass_seconds=10e-3,
    env_pass_seconds=1e-3,
    latency=1e-4,
    bandwidth=2e9,
    parameters=300_000,
)


@dataclass(frozen=True)
class Mishaps:
    """How ranks differ and fail."""

    spread: float = 0.05  # standard deviation of the logarithm of a rank's time for a round
    straggler_rate: float = 1e-3  # share of rounds of a rank in which it is a straggler
    straggler_factor: float = 2.0  # times as long
    hours_between_losses: float = 50_000.0  # of one rank, on average
    restart_seconds: float = 120.0
    checkpoint_every: int = 5  # rounds


def reduction_seconds(costs: Costs, ranks: int, size: float) -> float:
    """An all-reduce of `size` bytes in a ring, whose latency grows with the logarithm as that of a
    tree does.
    """
    return costs.latency * math.log2(ranks) + 2 * (ranks - 1) / ranks * size / costs.bandwidth


def gathered_bytes(costs: Costs, envs: int) -> float:
    """What a rank receives of all envs in a round."""
    return TOLD * DOUBLE * costs.steps * envs


def round_seconds(costs: Costs, ranks: int, envs: int, crowding: float = 1.0) -> dict[str, float]:
    """The parts of a round of `ranks` with `envs` each, all alike; crowding: ranks per core where
    there are too few.
    """
    whole = ranks * envs
    means = reduction_seconds(costs, ranks, MEANS * DOUBLE)
    gradient = reduction_seconds(costs, ranks, costs.parameters * FLOAT)
    remote = (ranks - 1) / ranks
    told = (
        remote
        * (gathered_bytes(costs, whole) + costs.packed * DOUBLE * costs.steps * whole)
        / costs.bandwidth
    )
    return {
        "collect": crowding * costs.steps * (costs.step_seconds + costs.env_seconds * envs),
        "update": crowding
        * (costs.passes * costs.pass_seconds + costs.env_pass_seconds * envs * costs.passes),
        "gradient": costs.passes * gradient,
        "means": costs.passes * means,
        "gather": told,
    }


def simulate(
    costs: Costs, mishaps: Mishaps, ranks: int, envs: int, rounds: int = 400
) -> dict[str, float]:
    """Efficiency, against as many single ranks without any mishap, and what it is lost to, over so
    many rounds.
    """
    random = np.random.default_rng(ranks)
    parts = round_seconds(costs, ranks, envs)
    alone = round_seconds(costs, 1, envs)
    ideal = rounds * sum(alone.values())
    drawn = np.exp(mishaps.spread * random.standard_normal((rounds, ranks)) - mishaps.spread**2 / 2)
    straggling = random.random((rounds, ranks)) < mishaps.straggler_rate
    slowest = parts["collect"] * np.where(straggling, mishaps.straggler_factor, 1.0) * drawn
    waited = slowest.max(1).sum() - rounds * parts["collect"]
    reduced = rounds * (parts["gradient"] + parts["means"] + parts["gather"])
    played_seconds = rounds * sum(parts.values()) + waited
    losses = played_seconds / 3600 * ranks / mishaps.hours_between_losses
    again = losses * (
        mishaps.restart_seconds + mishaps.checkpoint_every / 2 * played_seconds / rounds
    )
    total = played_seconds + again
    return {
        "efficiency": ideal / total,
        "waiting": waited / total,
        "reduced": reduced / total,
        "again": again / total,
        "eps": rounds * ranks * envs * costs.steps / total,
        "MB": gathered_bytes(costs, ranks * envs) / 1e6,
    }


def measured(console: Console) -> Record:
    """Costs of this machine, and runs of several ranks beside what the costs say of them."""
    steps = 12
    rounds = 2

    def run(ranks: int, envs: int) -> tuple[float, float]:
        rates = played(
            Side(ranks, 1), [f"steps={steps}", f"envs={envs}", "policy.ppo.target_kl=0"], rounds
        )
        console.print(
            f"{ranks} ranks, {envs} envs: {rates.collect_seconds:.2f} + "
            f"{rates.update_seconds:.3f} s"
        )
        return rates.collect_seconds, rates.update_seconds

    few = run(1, FEW)
    many = run(1, MANY)
    env = (many[0] - few[0]) / (MANY - FEW) / steps
    per_env = (many[1] - few[1]) / (MANY - FEW)
    (latency, bandwidth), (parameters, passes) = network(), policy_of()
    costs = Costs(
        step_seconds=max(0.0, few[0] / steps - FEW * env),
        env_seconds=env,
        pass_seconds=max(0.0, few[1] - FEW * per_env) / passes,
        env_pass_seconds=per_env / passes,
        latency=latency,
        bandwidth=bandwidth,
        parameters=parameters,
        steps=steps,
        passes=passes,
    )
    checks = []
    for ranks in (1, 2, 4):
        said = round_seconds(costs, ranks, MANY // ranks, max(1.0, ranks / cores()))
        found = many if ranks == 1 else run(ranks, MANY)
        checks.append({"ranks": ranks, "said": sum(said.values()), "found": sum(found)})
    return origin("scaling", torch.device("cpu")) | {"costs": vars(costs), "checks": checks}


def policy_of() -> tuple[int, int]:
    """Parameters of the policy of the measured runs, and minibatches of its updates."""
    cfg = compose_settings(overrides=WORK)
    policy = RecurrentPolicy(cfg.policy, task_slots(cfg.task, cfg.slots), cfg.seed)
    return sum(
        weights.numel() for weights in policy.parameters()
    ), cfg.policy.ppo.epochs * cfg.policy.ppo.minibatches


def network(repeats: int = 200, size: int = 4_000_000) -> tuple[float, float]:
    """Seconds of a small reduction of two processes here, by gloo, and bytes per second of a large
    one.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _timed, (folder, repeats, size), nprocs=2, start_method="spawn"
        )
        latency, seconds = json.loads(Path(folder, "found").read_text(encoding="utf-8"))
    return latency, size * FLOAT / seconds


def _timed(rank: int, folder: str, repeats: int, size: int) -> None:
    """One of the two processes of `network`."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=2),
    )
    found = []
    for count in (MEANS, size):
        numbers = torch.zeros(count)
        seconds = []
        for _ in range(repeats if count == MEANS else 10):
            begun = time.perf_counter()
            dist.all_reduce(numbers)
            seconds.append(time.perf_counter() - begun)
        found.append(statistics.median(seconds))
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def show_checks(record: Record, console: Console) -> None:
    """What the model says of the measured runs."""
    table = Table("ranks", "round, model (s)", "round, measured (s)", "model / measured")
    checks = record["checks"]
    assert isinstance(checks, list)
    for one in checks:
        table.add_row(
            str(one["ranks"]),
            f"{one['said']:.2f}",
            f"{one['found']:.2f}",
            f"{one['said'] / one['found']:.2f}",
        )
    console.print(table)


def show(costs: Costs, mishaps: Mishaps, envs: int, console: Console) -> None:
    """The simulated numbers of ranks as a table, below what was put into it."""
    console.print(*(f"{name}={value:g}" for name, value in (vars(costs) | vars(mishaps)).items()))
    table = Table(
        "ranks",
        "env-steps/s",
        "efficiency",
        "lost to waiting",
        "to reductions",
        "to losses",
        "MB per rank",
    )
    for ranks in COUNTS:
        found = simulate(costs, mishaps, ranks, envs)
        shares = (
            f"{100 * found[part]:.1f} %" for part in ("efficiency", "waiting", "reduced", "again")
        )
        table.add_row(str(ranks), f"{found['eps']:,.0f}", *shares, f"{found['MB']:,.1f}")
    console.print(table)


def costs_of(given: argparse.Namespace) -> Costs:
    """The newest measured costs, or those assumed where there are none, with what the command line
    changes.
    """
    found, _ = newest(Path(given.results or RESULTS), "scaling")
    costs = Costs(**found[-1]["costs"]) if found else ASSUMED
    quicker = {
        name: vars(costs)[name] / given.speed_up
        for name in ("step_seconds", "env_seconds", "pass_seconds", "env_pass_seconds")
    }
    network_there = {"latency": given.latency * 1e-6, "bandwidth": given.bandwidth * 1e9}
    return replace(costs, **quicker, **network_there, steps=given.steps, packed=given.packed)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends with status 2 for what cannot be measured or simulated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--envs", type=int, default=16, help="of every rank")
    parser.add_argument("--steps", type=int, default=150, help="env-steps per episode")
    parser.add_argument(
        "--speed-up", type=float, default=1.0, help="of all computing, over what was measured"
    )
    parser.add_argument(
        "--latency", type=float, default=30.0, help="microseconds between two machines"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=10.0, help="GB per second between two machines"
    )
    parser.add_argument(
        "--packed", type=int, default=0, help="numbers per env-step and env for the tables"
    )
    for name, value in vars(Mishaps()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--results", default=str(RESULTS), help='folder of the records; "" = none')
    given = parser.parse_args(arguments)
    console = Console()
    try:
        if given.measure:
            check_folder(given.results)
            record = measured(console)
            show_checks(record, console)
            if given.results:
                keep(record, given.results, "scaling")
            return
        mishaps = Mishaps(**{name: vars(given)[name] for name in vars(Mishaps())})
        show(costs_of(given), mishaps, given.envs, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
