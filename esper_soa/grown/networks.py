"""The folder networks/ of a run: the best host of all its rounds, and all hosts of its last round.

Files have the number of their round in their names, as checkpoints have. A run that goes on from a
checkpoint finds what was the best host then, as the ones before are kept while a checkpoint needs
them. Where ranks share out the hosts, all look for the best in the same order, and the first one
writes.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from esper_soa.config.settings import TrainConfig
from esper_soa.env.topology import Standing
from esper_soa.env.world import World
from esper_soa.grown.build import Grown, Pixels, Residents, grown_hosts
from esper_soa.grown.module_files import ModuleFileError, load, save, save_hosts
from esper_soa.nets.data.image_set import images_of
from esper_soa.runtime.files import LOGGER, Unwritten
from esper_soa.training.run_folder import RunFolder, package_versions, rounds_of

BEST = "networks/best"  # what files are called that could not be written
HOSTS = "networks/hosts"


class Networks:
    """Writes the folder. A best host that cannot be written waits for the next round."""

    def __init__(
        self, folder: RunFolder, unwritten: Unwritten, cfg: TrainConfig, world: World
    ) -> None:
        """At the start of a run: no host has been seen."""
        self.folder = folder
        self.unwritten = unwritten
        self.cfg = cfg
        self.world = world
        self.ranks = world.ranks
        self.best: dict | None = None  # spec of the best host so far
        self.waiting: Grown | None = None  # it, where it is not written yet
        self.newest: tuple[Standing, int] | None = None  # round that was played last, its number

    def go_back(self, rounds: int) -> None:
        """The run goes on after `rounds` rounds: later files go, the best host is that of then."""
        self.best = self.ranks.from_first(partial(self._found_best, rounds))

    def _found_best(self, rounds: int) -> dict | None:
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
            gone = "the best host so far is not there: that of the rounds to come will be the best"
            LOGGER.warning("networks %s", gone)
        return None

    def follow(self, standing: Standing, number: int) -> None:
        """Round `number` (from 1) has ended with these hosts: write the run's best if it is here.

        That is: a higher validation accuracy, or the same with fewer parameters; of equals the
        earlier, then the lower env. A host that was rolled back at its last env-step has no
        accuracy, and is never the best.
        """
        self.newest = standing, number
        accuracies = standing.accuracy.nan_to_num(nan=-math.inf).tolist()
        highest = max(accuracies)
        if highest > -math.inf and (self.best is None or highest >= self.best["accuracy"]):
            envs = [env for env, accuracy in enumerate(accuracies) if accuracy == highest]
            found = self.ranks.of_all(self.own_hosts(standing, number, envs))
            first = min(chain(*found), key=lambda host: host.spec["parameters"])
            if self.best is None or _rank(first.spec) > _rank(self.best):
                self.best = first.spec
                self.waiting = first
        if self.waiting is not None and self.ranks.first:
            with self.unwritten.noting(BEST):
                save(self.waiting.network(), self._path("best", self.waiting.spec["round"]))
                self.waiting = None

    def keep(self) -> None:
        """Write all hosts of the newest round, as long as they are what they were then."""
        if self.newest is None:
            return
        standing, number = self.newest
        parts = self.ranks.at_first(self.own_hosts(standing, number, range(len(standing.accuracy))))
        if self.ranks.first:
            with self.unwritten.noting(HOSTS):
                save_hosts(list(chain(*parts)), self._path("hosts", number))

    def tidy(self) -> None:
        """Keep, of what the oldest checkpoint has seen, the newest file of each kind."""
        oldest = min(map(rounds_of, self.folder.checkpoints()), default=0)
        for kind in ("best", "hosts"):
            files = self.folder.network_files(kind)
            for path in [path for path in files if rounds_of(path) <= oldest][:-1]:
                path.unlink(missing_ok=True)

    def own_hosts(self, standing: Standing, number: int, envs: Sequence[int]) -> list[Grown]:
        """Those of these hosts of round `number` (from 1) that this rank has."""
        own = [env for env in envs if env in self.ranks.share(len(standing.accuracy))]
        return measured_hosts(self.world, self.cfg, standing, number, own) if own else []

    def _path(self, kind: str, number: int) -> Path:
        self.folder.networks.mkdir(exist_ok=True)
        return self.folder.network(kind, number)


def measured_hosts(
    world: World, cfg: TrainConfig, standing: Standing, number: int, envs: Sequence[int]
) -> list[Grown]:
    """These hosts of the world, as they were last measured, with a spec that says so.

    envs: their numbers among all that `standing` tells of.
    """
    images = images_of(world.data)
    facts = {
        "task": cfg.task.host_name,
        "round": number,
        "seed": cfg.seed,
        "data": {"name": images.name, "source": images.source, "identity": images.identity},
        "validation_images": world.sizes.val_samples,
        "precision": str(world.rules.nets.precision).removeprefix("torch."),
        "version": package_versions()["esper-soa"],
    }
    rows = [env - world.ranks.first_env for env in envs]
    columns = [part.tolist() for part in standing[:4]]
    mine = [Residents(*(column[env] for column in columns)) for env in envs]
    pixels = Pixels(images.mean, images.std)
    found = grown_hosts(world.rules.nets.shape, world.weights, rows, mine, pixels)
    for env, host in zip(envs, found, strict=True):
        scores = (float(part[env]) for part in (standing.accuracy, standing.loss))
        accuracy, loss = (None if math.isnan(one) else one for one in scores)
        host.spec.update(facts | {"env": env, "accuracy": accuracy, "loss": loss})
    return found


def _rank(spec: dict) -> tuple[float, int]:
    return spec["accuracy"], -spec["parameters"]
