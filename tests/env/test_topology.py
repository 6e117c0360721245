"""Hosts whose seeds are there from the first env-step: plain torch networks train alike."""

import pytest
import torch
from torch import Tensor

from benchmarks.baseline_env import BaselineEnv, Plant
from benchmarks.baseline_modules import Gate, make_seed
from esper_soa.agent.scripted import WaitPolicy
from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.step import look
from esper_soa.env.topology import Topology, state_with_topology, topology_of
from esper_soa.env.world import World
from esper_soa.nets.seeds import pools
from esper_soa.state import EnvState
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round
from esper_soa.training.results.metrics import RoundResult
from esper_soa.vocabulary import AlphaMode, Blend, Blueprint, Op, Stage
from tests.builders.tiny_world import CPU, quiet_progress

STEPS = 4
ROUND = 2
CFG = TrainConfig(
    device="cpu",
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


def plain_loop(world: World, env: int) -> BaselineEnv:
    """The plain loop of an env with fossils in its slots, with the weights that the world drew."""
    loop = BaselineEnv(CFG.task, CFG.slots, CFG.lifecycle, CFG.gates)
    loop.host.load_flat(world.weights["host", "params"][env])
    for slot, spec in enumerate(loop.specs):
        blueprint = BLUEPRINTS[env][slot]
        blend = BLENDS[env][slot]
        if blueprint < 0:
            continue
        loop.plants[slot] = Plant(make_seed(blueprint, spec.channels, blend), Gate(spec.channels))
        row = world.weights["seeds", spec.name, "params"][env]
        layout = pools.row_layout(world.rules.setup.shape, slot)
        loop.plants[slot].seed.load_flat(row[: loop.plants[slot].seed.num_parameters()])
        loop.plants[slot].gate.load_flat(row[layout.seed : layout.seed + layout.gate])
        seed = loop.machines[slot].seed
        seed.stage = Stage.FOSSILIZED
        seed.blend = blend
        seed.alpha = ALPHAS[env][slot]
    return loop


def parameters_of(loop: BaselineEnv) -> int:
    """Gates count where they are used."""
    total = loop.host.num_parameters()
    for slot, networks in loop.plants.items():
        gated = loop.machines[slot].seed.blend == Blend.GATE
        total += networks.seed.num_parameters() + gated * networks.gate.num_parameters()
    return total


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


def validation(world: World, env: int) -> list[tuple[Tensor, Tensor]]:
    (batch,) = world.work(0).validation.batches(torch.tensor([env]), CFG.val_samples)
    images, labels = batch
    return [(images[:, :3].contiguous(), labels.flatten())]


def test_plain_networks_of_the_topology_are_trained_alike(world: World) -> None:
    played = episode(world)
    loops = [plain_loop(world, env) for env in range(CFG.envs)]
    for step in range(STEPS):
        played.step_()
        signals = played.env.state.signals
        for env, loop in enumerate(loops):
            loss = loop.train(batches(world, step, env)).loss
            assert signals.train_loss[env].item() == pytest.approx(loss, rel=1e-4)
            tested = loop.evaluate(validation(world, env))
            assert signals.val_loss[env].item() == pytest.approx(tested.loss, rel=1e-3)
            off = abs(signals.val_accuracy[env].item() - tested.accuracy[0])
            assert off <= 100 / CFG.val_samples
    result, _ = played.finish()
    assert result.parameters == [parameters_of(loop) for loop in loops]
    close = {"rtol": 1e-3, "atol": 1e-4}
    for env, loop in enumerate(loops):
        host = world.weights["host", "params"][env]
        torch.testing.assert_close(host, loop.host.flat(), **close)
        for slot, networks in loop.plants.items():
            seed = networks.seed.flat()
            row = world.weights["seeds", loop.specs[slot].name, "params"][env]
            torch.testing.assert_close(row[: len(seed)], seed, **close)


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
    present = GROWN.blueprint >= 0
    assert torch.equal(slots.stage == Stage.FOSSILIZED, present)
    assert not slots.newborn.any()
    assert not slots.contribution_known.any()  # no reward here reads what fossils contribute
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
    assert all(
        rows.any(1)[GROWN.blueprint[:, slot] >= 0].all() for slot, rows in enumerate(born.values())
    )
    world.weights["host", "params"][0] = torch.nan
    played.step_()
    assert played.env.state.totals.rollbacks.sum(1).tolist() == [1, 0]
    for slot, name in enumerate(CFG.slots):
        back = torch.equal(world.weights["seeds", name, "params"][0], born[name][0])
        assert back == bool(GROWN.blueprint[0, slot] >= 0) or not born[name][0].any()
        if GROWN.blueprint[1, slot] >= 0:  # it went on training
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
        blueprint=torch.tensor([[1, Blueprint.NOOP, 3], [4, 5, 6]]),
        blend=torch.tensor([[2, 3, 2], [1, 2, 3]]),
    )
    return state.replace(slots=slots)


def test_a_topology_is_of_the_seeds_that_the_host_feels(world: World) -> None:
    found = topology_of(grown_state(world))
    assert found.blueprint.tolist() == [[-1, Blueprint.NOOP, 3], [-1, -1, 6]]
    assert found.blend.tolist() == [[1, 3, 2], [1, 1, 3]]
    assert found.alpha.tolist() == [[0.0, 0.25, 1.0], [0.0, 0.0, 0.5]]
    assert (found.blueprint >= 0).tolist() == [[False, True, True], [False, False, True]]
    again = state_with_topology(world.start_round(0), found)
    assert all(map(torch.equal, topology_of(again), found))
    for part in (again.ramp.alpha, again.ramp.start, again.ramp.target):
        assert torch.equal(part, found.alpha)
    before = torch.where(found.blueprint >= 0, Stage.HOLDING, Stage.UNKNOWN)
    assert torch.equal(again.slots.previous_stage, before)


def test_a_topology_of_other_hosts_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"a topology of \[2, 1\] for hosts and slots of \[2, 3\]"):
        state_with_topology(world.start_round(0), Topology(*(part[:, :1] for part in GROWN)))
