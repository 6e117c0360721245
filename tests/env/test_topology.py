"""Hosts whose seeds are there from the first env-step: plain torch networks train alike."""

import pytest
import torch
from tiny_world import CPU, quiet_progress
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baseline_modules import Gate, Graft, Host, make_seed
from esper_soa.agent.scripted import WaitPolicy
from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.step import look
from esper_soa.env.topology import Topology, plant, topology_of
from esper_soa.env.world import World
from esper_soa.nets.seeds import pools
from esper_soa.state import EnvState
from esper_soa.training.build import build_world
from esper_soa.training.collect import EpisodeRunner, Player, Round
from esper_soa.training.metrics import RoundResult
from esper_soa.vocabulary import AlphaMode, Blend, Blueprint, Op, Stage

STEPS = 4
ROUND = 2
CFG = TrainConfig(
    envs=2,
    steps=STEPS,
    batch_size=8,
    train_samples=16,
    val_samples=32,
    slots=["r0c0", "r0c1", "r1c0"],
    task=TaskConfig(name="small", base_channels=8, num_blocks=2, num_pools=2),
    data=DataConfig(name="synthetic", synthetic_train=64, synthetic_test=32),
    compute=ComputeConfig(threads=1, workers=1),
)
BLUEPRINTS = [
    [Blueprint.CONV_LIGHT, -1, Blueprint.NORM],
    [Blueprint.DEPTHWISE, Blueprint.ATTENTION, -1],
]
BLENDS = [[Blend.ADD, Blend.ADD, Blend.MULTIPLY], [Blend.GATE, Blend.ADD, Blend.ADD]]
ALPHAS = [[1.0, 0.0, 0.7], [0.5, 1.0, 0.0]]
GROWN = Topology(
    torch.tensor(BLUEPRINTS), torch.tensor(BLENDS), torch.tensor(ALPHAS, dtype=torch.float64)
)


class PlainNet:
    """One env's network with its optimisers, with the weights that the world has drawn for it."""

    def __init__(self, world: World, env: int) -> None:
        shape = world.rules.nets.shape
        task = CFG.task
        self.host = Host(task)
        self.host.load_flat(world.weights["host", "params"][env])
        self.grafts = {}
        self.trained = [list(self.host.parameters())]
        for slot, spec in enumerate(shape.slots):
            blueprint = BLUEPRINTS[env][slot]
            blend = BLENDS[env][slot]
            if blueprint < 0:
                continue
            row = world.weights["seeds", spec.name, "params"][env]
            layout = pools.row_layout(shape, slot)
            seed = make_seed(blueprint, spec.channels, blend)
            gate = Gate(spec.channels)
            seed.load_flat(row[: seed.num_parameters()])
            gate.load_flat(row[layout.seed : layout.seed + layout.gate])
            used = gate if blend == Blend.GATE else None
            self.grafts[spec.name] = Graft(
                seed, used, blend, ALPHAS[env][slot], incubating=False, detached=False
            )
            self.trained.append([*seed.parameters(), *(used.parameters() if used else ())])
        self.optimisers = [
            torch.optim.SGD(
                own,
                task.seed_lr if number else task.host_lr,
                task.momentum,
                weight_decay=0.0 if number else task.weight_decay,
            )
            for number, own in enumerate(self.trained)
        ]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for own in self.trained for parameter in own)

    def train(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Mean loss of one pass of SGD with clipping."""
        self.host.train()
        losses = []
        for images, labels in batches:
            for optimiser in self.optimisers:
                optimiser.zero_grad()
            loss = F.cross_entropy(self.host(images, self.grafts), labels)
            loss.backward()
            for own, optimiser in zip(self.trained, self.optimisers, strict=True):
                nn.utils.clip_grad_norm_(own, CFG.task.max_grad_norm)
                optimiser.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    @torch.no_grad()
    def loss(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Loss and accuracy in percent."""
        self.host.eval()
        logits = self.host(images, self.grafts)
        return F.cross_entropy(logits, labels).item(), 100 * (
            logits.argmax(1) == labels
        ).double().mean().item()


@pytest.fixture
def world() -> World:
    return build_world(CFG, CPU)


def episode(world: World) -> EpisodeRunner:
    quiet = quiet_progress()
    return EpisodeRunner(world, Player(WaitPolicy(), None), Round(ROUND, quiet, topology=GROWN))


def batches(world: World, step: int, env: int) -> list[tuple[Tensor, Tensor]]:
    work = world.work(step)
    each = [work.training.batch(torch.tensor([env]), index) for index in range(work.num_batches)]
    return [(images.contiguous(), labels[:, 0]) for images, labels in each]


def validation(world: World, env: int) -> tuple[Tensor, Tensor]:
    (batch,) = world.work(0).validation.batches(torch.tensor([env]), CFG.val_samples)
    images, labels = batch
    return images[:, :3].contiguous(), labels.flatten()


def test_plain_networks_of_the_topology_are_trained_alike(world: World) -> None:
    played = episode(world)
    nets = [PlainNet(world, env) for env in range(CFG.envs)]
    for step in range(STEPS):
        played.step_()
        signals = played.env.state.signals
        for env, net in enumerate(nets):
            assert signals.train_loss[env].item() == pytest.approx(
                net.train(batches(world, step, env)), rel=1e-4
            )
            loss, accuracy = net.loss(*validation(world, env))
            assert signals.val_loss[env].item() == pytest.approx(loss, rel=1e-3)
            assert signals.val_accuracy[env].item() == pytest.approx(
                accuracy, abs=100 / CFG.val_samples
            )
    result, _ = played.finish()
    assert result.parameters == [net.parameters for net in nets]
    for env, net in enumerate(nets):
        torch.testing.assert_close(
            world.weights["host", "params"][env], net.host.flat(), rtol=1e-3, atol=1e-4
        )
        for name, graft in net.grafts.items():
            row = world.weights["seeds", name, "params"][env]
            torch.testing.assert_close(
                row[: graft.seed.num_parameters()], graft.seed.flat(), rtol=1e-3, atol=1e-4
            )


def result_of(world: World) -> RoundResult:
    played = episode(world)
    for _ in range(STEPS):
        played.step_()
    return played.finish()[0]


def test_they_cost_the_whole_network_in_every_env_step_and_end_as_they_began(world: World) -> None:
    result = result_of(world)
    images = STEPS * CFG.train_samples
    cost = world.flop
    for env in range(CFG.envs):
        whole = cost.host + sum(
            float(cost.seed[slot, code]) for slot, code in enumerate(BLUEPRINTS[env]) if code >= 0
        )
        whole += float(cost.gate[0]) if env == 1 else 0.0  # the one GATE
        assert result.train_flop[env] == pytest.approx(images * whole)
    for name, part in GROWN._asdict().items():
        assert torch.equal(getattr(result.topology, name), part), name


def test_they_count_as_fossils_for_masks_reports_and_telemetry(world: World) -> None:
    played = episode(world)
    played.step_()
    slots = played.env.state.slots
    totals = played.env.state.totals
    present = GROWN.present
    assert torch.equal(slots.stage == Stage.FOSSILIZED, present)
    assert not played.env.state.slots.newborn.any()
    assert torch.equal(slots.alpha, GROWN.alpha)
    assert torch.equal(played.env.state.ramp.alpha, GROWN.alpha)
    assert (played.env.state.ramp.mode == AlphaMode.HOLD).all()
    assert totals.germinated.tolist() == totals.fossilized.tolist() == [2, 2]
    masks, _ = look(world.rules, played.env.state)
    for op in (Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE, Op.SET_ALPHA_TARGET):
        assert not masks.slot_by_op[:, op].any()
    assert torch.equal(masks.slot_by_op[:, Op.GERMINATE], ~present)
    for _ in range(1, STEPS):
        played.step_()
    episodes = played.finish()[0].episodes
    assert [one["seeds"]["fossilized"] for one in episodes] == [2, 2]
    assert [one["seeds"]["unfinished"] for one in episodes] == [0, 0]


def test_a_host_that_breaks_in_its_first_env_step_gets_its_fossils_back_as_they_were_born(
    world: World,
) -> None:
    played = episode(world)
    born = {name: world.weights["seeds", name, "params"].clone() for name in CFG.slots}
    assert all(rows.any(1)[GROWN.present[:, slot]].all() for slot, rows in enumerate(born.values()))
    world.weights["host", "params"][0] = torch.nan
    played.step_()
    assert played.env.state.totals.rollbacks.sum(1).tolist() == [1, 0]
    for slot, name in enumerate(CFG.slots):
        back = torch.equal(world.weights["seeds", name, "params"][0], born[name][0])
        assert back == bool(GROWN.present[0, slot]) or not born[name][0].any()
        if GROWN.present[1, slot]:  # it went on training
            assert not torch.equal(world.weights["seeds", name, "params"][1], born[name][1])


def grown_state(world: World) -> EnvState:
    state = world.start_round(0)
    stages = [
        [Stage.TRAINING, Stage.BLENDING, Stage.FOSSILIZED],
        [Stage.GERMINATED, Stage.PRUNED, Stage.HOLDING],
    ]
    alphas = [[0.0, 0.25, 1.0], [0.0, 0.0, 0.5]]
    slots = state.slots.replace(
        stage=torch.tensor(stages),
        alpha=torch.tensor(alphas, dtype=torch.float64),
        blueprint=torch.tensor([[1, 2, 3], [4, 5, 6]]),
        blend=torch.tensor([[2, 3, 2], [1, 2, 3]]),
    )
    return state.replace(slots=slots)


def test_a_topology_is_of_the_seeds_that_the_host_feels(world: World) -> None:
    found = topology_of(grown_state(world))
    assert found.blueprint.tolist() == [[-1, 2, 3], [-1, -1, 6]]
    assert found.blend.tolist() == [[1, 3, 2], [1, 1, 3]]
    assert found.alpha.tolist() == [[0.0, 0.25, 1.0], [0.0, 0.0, 0.5]]


def test_a_topology_of_other_hosts_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"a topology of \[2, 1\] for hosts and slots of \[2, 3\]"):
        plant(world.start_round(0), Topology(*(part[:, :1] for part in GROWN)))
