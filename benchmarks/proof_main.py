"""The main run itself, as a user starts it, with seeds that no tuning has seen: do grown hosts end
ahead?

The runs follow one another, each a command of its own with all cores, in a folder of its own beside
the file that keeps what it came to; a run that was cut off is played again from its start, as its
wall time counts.
"""

import argparse
import json
import shutil
import time
from collections.abc import Sequence

import torch

from benchmarks import machine
from benchmarks.processes import command, in_processes, why
from benchmarks.proof_play import EXPERIMENT, Data, Facts, sample, settings_of
from benchmarks.records import Record, origin
from benchmarks.timing import BenchmarkError
from benchmarks.units import Units, opened
from esper_soa.config import TrainConfig
from esper_soa.ops.progress import duration

NAME = "proof_main"
SEEDS = tuple(range(101, 111))  # no policy was trained, tuned or looked at with these
SIDES = ("grown", "control")  # of summary.json
START = 10.0  # seconds that a run takes to start, for the forecast alone


def settings_given(data: Data, given: Sequence[str]) -> TrainConfig:
    """The settings of a main run."""
    return settings_of((*given, *data.settings))


def play(
    sets: Sequence[Data], facts: Facts, cfg: TrainConfig, options: argparse.Namespace
) -> Record:
    """Play the runs that are missing; returns the record. CalledProcessError where a run fails."""
    with opened(options.folder, facts, options.fresh) as units:
        plan = [(data, seed) for data in sets for seed in options.seeds]
        held = units.held([(data.name, seed) for data, seed in plan])
        left = [(data, seed) for data, seed in plan if (data.name, seed) not in held]
        seconds = [units.read(key)["seconds"] for key in held]
        print(
            f"the main run on {', '.join(one.name for one in sets)}, seeds "
            f"{', '.join(map(str, options.seeds))}: {len(left)} of {len(plan)} runs are left",
            flush=True,
        )
        if left:
            each = sum(seconds) / len(seconds) if seconds else guess(cfg)
            print(
                (
                    f"this will take about {duration(each * len(left))}; the runs stay in "
                    f"{options.folder}"
                ),
                flush=True,
            )
        for place, (data, seed) in enumerate(left, 1):
            one_run(units, data, seed, options.settings)
            seconds.append(units.read((data.name, seed))["seconds"])
            print(
                f"{data.name} seed {seed}: {duration(seconds[-1])}; {place} of {len(left)} runs, "
                f"left {duration((len(left) - place) * sum(seconds) / len(seconds))}",
                flush=True,
            )
        return record_of(units, sets, facts, options)


def guess(cfg: TrainConfig) -> float:
    """Seconds of a run: its rounds and that of the control, from a few env-steps."""
    timed = in_processes(sample, [cfg], 1)[0]
    if isinstance(timed, Exception):
        raise BenchmarkError(f"no env-step can be timed: {why(timed)}") from timed
    return START + timed * cfg.steps * (cfg.rounds + 1)


def one_run(units: Units, data: Data, seed: int, given: Sequence[str]) -> None:
    """Play the main run with `seed`, from its start, and keep what it came to."""
    folder = units.folder / f"{data.name}-{seed}"
    load = machine.load()
    if folder.exists():
        shutil.rmtree(folder)
    begun = time.monotonic()
    command(
        "esper_soa.train",
        f"+experiment={EXPERIMENT}",
        f"seed={seed}",
        f"run_dir={folder}",
        *data.settings,
        *given,
        threads=None,
    )
    seconds = time.monotonic() - begun
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if summary["control"] is None:
        raise BenchmarkError(
            f"{folder} has no control: leave out control=none, it is what grown hosts are set "
            "against"
        )
    unit = {
        side: {name: summary[side][name] for name in ("accuracies", "parameters")} for side in SIDES
    }
    units.write(
        (data.name, seed), {**unit, "images": data.images, "seconds": seconds, "load": load}
    )


def record_of(
    units: Units, sets: Sequence[Data], facts: Facts, options: argparse.Namespace
) -> Record:
    """All runs as one record."""
    found = []
    for data in sets:
        runs = [units.read((data.name, seed)) for seed in options.seeds]
        if any(run["images"] != data.images for run in runs):
            raise BenchmarkError(
                f"{units.folder} holds runs on other images of {data.name}. Give another folder "
                "with --folder, or delete what it holds with --fresh"
            )
        kept = [
            {name: part for name, part in run.items() if name not in ("stamp", "images")}
            for run in runs
        ]
        found.append(
            {
                "name": data.name,
                "images": data.images,
                "train": data.train,
                "test": data.test,
                "runs": kept,
            }
        )
    words = ["python -m esper_soa.train", f"+experiment={EXPERIMENT}", *options.settings]
    return (
        origin("proof_main", torch.device("cpu"))
        | facts
        | {
            "name": options.name,
            "seeds": list(options.seeds),
            "command": " ".join(words),
            "data": found,
        }
    )
