"""The recorder of env-steps: what it is handed, and how settings name the one of esper_soa.lab."""

from typing import NamedTuple, cast

import numpy as np
from rich.console import RenderableType
from torch import Tensor

from esper_soa.config.lab import find_in_lab
from esper_soa.config.settings import TelemetryConfig
from esper_soa.env.step import EnvView, StepResult
from esper_soa.env.world import World
from esper_soa.runtime.ranks import Ranks
from esper_soa.state import Decision
from esper_soa.training.files.session import Session

TABLE_LEVELS = ("events", "full")  # telemetry.level at which env-steps are recorded


class Facts(NamedTuple):
    """Observation, decision and result of an env-step."""

    observed: EnvView
    decision: Decision
    result: StepResult
    # Float32 [N, X] of all choices in HEADS order; None = not asked or not known.
    probabilities: Tensor | None = None


class Recorder:
    """Records the env-steps of a run. This one records nothing."""

    full = False  # whether `pack` reads the probabilities of all choices
    env_steps = 0  # env-steps of all envs that every table has on the disk
    received = 0  # env-steps of all envs that were handed over
    table: RenderableType | None = None  # shown below the progress bar

    @property
    def dropped(self) -> int:
        """Env-steps of all envs that some table lacks; known once all is closed."""
        return self.received - self.env_steps

    def escalate(self, full: bool) -> None:
        """Record the rounds that begin from now on at level full, or at the level asked for."""

    def truncate(self, rounds: int) -> None:
        """Drop what is recorded after the first `rounds` rounds, which the run repeats; OSError."""

    def begin(self, number: int) -> None:
        """Begin round `number`, from 1."""

    def pack(self, facts: Facts) -> Tensor | None:
        """Numbers of an env-step to copy to the host, float64 [N, C]; None = nothing."""
        return None

    def emit(self, step: int, numbers: np.ndarray) -> None:
        """Take what `pack` returned for env-step `step`, from 1, once on the host; never waits."""

    def end(self) -> None:
        """End the round."""

    def flush(self) -> None:
        """Wait until all complete rounds are on the disk."""

    def close(self) -> None:
        """Write what is left, the round in progress included, and end the thread."""


NO_RECORDER = Recorder()


class PassingRecorder(Recorder):
    """Passes the env-steps of a round on to another recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.full = recorder.full

    def begin(self, number: int) -> None:
        self._recorder.begin(number)
        self.full = self._recorder.full

    def pack(self, facts: Facts) -> Tensor | None:
        return self._recorder.pack(facts)

    def emit(self, step: int, numbers: np.ndarray) -> None:
        self._recorder.emit(step, numbers)

    def end(self) -> None:
        self._recorder.end()


def no_recorder(world: World) -> Recorder:
    """Nothing records the env-steps of the world."""
    return NO_RECORDER


def make_recorder(
    telemetry: TelemetryConfig,
    world: World,
    session: Session,
    ranks: Ranks,
    learns: bool = False,
    control: bool = False,
) -> Recorder:
    """The recorder that telemetry asks for, of the hosts of `world`, or of the control's; at
    any level where a folder has tables, which a resumed run cuts back.
    """
    level = telemetry.level
    escalates = telemetry.escalation > 0 and not control
    if level not in TABLE_LEVELS and not escalates and not session.folder.tables.exists():
        return NO_RECORDER
    other = "another run_dir"
    if level in TABLE_LEVELS:
        other = "telemetry.level=rounds"
    elif escalates:
        other = "telemetry.escalation=0"
    asked = f"telemetry.level={level}"
    make = find_in_lab("telemetry.level", asked, f"Take {other}")
    return cast(Recorder, make(telemetry, world, session, ranks, learns, control))
