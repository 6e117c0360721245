"""MLflow: a run in the experiment `esper_soa`, at MLFLOW_TRACKING_URI, or else in `mlflow.db` of
the run folder.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus

from esper_soa.lab.telemetry.tracking import TrackedRun

EXPERIMENT = "esper_soa"
MAX_PARAMS = 100  # settings in one call, at most
URL_SIGNS = frozenset("%?#")
MAX_SETTING_LENGTH = 500  # characters of a setting


class MLflow:
    def __init__(self, tracked: TrackedRun) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI")
        self._link = TemporaryDirectory(prefix="esper_mlflow_")
        self._client = MlflowClient(place or f"sqlite:///{self._plain(tracked.folder)}/mlflow.db")
        self.id = tracked.id or self._create(tracked)
        self._client.update_run(self.id, RunStatus.to_string(RunStatus.RUNNING))

    def _plain(self, folder: Path) -> Path:
        """The folder, or a link to it where its path has signs that URLs have a meaning for.

        SQLAlchemy decodes such signs in some versions and not in others.
        """
        if not URL_SIGNS & {*str(folder)}:
            return folder
        link = Path(self._link.name, "run")
        link.symlink_to(folder.resolve(), target_is_directory=True)
        return link

    def _create(self, tracked: TrackedRun) -> str:
        """A new run with its settings, which MLflow lets nobody change later; returns its id."""
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT)
        name = f"{tracked.name} {tracked.folder.name}"
        run: str = self._client.create_run(experiment, run_name=name).info.run_id
        texts = {name: str(value)[:MAX_SETTING_LENGTH] for name, value in tracked.settings.items()}
        settings = [Param(name, text) for name, text in texts.items()]
        for start in range(0, len(settings), MAX_PARAMS):
            self._client.log_batch(run, params=settings[start : start + MAX_PARAMS])
        return run

    def log(self, number: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, number) for name, value in numbers.items()]
        self._client.log_batch(self.id, metrics)

    def finish(self) -> None:
        self._client.set_terminated(self.id)
        self._link.cleanup()


open_tracker = MLflow
