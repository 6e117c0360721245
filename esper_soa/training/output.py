"""Writes the files of a run: its checkpoints, and of each task JSON lines, networks and recorded
env-steps.

Only the first rank writes. What cannot be written is noted, and the run continues.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager

from esper_soa.config.settings import TrainConfig
from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.runtime.files import DELETED
from esper_soa.runtime.json_lines import Json, MetricsWriter
from esper_soa.runtime.ranks import Ranks
from esper_soa.training.callbacks import Callback, make_callbacks, make_recorder
from esper_soa.training.checkpoint import save_checkpoint
from esper_soa.training.network_files import NetworkFiles
from esper_soa.training.resume import cut_back
from esper_soa.training.run_folder import rounds_of
from esper_soa.training.session import Session

NEWEST = "the newest checkpoint"  # its name in messages


class Checkpoints:
    """The numbered checkpoints of a run, and that of the policy of its best round."""

    def __init__(self, cfg: TrainConfig, session: Session, ranks: Ranks) -> None:
        self.cfg = cfg
        self.folder = session.folder
        self.write_errors = session.write_errors
        self.writes = ranks.first
        self.rounds = 0  # done
        self.content: dict = {}  # of a checkpoint after them
        self.saved = -1  # rounds done at the newest that this process wrote

    def save_best(self) -> None:
        """Save the policy of the best round so far, as it was before the update."""
        if self.writes:
            with self.write_errors.attempt(self.folder.best.name):
                save_checkpoint(self.folder.best, self.content)

    def save(self, outputs: Collection["TaskOutput"]) -> None:
        """Save the checkpoint of the rounds done, once, and drop what is too old, tasks' files too.

        A full disk costs the checkpoint, not the run; older ones stay.
        """
        path = self.folder.checkpoint(self.rounds)
        if self.saved == self.rounds or not self.writes:
            return
        for one in outputs:
            one.recorder.flush()
        with self.write_errors.attempt(NEWEST):
            save_checkpoint(path, self.content)
            self.saved = self.rounds
            for old in self.folder.checkpoints()[: -self.cfg.checkpoint_keep]:
                old.unlink(missing_ok=True)
            for one in outputs:
                one.networks.remove_old_files(self.oldest)

    @property
    def oldest(self) -> int:
        """Rounds done at the oldest checkpoint; 0 for none."""
        return min(map(rounds_of, self.folder.checkpoints()), default=0)


class TaskOutput:
    """The files of a task in a run, and the callbacks that watch it."""

    def __init__(
        self,
        cfg: TrainConfig,
        session: Session,
        world: World,
        ranks: Ranks,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """callbacks: those beside the settings' own."""
        self.cfg = cfg
        self.folder = session.folder
        self.write_errors = session.write_errors
        self.claim = session.claim
        self.writes = ranks.first
        self.networks = NetworkFiles(self.folder, self.write_errors, cfg, world, ranks)
        self.callbacks = make_callbacks(cfg, callbacks)
        self.recorder = make_recorder(cfg, world, session, ranks)
        self.lost: dict[str, int] = {}  # lines that callbacks lack, by name
        self._lines: dict[str, MetricsWriter] = {}  # open files by name
        self._seen = set[str]()  # names of files of this run

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the recorder and the files of lines for the rounds in the context."""
        writes_lines = self.cfg.telemetry.level != "off" and self.writes
        paths = (self.folder.episodes, self.folder.metrics) if writes_lines else ()
        with ExitStack() as stack:
            self._lines = {path.name: stack.enter_context(MetricsWriter(path)) for path in paths}
            stack.enter_context(closing(self.recorder))
            yield

    def truncate(self, rounds: int) -> None:
        """Drop what later rounds wrote; raises UserError where the folder cannot be written."""
        if self.writes:
            cut_back(self.folder, rounds, self.recorder)
        self.networks.truncate(rounds)

    def log(self, metrics: Mapping[str, Json], episodes: Sequence[Mapping[str, Json]]) -> None:
        """Append the lines of a round to metrics.jsonl and episodes.jsonl.

        Raises IncompleteError where the folder is open to another run.
        """
        self.look_for_files()
        for (name, file), records in zip(self._lines.items(), (episodes, [metrics]), strict=False):
            with self.write_errors.attempt(name):
                file.write(*records)
                file.sync()

    def look_for_files(self) -> None:
        """Note which files of this run somebody has deleted."""
        if self.claim is None:
            return
        self.claim.check()
        folder = self.folder
        written = [folder.config, folder.versions, folder.networks, folder.best]
        there = {path.name for path in written if path.exists()}
        for name in sorted(self._seen - there):
            self.write_errors.note(name, DELETED)
        self._seen = there

    def save_networks(self, number: int, hosts: HostStates, due: bool) -> None:
        """Save the networks of round `number`, from 1; due: whether a checkpoint of it is."""
        self.networks.save_best(hosts, number)
        if due or number == self.cfg.rounds:
            self.networks.save_hosts()
