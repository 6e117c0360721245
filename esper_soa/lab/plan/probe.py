"""Measures the cost of a run by its first rounds, in a separate process and a temporary folder.

`python -m esper_soa.lab.plan` is started by plan.py and prints one line of JSON at its end.
It plays the run's own first round with tables, checkpoint and report as the run would have them;
the env-steps for which there is no time train and validate on a few images only.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from esper_soa.config.nets import IMAGES
from esper_soa.config.settings import TrainConfig, settings_from_yaml, settings_yaml
from esper_soa.env.env import Observer
from esper_soa.env.step import EnvRules, StepData
from esper_soa.env.world import World
from esper_soa.lab.plan.probe_result import SETTINGS, ProbeResult
from esper_soa.nets.needs import at_once
from esper_soa.nets.setup import lay_out
from esper_soa.runtime.device import resolve_device
from esper_soa.runtime.memory import check_room, free_memory, memory_errors, needs
from esper_soa.runtime.ranks import keep_to_cores
from esper_soa.system.errors import RunMemoryError, UserError
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop.build import make_setup
from esper_soa.training.loop.run import Run
from esper_soa.training.loop.trainer import train_rounds
from esper_soa.training.start.launch import check_devices

STATUS = Path("/proc/self/status")
KIB = 1024
PROBE_SECONDS = 1.5  # for the env-steps of the episode that are played in full
FEW_SAMPLES = 8  # of training and of validation, in the env-steps that are not played in full
MORE_ENVS = 8  # times as many, for which needs are counted too, to tell those of one
# Processes had from 1.2 to 2.2 times what is counted for a further env.
ENV_MARGIN = 2.0


class ProbeProfile(Observer):
    """Plays as many env-steps of the first round in full as fit into `seconds`, spread over it, and
    times them.

    Of the others, and of later rounds, `cut` makes little work, so that seeds still pass through
    their stages. On a GPU all are played in full: other amounts of work would be other graphs
    there, with memory of their own.
    """

    def __init__(
        self,
        seconds: float,
        num_steps: int,
        device: torch.device,
        cut: Callable[[StepData], StepData],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.cut = cut
        self.left = seconds
        self.num_steps = num_steps
        self.every = device.type == "cuda"
        self.full = True  # whether the env-step at play is
        self.next_full = 0
        # of the first round: env-steps so far, and which were played in full, with their seconds
        self.num_played = 0
        self.full_steps: list[int] = []
        self.full_times: list[float] = []
        self.beside = 0.0  # seconds of its episode beside env-steps
        self.update_seconds = 0.0
        self.rounds = 0  # that are done, and what files took in all of them
        self.files_seconds = 0.0
        self.phase_began = self.step_began = clock()

    def on_phase_end(self, phase: str) -> None:
        """The first env-step begins behind the reset."""
        now = self.clock()
        seconds = now - self.phase_began
        self.phase_began = now
        if phase == "files":
            self.files_seconds += seconds
        elif self.rounds == 0 and phase == "update":
            self.update_seconds += seconds
        elif self.rounds == 0:
            self.beside += seconds
        self.step_began = now if phase == "reset" else self.step_began

    def watch(self, data: StepData) -> StepData:
        """The data, or little of them."""
        self.full = self.every or (self.rounds == 0 and self.num_played >= self.next_full)
        return data if self.full else self.cut(data)

    def env_step(self) -> None:
        """Count an env-step, and choose the next that is played in full."""
        now = self.clock()
        seconds = now - self.step_began
        self.step_began = now
        if self.rounds > 0:
            return
        self.beside -= seconds
        if self.full:
            self.full_steps.append(self.num_played)
            self.full_times.append(seconds)
            self.left -= seconds
        self.num_played += 1
        if self.full:
            affordable = max(1.0, self.left / max(seconds, 1e-9))
            wide = max(1.0, (self.num_steps - self.num_played) / affordable)
            # the last env-step at the latest, where no time is left
            self.next_full = self.num_played + (round(wide) - 1 if self.num_played > 1 else 0)

    def report(self, label: str) -> None:
        """A round is done."""
        self.rounds += 1

    @property
    def paces(self) -> list[float]:
        """Seconds of every env-step, played in full: of one that was not, those on the line between
        the nearest that were; the first (warm-up) counts as the second.
        """
        if not self.num_played:
            return []
        warm = slice(1, None) if len(self.full_times) > 1 else slice(None)
        steps = self.full_steps[warm]
        return np.interp(range(self.num_played), steps, self.full_times[warm]).tolist()


def cut_for(rules: EnvRules) -> Callable[[World, StepData], StepData]:
    """`few_samples` where kernels train in memory of their own; where torch does, `one_batch`, as
    the heap that env-steps work in grows with their number.
    """
    images = rules.setup.shape.slots[0].topology == IMAGES
    return few_samples if images and rules.engine.chosen.name == "native" else one_batch


def few_samples(world: World, data: StepData) -> StepData:
    """One optimiser step on batches of FEW_SAMPLES, and as many to validate on."""
    draw = data.training.draw
    smaller = draw._replace(batch_size=min(draw.batch_size, FEW_SAMPLES))
    training = world.data.training(smaller, world.dtype)
    few = one_batch(world, data)._replace(training=training)
    return few._replace(validation=data.validation.first(FEW_SAMPLES))


def one_batch(world: World, data: StepData) -> StepData:
    """One optimiser step on batches of their size, which takes the memory of all."""
    validation = data.validation.first(world.setup.eval_batch)
    return data._replace(num_batches=world.setup.accumulate, validation=validation)


def main() -> None:
    """Measure: a folder with SETTINGS, rank, ranks."""
    program = _memory("VmRSS")
    folder = Path(sys.argv[1])
    rank, ranks = map(int, sys.argv[2:])
    keep_to_cores(rank, ranks)
    try:
        cfg = settings_in(folder / SETTINGS)
        device = resolve_device(cfg.device, rank)
        check_devices(cfg.device, ranks, here=ranks)
        setup = make_setup(cfg, device)._replace(processes=ranks if device.type == "cpu" else 1)
        check_room(setup, cfg.policy)
        cfg = replace(cfg, device=str(device))
        result = round_of(cfg, RunFolder(folder / f"{rank}"), PROBE_SECONDS, program=program)
        print(json.dumps(result._asdict()))
    except (UserError, RunMemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def settings_in(path: Path) -> TrainConfig:
    """The settings in a file, without what tells others of the run or goes on from another.

    Where episodes may end early, none does: hosts that are hardly trained would at once, and a plan
    is to hold where none does.
    """
    cfg = settings_from_yaml(path.read_text(encoding="utf-8"))
    telemetry = replace(cfg.telemetry, progress="off", console="bar")
    stop = replace(cfg.early_stop, min_steps=cfg.steps)  # the last env-step is no early end
    return replace(
        cfg, early_stop=stop, telemetry=telemetry, track=[], profile="off", resume="", run_dir=""
    )


def round_of(cfg: TrainConfig, folder: RunFolder, seconds: float, program: int) -> ProbeResult:
    """Play and measure a round, then a short one, which shows what memory later rounds add."""
    start = time.perf_counter()
    free = free_memory(resolve_device(cfg.device))
    folder.path.mkdir()
    with session(folder) as run_session, memory_errors(RunMemoryError):
        job = Run(cfg, run_session)
        (task,) = job.tasks.values()
        short = replace(cfg, rounds=min(2, cfg.rounds), control="none")
        job.cfg = task.cfg = short
        cut = partial(cut_for(task.world.rules), task.world)
        job.profile = pace = ProbeProfile(seconds, cfg.steps, job.device, cut=cut)
        built = time.perf_counter()
        first_flop: list[float] = []
        for _ in train_rounds(job):
            first_flop = first_flop or task.totals.recent[-1].train_flop
        rounds_end = time.perf_counter()
        folder.config.write_text(settings_yaml(job.cfg), encoding="utf-8")
        if cfg.report:
            # as a run does at its end, so that those without a report take no memory for it
            from esper_soa.lab.report.page import try_write_report

            try_write_report(run_session)
        end = time.perf_counter()
    extra = max(0.0, pace.beside)
    setup = task.world.setup
    more = lay_out(setup, MORE_ENVS * setup.num_envs)
    engine = task.world.rules.engine
    least, larger = (at_once(needs(part, cfg.policy, engine)) for part in (setup, more))
    return ProbeResult(
        program=program,
        host=_memory("VmHWM"),
        device=_on_device(job.device),
        free=-1 if free is None else free,
        build_seconds=built - start,
        episode_seconds=sum(pace.paces) + extra,
        bare_seconds=min(pace.paces) * cfg.steps + extra,
        update_seconds=pace.update_seconds,
        files_seconds=pace.files_seconds / pace.rounds,
        report_seconds=end - rounds_end,
        measured_steps=len(pace.full_times),
        per_env=ENV_MARGIN * (larger - least) / (more.num_envs - setup.num_envs),
        least=least,
        device_name=str(job.device),
        train_flop=fmean(first_flop),
    )


def _memory(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most; the latter for both elsewhere."""
    if STATUS.exists():
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return next(KIB * int(line.split()[1]) for line in lines if line.startswith(name))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else KIB
    )


def _on_device(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
