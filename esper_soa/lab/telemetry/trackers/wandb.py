"""Weights & Biases: a run of its own per run of ours, in the project `esper_soa` unless
WANDB_PROJECT says otherwise.

WANDB_MODE=offline keeps everything in the run folder, for `wandb sync`; without it, `wandb login`
comes first. A run that goes on is the same run there; offline it leaves a further folder of the
same id, for `wandb sync --append`.
"""

import os
from collections.abc import Mapping

import wandb

from esper_soa.lab.telemetry.tracking import TrackedRun


class WeightsAndBiases:
    def __init__(self, tracked: TrackedRun) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "esper_soa"),
            name=f"{tracked.name} {tracked.folder.name}",
            dir=str(tracked.folder),
            config=dict(tracked.settings),
            allow_val_change=True,
            reinit="create_new",
            id=tracked.id or None,
            resume="allow" if tracked.id else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.id = str(self._run.id)

    def log(self, number: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=number)

    def finish(self) -> None:
        """End the run, so that the next job of a sweep has one of its own."""
        self._run.finish()


open_tracker = WeightsAndBiases
