"""What telemetry costs: env-steps per second of real episodes with the tables of a level, over those without any.

    python -m benchmarks.telemetry                                       works a and c, level events, 9 turns
    python -m benchmarks.telemetry works=c levels=events,full repeats=15 steps=40 results=

Every side plays the same episodes, decisions of a new policy included, in turns and alternating order; a side's time
ends when its files are on the disk. There is no update, which would make telemetry's share smaller. Prints the ratios
of the timings of a turn, and a JSON line, which is also appended to benchmarks/results/telemetry.jsonl.
"""

import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.console import Console

from benchmarks.eps_config import EpsConfig, train_config
from benchmarks.machine import wait_for
from benchmarks.records import RESULTS, Record, check_folder, keep, origin
from benchmarks.timing import BenchmarkError
from esper_soa.build import build_player, build_world
from esper_soa.config import LEVELS, TrainConfig
from esper_soa.ops.collect import Player, Round, play_round
from esper_soa.ops.device import apply_threads, resolve_device
from esper_soa.ops.files import Unwritten
from esper_soa.ops.progress import Progress
from esper_soa.telemetry.recorder import NO_RECORDER, NoRecorder, Recorder
from esper_soa.telemetry.recording import legend_of

DEFAULTS = {
    "works": "a,c",
    "levels": "events",
    "repeats": "9",
    "steps": "20",
    "results": str(RESULTS),
    "device": "auto",
}
CONF = Path(__file__).parent / "conf"
INTERVAL = 10.0  # seconds, as telemetry.write_interval


class Work:
    """A named work, and who plays it."""

    def __init__(self, name: str, steps: int, device: str) -> None:
        ConfigStore.instance().store(name="eps_schema", node=EpsConfig)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("eps", [f"+work={name}", f"steps={steps}", f"device={device}"])
        settings = OmegaConf.to_object(composed)
        if not isinstance(settings, EpsConfig):
            raise BenchmarkError(f"works={name}: is no work of benchmarks/conf/work")
        self.cfg: TrainConfig = train_config(settings)
        self.device = resolve_device(self.cfg.device)
        apply_threads(self.cfg.compute.threads)
        self.world = build_world(self.cfg, self.device)
        self.player: Player = build_player(self.cfg, self.world)

    def seconds(self, level: str, number: int) -> float:
        """Of round `number` at a level, its files included."""
        with tempfile.TemporaryDirectory() as folder:
            recorder = self._recorder(level, Path(folder))
            quiet = Progress(1, Console(file=io.StringIO()), "off")
            wait_for(self.device)
            begun = time.perf_counter()
            play_round(self.world, self.player, Round(number, quiet, recorder=recorder))
            wait_for(self.device)
            recorder.flush()
            seconds = time.perf_counter() - begun
            recorder.close()
        if recorder.dropped:
            raise BenchmarkError(f"level {level} has dropped {recorder.dropped} env-steps")
        return seconds

    def _recorder(self, level: str, folder: Path) -> NoRecorder:
        if level in ("off", "rounds"):
            return NO_RECORDER
        return Recorder(folder, legend_of(self.world, learns=True), level, INTERVAL, Unwritten())


def compare(work: Work, levels: list[str], repeats: int) -> Record:
    """EPS by level, and the ratios over `off` of the timings of a turn."""
    sides, env_steps = ["off", *levels], work.cfg.envs * work.cfg.steps
    for side in sides:
        work.seconds(side, 0)
    found: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(1, repeats + 1):
        for side in sides if repeat % 2 else reversed(sides):
            found[side].append(work.seconds(side, repeat))
    record: Record = {"envs": work.cfg.envs, "steps": work.cfg.steps, "repeats": repeats}
    for side in sides:
        ratios = [off / mine for off, mine in zip(found["off"], found[side], strict=True)]
        record[side] = {
            "eps": env_steps / statistics.median(found[side]), "over_off": statistics.median(ratios),
            "low": min(ratios), "high": max(ratios),
        }  # fmt: skip
    return record


def main(given: list[str]) -> None:
    """Measure, print, and keep the record."""
    settings = DEFAULTS | dict(word.split("=", 1) for word in given)
    if strangers := set(settings) - set(DEFAULTS):
        raise BenchmarkError(f"{', '.join(strangers)}: must be one of {', '.join(DEFAULTS)}")
    levels = settings["levels"].split(",")
    if wrong := set(levels) - set(LEVELS):
        raise BenchmarkError(f"levels={', '.join(wrong)}: must be of {', '.join(LEVELS)}")
    if settings["results"]:
        check_folder(settings["results"])
    works: Record = {}
    for name in settings["works"].split(","):
        work = Work(name, int(settings["steps"]), settings["device"])
        works[name] = compare(work, levels, int(settings["repeats"]))
        print(f"work {name}: {json.dumps(works[name], indent=2)}")
    record = origin("telemetry", torch.device(resolve_device(settings["device"]))) | {"works": works}
    if settings["results"]:
        keep(record, settings["results"], "telemetry")
    print(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1:])
