"""Hosts of a world as they were last measured, taken out as plain networks."""

import math
from collections.abc import Sequence

from esper_soa.config.settings import TrainConfig
from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.grown.build import GrownHost, Residents, grown_hosts
from esper_soa.runtime.versions import package_versions


def measured_hosts(
    world: World, cfg: TrainConfig, states: HostStates, number: int, envs: Sequence[int]
) -> list[GrownHost]:
    """These hosts of the world, as they were last measured, with a spec that says so.

    envs: their numbers among all that `states` tells of.
    """
    source = world.data
    facts = {
        "task": cfg.task.host_name,
        "round": number,
        "seed": cfg.seed,
        "data": {"name": source.name, "source": source.source, "identity": source.identity},
        f"validation_{source.spec.name}": world.sizes.val_samples,
        "precision": str(world.rules.nets.precision).removeprefix("torch."),
        "version": package_versions()["esper-soa"],
    }
    rows = [env - world.reduction.first_env for env in envs]
    columns = [part.tolist() for part in states[:4]]
    mine = [Residents(*(column[env] for column in columns)) for env in envs]
    found = grown_hosts(world.rules.nets.shape, world.weights, rows, mine, source.input_spec())
    for env, host in zip(envs, found, strict=True):
        scores = (float(part[env]) for part in (states.accuracy, states.loss))
        accuracy, loss = (None if math.isnan(one) else one for one in scores)
        host.spec.update(facts | {"env": env, "accuracy": accuracy, "loss": loss})
    return found
