"""The callback of a trial: tells the study its accuracy, and ends it where it is hopeless."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from hydra.conf import HydraConf
from optuna.trial import Trial

from esper_soa.lab.sweep.search import load_study
from esper_soa.system.errors import PrunedError
from esper_soa.system.json_lines import Json
from esper_soa.training.loop.callbacks import Callback, RunView


class Pruner(Callback):
    """Ends the trial whose job Hydra has begun in this process, where it is hopeless."""

    def __init__(self, hydra: HydraConf) -> None:
        study = load_study(hydra.sweeper, Path(hydra.sweep.dir))
        frozen = study.trials[int(hydra.job.num)]
        self.trial = Trial(study, frozen._trial_id)
        self.reported = set(frozen.intermediate_values)

    def on_round_end(self, run: RunView, metrics: Mapping[str, Json]) -> None:
        """Raise PrunedError where the round leaves no hope, but after the last."""
        done = cast(int, metrics["round"])
        accuracy = cast(dict, metrics["accuracy"])["mean"]
        step = done - 1  # from 0, as pruners count
        if step not in self.reported:
            self.trial.report(accuracy, step)
        if done < run.cfg.rounds and self.trial.should_prune():
            raise PrunedError(done, accuracy)
