"""Measures the cost of a run by its first rounds, in a separate process and a temporary folder.

`python -m esper_soa.lab.plan.probe` is started by plan.py and prints one line of JSON at its end.
It plays the run's own first round with tables, checkpoint and report as the run would have them;
the env-steps for which there is no time train and validate on a few images only.
"""

import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from esper_soa.agent.rollout import write_
from esper_soa.config.errors import RunMemoryError, UserError
from esper_soa.config.settings import MAX_ENVS, TrainConfig, settings_from_yaml, settings_yaml
from esper_soa.env.env import Observer
from esper_soa.env.step import StepData
from esper_soa.lab.plan.probe_result import ENDED, SETTINGS, ProbeResult
from esper_soa.lab.report.page import try_write_report
from esper_soa.nets.data.datasets import count_samples
from esper_soa.runtime.device import CPU_EVAL_BATCH, resolve_device
from esper_soa.runtime.memory import at_once, check_room, free_memory, memory_errors, needs
from esper_soa.runtime.ranks import keep_to_cores
from esper_soa.training.collect import EpisodeRunner, Round
from esper_soa.training.launch import check_devices
from esper_soa.training.progress import Progress
from esper_soa.training.run_folder import RunFolder
from esper_soa.training.running import Run
from esper_soa.training.session import Session, session
from esper_soa.training.trainer import train_rounds

STATUS = Path("/proc/self/status")
KIB = 1024
FEW_STEPS = 2  # env-steps that are played where only memory is asked for
PROBE_SECONDS = 1.5  # for the env-steps of the episode that are played in full
SPREAD = 96 * 2**20  # bytes between the two numbers of envs that tell what one takes


class ProbeProfile(Observer):
    """Plays as many env-steps of the first round in full as fit into `seconds`, spread over it, and
    times them.

    The others, and later rounds, train on one batch and validate on a few images, so that seeds
    still pass through their stages. On a GPU all are played in full: other amounts of work would be
    other graphs there, with memory of their own.
    """

    def __init__(
        self,
        seconds: float,
        num_steps: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
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
        if self.full:
            return data
        return data._replace(num_batches=1, validation=data.validation.first(CPU_EVAL_BATCH))

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


def main() -> None:
    """Measure: a folder with SETTINGS, rank, ranks."""
    program = _memory("VmRSS")
    folder = Path(sys.argv[1])
    rank, ranks = map(int, sys.argv[2:])
    keep_to_cores(rank, ranks)
    try:
        cfg = settings_in(folder / SETTINGS)
        # in a fork, which leaves nothing behind in the memory that is measured next
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            envs = folder / f"envs_{rank}"
            counted = pool.submit(count_memory, cfg, envs, rank, ranks).result()
        if isinstance(counted, str):
            raise UserError(counted)
        own = replace(cfg, device=str(resolve_device(cfg.device, rank)))
        result = round_of(own, RunFolder(folder / f"{rank}"), PROBE_SECONDS, program)
        print(json.dumps(result._asdict() | counted))
    except (UserError, RunMemoryError, BrokenProcessPool) as error:
        text = ENDED if isinstance(error, BrokenProcessPool) else error
        print(f"error: {text}", file=sys.stderr)
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


@contextmanager
def run_at_start(cfg: TrainConfig, folder: RunFolder) -> Iterator[tuple[Session, Run]]:
    """A run at its start in `folder`."""
    folder.path.mkdir()
    with session(folder) as run_session, memory_errors(RunMemoryError):
        yield run_session, Run(cfg, run_session)


def round_of(cfg: TrainConfig, folder: RunFolder, seconds: float, program: int) -> ProbeResult:
    """Play and measure a round, then a short one, which shows what memory later rounds add."""
    start = time.perf_counter()
    free = free_memory(resolve_device(cfg.device))
    with run_at_start(cfg, folder) as (run_session, job):
        (task,) = job.tasks.values()
        short = replace(cfg, rounds=min(2, cfg.rounds), control="none")
        job.cfg = job.checkpoints.cfg = task.cfg = task.output.cfg = short
        job.profile = pace = ProbeProfile(seconds, cfg.steps, job.device)
        built = time.perf_counter()
        for _ in train_rounds(job):
            pass
        rounds_end = time.perf_counter()
        folder.config.write_text(settings_yaml(job.cfg), encoding="utf-8")
        if cfg.report:
            try_write_report(run_session)
        end = time.perf_counter()
    extra = max(0.0, pace.beside)
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
        per_env=0.0,  # and what follows: by `count_memory`
        least=0,
        device_name=str(job.device),
    )


def count_memory(cfg: TrainConfig, folder: Path, rank: int, ranks: int) -> dict[str, float] | str:
    """`least` and `per_env` of a ProbeResult; for another process, so why the run is refused is no
    error but a text.
    """
    try:
        device = resolve_device(cfg.device, rank)
        processes = ranks if device.type == "cpu" else 1
        check_devices(cfg, ranks)
        check_room(cfg, device, count_samples(cfg.data), processes)
        few, many = numbers_of_envs(cfg, device, processes)
        each = per_env(replace(cfg, device=str(device)), folder, few, many)
    except (UserError, RunMemoryError) as error:
        return str(error)
    return {"least": at_once(needs(cfg, device)), "per_env": each}


def numbers_of_envs(cfg: TrainConfig, device: torch.device, processes: int) -> tuple[int, int]:
    """Two numbers of envs, SPREAD bytes apart at least, as far as there is room for `processes`."""
    small, large = (at_once(needs(replace(cfg, envs=envs), device)) for envs in (64, 128))
    free = free_memory(device)
    spread = SPREAD if free is None else min(SPREAD, free // (8 * processes))
    least = cfg.policy.ppo.minibatches if cfg.policy.name == "ppo" else 1
    few = max(least, int(spread / ((large - small) / 64)) // 2)
    return few, min(MAX_ENVS, 3 * few)


def per_env(cfg: TrainConfig, folder: Path, few: int, many: int) -> float:
    """Bytes of one more env: what the process had at most with `few`, then with `many` envs."""
    folder.mkdir()
    small, large = (
        peak_memory(replace(cfg, envs=envs), folder / f"{envs}") for envs in (few, many)
    )
    return max(1.0, (large - small) / (many - few))


def peak_memory(cfg: TrainConfig, folder: Path) -> int:
    """Bytes at most, of the GPU where there is one: a few env-steps and an update."""
    cfg.policy.ppo.epochs = 1
    with run_at_start(cfg, RunFolder(folder)) as (run_session, job):
        pace = ProbeProfile(0.0, cfg.steps, job.device)
        pace.next_full = cfg.steps
        (task,) = job.tasks.values()
        request = Round(0, Progress(1, run_session.console, "off"), "", pace)
        episode = EpisodeRunner(task.world, task.player, request)
        for _ in range(min(FEW_STEPS, cfg.steps)):
            episode.step_()
        rollout = episode.rollout
        learner = job.learner
        if rollout is not None and learner is not None:
            for place in range(FEW_STEPS, cfg.steps):
                write_(rollout, place, rollout.rows[0])
            learner.update(rollout)
        device = job.device
    del job, task, episode, rollout, learner
    gc.collect()  # what comes next is to take their place
    return _on_device(device) or _memory("VmHWM")


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


if __name__ == "__main__":
    main()
