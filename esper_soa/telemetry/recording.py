"""Begins the recording of a run, and says at its end what came of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from esper_soa.config import TrainConfig
from esper_soa.env.world import World
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.ops.files import Unwritten
from esper_soa.ops.json_lines import Json
from esper_soa.telemetry.envs_table import EnvsTable
from esper_soa.telemetry.recorder import NO_RECORDER, NoRecorder, Recorder, Relay
from esper_soa.telemetry.rows import Cost, Legend
from esper_soa.telemetry.table_files import written_at


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
