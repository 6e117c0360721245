"""What each tracker asks of its library, which stands in here for one that is not installed."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from esper_soa.lab.telemetry.tracking import HOME, TrackedRun, Tracker, find_openers

call = mock.call


def played(
    monkeypatch: pytest.MonkeyPatch, name: str, modules: dict[str, object], tracked: TrackedRun
) -> Tracker:
    """The tracker `name`, opened, told of round 3 and finished; with `modules` for its library."""
    for module, library in modules.items():
        monkeypatch.setitem(sys.modules, module, library)
    monkeypatch.delitem(sys.modules, f"{HOME}.{name}", raising=False)
    tracker = find_openers([name])[name](tracked)
    tracker.log(3, {"a": 1.0, "b/c": 2.0})
    tracker.finish()
    del sys.modules[f"{HOME}.{name}"]
    return tracker


def test_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = mock.Mock()
    wandb.init.return_value.id = 7
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    told = TrackedRun(tmp_path, "trial", {"seed": 1})
    assert played(monkeypatch, "wandb", {"wandb": wandb}, told).id == "7"
    options = {
        "project": "esper_soa",
        "name": f"trial {tmp_path.name}",
        "dir": str(tmp_path),
        "config": {"seed": 1},
        "allow_val_change": True,
        "reinit": "create_new",
        "id": None,
        "resume": None,
        "settings": wandb.Settings.return_value,
    }
    assert wandb.mock_calls == [
        call.Settings(silent=True, console="off"),
        call.init(**options),
        call.init().log({"a": 1.0, "b/c": 2.0}, step=3),
        call.init().finish(),
    ]
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    played(monkeypatch, "wandb", {"wandb": wandb}, told._replace(id="7", last_round=2))
    again = {"project": "mine", "id": "7", "resume": "allow"}
    assert wandb.init.call_args == call(**options | again)


def test_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = mock.Mock()
    told = TrackedRun(tmp_path, "trial", {}, "tensorboard", 2)
    modules = {"torch.utils.tensorboard": library}
    assert played(monkeypatch, "tensorboard", modules, told).id == "tensorboard"
    assert library.mock_calls == [
        call.SummaryWriter(f"{tmp_path}/tensorboard", purge_step=3),
        call.SummaryWriter().add_scalar("a", 1.0, 3),
        call.SummaryWriter().add_scalar("b/c", 2.0, 3),
        call.SummaryWriter().flush(),
        call.SummaryWriter().close(),
    ]


def metric(name: str, value: float, stamp: float, step: int) -> tuple[object, ...]:
    """A number of MLflow, whose stamp is now in milliseconds."""
    return name, value, type(stamp), abs(stamp / 1000 - time.time()) < 60, step


@pytest.mark.parametrize("known", [SimpleNamespace(experiment_id="5"), None])
def test_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: object) -> None:
    client = mock.Mock()
    client.get_experiment_by_name.return_value = known
    client.create_experiment.return_value = "6"
    client.create_run.return_value.info.run_id = "run"
    library = mock.Mock(Param=lambda *words: words, Metric=metric)
    mlflow = mock.Mock()
    mlflow.MlflowClient.return_value = client
    modules = {"mlflow": mlflow, "mlflow.entities": library}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    values = {f"s{number}": "x" * 600 for number in range(101)}
    assert played(monkeypatch, "mlflow", modules, TrackedRun(tmp_path, "trial", values)).id == "run"
    assert mlflow.MlflowClient.call_args == call(f"sqlite:///{tmp_path}/mlflow.db")
    status = library.RunStatus
    assert status.to_string.call_args == call(status.RUNNING)
    params = [(name, "x" * 500) for name in values]
    made = [] if known else [call.create_experiment("esper_soa")]
    assert client.mock_calls == [
        call.get_experiment_by_name("esper_soa"),
        *made,
        call.create_run("5" if known else "6", run_name=f"trial {tmp_path.name}"),
        call.log_batch("run", params=params[:100]),
        call.log_batch("run", params=params[100:]),
        call.update_run("run", status.to_string.return_value),
        call.log_batch("run", [("a", 1.0, int, True, 3), ("b/c", 2.0, int, True, 3)]),
        call.set_terminated("run"),
    ]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "there")
    again = played(monkeypatch, "mlflow", modules, TrackedRun(tmp_path, "trial", {}, "old", 2))
    assert (again.id, client.create_run.call_count) == ("old", 1)
    assert mlflow.MlflowClient.call_args == call("there")
