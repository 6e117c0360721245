"""The package from Python: train a run, open one, and read its results, samples and networks.

A run is its folder: one from another machine, or one in progress, can be opened too.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper_soa.agent.controller import Controller, controller_spec
from esper_soa.config.compose import compose_settings, override_list
from esper_soa.config.nets import blueprint_names
from esper_soa.config.ranges import env_words
from esper_soa.config.registry import is_reference, name_in
from esper_soa.config.settings import MAX_ENVS, TrainConfig, settings_from_mapping
from esper_soa.grown.module_files import load
from esper_soa.grown.networks import (
    NetworkScore,
    add_test_accuracy,
    score_classes,
    score_network,
)
from esper_soa.grown.plain import plain_module
from esper_soa.nets.data import orders
from esper_soa.nets.data.batches import BatchSource
from esper_soa.nets.data.datasets import load_samples
from esper_soa.nets.data.image_set import source_of
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.nets.model.user_parts import task_slots
from esper_soa.system.errors import (
    SettingError,
    UserError,
    check,
    check_choice,
    check_path,
    one_line,
    reading,
    whole_number,
)
from esper_soa.system.plain_files import FILE, list_folder, open_plain, read_text
from esper_soa.system.signals import Interrupted
from esper_soa.system.torch_state import package_state
from esper_soa.system.versions import package_versions
from esper_soa.training.files.run_folder import RunFolder, find_checkpoint, read_config
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.files.session import quiet_warnings, session
from esper_soa.training.loop.callbacks import Callback
from esper_soa.training.loop.resume import restore_policy
from esper_soa.training.start.begin import begin_run, make_run_folder
from esper_soa.training.start.launch import train_in_session

if TYPE_CHECKING:
    from pandas import DataFrame
    from pyarrow import Table

TABLE_FILES = "round_*.parquet"
TABLES = ("steps", "slots", "events", "control_steps", "effects", "choices", "subsets")
MAX_OPENED_SETTINGS = 1 << 20  # bytes of the config.yaml of a run that is opened, of many tasks
DATA_SPLITS = ("train", "validation", "test")


class RecordedRun:
    """A run, by the files in its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path  # path of the folder
        self.folder = RunFolder(path)

    def __repr__(self) -> str:
        return f"RecordedRun({str(self.path)!r})"

    @property
    def summary(self) -> dict:
        """summary.json: the final table in numbers; UserError where the run has not ended."""
        text = self._text(self.folder.summary, "the run has not come to its end")
        with reading(self.folder.summary, UserError, "the summary of a run"):
            return dict(json.loads(text))

    def metrics(self) -> list[dict]:
        """metrics.jsonl: a record per round that is done."""
        return self._lines(self.folder.metrics)

    def episodes(self) -> list[dict]:
        """episodes.jsonl: a record per host of every round that is done."""
        return self._lines(self.folder.episodes)

    def table(self, name: str) -> "Table":
        """A table of docs/telemetry.md, all rounds of it, as Arrow: for duckdb, polars, pandas.

        name: steps, slots, events, control_steps (the control's), effects, choices or subsets.
        Raises UserError where the run has written no such table.
        """
        check_choice("table", name, TABLES)
        entries = list_folder(self.folder.tables / name)
        files = [path for path in entries if entries[path] == FILE and path.match(TABLE_FILES)]
        if not files:
            self._check_one_task()
            level = "full" if name in TABLES[-2:] else "events"
            asked = "effects.ops" if name == "effects" else f"telemetry.level={level}"
            reason = f"it is written with {asked}, once a round is done"
            control = ", of a control" * (name == "control_steps")
            raise UserError(f"{self.path}: there is no table {name}: {reason}{control}")
        with reading(self.folder.tables, UserError, "tables of a run"):
            tables = [import_module("pyarrow.parquet").read_table(file) for file in files]
            joined: Table = import_module("pyarrow").concat_tables(tables)
        return joined

    def steps(self) -> "DataFrame":
        """`table("steps")` as a data frame: a row per round, env-step and env.

        Raises UserError where pandas is not installed, or the run has written no such table
        (telemetry.level=off or rounds).
        """
        return self._frame("steps")

    def slots(self) -> "DataFrame":
        """`table("slots")` as a data frame, see `steps`: a row per env-step, env and slot."""
        return self._frame("slots")

    def events(self) -> "DataFrame":
        """`table("events")` as a data frame, see `steps`: a row per event of a seed or an env."""
        return self._frame("events")

    def control_steps(self) -> "DataFrame":
        """`table("control_steps")` as a data frame: the `steps` of the first control."""
        return self._frame("control_steps")

    def _frame(self, name: str) -> "DataFrame":
        table = self.table(name)
        if find_spec("pandas") is None:
            remedy = f'Install esper-soa[pandas], or take table("{name}"), which is Arrow'
            raise UserError(f"{name}: needs pandas. {remedy}")
        frame: DataFrame = table.to_pandas()
        return frame

    @cached_property
    def settings(self) -> TrainConfig:
        """The settings of the run."""
        with reading(self.folder.config, UserError, "settings of a run"):
            return settings_from_mapping(read_config(self.folder.config, MAX_OPENED_SETTINGS))

    @cached_property
    def _source(self) -> BatchSource:
        """The data of the run; UserError where it is another now."""
        source = load_samples(self.settings.data, "cpu")
        text = self._text(self.folder.versions, "the run has not begun")
        with reading(self.folder.versions, UserError, "the versions of a run"):
            identity = json.loads(text)["data"]["identity"]
        if source.identity != identity:
            gone = f"its {source.spec.name} are not there any more"
            raise UserError(f"{self.path}: {gone}: {source.source}")
        return source

    @package_state()
    def samples(self, split: str = "validation", env: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and labels, on the CPU: images float32 [B, 3, 32, 32] in [0, 1], RGB, and int64
        [B]; other samples as their data set gives them to grown networks.

        split: "train" or "test", that whole part of the data set; "validation", the samples of the
        validation part that the run measures hosts on. env: the host whose samples these are, where
        data.split=true or a list in data.name gives each host its own. Raises UserError for another
        split, and where the data is not what it was.
        """
        check(split in DATA_SPLITS, "split", split, allowed=" or ".join(DATA_SPLITS))
        env = whole_number("env", env, 0, high=MAX_ENVS)
        source = source_of(self._source, env)
        if split == "validation":
            return source.samples(split, self._validation_order(source, env))
        labels = source.train_labels if split == "train" else source.test_labels
        return source.samples(split, torch.arange(len(labels)))

    def images(self, split: str = "validation", env: int = 0) -> tuple[Tensor, Tensor]:
        """The `samples` of a run on images."""
        return self.samples(split, env)

    def _validation_order(self, source: BatchSource, env: int) -> Tensor:
        cfg = self.settings
        num_val = len(source.val_labels)
        if not cfg.data.split:
            return orders.validation_order(num_val, cfg.val_samples, cfg.seed)
        check(0 <= env < cfg.envs, "env", env, allowed=f"0 to {cfg.envs - 1}")
        shares = orders.split_sizes(source, cfg.batch_size, cfg.envs)
        order = orders.split_validation_order(num_val, shares)[env]
        return order[order >= 0]

    @package_state()
    def evaluate(self, net: nn.Module, split: str = "test") -> NetworkScore:
        """Accuracy and loss of `net`, in eval mode, on samples of the run, as `samples` gives them.

        net: images [B, 3, 32, 32] in [0, 1] to logits [B, classes], other samples to logits
        [B, K, classes] for K targets each, on any device. split: "test", "validation" or "train".
        For a host of this run, as `export` gives it, "test" gives the test_accuracy of its `spec`;
        "validation" its validation_accuracy, unless rounding decides between two classes, and its
        validation_loss to 1e-5. Raises UserError where the data is not what it was.
        """
        check(isinstance(net, nn.Module), "net", net, allowed="a module of torch")
        plain: nn.Module = net
        with suppress(UserError):  # no network of a run
            plain = plain_module(net)
        if not isinstance(plain, GrownNetwork):
            return score_network(net, *self.samples(split))
        with reading("net", UserError, "a network that takes the samples of the run"):
            return score_network(net, *self.samples(split, plain.spec["env"]))

    @package_state()
    def evaluate_by_class(self, net: GrownNetwork, split: str = "test") -> dict:
        """Accuracy and AUC of each class, and the confusion matrix, of a host; as of `evaluate`."""
        plain = plain_module(net)
        if not isinstance(plain, GrownNetwork):
            raise SettingError("net", net, "a network of the run")
        with reading("net", UserError, "a network that takes the samples of the run"):
            inputs, labels = self.samples(split, plain.spec["env"])
            return score_classes(plain, inputs, labels)

    @package_state()
    def export(self, env: int | str = "best") -> GrownNetwork:
        """A host as a module in eval mode: samples as of `samples` to logits as of `evaluate`.

        env: "best", the host with the highest validation accuracy that a round of the run has ended
        with, then with the fewest parameters; or the number of a host of the last round. Its `spec`
        has its accuracy on the test images, measured here, where the images of the run are here.
        Raises UserError where it is not there. Nothing is imported: images of a data set of your
        own are here where its module is.
        """
        number = None if isinstance(env, str) else env
        known = number is not None or env == "best"
        check(known, "env", env, allowed="best, or the number of a host of the last round")
        kind = "best" if number is None else "hosts"
        files = self.folder.network_files(kind)
        if not files:
            self._check_one_task()
            available_text = "with every checkpoint and at the end of the last round"
            hint = "once a round is done" if number is None else available_text
            raise UserError(f"env={env}: {self.path} holds no such network; it is written {hint}")
        os.close(open_plain(files[-1]))  # no link leads to it, which `load` would follow
        net = load(files[-1], number)
        if not isinstance(net, GrownNetwork):
            raise UserError(f"{files[-1]}: holds no network")
        source = None
        with suppress(UserError):
            names = filter(is_reference, env_words(self.settings.data.name))
            if all(name.partition(":")[0] in sys.modules for name in names):
                source = self._source
        if source is not None:
            with reading(files[-1], UserError, "a network that takes the samples of its run"):
                add_test_accuracy(net, source)
        return net

    @property
    def tasks(self) -> dict[str, "RecordedRun"]:
        """Each task of the run by its name, as the run on it alone would be; of one task, itself.

        The policy is that of the whole run.
        """
        if not self.settings.worlds:
            return {self.settings.task.name: self}
        return {name: RecordedRun(self.path / name) for name in self.settings.worlds}

    @package_state()
    def policy(self, which: str = "newest", task: str = "") -> Controller:
        """The learned policy as a module: observation in, legal action out: agent/controller.py.

        which: "newest", of the newest checkpoint; "best", that played the best round; or a
        checkpoint's name. task: whose hosts it is for; "" = the first one's. Raises UserError where
        nothing was learned, or there is none such.
        """
        check_path("which", which)
        named = {"newest": self.path, "best": self.folder.best}.get(which, self.path / which)
        checkpoint_run = read_run(find_checkpoint(str(named), "policy"), torch.device("cpu"))
        by_task = settings_from_mapping(checkpoint_run.settings).by_task
        check_choice("task", task or next(iter(by_task)), tuple(by_task))
        settings = by_task[task or next(iter(by_task))]
        learns = checkpoint_run.learner is not None
        check(learns, "policy", settings.policy.name, allowed="one that learns, as ppo does")
        slots = task_slots(settings.task, settings.slots, settings.data.image_shape)
        names = blueprint_names(settings.task.blueprints)
        spec = controller_spec(settings.policy, slots, tuple(map(name_in, names)))
        facts = {
            "task": settings.task.host_name,
            "rounds": checkpoint_run.rounds_done,
            "seed": settings.seed,
            "data": checkpoint_run.task(settings.task.name).data,
            "version": package_versions()["esper-soa"],
        }
        controller = Controller(spec | facts)
        restore_policy(controller.policy, checkpoint_run)
        return controller.eval()

    def _check_one_task(self) -> None:
        """Raise UserError where each of several tasks has its own files."""
        names = ", ".join(self.settings.worlds) if self.folder.config.exists() else ""
        if names:
            raise UserError(f"{self.path}: has a folder for each of its tasks: {names}. Take one")

    def _lines(self, path: Path) -> list[dict]:
        """The records of the file, one a line."""
        text = self._text(path)
        with reading(path, UserError, "lines of JSON"):
            return [dict(json.loads(line)) for line in text.splitlines()]

    def _text(self, path: Path, otherwise: str = "") -> str:
        """The records of the file; without it nothing, or UserError with the reason `otherwise`."""
        with reading(path, UserError, "text of a run"), suppress(FileNotFoundError):
            return read_text(path)
        self._check_one_task()
        if otherwise:
            raise UserError(f"{self.path}: there is no {path.name}: {otherwise}")
        return ""


def open_run(path: str | PathLike[str]) -> RecordedRun:
    """The run in a folder; raises UserError where there is none."""
    check_path("path", path)
    folder = RunFolder(Path(path).expanduser().resolve())
    if not folder.config.is_file():
        problem = f"is not the folder of a run: there is no {folder.config.name} in it"
        raise UserError(f"{one_line(path)}: {problem}")
    return RecordedRun(folder.path)


@package_state()
def train(
    experiment: str = "",
    overrides: str | Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    *,
    verbose: int = 1,
) -> RecordedRun:
    """Train as `esper-train +experiment=... overrides...` does, and return the run.

    callbacks: called at the start of the run, after every round and at its end; see Callback.
    verbose: what the console shows: 0 nothing, 1 progress, messages and the final table, 2 debug
    messages too. log.txt in the folder of the run has all of them.

    A caller's own use of Hydra and state of torch are left as they are. An interrupt (Ctrl-C, or
    the stop button of a notebook) ends the run with a checkpoint and a KeyboardInterrupt that says
    how to go on. Raises UserError for settings that cannot work, RunMemoryError where memory ran
    out, and IncompleteError, with everything played, where something could not be written.
    """
    check(verbose in (0, 1, 2), "verbose", verbose, allowed="0, 1 or 2")
    is_list = isinstance(callbacks, Sequence) and all(
        isinstance(callback, Callback) for callback in callbacks
    )
    check(is_list, "callbacks", callbacks, allowed="a list of instances of Callback")
    changes = [f"+experiment={experiment}"] * bool(experiment) + override_list(overrides)
    settings = compose_settings(experiment, overrides)
    folder = make_run_folder(settings, settings.run_dir)
    try:
        train_in_folder(folder, settings, changes, callbacks=callbacks, verbose=verbose)
    except Interrupted as stop:
        if stop.number != SIGINT:
            raise
        raise KeyboardInterrupt(f"{stop}. Go on with resume={folder.path}") from None
    return RecordedRun(folder.path)


def train_in_folder(
    folder: RunFolder,
    settings: TrainConfig,
    overrides: Sequence[str],
    callbacks: Sequence[Callback] = (),
    verbose: int = 1,
) -> None:
    """`train` by settings, which the `overrides` made, in a folder of `make_run_folder`."""
    threads = torch.get_num_threads()
    try:
        with session(folder, verbose) as opened, quiet_warnings():
            train_in_session(
                opened, settings, begin_run(opened, settings, overrides), callbacks=callbacks
            )
    finally:
        torch.set_num_threads(threads)
