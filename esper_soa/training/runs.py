"""The package from Python: train, open a run that there is, and take out of it what it has found.

A run is known by its folder alone: one from elsewhere, or still going on, is opened too.
"""

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from signal import SIGINT

import torch

from esper_soa.agent.controller import Controller, controller_spec
from esper_soa.config.compose import compose_settings
from esper_soa.config.errors import UserError, check, one_line
from esper_soa.config.nets import blueprint_names
from esper_soa.config.registry import name_in
from esper_soa.config.settings import settings_from_mapping
from esper_soa.grown.module_files import load
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.nets.model.user_parts import task_slots
from esper_soa.runtime.signals import Interrupted
from esper_soa.runtime.versions import package_versions
from esper_soa.training.callbacks import Callback
from esper_soa.training.launch import train_within
from esper_soa.training.resume import read_run, restore_policy
from esper_soa.training.run_folder import RunFolder, find_checkpoint
from esper_soa.training.session import quiet_warnings, session
from esper_soa.training.start import begin_run, make_run_folder


class RecordedRun:
    """A run, by what lies in its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path  # of the folder
        self.folder = RunFolder(path)

    def __repr__(self) -> str:
        return f"RecordedRun({str(self.path)!r})"

    @property
    def summary(self) -> dict:
        """summary.json: the final table in numbers; UserError where the run has not ended."""
        return dict(json.loads(self._text(self.folder.summary, "the run has not come to its end")))

    def metrics(self) -> list[dict]:
        """metrics.jsonl: a record per round that is done."""
        return [json.loads(line) for line in self._text(self.folder.metrics).splitlines()]

    def episodes(self) -> list[dict]:
        """episodes.jsonl: a record per host of every round that is done."""
        return [json.loads(line) for line in self._text(self.folder.episodes).splitlines()]

    def export(self, env: int | str = "best") -> GrownNetwork:
        """A host as a module in eval mode: images [B, 3, 32, 32] in [0, 1] to logits [B, classes].

        env: "best", the host with the highest validation accuracy that a round of the run has ended
        with, then with the fewest parameters; or the number of a host of the last round. Raises
        UserError where it is not there.
        """
        number = None if isinstance(env, str) else int(env)
        known = number is not None or env == "best"
        check(known, "env", env, "best, or the number of a host of the last round")
        kind = "best" if number is None else "hosts"
        found = self.folder.network_files(kind)
        if not found:
            late = "with every checkpoint and at the end of the last round"
            when = "once a round is done" if number is None else late
            raise UserError(f"env={env}: {self.path} holds no such network; it is written {when}")
        net = load(found[-1], number)
        if not isinstance(net, GrownNetwork):
            raise UserError(f"{found[-1]}: holds no network")
        return net

    def policy(self, which: str = "newest") -> Controller:
        """The learned policy as a module: observation in, legal action out: agent/controller.py.

        which: "newest", of the newest checkpoint; "best", that played the best round; or a
        checkpoint's name. Raises UserError where nothing was learned, or there is none such.
        """
        named = {"newest": self.path, "best": self.folder.best}.get(which, self.path / which)
        saved = read_run(find_checkpoint(str(named), "policy"), torch.device("cpu"))
        settings = settings_from_mapping(saved.settings)
        learns = saved.learner is not None
        check(learns, "policy", settings.policy.name, "one that learns, as ppo does")
        slots = task_slots(settings.task, settings.slots)
        names = blueprint_names(settings.task.blueprints)
        spec = controller_spec(settings.policy, slots, tuple(map(name_in, names)))
        facts = {
            "task": settings.task.host_name,
            "rounds": saved.progress.rounds_done,
            "seed": settings.seed,
            "data": saved.data,
            "version": package_versions()["esper-soa"],
        }
        with torch.random.fork_rng(devices=[]):
            made = Controller(spec | facts)
        restore_policy(made.policy, saved)
        return made.eval()

    def _text(self, path: Path, otherwise: str = "") -> str:
        """What the file holds; without it nothing, or UserError with the reason `otherwise`."""
        if path.exists():
            return path.read_text(encoding="utf-8")
        if otherwise:
            raise UserError(f"{self.path}: there is no {path.name}: {otherwise}")
        return ""


def open_run(path: str | PathLike[str]) -> RecordedRun:
    """The run in a folder; raises UserError where there is none."""
    folder = RunFolder(Path(path).expanduser().resolve())
    if not folder.config.is_file():
        raise UserError(
            f"{one_line(path)}: is not the folder of a run: there is no {folder.config.name} in it"
        )
    return RecordedRun(folder.path)


def train(
    experiment: str = "", overrides: Sequence[str] = (), callbacks: Sequence[Callback] = ()
) -> RecordedRun:
    """Train as `esper-train +experiment=... overrides...` does, and return the run.

    callbacks: called at the start of the run, after every round and at its end; see Callback.

    A caller's own use of Hydra and of torch's threads is left as it is. An interrupt (Ctrl-C, or
    the stop button of a notebook) ends the run with a checkpoint and a KeyboardInterrupt that says
    how to go on. Raises UserError for settings that cannot work, OutOfRoomError where memory ran
    out, and IncompleteError, with everything played, where something could not be written.
    """
    changes = [f"+experiment={experiment}"] * bool(experiment) + list(overrides)
    settings = compose_settings(experiment, overrides)
    folder = make_run_folder(settings, settings.run_dir)
    threads = torch.get_num_threads()
    try:
        with session(folder) as within, quiet_warnings():
            train_within(within, settings, begin_run(within, settings, changes), callbacks)
    except Interrupted as stop:
        if stop.number != SIGINT:
            raise
        raise KeyboardInterrupt(f"{stop}. Go on with resume={folder.path}") from None
    finally:
        torch.set_num_threads(threads)
    return RecordedRun(folder.path)
