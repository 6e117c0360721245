"""The files of a task of a run in progress: records, tables and networks.

Only the first rank writes. What cannot be written is noted, and the run continues.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from esper_soa.config.settings import TrainConfig, settings_yaml
from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.runtime.files import DELETED, LineFile
from esper_soa.runtime.json_lines import Json, json_line
from esper_soa.runtime.ranks import Ranks
from esper_soa.training import resume, run_folder
from esper_soa.training.build import world_facts
from esper_soa.training.callbacks import make_recorder
from esper_soa.training.network_files import NetworkFiles
from esper_soa.training.session import Session


class TaskFiles:
    """Writes the folder of a task."""

    def __init__(self, cfg: TrainConfig, session: Session, world: World, ranks: Ranks) -> None:
        """session: in the folder of the task."""
        self.cfg = cfg
        self.session = session
        self.ranks = ranks
        self.networks = NetworkFiles(cfg, session, world, ranks)
        self.recorder = make_recorder(cfg, world, session, ranks)
        folder = session.folder
        writes_lines = cfg.telemetry.level != "off" and ranks.first
        paths = (folder.episodes, folder.metrics) if writes_lines else ()
        self.lines = {path.name: LineFile(path) for path in paths}
        self._seen = set[str]()  # names of files of this run

    def begin(self) -> None:
        """Begin afresh; UserError where the folder of the task holds results already."""
        if self.session.part:
            run_folder.open_run_folder(str(self.session.folder.path), self.cfg.name)
        self.networks.truncate(0)

    def truncate(self, rounds: int) -> None:
        """Drop what later rounds wrote; raises UserError where the folder cannot be written."""
        if self.ranks.first:
            resume.cut_back(self.session.folder, rounds, self.recorder)
        self.networks.truncate(rounds)

    def write_records(self, place: str, world: World) -> None:
        """Write versions.json, and config.yaml where the folder is of this task alone."""
        folder = self.session.folder
        write_errors = self.session.write_errors
        with write_errors.attempt(folder.versions.name):
            run_folder.write_versions(folder, place, world_facts(world))
        if self.session.part:
            with write_errors.attempt(folder.config.name):
                run_folder.write_config(folder, settings_yaml(self.cfg))

    def write_round(
        self, episodes: Sequence[Mapping[str, Json]], metrics: Mapping[str, Json]
    ) -> None:
        """Append the lines of a round to episodes.jsonl and metrics.jsonl."""
        self.look_for_files()
        for (name, file), records in zip(self.lines.items(), (episodes, [metrics]), strict=False):
            with self.session.write_errors.attempt(name):
                file.write(*map(json_line, records))
                file.sync()

    def look_for_files(self) -> None:
        """Note which files of this run somebody has deleted.

        Raises IncompleteError where the folder is open to another run.
        """
        if self.session.claim is None:
            return
        self.session.claim.check()
        folder = self.session.folder
        written = [folder.config, folder.versions, folder.networks, folder.best]
        there = {path.name for path in written if path.exists()}
        for name in sorted(self._seen - there):
            self.session.write_errors.note(name, DELETED)
        self._seen = there

    def save_networks(self, hosts: HostStates, number: int, every_host: bool) -> None:
        """Save the best of the hosts that round `number` (from 1) has ended with, if it is the best
        of the run; with every_host all of them too.
        """
        self.networks.save_best(hosts, number)
        if every_host:
            self.networks.save_hosts(hosts, number)

    def close(self) -> None:
        """Close what is open, once all rounds are played."""
        with ExitStack() as stack:
            for file in self.lines.values():
                stack.callback(file.close)
            stack.callback(self.recorder.close)
