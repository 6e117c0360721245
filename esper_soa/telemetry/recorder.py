"""Keeps the env-steps of a run as tables in its folder, by a thread that the run never waits for.

A round's files are written when it is over, and now and then before.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.config import TrainConfig
from esper_soa.env.world import World
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.ops.files import LOGGER, Unwritten, write_bytes
from esper_soa.ops.json_lines import Json
from esper_soa.ranks import Ranks
from esper_soa.telemetry.envs_table import EnvsTable
from esper_soa.telemetry.happenings import events_rows
from esper_soa.telemetry.pack import Facts, ended, pack, still_played, unpack
from esper_soa.telemetry.parquet import table_bytes
from esper_soa.telemetry.rows import (
    Cost,
    Legend,
    Maker,
    choices_rows,
    slots_rows,
    steps_rows,
    subsets_rows,
)
from esper_soa.telemetry.schema import CURVE_NAMES, SCHEMA_VERSION, STYLE_NAMES
from esper_soa.telemetry.table_files import FOLDER, table_path, written_at
from esper_soa.telemetry.worker import Worker
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES, STAGE_NAMES

LIMIT = 256  # env-steps of all envs that may wait for the thread
# a round in progress is written again after this many times as long as the last time took
SHARE = 20
PATIENCE = 60.0  # seconds that a checkpoint waits for the tables of its rounds
MOST_WAITING = 2**26  # bytes of finished rounds that wait for room on the disk
MAKERS: dict[str, Maker] = {
    "steps": steps_rows,
    "slots": slots_rows,
    "events": events_rows,
    "choices": choices_rows,
    "subsets": subsets_rows,
}


class NoRecorder:
    """Records nothing, and asks the device for nothing."""

    full = False

    @property
    def env_steps(self) -> int:
        """Env-steps of all envs of which every table is on the disk."""
        return 0

    @property
    def dropped(self) -> int:
        """Env-steps of all envs that some table lacks; known once all is closed."""
        return 0

    def begin(self, number: int) -> None:
        """Round `number`, from 1, begins."""

    def pack(self, facts: Facts) -> Tensor | None:
        """What is to be copied to the host of an env-step, float64 [N, C]; None = nothing."""
        return None

    def emit(self, step: int, numbers: np.ndarray) -> None:
        """Hand over what `pack` gave for env-step `step`, from 1, once on the host; never waits."""

    def end(self) -> None:
        """The round is over."""

    def flush(self) -> None:
        """Wait until the rounds that are over are on the disk."""

    def close(self) -> None:
        """Write what is left, the round in progress included, and let the thread go."""


NO_RECORDER = NoRecorder()


class Step(NamedTuple):
    """An env-step on the host."""

    round: int
    step: int
    numbers: np.ndarray  # float64 [N, C]


class End(NamedTuple):
    """A round is over; 0 where no more will come."""

    round: int
    dropped: int  # env-steps of all envs that were lost of it


class Waiting(NamedTuple):
    """A round as far as it had come, of which files are to be written."""

    env_steps: int  # of all envs whose episode was not over
    files: dict[Path, bytes]


class Recorder(NoRecorder):
    """Records the rounds of a run in its folder."""

    def __init__(
        self,
        folder: Path,
        legend: Legend,
        level: str,
        interval: float,
        unwritten: Unwritten,
        table: EnvsTable | None = None,
    ) -> None:
        """level: events or full; interval: least seconds between two writings of a round in
        progress; table: shown.
        """
        self._table = table
        self.full = level == "full"
        self._folder = folder
        self._legend = legend
        self._interval = interval
        self._unwritten = unwritten
        self._tables = written_at(level)
        self._facts = {"schema": str(SCHEMA_VERSION), "legend": json.dumps(legend_record(legend))}
        self._number = self._lost = self._given = 0
        # of the thread: the round in progress, and when its files are written again, on the clock
        self._steps: list[Step] = []
        self._due = 0.0
        self._waiting: dict[int, Waiting] = {}  # by round; what the disk has no room for stays here
        self._on_disk: dict[int, int] = {}  # env-steps of all envs by round
        self._worker: Worker[Step | End] = Worker("telemetry", self._handle, LIMIT)

    @property
    def env_steps(self) -> int:
        return sum(self._on_disk.values())

    @property
    def dropped(self) -> int:
        return self._given - self.env_steps

    def begin(self, number: int) -> None:
        self._number = number
        self._lost = 0

    def pack(self, facts: Facts) -> Tensor | None:
        return pack(facts, self.full)

    def emit(self, step: int, numbers: np.ndarray) -> None:
        if self._table is not None:
            self._table.show(self._number, step, numbers)
        env_steps = int(still_played(numbers).sum())
        self._given += env_steps
        if not self._worker.emit(Step(self._number, step, numbers)):
            self._lost += env_steps

    def end(self) -> None:
        self._worker.insist(End(self._number, self._lost))

    def flush(self) -> None:
        done = self._worker.flush(PATIENCE)
        if not done or self._worker.reason:
            self._unwritten.reasons[FOLDER] = self._worker.reason or "the disk is too slow"

    def close(self) -> None:
        self._worker.insist(End(0, 0))
        self.flush()
        self._worker.close(PATIENCE)
        if self.dropped:
            reason = self._unwritten.reasons.get(FOLDER) or "the disk was full, or too slow"
            LOGGER.warning("%s lacks %d env-steps: %s", FOLDER, self.dropped, reason)

    def _handle(self, item: Step | End) -> None:
        """In the thread: keep an env-step, or write a round."""
        steps = self._steps
        if isinstance(item, End):
            self._steps = []
            if steps:
                lost = {"dropped": str(item.dropped)} if item.dropped else {}
                over = item.round == steps[0].round
                self._make(steps, {"complete": str(over).lower()} | lost)
            self._write()
            self._give_up()
            return
        now = time.monotonic()
        if not steps or steps[0].round != item.round:
            steps = self._steps = []
            self._due = now + self._interval
        steps.append(item)
        if now > self._due and self._worker.idle:
            self._make(steps, {"complete": "false"})
            self._write()
            done = time.monotonic()
            self._due = done + max(self._interval, SHARE * (done - now))

    def _make(self, steps: list[Step], facts: dict[str, str]) -> None:
        """The files of a round as far as it has come."""
        number = steps[0].round
        numbers = np.stack([step.numbers for step in steps])
        played = unpack(self._legend, np.array([step.step for step in steps]), numbers)
        files = {}
        for table in self._tables:
            rows = MAKERS[table.name](played, number)
            content = table_bytes(table.columns, rows, {"table": table.name} | self._facts | facts)
            files[table_path(self._folder, table.name, number)] = content
        self._waiting[number] = Waiting(int(still_played(numbers).sum()), files)

    def _write(self) -> None:
        """Write what waits; what the disk refuses is tried again the next time."""
        with self._unwritten.noting(FOLDER):
            for number, (env_steps, files) in list(self._waiting.items()):
                for path in list(files):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_bytes(path, files[path])
                    del files[path]
                self._on_disk[number] = env_steps
                del self._waiting[number]

    def _give_up(self) -> None:
        """Drop the oldest rounds that wait, until the others have at most MOST_WAITING bytes."""
        sizes = {number: sum(map(len, one.files.values())) for number, one in self._waiting.items()}
        for number in sorted(sizes):
            if sum(sizes.values()) > MOST_WAITING:
                del self._waiting[number], sizes[number]


class Relay(NoRecorder):
    """Records what several ranks play: each keeps a round's env-steps, the first records all."""

    def __init__(self, recorder: NoRecorder, ranks: Ranks, level: str) -> None:
        """recorder: of the first rank; it records nothing on others. level: events or full."""
        self.full = level == "full"
        self._recorder = recorder
        self._ranks = ranks
        self._steps: list[np.ndarray] = []

    @property
    def env_steps(self) -> int:
        return self._recorder.env_steps

    @property
    def dropped(self) -> int:
        return self._recorder.dropped

    def begin(self, number: int) -> None:
        self._steps = []
        self._recorder.begin(number)

    def pack(self, facts: Facts) -> Tensor | None:
        return pack(facts, self.full)

    def emit(self, step: int, numbers: np.ndarray) -> None:
        self._steps.append(numbers)

    def end(self) -> None:
        # where others play on
        left_out = max(self._ranks.of_all(len(self._steps))) - len(self._steps)
        steps = [*self._steps, *[ended(numbers) for numbers in self._steps[-1:]] * left_out]
        played = self._ranks.gather_at_first(torch.from_numpy(np.stack(steps, 1)))
        for step, numbers in enumerate([] if played is None else played.unbind(1), start=1):
            self._recorder.emit(step, numbers.numpy())
            if step % (LIMIT // 2) == 0:
                self._recorder.flush()
        self._recorder.end()

    def flush(self) -> None:
        self._recorder.flush()


def legend_record(legend: Legend) -> dict[str, tuple[str, ...]]:
    """The lists by which bits and lists in the tables are to be read."""
    return {
        "ops": OP_NAMES,
        "slots": legend.slots,
        "blueprints": legend.blueprints,
        "styles": STYLE_NAMES,
        "curves": CURVE_NAMES,
        "stages": STAGE_NAMES,
        "heads": HEAD_NAMES,
    }


@contextmanager
def recording(
    cfg: TrainConfig,
    world: World,
    folder: Path,
    unwritten: Unwritten,
    table: EnvsTable | None = None,
) -> Iterator[NoRecorder]:
    """Records the rounds of a run in `folder` while the context lasts; table: shown each step."""
    telemetry = cfg.telemetry
    ranks = world.ranks
    if not written_at(telemetry.level):
        yield NO_RECORDER
        return
    if not ranks.first:
        yield Relay(NO_RECORDER, ranks, telemetry.level)
        return
    legend = legend_of(world, cfg.policy.name == "ppo")
    recorder = Recorder(folder, legend, telemetry.level, telemetry.write_interval, unwritten, table)
    try:
        yield recorder if ranks.count == 1 else Relay(recorder, ranks, telemetry.level)
    finally:
        recorder.close()


def envs_table(cfg: TrainConfig, world: World) -> EnvsTable | None:
    """The table of envs that telemetry.console asks for; None where it does not."""
    if cfg.telemetry.console != "envs":
        return None
    return EnvsTable(legend_of(world, cfg.policy.name == "ppo"))


def legend_of(world: World, learns: bool) -> Legend:
    """What the tables of a world's runs are read by; learns: whether its policy does."""
    shape = world.rules.nets.shape
    counts = world.rules.reward.counts
    flop = world.flop
    samples = world.sizes.train_samples
    return Legend(
        slots=tuple(spec.name for spec in shape.slots),
        blueprints=names_by_code(shape.blueprints),
        parameters=_cost(counts.host, counts.seed, counts.gate, 1),
        train_flop=_cost(flop.host, flop.seed, flop.gate, samples),
        learns=learns,
        sampled_shapley=world.rules.shapley_orders is not None,
    )


def _cost(host: float, seed: Tensor, gate: Tensor, times: int) -> Cost:
    """The cost of `times` as much."""
    tables = [np.asarray(part.cpu().numpy(), np.float64) * times for part in (seed, gate)]
    return Cost(float(host) * times, *tables)


def recorded(level: str, recorder: NoRecorder, lacking: Mapping[str, int]) -> dict[str, Json]:
    """What summary.json says of telemetry; lacking: lines that trackers were not given, by name."""
    dropped = {"tables": recorder.dropped} if recorder.dropped else {}
    return {"level": level, "env_steps": recorder.env_steps, "dropped": dropped | dict(lacking)}
