"""Hosts of a world as they were last measured, taken out as plain networks."""

import math
from collections.abc import Sequence

from esper_soa.config.settings import TrainConfig
from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.grown.build import GrownHost, Pixels, Residents, grown_hosts
from esper_soa.nets.data.image_set import images_of
from esper_soa.runtime.versions import package_versions


def measured_hosts(
    world: World, cfg: TrainConfig, states: HostStates, number: int, envs: Sequence[int]
) -> list[GrownHost]:
    """These hosts of the world, as they were last measured, with a spec that says so.

    envs: their numbers among all that `states` tells of.
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
    rows = [env - world.reduction.first_env for env in envs]
    columns = [part.tolist() for part in states[:4]]
    mine = [Residents(*(column[env] for column in columns)) for env in envs]
    pixels = Pixels(images.mean, images.std)
    found = grown_hosts(world.rules.nets.shape, world.weights, rows, mine, pixels)
    for env, host in zip(envs, found, strict=True):
        scores = (float(part[env]) for part in (states.accuracy, states.loss))
        accuracy, loss = (None if math.isnan(one) else one for one in scores)
        host.spec.update(facts | {"env": env, "accuracy": accuracy, "loss": loss})
    return found
