"""What telemetry costs: env-steps per second of real episodes with what a side writes, over those
without any.

At commits 4c0a608 and, for `sinks` in episodes of 75 env-steps, bb536803:

    python -m benchmarks.telemetry                                       works a and c, 9 turns
    python -m benchmarks.telemetry --works c --sides events,full --repeats 15 --results ''

A side is a level of telemetry, or `sinks`: tables of events, live table, and all trackers, which
are told the line of the round; it needs their extras. Every side plays the same episodes, in turns;
its time ends when its files are on the disk and its trackers have taken what they were told. There
is no update, which would make telemetry's share smaller. Prints the ratios of the timings of a
turn, and a JSON line, which is also appended to benchmarks/results/telemetry.jsonl.
"""

import io
import json
import os
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.console import Console

from benchmarks.eps_config import EpsConfig, train_config
from benchmarks.machine import wait_for
from benchmarks.records import Record, check_folder, command_line, finish, origin
from benchmarks.timing import BenchmarkError, in_turns
from esper_soa.config.hydra_versions import INITIALIZE
from esper_soa.config.settings import LEVELS, TRACKERS, TrainConfig
from esper_soa.lab.telemetry.console_table import EnvsTable
from esper_soa.lab.telemetry.pack import legend_of
from esper_soa.lab.telemetry.recorder import TableRecorder
from esper_soa.lab.telemetry.tracking import (
    Line,
    TrackedRun,
    TrackerState,
    find_openers,
    make_sender,
    numbers_of,
)
from esper_soa.lab.telemetry.worker import Worker
from esper_soa.runtime.device import apply_threads, resolve_device
from esper_soa.system.files import WriteErrors
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.players import build_player
from esper_soa.training.loop.recorder import NO_RECORDER, Recorder
from esper_soa.training.results.progress import Progress

CONF = Path(__file__).parents[1] / "conf"
INTERVAL = 10.0  # seconds, as telemetry.write_interval
SINKS = "sinks"  # the side of all of them
WAITING = 64  # rounds that may wait for a tracker
PATIENCE = 60.0  # seconds for a tracker to take a round


class Trackers:
    """All trackers of a run in `folder`, each told by a thread of its own, as a run has them."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        state = TrackerState(folder, False, WriteErrors())
        tracked = TrackedRun(folder, "benchmark", {})
        self._workers = {
            name: Worker[Line](name, make_sender(name, open_, tracked, state), WAITING)
            for name, open_ in find_openers(names).items()
        }
        self._to_tensors = 0
        self.tell({"round": 0.0})

    def tell(self, numbers: dict[str, float]) -> None:
        """The numbers of the next round, until they are taken; else BenchmarkError."""
        self._to_tensors += 1
        for worker in self._workers.values():
            worker.emit((self._to_tensors, numbers))
        for name, worker in self._workers.items():
            if not worker.flush(PATIENCE) or worker.dropped:
                raise BenchmarkError(
                    f"{name} lacks {worker.dropped} lines: {worker.reason or 'it is too slow'}"
                )

    def close(self) -> None:
        """Tell them that this is all."""
        for worker in self._workers.values():
            worker.insist((0, {}))
            worker.close(PATIENCE)


class Work:
    """A named work, and who plays it."""

    def __init__(self, name: str, steps: int, device: str) -> None:
        ConfigStore.instance().store(name="eps_schema", node=EpsConfig)
        with initialize_config_dir(str(CONF), **INITIALIZE):
            composed = compose("eps", [f"+work={name}", f"steps={steps}", f"device={device}"])
        settings = OmegaConf.to_object(composed)
        if not isinstance(settings, EpsConfig):
            raise BenchmarkError(f"works={name}: is no work of benchmarks/conf/work")
        self.cfg: TrainConfig = train_config(settings)
        self.device = resolve_device(self.cfg.device)
        apply_threads(self.cfg.compute.threads)
        self.world = build_world(self.cfg, self.device)
        self.player: Player = build_player(self.cfg, self.world)

    def seconds(self, side: str, number: int, trackers: Trackers) -> float:
        """Of round `number` with what a side writes, its files included."""
        table = EnvsTable(legend_of(self.world, learns=True)) if side == SINKS else None
        shown = Progress(
            self.cfg.envs * self.cfg.steps,
            Console(file=io.StringIO(), force_terminal=True),
            "off" if table is None else "live",
        )
        shown.below = table
        with tempfile.TemporaryDirectory() as folder:
            recorder: Recorder = NO_RECORDER
            if side not in ("off", "rounds"):
                level = "events" if side == SINKS else side
                legend = legend_of(self.world, learns=True)
                recorder = TableRecorder(
                    Path(folder), legend, level, INTERVAL, WriteErrors(), table
                )
            wait_for(self.device)
            begun = time.perf_counter()
            with shown as progress:
                result, _ = play_round(
                    self.world, self.player, Round(number, progress, recorder=recorder)
                )
            wait_for(self.device)
            if side == SINKS:
                trackers.tell(dict(numbers_of(result.record)))
            recorder.flush()
            seconds = time.perf_counter() - begun
            recorder.close()
        if recorder.dropped:
            raise BenchmarkError(f"side {side} has dropped {recorder.dropped} env-steps")
        return seconds


def compare(work: Work, given: list[str], repeats: int) -> Record:
    """EPS by side, and the ratios over `off` of the timings of a turn."""
    sides = ["off", *given]
    env_steps = work.cfg.envs * work.cfg.steps
    found: dict[str, list[float]] = {side: [] for side in sides}
    os.environ["WANDB_MODE"] = "offline"
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    wanted = TRACKERS if SINKS in sides else ()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Trackers(Path(folder), wanted)) as trackers,
    ):
        for side in sides:
            work.seconds(side, 0, trackers)
        for side in in_turns(sides, repeats):
            found[side].append(work.seconds(side, 1 + len(found[side]), trackers))
    record: Record = {"envs": work.cfg.envs, "steps": work.cfg.steps, "repeats": repeats}
    for side in sides:
        ratios = [off / mine for off, mine in zip(found["off"], found[side], strict=True)]
        record[side] = {
            "eps": env_steps / statistics.median(found[side]),
            "over_off": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
        }
    return record


def main() -> None:
    """Measure, print, and keep the record."""
    parser = command_line(__doc__)
    for name, value in (("works", "a,c"), ("sides", f"events,{SINKS}"), ("device", "auto")):
        parser.add_argument(f"--{name}", default=value)
    for name, count in (("repeats", 9), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=count)
    given = parser.parse_args()
    sides = given.sides.split(",")
    if wrong := set(sides) - {*LEVELS, SINKS}:
        raise BenchmarkError(f"sides={', '.join(wrong)}: must be of {', '.join([*LEVELS, SINKS])}")
    check_folder(given.results)
    works: Record = {}
    for name in given.works.split(","):
        work = Work(name, given.steps, given.device)
        works[name] = compare(work, sides, given.repeats)
        print(f"work {name}: {json.dumps(works[name], indent=2)}")
    record = origin("telemetry", resolve_device(given.device)) | {"works": works}
    finish(record, given.results, "telemetry")


if __name__ == "__main__":
    main()
