"""The folder networks/ of a run: the best host of all its rounds, and all hosts of its last round.

Files have the number of their round in their names, as checkpoints have. A run that is resumed from
a checkpoint finds the best host of that time, as earlier files stay while a checkpoint needs them.
Where ranks share out the hosts, all look for the best in the same order, and the first one writes.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from esper_soa.config.settings import TrainConfig
from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.grown.build import GrownHost
from esper_soa.grown.module_files import ModuleFileError, load, save, save_hosts
from esper_soa.grown.networks import add_test_accuracy, export_hosts
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.runtime.files import LOGGER
from esper_soa.runtime.ranks import Ranks
from esper_soa.training.run_folder import rounds_of
from esper_soa.training.session import Session

BEST = "networks/best"  # what files are called that could not be written
HOSTS = "networks/hosts"
CHOSEN_BY = "validation_accuracy"  # entry of a spec that the best host is highest in


class NetworkFiles:
    """Writes the folder. A best host that cannot be written waits for the next round."""

    def __init__(self, cfg: TrainConfig, session: Session, world: World, ranks: Ranks) -> None:
        self.folder = session.folder
        self.write_errors = session.write_errors
        self.cfg = cfg
        self.world = world
        self.ranks = ranks
        self.best: dict | None = None  # spec of the best host so far
        self.unsaved: GrownHost | None = None  # it, where it is not written yet

    def truncate(self, rounds: int) -> None:
        """Resume after `rounds` rounds: drop later files, and find the best host of that time."""
        self.best = self.ranks.from_first(partial(self._find_best, rounds))

    def _find_best(self, rounds: int) -> dict | None:
        for kind in ("best", "hosts"):
            for path in self.folder.network_files(kind):
                if rounds_of(path) > rounds:
                    path.unlink(missing_ok=True)
        for path in reversed(self.folder.network_files("best")):
            try:
                return load(path).spec
            except ModuleFileError as error:
                LOGGER.warning("networks %s: it is passed over", error)
        if rounds:
            other = "that of the rounds to come will be the best"
            LOGGER.warning("networks the best host so far is not there: %s", other)
        return None

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
            hosts = self.ranks.gather_values(self.local_hosts(states, number, envs, CHOSEN_BY))
            first = min(chain(*hosts), key=lambda host: host.spec["parameters"])
            if self.best is None or _rank(first.spec) > _rank(self.best):
                self.best = first.spec
                self.unsaved = first
        if self.unsaved is not None and self.ranks.first:
            with self.write_errors.attempt(BEST):
                save(self.unsaved.network(), self._path("best", self.unsaved.spec["round"]))
                self.unsaved = None

    def save_hosts(self, states: HostStates, number: int) -> None:
        """Write all hosts of round `number` (from 1), as long as they are what they were then."""
        parts = self.ranks.at_first(self.local_hosts(states, number, range(len(states.accuracy))))
        if self.ranks.first:
            with self.write_errors.attempt(HOSTS):
                save_hosts(list(chain(*parts)), self._path("hosts", number))

    def remove_old_files(self, oldest: int) -> None:
        """Keep, of what a checkpoint of `oldest` rounds has seen, the newest file of each kind."""
        for kind in ("best", "hosts"):
            files = self.folder.network_files(kind)
            for path in [path for path in files if rounds_of(path) <= oldest][:-1]:
                path.unlink(missing_ok=True)

    def measure_best(self) -> None:
        """Put the test accuracy of the run's best host into its file, once all rounds are done."""
        for path in self.folder.network_files("best")[-1:] if self.ranks.first else ():
            with self.write_errors.attempt(BEST), suppress(ModuleFileError):
                net = load(path)
                if isinstance(net, GrownNetwork):
                    add_test_accuracy(net, self.world.data)
                    save(net, path)

    def local_hosts(
        self, states: HostStates, number: int, envs: Sequence[int], chosen_by: str | None = None
    ) -> list[GrownHost]:
        """Those of these hosts of round `number` (from 1) that this rank has."""
        own = [env for env in envs if env in self.ranks.share(len(states.accuracy))]
        arguments = self.world, self.cfg, states, number, own
        return export_hosts(*arguments, chosen_by) if own else []

    def _path(self, kind: str, number: int) -> Path:
        self.folder.networks.mkdir(exist_ok=True)
        return self.folder.network(kind, number)


def _rank(spec: dict) -> tuple[float, int]:
    return spec[CHOSEN_BY], -spec["parameters"]
