"""The state machine alone: attribution, signals, masks, observation, rewards and transitions,
without any network.

`python -m benchmarks.kernels` plays random legal actions on made-up measurements and prints
env-steps per second at several N, eager and compiled ahead of time, with a JSON line last, which is
also appended to benchmarks/results/. Only the two kernels of an env-step are timed.
"""

import argparse
import statistics
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import sections
from benchmarks.machine import wait_for
from benchmarks.records import Record, command_line, origin, report
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.settings import TrainConfig
from esper_soa.env.step import EAGER, EnvRules, StepKernels, compiled, initial_state
from esper_soa.runtime.device import apply_threads, device_name, keep_freed_memory, resolve_device
from esper_soa.runtime.step_cache import stored_kernels
from esper_soa.state import STATE_FLOAT, EnvState, GradientStats, Measurements, Slots, View
from esper_soa.system import streams
from esper_soa.training.loop.build import build_rules, make_setup
from esper_soa.vocabulary import HEADS, Stage

WARMUP_STEPS = 20  # env-steps before anything is timed: by then seeds of every age are about
MODES = ("eager", "ahead", "compiled")


class Made(NamedTuple):
    """Stands in for training and validation at one env-step: random numbers, drawn untimed."""

    loss: Tensor  # float64 [N]
    accuracy: Tensor  # float64 [N, 2^S], percent
    gradient: Tensor  # float64 [N, S]
    noise: Tensor  # float32 [N, 8], what the actions are drawn from


def make(num_envs: int, num_slots: int, step: int, device: torch.device) -> Made:
    """Random numbers of env-step `step`, a function of their coordinates."""
    keys = streams.stream_keys(
        0, streams.POLICY_SAMPLE, (step,), torch.arange(num_envs, device=device)
    ).unsqueeze(1)

    def draw(start: int, count: int, dtype: torch.dtype) -> Tensor:
        return streams.uniform(keys, start + torch.arange(count, device=device), dtype)

    return Made(
        loss=0.5 + draw(0, 1, STATE_FLOAT).squeeze(1),
        accuracy=50 + 10 * draw(1, 2**num_slots, STATE_FLOAT),
        gradient=draw(1000, num_slots, STATE_FLOAT),
        noise=draw(2000, len(HEADS), torch.float32),
    )


def measure(slots: Slots, made: Made) -> Measurements:
    """Every subset of the seeds at work, with made-up accuracies; other rows not evaluated."""
    ablated = slots.running & (slots.alpha > 0) & (slots.stage != Stage.FOSSILIZED)
    bits = 1 << torch.arange(ablated.shape[1], device=ablated.device)
    full = torch.where(ablated, bits, 0).sum(1, keepdim=True)
    off = torch.arange(made.accuracy.shape[1], device=ablated.device)
    measured = slots.running & (slots.stage != Stage.FOSSILIZED)
    healthy = made.gradient > 0.1
    return Measurements(
        train_loss=made.loss,
        train_accuracy=made.accuracy[:, 0],
        val_loss=made.loss,
        accuracy=made.accuracy,
        subset=torch.where((off & ~full) == 0, full & ~off, -1),
        ablated=ablated,
        gradients=GradientStats(
            l2=made.gradient,
            health=healthy.to(STATE_FLOAT),
            vanishing=~healthy,
            exploding=~healthy,
            ratio=made.gradient,
            measured=measured,
            batch_size=ablated.shape,
        ),
        batch_size=ablated.shape[:1],
    )


def turn(
    kernels: StepKernels, rules: EnvRules, state: EnvState, made: Made
) -> tuple[EnvState, float]:
    """One env-step under random legal actions, and the seconds of the two kernels alone."""
    measured = measure(state.slots, made)
    device = made.loss.device
    wait_for(device)
    begun = time.perf_counter()
    recorded = kernels.record_and_observe(rules, state, measured, ())
    wait_for(device)
    seconds = time.perf_counter() - begun
    state, attribution, masks, observation = recorded
    view = View(state, observation, masks, made.noise, batch_size=made.loss.shape)
    decision, _ = RandomPolicy().act(view, ())
    wait_for(device)
    begun = time.perf_counter()
    state = kernels.apply_action(rules, state, attribution, decision.action, ()).state
    wait_for(device)
    return state, seconds + time.perf_counter() - begun


def run(mode: str, envs: int, args: argparse.Namespace, device: torch.device) -> Record:
    """Times of one mode at one N, in seconds per env-step of all envs; the first call apart."""
    apply_threads(args.threads)
    cfg = TrainConfig(envs=envs, steps=args.steps)
    rules = build_rules(cfg, make_setup(cfg, device))
    num_slots = len(rules.setup.shape.slots)
    made = [make(envs, num_slots, step, device) for step in range(WARMUP_STEPS)]
    state = initial_state(rules, envs, device)
    torch.compiler.reset()
    kernels = compiled() if mode == "compiled" else EAGER
    if mode == "ahead":
        kernels = stored_kernels(rules, envs, args.steps, wait=True)
        if kernels.record_and_observe is EAGER.record_and_observe:
            sys.exit(f"error: {kernels.reason}")
    times = []
    with torch.no_grad():
        state, first = turn(kernels, rules, state, made[0])
        for warmup in made:
            state, _ = turn(kernels, rules, state, warmup)
        for repeat in range(args.repeats):
            state, seconds = turn(kernels, rules, state, made[repeat % len(made)])
            times.append(seconds)
    lower, median, upper = statistics.quantiles(times, n=4)
    return {
        "mode": mode,
        "threads": torch.get_num_threads(),
        "envs": envs,
        "median": median,
        "lower_quartile": lower,
        "upper_quartile": upper,
        "repeats": args.repeats,
        "env_steps_per_second": envs / median,
        "compile_seconds": first if mode == "compiled" else 0.0,
    }


def measure_all(args: argparse.Namespace) -> Record:
    """The record of every mode at every N."""
    device = resolve_device(args.device)
    keep_freed_memory(device)  # as in a run
    print(f"state machine alone, episodes of {args.steps} env-steps, on {device_name(device)}")
    results = [run(mode, envs, args, device) for mode in args.modes for envs in args.envs]
    return origin("kernels", device) | {"steps": args.steps, "results": results}


def main() -> None:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--envs", type=int, nargs="+", default=[4, 64, 1024])
    add("--modes", nargs="+", choices=MODES, default=["eager", "ahead"])
    add("--repeats", type=int, default=60, help="timed env-steps")
    add("--steps", type=int, default=150, help="env-steps per episode, all that is timed in one")
    add("--threads", type=int, default=0, help="of one operation; 0 = one, as in a run")
    add("--device", default="auto")
    args = parser.parse_args()
    least = args.repeats + WARMUP_STEPS + 1
    if args.steps < least:
        parser.error(f"--steps must be at least {least}: all that is timed is one episode")
    report(args, measure_all, sections.kernels)


if __name__ == "__main__":
    main()
