"""The files of a task of a run in progress: records, tables, and networks: the best host of all
rounds, and all hosts of the last round.

Only the first rank writes. What cannot be written is noted, and the run continues; a best host that
cannot be written waits for the next round. Files of networks have the number of their round in
their names, as checkpoints have. A run that is resumed from a checkpoint finds the best host of
that time, as earlier files stay while a checkpoint needs them. Where ranks share out the hosts, all
look for the best in the same order.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import chain
from pathlib import Path

from esper_soa.config.settings import TrainConfig, settings_yaml
from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.grown.build import GrownHost
from esper_soa.grown.module_files import ModuleFileError, load, save_hosts, write_module
from esper_soa.grown.networks import add_test_accuracy, export_hosts
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.runtime.device import device_name
from esper_soa.runtime.ranks import Ranks
from esper_soa.system.files import DELETED_REASON, LOGGER, LineFile
from esper_soa.system.json_lines import Json, json_line
from esper_soa.system.plain_files import make_folder, remove
from esper_soa.training.files import run_folder
from esper_soa.training.files.session import Session
from esper_soa.training.loop import resume
from esper_soa.training.loop.build import world_facts
from esper_soa.training.loop.recorder import make_recorder

BEST_HOST_FILE = "networks/best"  # names of files that could not be written
HOSTS_FILE = "networks/hosts"
CHOSEN_BY = "validation_accuracy"  # entry of a spec that the best host is highest in


class TaskFiles:
    """Writes the folder of a task."""

    def __init__(self, cfg: TrainConfig, session: Session, world: World, ranks: Ranks) -> None:
        """session: in the folder of the task."""
        self.cfg = cfg
        self.session = session
        self.world = world
        self.ranks = ranks
        self.folder = session.folder
        self.write_errors = session.write_errors
        self.recorder = make_recorder(
            cfg.telemetry, world, session, ranks=ranks, learns=cfg.policy.name == "ppo"
        )
        self.episodes = LineFile(self.folder.episodes)
        self.metrics = LineFile(self.folder.metrics)
        self.best: dict | None = None  # spec of the best host so far
        self._unsaved: GrownHost | None = None  # the best host, where it is not written yet
        self._seen = set[str]()  # names of files of this run
        self.lost: dict[str, int] = {}  # lines that files of callbacks lack, by name

    def begin(self) -> None:
        """Begin afresh; UserError where the folder of the task holds results already."""
        if self.session.part:
            run_folder.open_run_folder(str(self.folder.path), self.cfg.name)
        self.best = self.ranks.from_first(partial(self._find_best, 0))

    def truncate(self, rounds: int) -> None:
        """Drop what later rounds wrote; raises UserError where the folder cannot be written."""
        if self.ranks.first:
            resume.cut_back(self.folder, rounds, self.recorder)
        self.best = self.ranks.from_first(partial(self._find_best, rounds))

    def _find_best(self, rounds: int) -> dict | None:
        for kind in ("best", "hosts"):
            for path in self.folder.network_files(kind):
                if run_folder.rounds_of(path) > rounds:
                    remove(path)
        for path in reversed(self.folder.network_files("best")):
            try:
                return load(path).spec
            except ModuleFileError as error:
                LOGGER.warning("networks %s: it is passed over", error)
        if rounds:
            other = "that of the rounds to come will be the best"
            LOGGER.warning("networks the best host so far is not there: %s", other)
        return None

    def write_records(self) -> None:
        """Write versions.json, and config.yaml where the folder is of this task alone."""
        write_world_versions(self.session, self.world)
        if self.session.part:
            with self.write_errors.attempt(self.folder.config.name):
                run_folder.write_config(self.folder, settings_yaml(self.cfg))

    def write_round(
        self, episodes: Sequence[Mapping[str, Json]], metrics: Mapping[str, Json]
    ) -> None:
        """Append the lines of a round to episodes.jsonl and metrics.jsonl."""
        self.look_for_files()
        if self.cfg.telemetry.level == "off" or not self.ranks.first:
            return
        with self.write_errors.attempt(self.folder.episodes.name):
            self.episodes.write(*map(json_line, episodes))
            self.episodes.sync()
        with self.write_errors.attempt(self.folder.metrics.name):
            self.metrics.write(json_line(metrics))
            self.metrics.sync()

    def look_for_files(self) -> None:
        """Note files that somebody has deleted; IncompleteError where another run may enter."""
        if self.session.claim is None:
            return
        self.session.claim.check()
        folder = self.folder
        written = [folder.config, folder.versions, folder.networks, folder.best]
        there = {path.name for path in written if path.exists()}
        for name in sorted(self._seen - there):
            self.write_errors.note(name, DELETED_REASON)
        self._seen = there

    def save_best(self, states: HostStates, number: int) -> None:
        """Round `number` (from 1) has ended with these hosts: write the run's best if it is here.

        That is: a higher validation accuracy, or the same with fewer parameters; of equals the
        earlier, then the lower env. A host that was rolled back at its last env-step has no
        accuracy, and is never the best.
        """
        accuracies = states.accuracy.nan_to_num(nan=-math.inf).tolist()
        highest = max(accuracies)
        if highest > -math.inf and (self.best is None or highest >= self.best[CHOSEN_BY]):
            envs = [env for env, accuracy in enumerate(accuracies) if accuracy == highest]
            hosts = self.ranks.gather_values(
                self._local_hosts(states, number, envs, chosen_by=CHOSEN_BY)
            )
            first = min(chain(*hosts), key=lambda host: host.spec["parameters"])
            if self.best is None or _rank(first.spec) > _rank(self.best):
                self.best = first.spec
                self._unsaved = first
        if self._unsaved is not None and self.ranks.first:
            with self.write_errors.attempt(BEST_HOST_FILE):
                write_module(
                    self._unsaved.network(), self._path("best", self._unsaved.spec["round"])
                )
                self._unsaved = None

    def save_hosts(self, states: HostStates, number: int) -> None:
        """Write all hosts of round `number` (from 1), as long as they are what they were then."""
        parts = self.ranks.at_first(self._local_hosts(states, number, range(len(states.accuracy))))
        if self.ranks.first:
            with self.write_errors.attempt(HOSTS_FILE):
                save_hosts(list(chain(*parts)), self._path("hosts", number))

    def _local_hosts(
        self, states: HostStates, number: int, envs: Sequence[int], chosen_by: str | None = None
    ) -> list[GrownHost]:
        here = [env for env in envs if env in self.ranks.share(len(states.accuracy))]
        if not here:
            return []
        return export_hosts(self.world, states, number, envs=here, chosen_by=chosen_by)

    def _path(self, kind: str, number: int) -> Path:
        make_folder(self.folder.networks)
        return self.folder.network(kind, number)

    def remove_old_networks(self, oldest: int) -> None:
        """Keep, of what a checkpoint of `oldest` rounds has seen, the newest file of each kind."""
        for kind in ("best", "hosts"):
            files = self.folder.network_files(kind)
            for path in [path for path in files if run_folder.rounds_of(path) <= oldest][:-1]:
                remove(path)

    def measure_best(self) -> None:
        """Put the test accuracy of the run's best host into its file, once all rounds are done."""
        for path in self.folder.network_files("best")[-1:] if self.ranks.first else ():
            with self.write_errors.attempt(BEST_HOST_FILE), suppress(ModuleFileError):
                net = load(path)
                if isinstance(net, GrownNetwork):
                    add_test_accuracy(net, self.world.data)
                    write_module(net, path)

    def close(self) -> None:
        """Close what is open, once all rounds are played."""
        with closing(self.episodes), closing(self.metrics):
            self.recorder.close()


def place_of(world: World) -> str:
    """The device in words."""
    setup = world.setup
    return device_name(world.device, setup.workers, setup.precision)


def write_world_versions(session: Session, world: World) -> None:
    """Write versions.json of a folder in which the hosts of `world` alone are played."""
    with session.write_errors.attempt(session.folder.versions.name):
        run_folder.write_versions(session.folder, place_of(world), world_facts(world))


def _rank(spec: dict) -> tuple[float, int]:
    return spec[CHOSEN_BY], -spec["parameters"]
