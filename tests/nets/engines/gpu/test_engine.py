"""The GPU's engine in Triton's interpreter: whole passes against torch, launches that are the same
whatever grows.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.sync_guard import SyncGuard
from esper_soa.config.compose import compose_settings
from esper_soa.config.nets import DataConfig, SubsetRows, TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.step import StepData, initial_state
from esper_soa.env.world import World
from esper_soa.nets.choose import ENGINES, choose_engine
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.data.images import cut_batch, training_crops
from esper_soa.nets.engine import Engine, EngineChoice, TrainReport, ValidationReport
from esper_soa.nets.engines.gpu.support import unavailable_reason
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.gradients import SMALLEST_NORM
from esper_soa.nets.needs import BUILT, PASSED, at_once
from esper_soa.nets.seeds.pools import ActiveSeeds, read_active_seeds, slot_seeds
from esper_soa.nets.seeds.seed_plan import seed_plan
from esper_soa.nets.seeds.subsets import max_rows, subset_codes
from esper_soa.nets.sgd import rules_of
from esper_soa.runtime.memory import needs, needs_in_words
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world, make_setup
from esper_soa.vocabulary import CNN_BLUEPRINTS, AlphaMode, Blend, Blueprint, Stage
from tests.builders.gpu_mixtures import APPROXIMATE, DEVICE, planned_roster
from tests.builders.tiny_world import (
    CPU,
    SMALL_TASK,
    rules_from,
    seeds_where,
    silence_hosts_,
    tiny_rules,
    tiny_settings,
)

pytest.importorskip("triton", reason="the package triton is not installed (extra: test)")

from esper_soa.nets.engines.gpu import slot_flags, tree
from esper_soa.nets.engines.gpu.engine import GpuEngine
from esper_soa.nets.engines.gpu.kernels import images, tiles
from tests.builders.gpu_launches import Watched, counted

pytestmark = pytest.mark.usefixtures("kernel_device")
ROUNDING = 1e-4 * APPROXIMATE  # of the largest number of a tensor; sums are taken in another order
SLOTS = ("r0c2", "r1c1", "r1c2")
STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
BLENDS = (Blend.ADD, Blend.MULTIPLY, Blend.GATE)


def build(
    num_envs: int,
    batch: int,
    slots: tuple[str, ...] = SLOTS,
    task: TaskConfig = SMALL_TASK,
    data: str = "synthetic",
) -> World:
    """A world of weights neither 0 nor 1, in torch; two batches, validation in batches of 3."""
    cfg = replace(tiny_settings(num_envs, 1, 2), task=task, slots=list(slots), val_samples=4)
    cfg.batch_size = batch
    cfg.train_samples = 2 * batch
    cfg.data = DataConfig(name=data, synthetic_train=64, synthetic_test=32)
    cfg.compute.engine = "torch"
    world = build_world(cfg, DEVICE)
    g = torch.Generator().manual_seed(3)
    nets = world.rules.setup
    task = replace(nets.task, gradient_stride=2)
    world.rules = world.rules._replace(setup=nets._replace(eval_batch=3, task=task))
    for pool in (world.weights["host"], *world.weights["seeds"].values()):
        pool["params"].copy_(0.4 * torch.randn(pool["params"].shape, generator=g))
    return world


def some_seeds(num_envs: int, num_slots: int, seed: int, running: float = 0.8) -> ActiveSeeds:
    """Seeds of all kinds at random, some of them newborn."""
    rng = np.random.default_rng(seed)
    size = (num_envs, num_slots)
    runs = rng.random(size) < running
    stage = rng.choice(STAGES, size)
    blend = rng.choice(BLENDS, size)
    ablated = runs & (stage != Stage.TRAINING) & (rng.random(size) < 0.8)
    blueprint = rng.choice(CNN_BLUEPRINTS, size)
    flags = {"ablated": ablated, "frozen": rng.random(size) < 0.2}
    newborn, fresh = (runs & (rng.random(size) < share) for share in (0.3, 0.6))
    flags |= {"newborn": newborn, "fresh_momentum": newborn | fresh}
    return seeds_where(runs, stage, blueprint, blend, **flags)


def play(
    world: World,
    engine: Engine,
    seeds: ActiveSeeds,
    given: StepData | None = None,
    answers: Tensor | None = None,
) -> tuple[TrainReport, ValidationReport]:
    work = given or world.work(0)
    nets = world.rules.setup
    alpha = 0.7 * torch.from_numpy(seeds.visible).to(DEVICE).double()
    claimed = engine.claim_(nets, world.weights, seeds.resident(DEVICE), work.seed_keys)
    halved = rules_of(nets.task, 0.5)
    trained = engine.train_(
        nets, world.weights, alpha, claimed, work.training, work.num_batches, halved
    )
    return trained, engine.validate(
        nets, world.weights, alpha, claimed, work.validation, answers=answers
    )


def results(world: World, engine: Engine, seeds: ActiveSeeds) -> dict[str, Tensor]:
    """Everything that a training pass and a validation give and change."""
    answers = torch.zeros(len(seeds.running), 4, dtype=torch.int16, device=DEVICE)
    trained, tested = play(world, engine, seeds, answers=answers)
    found = {"loss": trained.loss, "accuracy": trained.accuracy, **tested._asdict()}
    found["answers"] = answers
    found["tested"], found["subsets"] = found.pop("loss"), found.pop("subset")
    found |= {"train loss": trained.loss, "train accuracy": trained.accuracy}
    return found | dict(trained.gradients.items()) | dict(world.weights.flatten_keys(".").items())


@pytest.mark.parametrize(
    ("num_envs", "batch", "seed"),
    [
        (1, 2, 1),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((1, 3, 1), (3, 2, 2), (2, 5, 3))
        ),
    ],
)
def test_a_training_pass_and_a_validation_equal_torch(num_envs: int, batch: int, seed: int) -> None:
    seeds = some_seeds(num_envs, 3, seed)
    ours = build(num_envs, batch)
    theirs = build(num_envs, batch)
    found = results(ours, GpuEngine(), seeds)
    wanted = results(theirs, theirs.rules.engine, seeds)
    assert seeds.running.any()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        scale = float(value.double().abs().max().clamp(min=1e-3))
        assert float((found[name].double() - value.double()).abs().max()) <= ROUNDING * scale, name


@pytest.mark.slow
def test_networks_whose_episode_has_ended_are_left_out_as_by_torch_and_stay_as_they_are() -> None:
    rows = [[True], [False]]
    seeds = seeds_where(rows, Stage.BLENDING, Blueprint.CONV_SMALL, Blend.ADD)
    seeds = seeds._replace(over=np.array([[False], [True]]))
    worlds = [build(2, 2, ("r1c1",), BARE) for _ in range(2)]
    before = worlds[0].weights.clone()
    for part in before["host"].values():
        part[1] += 1.0  # so that what is left out differs from what is computed
    for world in worlds:
        world.weights.update_(before)
    found = results(worlds[0], GpuEngine(), seeds)
    wanted = results(worlds[1], worlds[1].rules.engine, seeds)
    near_torch(found, wanted)
    assert found["subsets"][1].tolist() == [-1] * found["subsets"].shape[1]
    for name, rows in before.flatten_keys(".").items():
        assert torch.equal(found[name][1], rows[1]), name
    assert not torch.equal(found["host.params"][0], before["host", "params"][0])


@pytest.mark.slow
def test_networks_on_several_data_sets_are_those_of_a_run_on_each_to_the_bit() -> None:
    seeds = seeds_where([[1], [1]], Stage.BLENDING, Blueprint.NORM, Blend.ADD)
    found = {}
    for data in ("[synthetic,fashion32]", "synthetic", "fashion32"):
        world = build(2, 2, ("r1c1",), BARE, data)
        found[data] = after_batches(world, GpuEngine(), seeds, 1)
    both, *alone = found.values()
    for env, name in product((0, 1), both):
        same = [torch.equal(both[name][env], one[name][env]) for one in alone]
        assert same[env], name
        assert name != "host.params" or not all(same)


def one_seed(blend: Blend) -> ActiveSeeds:
    """Of one network: a convolution that blends in."""
    return seeds_where([[1]], Stage.BLENDING, Blueprint.CONV_SMALL, blend, ablated=False)


def after_batches(
    world: World, engine: Engine, seeds: ActiveSeeds, batches: int
) -> dict[str, Tensor]:
    """Gradient statistics, loss and weights; validation, which costs more than they do, is not
    played.
    """
    nets = world.rules.setup
    alpha = 0.7 * torch.from_numpy(seeds.visible).to(DEVICE).double()
    work = world.work(0)
    claimed = engine.claim_(nets, world.weights, seeds.resident(DEVICE), work.seed_keys)
    trained = engine.train_(nets, world.weights, alpha, claimed, work.training, batches)
    weights = dict(world.weights.flatten_keys(".").items())
    return {"loss": trained.loss} | dict(trained.gradients.items()) | weights


def near_torch(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name].double(), value.double(), rtol=10 * ROUNDING, atol=0.1 * ROUNDING
        )


BARE = TaskConfig(name="bare", base_channels=1, kernel_size=1, num_blocks=2, num_pools=2)


def test_behind_a_seed_with_a_gate_one_without_leaves_the_gate_alone() -> None:
    """In a step that is kept, where the gate's gradients of the first still lie."""
    ours, theirs = (build(1, 2, ("r1c1",), BARE) for _ in range(2))
    engine = GpuEngine()
    for blend in (Blend.GATE, Blend.ADD):
        seeds = one_seed(blend)
        wanted = after_batches(theirs, theirs.rules.engine, seeds, 1)
        near_torch(after_batches(ours, engine, seeds, 1), wanted)


def test_two_batches_to_a_step_and_gradients_that_vanish_cost_health_as_in_torch() -> None:
    worlds = [build(1, 2, ("r1c1",), BARE) for _ in range(2)]
    for world in worlds:
        world.rules = world.rules._replace(setup=world.rules.setup._replace(accumulate=2))
        world.weights["seeds", "r1c1", "params"].zero_()  # nothing reaches the kernel
    seeds = one_seed(Blend.ADD)
    wanted = after_batches(worlds[1], worlds[1].rules.engine, seeds, 2)
    assert wanted["vanishing"].all()
    near_torch(after_batches(worlds[0], GpuEngine(), seeds, 2), wanted)


def test_no_ratio_is_of_a_host_without_a_gradient() -> None:
    world = build(1, 2, ("r1c1",), BARE)
    silence_hosts_(world)
    seeds = seeds_where([[1]], Stage.TRAINING, Blueprint.CONV_SMALL, Blend.ADD)
    found = after_batches(world, GpuEngine(), seeds, 1)
    assert (found["l2"] > 100 * SMALLEST_NORM).all()
    assert not found["ratio"].any()


@pytest.mark.slow
def test_a_step_that_is_kept_gives_the_bits_of_a_fresh_one() -> None:
    kept, fresh = (build(1, 2, ("r1c1", "r1c2")) for _ in range(2))
    engine = GpuEngine()
    reports = []
    for seed in (4, 5):
        seeds = some_seeds(1, 2, seed, running=1.0)
        reports.append((play(kept, engine, seeds), play(fresh, GpuEngine(), seeds)))
    assert len(engine.steps._cached) == 3  # claim, training, validation
    for ours, theirs in reports:
        assert torch.equal(ours[0].loss, theirs[0].loss)
        assert torch.equal(ours[1].loss, theirs[1].loss)
        assert torch.equal(ours[1].accuracy, theirs[1].accuracy)
        for name, values in theirs[0].gradients.items():
            assert torch.equal(ours[0].gradients.get(name), values), name
    for name, rows in fresh.weights.flatten_keys(".").items():
        assert torch.equal(kept.weights.flatten_keys(".")[name], rows), name


@pytest.mark.slow
def test_in_bfloat16_a_pass_is_near_float32() -> None:
    low = build(1, 3)
    exact = build(1, 3)
    seeds = some_seeds(1, 3, 1)
    before = exact.weights.clone()
    low.rules = low.rules._replace(setup=low.rules.setup._replace(precision=torch.bfloat16))
    found = results(low, GpuEngine(), seeds)
    wanted = results(exact, exact.rules.engine, seeds)
    for name in ("train loss", "tested"):
        torch.testing.assert_close(found[name], wanted[name], rtol=0.05, atol=0)
    for name in ("host.params", *(f"seeds.{slot}.params" for slot in SLOTS)):
        step = wanted[name] - before.flatten_keys(".")[name]
        assert float((found[name] - wanted[name]).norm()) <= 0.15 * float(step.norm()), name


# --- launches


def launches_of(
    monkeypatch: pytest.MonkeyPatch, num_envs: int, seeds: int
) -> tuple[list[int], int]:
    """Launches of the batches of two env-steps, each with its mixture, after a first one; all
    others of the last.
    """
    slots = ("r0c0", "r0c1", "r0c2")
    world = build(num_envs, 2, slots, TaskConfig())
    with counted(monkeypatch) as launches:
        engine = GpuEngine(Watched(launches))
        play(world, engine, some_seeds(num_envs, len(slots), seeds))
        launches.steps.clear()
        for step, work in enumerate([world.work(step) for step in range(2)]):
            launches.take()
            mixture = some_seeds(num_envs, len(slots), seeds + step, running=0.4 * step + 0.3)
            play(world, engine, mixture, work)
    assert len(engine.steps._cached) == 3  # claim, a training batch, a validation batch
    return [step.launches for step in launches.steps if step.name.endswith("Step")], launches.take()


def test_launches_are_the_same_for_any_networks_and_mixture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = ((1, 1), (3, 2), (17, 3), (17, 4))
    first, *others = (launches_of(monkeypatch, num_envs, seed) for num_envs, seed in sizes)
    batches, _ = first
    # a batch with and one without gradient statistics, two of validation
    assert batches == [33, 32, 10, 10] * 2
    assert [own for own, _ in others] == [batches] * 3
    assert others[0][1] == others[1][1] == others[2][1] <= 120


def test_what_an_engine_keeps_is_known_before_it_is_made_and_weights_change_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = build(3, 2)
    engine = GpuEngine()
    planned = at_once(engine.needs(world.setup._replace(train_samples=3, val_samples=3)))
    own = {rows.data_ptr() for rows in world.weights.flatten_keys(".").values()}
    with counted(monkeypatch):
        play(world, engine, some_seeds(3, 3, 1))
    assert own == {rows.data_ptr() for rows in world.weights.flatten_keys(".").values()}
    kept = [one.step for one in engine.steps._cached.values()]
    steps = [step.memory for step in kept if hasattr(step, "memory")]
    found = [one.untyped_storage() for one in tree_leaves(steps) if isinstance(one, Tensor)]
    made = {one.data_ptr(): one.nbytes() for one in found if one.data_ptr() not in own}
    assert len(steps) == 2
    assert 0.99 < planned / sum(made.values()) <= 1.0


def test_what_an_engine_keeps_must_find_room_beside_the_rest_of_the_run() -> None:
    compute = ComputeConfig(workers=1, engine="triton")
    given = make_setup(replace(tiny_settings(3, 3, 4), compute=compute), DEVICE)
    given = given._replace(num_envs=2**20)
    kept = at_once(GpuEngine().needs(given))
    assert kept > 10 * 2**30
    engine = choose_engine(given, synthetic, kept)
    assert isinstance(engine, GpuEngine)
    reason = "triton (compute.engine=triton)"
    assert engine.chosen == EngineChoice(False, reason, name="triton")
    for room, left in ((kept - 1, f"{kept / 2**30:.1f}"), (-(2**30), "0.0")):
        assert ENGINES["triton"].obstacle(given, room) == (
            f"its steps keep {kept / 2**30:.1f} GiB, and {left} GiB are free beside the rest of "
            "the run: lower envs, batch_size or task.base_channels"
        )


RULES = {
    "host_lr": (0.3, 0.1),
    "seed_lr": (0.02, 0.2),
    "momentum": (0.5, 0.9),
    "weight_decay": (0.1, 0.0),
    "max_grad_norm": (0.01, 0.0),
}


@pytest.mark.slow
def test_an_env_with_its_own_rule_of_updates_is_the_env_of_a_run_with_it() -> None:
    seeds = seeds_where([[1], [1]], Stage.BLENDING, Blueprint.CONV_SMALL, Blend.ADD)
    lists = {name: str(list(values)) for name, values in RULES.items()}
    mixed = trained_by_rule(lists, seeds, True)
    for env in range(2):
        own = {name: values[env] for name, values in RULES.items()}
        for name, rows in trained_by_rule(own, seeds, True).items():
            assert torch.equal(mixed[name][env], rows[env]), (name, env)
    for name, rows in trained_by_rule(lists, seeds, False).items():
        assert torch.allclose(mixed[name], rows, rtol=ROUNDING, atol=ROUNDING), name


def trained_by_rule(
    settings: dict[str, object], seeds: ActiveSeeds, triton: bool
) -> dict[str, Tensor]:
    """Weights and losses of 2 envs after an env-step, by the GPU's engine or by torch."""
    world = build(2, 2, ("r1c1",), replace(BARE, **settings))
    work = world.work(0)
    nets = world.rules.setup
    engine = GpuEngine() if triton else world.rules.engine
    alpha = 0.7 * torch.from_numpy(seeds.visible).to(DEVICE).double()
    claimed = engine.claim_(nets, world.weights, seeds.resident(DEVICE), work.seed_keys)
    given = work.training, work.num_batches, work.rules
    report = engine.train_(nets, world.weights, alpha, claimed, *given)
    return {"loss": report.loss} | dict(world.weights.clone().flatten_keys(".").items())


def test_a_run_that_keeps_more_than_the_machine_has_is_refused_before_it_begins() -> None:
    cfg = tiny_settings(3, 3, 4)
    cfg.compute = ComputeConfig(workers=1, engine="triton")
    cfg.batch_size = 2048
    cfg.train_samples = 2048
    cfg.envs = 2048
    cfg.data = DataConfig(name="synthetic", synthetic_train=2048, synthetic_test=32)
    with pytest.raises(SettingError, match="Its steps keep"):
        rules_from(cfg, DEVICE)


def test_the_plan_of_a_run_counts_what_its_engine_keeps() -> None:
    cfg = compose_settings("", ["envs=64"])
    setup = make_setup(cfg, CPU)
    engines = (TorchEngine(), GpuEngine())
    plain, kept = (needs_in_words(setup, cfg.policy, engine) for engine in engines)
    assert "for the steps of" not in plain
    assert re.search(r"\); \d+\.\d GiB are free$", plain)
    told = r"at least 1,[4-9]\d\d MiB on cpu \(1,[3-9]\d\d MiB of it for the steps of torch"
    assert re.search(told, kept)
    # passes need nothing beside the steps that they are
    cfg = compose_settings("", ["policy=wait", "batch_size=512", "train_samples=512"])
    setup = make_setup(cfg, CPU)
    parts = needs(setup, cfg.policy)
    lasting = sum(need.size for need in parts if not need.during)
    drawn = sum(need.size for need in parts if need.during == BUILT)
    assert sum(need.size for need in parts if need.during == PASSED) > drawn + 2**20
    steps = at_once(GpuEngine().needs(setup))
    told = needs_in_words(setup, cfg.policy, GpuEngine())
    assert f"at least {(lasting + drawn + steps) / 2**20:,.0f} MiB" in told


# --- what the kernels are told


def a_state(num_envs: int = 40) -> tuple:
    """Rules, slots and ramps of random envs."""
    rules = tiny_rules(3, 4)
    state = initial_state(rules, num_envs, CPU)
    g = torch.Generator().manual_seed(1)

    def choice(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_envs, 3), generator=g)]

    stage = choice((*STAGES, Stage.GERMINATED, Stage.EMPTY, Stage.PRUNED))
    alpha = (stage >= Stage.BLENDING) * torch.rand(num_envs, 3, generator=g).round().double()
    codes = {"blueprint": choice(CNN_BLUEPRINTS), "blend": choice(BLENDS)}
    slots = state.slots.replace(stage=stage, alpha=alpha, **codes)
    mode = choice((AlphaMode.HOLD, AlphaMode.UP, AlphaMode.DOWN))
    return rules, slots, state.ramp.replace(mode=mode)


@pytest.mark.parametrize("ablate_fossils", [False, True])
def test_the_roster_read_on_the_device_is_that_of_the_host(ablate_fossils: bool) -> None:
    rules, slots, ramp = a_state()
    seeds = slot_seeds(slots, ramp, ablate_fossils)
    detached = rules.setup.detached_stages
    active = read_active_seeds(seeds)
    with SyncGuard():
        trained = slot_flags.training_flags(seeds, detached)
        tested = slot_flags.validation_flags(seeds, detached)
    assert torch.equal(trained, planned_roster(seed_plan(active, active.running, detached)))
    # the first two are nothing to a validation pass
    read = ~(slot_flags.FROZEN | slot_flags.MEASURED | slot_flags.ABLATED)
    planned = planned_roster(seed_plan(active, active.visible, detached))
    assert torch.equal(tested & read, planned & read)
    assert torch.equal((tested & slot_flags.ABLATED) > 0, seeds.ablated)


def host_codes(seeds: ActiveSeeds, rows: SubsetRows) -> Tensor:
    """int64 [N, R]: the subsets of every env, one by one; -1 = no row."""
    num_envs, num_slots = seeds.stage.shape
    codes = torch.full((num_envs, max_rows(num_slots, rows)), -1)
    fossil = seeds.stage == Stage.FOSSILIZED
    for env, own in enumerate(codes):
        ablated = np.flatnonzero(seeds.ablated[env])
        fossils = ablated[fossil[env, ablated]]
        found = subset_codes(tuple(ablated.tolist()), tuple(fossils.tolist()), rows)
        own[: len(found)] = torch.tensor(found)
    return codes


@pytest.mark.parametrize("num_slots", [1, 3, 6])
def test_rows_of_the_tree_end_as_the_subsets_that_torch_validates(num_slots: int) -> None:
    order = tuple(np.random.default_rng(1).permutation(num_slots).tolist())
    seeds = some_seeds(30, num_slots, 5)
    codes = host_codes(seeds, SubsetRows())
    with SyncGuard():
        levels = tree.levels_of(codes, order)
    for env in range(30):
        own = tuple(code for code in codes[env].tolist() if code >= 0)
        rows = [0]
        for level, slot in zip(levels, order, strict=True):
            count = int(level.counts[env])
            origins = level.origins[env, :count].tolist()
            rows = [rows[origin // 2] | (origin % 2) << slot for origin in origins]
            assert len(set(rows)) == count
        assert tuple(rows) == own


@pytest.mark.parametrize("rows", [SubsetRows(), SubsetRows(pairs=False, codes=(5, 3, 63))])
@pytest.mark.parametrize("num_slots", [1, 3, 4, 6])
def test_subsets_found_on_the_device_are_those_of_the_host(
    num_slots: int, rows: SubsetRows
) -> None:
    seeds = some_seeds(60, num_slots, 7, running=1.0 if num_slots > 4 else 0.8)
    ablated = torch.from_numpy(seeds.ablated)
    fossil = torch.from_numpy(seeds.stage == Stage.FOSSILIZED)
    with SyncGuard():
        codes = tree.codes_of(ablated, ablated & fossil, rows)
    assert torch.equal(codes, host_codes(seeds, rows))
    assert num_slots <= 4 or len(set(seeds.ablated.sum(1))) > 3


def test_an_env_step_with_births_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = build(3, 2)
    _, slots, ramp = a_state(3)
    yes = torch.ones_like(slots.newborn)
    born = slot_seeds(slots.replace(newborn=yes, fresh_momentum=yes), ramp, True)
    engine = GpuEngine()
    work = world.work(0)
    given = (world.rules.setup, world.weights)
    with counted(monkeypatch):
        for first in (True, False):  # tables of a run are made at first use
            with nullcontext() if first else SyncGuard():
                seeds = engine.claim_(*given, born, work.seed_keys)
                engine.train_(*given, slots.alpha, seeds, work.training, work.num_batches)
                engine.validate(*given, slots.alpha, seeds, work.validation)


@pytest.mark.parametrize("augment", [False, True])
def test_images_are_those_of_torch_to_the_bit(augment: bool) -> None:
    world = build(2, 2)
    indices = torch.tensor([[3, 5, 1, 0], [2, 2, 63, 9]], device=DEVICE)
    keys = torch.tensor([5, -9], device=DEVICE)
    crops = training_crops(world.data.banks[0], indices, keys, 7, augment)
    found = torch.empty(2, 2, 1024, 4, device=DEVICE)
    second_batch = torch.ones(1, dtype=torch.int32, device=DEVICE)
    images.cut_(images.crops_record(crops.bank, crops.first), second_batch, found)
    second = crops._replace(first=crops.first[:, 2:], labels=crops.labels[:, 2:])
    wanted = cut_batch(second)[0].unflatten(1, (2, 3)).permute(1, 0, 3, 4, 2).flatten(2, 3)
    assert torch.equal(found[..., :3], wanted)
    assert not found[..., 3].any()


# --- which engine a run gets


def chosen(
    engine: str, task: TaskConfig = SMALL_TASK, device: torch.device = DEVICE, **compute: str
) -> Engine:
    cfg = TrainConfig(task=task, slots=["r0c0"], compute=ComputeConfig(engine=engine, **compute))
    return choose_engine(make_setup(cfg, device), synthetic)


def test_the_engine_is_chosen_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(chosen("triton"), GpuEngine)
    assert not isinstance(
        chosen("auto", device=CPU), GpuEngine
    )  # on a CPU the interpreter is for tests
    assert not isinstance(chosen("torch"), GpuEngine)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    told = (
        "Triton kernels need a CUDA device, not cpu (TRITON_INTERPRET=1 interprets them for tests)"
    )
    assert unavailable_reason(CPU) == told
    with pytest.raises(SettingError) as refused:
        chosen("triton", device=CPU)
    assert str(refused.value) == f"compute.engine=triton: must be auto or torch here. {told}."


def test_rocm_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert unavailable_reason(torch.device("cuda")) == (
        "the kernels are for NVIDIA: the barriers that they rely on do not order global memory "
        "on ROCm (6.4)"
    )


@pytest.mark.parametrize(
    ("task", "compute", "reason"),
    [
        (TaskConfig(base_channels=64), {}, "They hold at most 128 channels, not 256"),
        (TaskConfig(num_classes=2000), {}, "They hold at most 1024 classes, not 2000"),
        (
            TaskConfig(),
            {"precision": "float16"},
            "There is none for torch.float16, which needs loss scales",
        ),
    ],
)
def test_hosts_that_the_kernels_cannot_take_are_refused_with_a_reason(
    task: TaskConfig, compute: dict[str, str], reason: str
) -> None:
    with pytest.raises(SettingError) as refused:
        chosen("triton", task, **compute)
    assert str(refused.value) == f"compute.engine=triton: must be auto or torch here. {reason}."


def test_batches_that_no_grid_holds_are_refused_with_a_reason() -> None:
    words = ["compute.engine=triton", "envs=1", "batch_size=4096", "train_samples=4096"]
    setup = make_setup(compose_settings("", words), DEVICE)
    with pytest.raises(
        SettingError, match="They hold at most 4095 images in a batch, not 4096\\.$"
    ):
        choose_engine(setup, synthetic)


def test_activations_and_parameters_with_gaps_are_refused() -> None:
    told = r"activations of shape \(2, 3, 4, 2\) must lie without gaps"
    with pytest.raises(ValueError, match=told):
        tiles.plane(torch.zeros(2, 3, 4, 4)[..., ::2])
    told = r"parameters of shape \(2, 3\) must lie without gaps within a network"
    with pytest.raises(ValueError, match=told):
        tiles.rows(torch.zeros(2, 6)[:, ::2])
    assert tiles.rows(torch.zeros(2, 6)[:, 2:5]).env == 6
