"""What a run takes, measured: its first round in a process of its own, in a folder that is dropped
afterwards.

`python -m esper_soa.probe` is started by plan.py, so that no other work blurs what the process
takes. It plays the run's own first round with tables, checkpoint and report as the run would have
them; the env-steps for which there is no time train and validate on a few images only. Prints one
line of JSON at its end.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from omegaconf import OmegaConf

from esper_soa.agent.rollout import write_
from esper_soa.config import TrainConfig, settings_from_mapping, settings_yaml
from esper_soa.env.step import Work
from esper_soa.errors import OutOfRoomError, UserError
from esper_soa.nets.data import ValidationImages
from esper_soa.ops.collect import Episode, Round
from esper_soa.ops.device import CPU_EVAL_BATCH, resolve_device
from esper_soa.ops.memory import free_memory, naming_memory, with_envs
from esper_soa.ops.profile import NoProfile
from esper_soa.ops.progress import Progress
from esper_soa.ops.rundir import RunFolder
from esper_soa.ops.session import Session, session
from esper_soa.ops.torchrun import keep_to_cores
from esper_soa.report.end import leave_report
from esper_soa.trainer import Run, played, value_of

STATUS = Path("/proc/self/status")
KIB = 1024
FEW_STEPS = 3  # env-steps that are played where only memory is asked for
COLLECT = (
    "data",
    "state",
    "training",
    "validation",
    "policy",
    "telemetry",
    "reset",
)  # phases of an episode


class Took(NamedTuple):
    """What a round of the run took."""

    program: int  # bytes of the process before anything of the run was built
    host: int  # bytes of the process at most
    device: int  # bytes on the GPU at most; 0 where there is none
    free: int  # bytes that the GPU, or the machine, had left before; -1 where it does not say
    build_seconds: float  # up to the first round
    episode_seconds: float  # an episode of all envs, with its decisions
    bare_seconds: float  # the same at the pace of its quickest env-step: hosts without seeds
    update_seconds: float  # a policy update
    files_seconds: float  # what a round takes beside these
    report_seconds: float
    measured_steps: int  # env-steps that were played in full


class Pace(NoProfile):
    """Plays as many env-steps of the first episode in full as fit into `seconds`, spread over it,
    and times all of it.

    The others, and later episodes, train on one batch and validate on a few images, so that seeds
    go their way meanwhile. On a GPU all are played in full: other amounts of work would be other
    graphs there, with memory of their own.
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
        # Of every env-step: whether it was played in full, and its seconds.
        self.times: list[tuple[bool, float]] = []
        self.phases: dict[str, float] = {}  # seconds
        self.rounds = 0  # rounds that are done, and what files took in all of them
        self.files_seconds = 0.0
        self.full = True
        self.next_full = 0
        self.phase_began = self.step_began = clock()

    def phase_ended(self, phase: str) -> None:
        """The first env-step begins behind the reset."""
        now = self.clock()
        if phase == "files":
            self.files_seconds += now - self.phase_began
        elif self.rounds == 0:
            self.phases[phase] = self.phases.get(phase, 0.0) + now - self.phase_began
        self.phase_began = now
        self.step_began = now if phase == "reset" else self.step_began

    def watch(self, work: Work) -> Work:
        """The work, or little of it."""
        self.full = self.every or (self.rounds == 0 and len(self.times) >= self.next_full)
        if self.full or not isinstance(work.validation, ValidationImages):
            return work
        few = work.validation._replace(order=work.validation.order[..., :CPU_EVAL_BATCH])
        return work._replace(num_batches=1, validation=few)

    def env_step(self) -> None:
        """An env-step has been played: which one is the next to be played in full?"""
        now = self.clock()
        seconds = now - self.step_began
        self.step_began = now
        if self.rounds > 0:
            return
        self.times.append((self.full, seconds))
        if self.full:
            self.left -= seconds
            affordable = self.left / max(seconds, 1e-9)
            remaining = self.num_steps - len(self.times)
            wide = max(1.0, remaining / max(1.0, affordable)) if len(self.times) > 1 else 1.0
            self.next_full = len(self.times) + round(wide) - 1

    def report(self, label: str) -> None:
        """A round is done."""
        self.rounds += 1

    @property
    def full_times(self) -> list[float]:
        """Seconds of the env-steps played in full; without the first, which warms up, where there
        are others.
        """
        found = [seconds for full, seconds in self.times if full]
        return found[1:] or found

    @property
    def whole(self) -> float:
        """Seconds of all env-steps, had they been played in full: each as long as the last one
        before it that was.
        """
        total = 0.0
        last = self.full_times[0]
        for place, (full, seconds) in enumerate(self.times):
            last = seconds if full and place > 0 else last
            total += last
        return total

    @property
    def beside(self) -> float:
        """Seconds of the episode beside its env-steps."""
        played = sum(seconds for _, seconds in self.times)
        return max(0.0, sum(self.phases.get(phase, 0.0) for phase in COLLECT) - played)


def main() -> None:
    """Measure what is asked for: settings, a folder, seconds for the episode or `envs=<number>`,
    rank and ranks.
    """
    program = _memory("VmRSS")
    cfg = settings_in(Path(sys.argv[1]))
    folder = RunFolder(Path(sys.argv[2]))
    asked = sys.argv[3]
    rank = int(sys.argv[4])
    ranks = int(sys.argv[5])
    keep_to_cores(rank, ranks)
    name, _, number = asked.partition("=")
    try:
        if name == "envs":
            print(json.dumps({"most": most_of_envs(cfg, folder, int(number))}))
        else:
            print(json.dumps(round_of(cfg, folder, float(asked), program)._asdict()))
    except (UserError, OutOfRoomError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def settings_in(path: Path) -> TrainConfig:
    """The settings in a file, without what tells others of the run or goes on from another.

    Where episodes may end early, none does: hosts that are hardly trained would at once, and a plan
    is to hold where none does.
    """
    cfg = settings_from_mapping(cast(dict, OmegaConf.to_container(OmegaConf.load(path))))
    telemetry = replace(cfg.telemetry, progress="off", console="bar")
    whole = replace(cfg.early_stop, min_steps=cfg.steps)  # the last env-step is no early end
    return replace(
        cfg, early_stop=whole, telemetry=telemetry, track=[], profile="off", resume="", run_dir=""
    )


@contextmanager
def opened(cfg: TrainConfig, folder: RunFolder) -> Iterator[tuple[Session, Run, int]]:
    """A run at its start in `folder`, and the bytes that its device had left before."""
    folder.path.mkdir()
    with session(folder) as within, naming_memory(OutOfRoomError):
        free = free_memory(resolve_device(cfg.device))
        yield within, Run(cfg, within), -1 if free is None else free


def round_of(cfg: TrainConfig, folder: RunFolder, seconds: float, program: int) -> Took:
    """Play a round and measure it; a second one, of little work, shows what memory the next rounds
    take beside.
    """
    begun = time.perf_counter()
    with opened(cfg, folder) as (within, job, free):
        job.cfg = replace(cfg, rounds=min(2, cfg.rounds), control="none")
        job.profile = Pace(seconds, cfg.steps, job.device)
        pace = job.profile
        built = time.perf_counter()
        value_of(played(job))
        rounds_end = time.perf_counter()
        folder.config.write_text(settings_yaml(job.cfg), encoding="utf-8")
        if cfg.report:
            leave_report(within)
        reported = time.perf_counter()
    update = pace.phases.get("update", 0.0)
    return Took(
        program=program,
        host=_memory("VmHWM"),
        device=_on_device(job.device),
        free=free,
        build_seconds=built - begun,
        episode_seconds=pace.whole + pace.beside,
        bare_seconds=min(pace.full_times) * cfg.steps + pace.beside,
        update_seconds=update,
        files_seconds=pace.files_seconds / pace.rounds,
        report_seconds=reported - rounds_end,
        measured_steps=sum(full for full, _ in pace.times),
    )


def most_of_envs(cfg: TrainConfig, folder: RunFolder, envs: int) -> int:
    """Bytes at most, of the GPU where there is one, of the same run with N = `envs`: a few
    env-steps and an update.
    """
    cfg = with_envs(cfg, envs)
    cfg.policy.ppo.epochs = 1
    with opened(cfg, folder) as (within, job, _):
        pace = Pace(0.0, cfg.steps, job.device)
        pace.next_full = cfg.steps
        episode = Episode(
            job.world, job.player, Round(0, Progress(1, within.console, "off"), "", pace)
        )
        for _ in range(min(FEW_STEPS, cfg.steps)):
            episode.step_()
        rollout = episode.rollout
        learner = job.player.learner
        if rollout is not None and learner is not None:
            for place in range(FEW_STEPS, cfg.steps):
                write_(rollout, place, rollout.rows[0])
            learner.update(rollout)
    return _on_device(job.device) or _memory("VmHWM")


def _memory(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most; where the system does not tell, at most, for
    both.
    """
    if STATUS.exists():
        found = [
            line.split()[1]
            for line in STATUS.read_text(encoding="ascii").splitlines()
            if line.startswith(name)
        ]
        return KIB * int(found[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else KIB
    )


def _on_device(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
