"""Hosts with every kind of seed in every stage, trained and measured by an engine: what the tests
of exports share.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.world import World
from esper_soa.grown.build import GrownHost, SlotContents, grown_hosts
from esper_soa.nets.engine import ValidationReport
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.nets.seeds.pools import slot_seeds
from esper_soa.state import Slots
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend, Blueprint, Stage

SLOTS = ["r0c0", "r0c1", "r1c1"]
WAYS = [
    (Stage.EMPTY, 0.0),
    (Stage.TRAINING, 0.0),
    (Stage.BLENDING, 0.0),
    (Stage.BLENDING, 0.37),
    (Stage.HOLDING, 1.0),
    (Stage.FOSSILIZED, 1.0),
    (Stage.FOSSILIZED, 0.7),
]
BLENDS = (Blend.ADD, Blend.MULTIPLY, Blend.GATE)
# Every two of a blueprint, a blend and a way stand together in one of them.
KINDS = [
    (code, BLENDS[(one + other + 2) % 3], *way)
    for one, code in enumerate(CNN_BLUEPRINTS)
    for other, way in enumerate(WAYS)
]
EVERY_KIND = [(code, blend, *way) for code in CNN_BLUEPRINTS for blend in BLENDS for way in WAYS]
# By slot: numbers without a divisor in common with those of kinds, so each stands in each slot.
STEPS = (1, 2, 4)


class Measured(NamedTuple):
    """Hosts, what stands in them, and what their engine says of them."""

    world: World
    slots: Slots
    report: ValidationReport

    def slot_contents(self, env: int) -> SlotContents:
        """What stands in the slots of a host."""
        names = ("stage", "blueprint", "blend", "alpha")
        return SlotContents(*(self.slots.get(name)[env].tolist() for name in names))

    def hosts(self, envs: list[int]) -> list[GrownHost]:
        """These hosts by themselves."""
        inputs = [self.world.data.input_spec()] * len(envs)
        shape = self.world.rules.setup.shape
        slot_contents = [self.slot_contents(env) for env in envs]
        return grown_hosts(shape, self.world.weights, envs, slot_contents, inputs)

    def networks(self, envs: list[int]) -> list[GrownNetwork]:
        """They as modules."""
        return [host.network() for host in self.hosts(envs)]

    def validation(self) -> tuple[Tensor, Tensor]:
        """The validation images, raw in [0, 1], and their labels."""
        chosen = self.world.validation.order
        images = self.world.data
        pixels = images.val_images[chosen].permute(0, 3, 1, 2).float() / 255
        return pixels, images.val_labels[chosen]


def measured_hosts(engine: str, num_envs: int = len(KINDS), kinds: list = KINDS) -> Measured:
    """Host i has the kind i in its first slot, and others in the next, after an env-step of
    training.
    """
    sizes = {"num_blocks": 2, "num_pools": 2}
    settings = TrainConfig(
        device="cpu",
        envs=num_envs,
        steps=4,
        batch_size=16,
        train_samples=48,
        val_samples=64,
        slots=SLOTS,
        task=TaskConfig(name="small", base_channels=4, **sizes, host_lr=0.1, seed_lr=0.1),
        data=DataConfig(name="synthetic", synthetic_train=64, synthetic_test=64),
        compute=ComputeConfig(engine=engine, workers=1),
    )
    world = build_world(settings, torch.device("cpu"))
    state = world.start_round(0)
    rows = [
        [kinds[(env * step + 7 * slot) % len(kinds)] for slot, step in enumerate(STEPS)]
        for env in range(num_envs)
    ]
    code, blend, stage, alpha = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    here = stage.long() != Stage.EMPTY
    slots = state.slots.replace(
        blueprint=torch.where(here, code.long(), Blueprint.NONE),
        blend=blend.long(),
        stage=stage.long(),
        alpha=alpha,
        newborn=here,
        fresh_momentum=here,
    )
    work = world.work(0)
    runs = world.rules.engine
    given = (world.rules.setup, world.weights)
    active_seeds = runs.claim_(*given, slot_seeds(slots, state.ramp, False), work.seed_keys)
    runs.train_(*given, alpha, active_seeds, work.training, work.num_batches)
    return Measured(world, slots, runs.validate(*given, alpha, active_seeds, work.validation))


@torch.no_grad()
def score(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy in percent and mean loss."""
    logits = net(images)
    hits = (logits.argmax(-1) == labels).sum()
    return 100.0 * int(hits) / len(labels), float(F.cross_entropy(logits.double(), labels))
