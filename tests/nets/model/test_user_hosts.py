"""Hosts of users' own: named by the setting, found, run as what they say, refused in words."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hosts_of_users import SLOTS, Counting, Head, Staged, plain
from torch import Tensor, nn

from esper_soa import host
from esper_soa.config.nets import MAX_CHANNELS, TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.world import World
from esper_soa.nets.model.conv import ConvBlock
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.host import (
    HostChain,
    HostShape,
    evaluate_forward,
    fold_batch_norm,
    initial_hosts,
    train_loss,
)
from esper_soa.nets.model.user_module import Factory, InputUse, call_networks
from esper_soa.nets.model.user_parts import host_findings, task_shape, task_slots
from esper_soa.nets.model.user_segment import UserHost, children_of
from esper_soa.nets.passes import StepPlan
from esper_soa.nets.seeds.pools import claim_, claims_of, slot_seeds
from esper_soa.nets.seeds.seeds import TrainingSeeds
from esper_soa.nets.seeds.snapshot import add_snapshot_, restore_where_, snapshot_where_
from esper_soa.runtime.memory import needs
from esper_soa.system import streams
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world, make_setup
from esper_soa.vocabulary import Blend, Stage
from tests.builders.lanes import some_of
from tests.builders.tiny_world import (
    CPU,
    assert_alone,
    planned,
    random_round,
    rules_from,
    seeds_where,
    tiny_settings,
)

HERE = "hosts_of_users"
NETS = 3
BATCH = 4
CLASSES = 10
CHAINS = ["staged", "plain", "counting"]
MAKERS: dict[str, Factory] = {"staged": Staged, "plain": plain, "counting": Counting}


def task(name: str, **changed: object) -> TaskConfig:
    return TaskConfig(name="own", host=f"{HERE}:{name}", **changed)  # type: ignore[arg-type]


def settings(name: str, envs: int = 3, steps: int = 9, **changed: object) -> TrainConfig:
    """A small run of hosts of hosts_of_users with two slots."""
    given = {"task": task(name), "slots": SLOTS[name], **changed}
    return replace(tiny_settings(envs, 2, steps), **given)  # type: ignore[arg-type]


def trained(world: World) -> tuple[StepPlan, Tensor]:
    """Two batches of training at the start of a round; what runs in it, and alpha."""
    state = world.start_round(0)
    rules = world.rules
    seeds = slot_seeds(state.slots, state.ramp, False)
    active = rules.engine.claim_(rules.setup, world.weights, seeds, world.seed_keys(0))
    feed = world.work(0).training
    rules.engine.train_(rules.setup, world.weights, state.slots.alpha, active, feed, 2)
    return active, state.slots.alpha


# --- what a chain of modules is


def fresh(name: str, dtype: torch.dtype = torch.float64) -> tuple[HostShape, Tensor, Tensor]:
    """The shape of hosts without slots in use, and rows of parameters and of buffers."""
    shape = task_shape(task(name), SLOTS[name])
    keys = streams.stream_keys(5, streams.HOST_INIT, (0,), torch.arange(NETS))
    return shape, *initial_hosts(shape, keys, dtype)


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    """Images [B, n*3, 32, 32] as the engine has them."""
    g = torch.Generator().manual_seed(6)
    x = torch.randn(BATCH, NETS * 3, 32, 32, generator=g, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last)


def alone(name: str, env: int) -> nn.Module:
    """The host of an env as the user's constructor makes it."""
    keys = streams.stream_keys(5, streams.HOST_INIT, (0,), torch.arange(NETS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(keys[env]))
        return MAKERS[name](CLASSES)


def flat(tensors: list[Tensor]) -> Tensor:
    flat_ones = [one.detach().reshape(-1).double() for one in tensors]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *flat_ones])


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_trained_for_each_network_with_its_own_parameters_and_buffers(name: str) -> None:
    shape, rows, kept = fresh(name)
    statistics = [one.flatten().clone() for one in shape.statistics.unpack(kept)]
    labels = torch.arange(BATCH * NETS).view(BATCH, NETS) % CLASSES
    leaf = rows.clone().requires_grad_()
    x = images()
    seeds = TrainingSeeds([], NETS)
    for _ in range(2):
        parameters = shape.parameters.unpack(leaf)
        losses, correct = train_loss(shape, parameters, statistics, (x, labels), seeds)
    (gradient,) = torch.autograd.grad(losses.sum(), [leaf])
    for env in range(NETS):
        host = alone(name, env).double().train()
        assert torch.equal(flat(list(host.parameters())), rows[env])
        for _ in range(2):
            logits = host(x[:, 3 * env : 3 * env + 3].contiguous())
        loss = nn.functional.cross_entropy(logits, labels[:, env])
        loss.backward()
        torch.testing.assert_close(losses[env], loss, rtol=1e-12, atol=1e-12)
        assert correct[env] == (logits.argmax(-1) == labels[:, env]).sum()
        wanted = flat([one.grad for one in host.parameters() if one.grad is not None])
        torch.testing.assert_close(gradient[env], wanted, rtol=1e-9, atol=1e-9)
        moved = flat([one.view(NETS, -1)[env] for one in statistics])
        torch.testing.assert_close(moved, flat(list(host.buffers())), rtol=1e-12, atol=1e-12)
    if name == "counting":
        assert statistics[1].tolist() == [2.0] * NETS


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_validated_with_the_buffers_of_each_network(name: str, shared: bool) -> None:
    shape, rows, kept = fresh(name)
    kept = kept + 0.25 * torch.arange(NETS)[:, None] * (kept.shape[1] > 2)
    before = kept.clone()
    x = images()
    folded = fold_batch_norm(shape, shape.parameters.unpack(rows), shape.statistics.unpack(kept))
    with torch.no_grad():
        given = x[:, :3].contiguous(memory_format=torch.channels_last) if shared else x
        out = evaluate_forward(shape, folded, given, TrainingSeeds([], NETS))
        for env in range(NETS):
            host = alone(name, env).double().eval()
            start = 0
            for one in host.buffers():
                one.copy_(kept[env, start : start + one.numel()].view(one.shape))
                start += one.numel()
            wanted = host(given[:, :3] if shared else x[:, 3 * env : 3 * env + 3])
            torch.testing.assert_close(out[:, env], wanted, rtol=1e-10, atol=1e-10)
    assert torch.equal(kept, before)


@pytest.mark.parametrize("name", [*CHAINS, "uneven", "refined"])
def test_an_env_begins_as_it_does_alone_and_no_generator_of_the_process_is_moved(name: str) -> None:
    shape, rows, kept = fresh(name, torch.float32)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    keys = streams.stream_keys(5, streams.HOST_INIT, (0,), torch.tensor([1]))
    one = initial_hosts(shape, keys, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one[0][0], rows[1])
    assert torch.equal(one[1][0], kept[1])
    assert not torch.equal(rows[0], rows[1])


def test_parameters_and_flop_are_counted() -> None:
    staged = task_shape(task("staged"), ["r0c0"])
    units = 6 * 27 + 2 * 6 + 3 * 6 + 6 + 10 * 54 + 2 * 10 + 6 * 10 + 10
    assert staged.parameters.total == units + 10 * 10 + 10
    assert staged.statistics.total == 2 * 6 + 1 + 2 * 10 + 1
    products = 256 * 6 * (27 + 3) + 64 * 10 * (54 + 6) + 100
    assert training_flop(staged, CPU).host == 6 * products
    refined = task_shape(task("refined"), ["r0c1"])
    block = 8 * 27 + 2 * 8
    narrow = 8 * 8 + 2 * 8 + 8 * 72 + 2 * 8
    second = 12 * 200 + 2 * 12
    last = 12 * 9 + 12 * 12 + 2 * 12
    assert refined.parameters.total == block + narrow + second + last + 12 * 10 + 10
    products = 1024 * 8 * 27 + 256 * (64 + 8 * 72) + 256 * 12 * 200 + 64 * 12 * (9 + 12) + 120
    assert training_flop(refined, CPU).host == 6 * products
    assert rules_from(settings("staged"), CPU).reward.counts.host == staged.parameters.total


def test_the_head_of_a_chain_has_as_many_logits_as_the_task_has_classes() -> None:
    shape = task_shape(task("staged", num_classes=7), ["r0c0"])
    assert (shape.num_classes, shape.segments[-1].output_shape) == (7, (7,))


# --- slots


def test_slots_stand_behind_the_segments_that_give_features() -> None:
    every = {
        "uneven": "r0c0 5 32, r0c1 12 16, r0c2 9 16, r0c3 16 8, r1c0 5 16, r1c2 9 8",
        "refined": "r0c0 8 32, r0c1 8 16, r0c2 12 16, r0c3 12 8, r1c0 8 16, r1c2 12 8",
        "staged": "r0c0 6 16, r0c1 6 8, r0c2 10 8",
        "plain": "r0c0 3 8, r0c1 4 8, r0c2 4 8",
        "brief": "r0c0 4 32",
    }
    last = {"uneven": 3, "refined": 3, "staged": 2, "plain": 3, "brief": 1}
    for name, wanted in every.items():
        names = [slot.split()[0] for slot in wanted.split(", ")]
        found = task_slots(task(name), names[::-1])
        assert ", ".join(f"{one.name} {one.channels} {one.size}" for one in found) == wanted
        assert [one.depth for one in found] == [int(one.name[3]) / last[name] for one in found]
    order = task_shape(task("uneven"), ["r1c2", "r0c3", "r0c0", "r1c0"]).execution_order
    assert order == (0, 2, 3, 1)  # numbers of r0c0, r0c3, r1c0, r1c2
    told = r"^slots=r0c9: must be a slot of staged: r0c0, r0c1, r0c2\.$"
    with pytest.raises(SettingError, match=told):
        rules_from(settings("staged", slots=["r0c9"]), CPU)


# --- runs


@pytest.mark.parametrize("name", some_of(SLOTS, "staged", "counting", "refined"))
def test_an_env_of_many_plays_as_it_does_alone(name: str) -> None:
    """One network per forward pass, so that sums have one order: then to the bit."""
    compute = ComputeConfig(workers=2, env_chunk=1, engine="torch")
    assert_alone(settings(name, compute=compute))


def test_networks_that_are_trained_one_by_one_come_to_what_they_do_together() -> None:
    """With seeds that are modules, AdamW and subset rows; to the bit with any number of workers."""
    given = {"blueprints": ["parts_of_users:grouped"], "optimizer": "adamw", "host_lr": 0.001}
    own = replace(settings("staged"), task=task("staged", **given), batch_size=4, train_samples=8)
    every = np.ones((NETS, 2), dtype=bool)
    found = []
    for workers, chunk in ((1, 1), (2, 1), (1, NETS)):
        compute = ComputeConfig(workers=workers, env_chunk=chunk, engine="torch")
        world = build_world(replace(own, compute=compute), CPU)
        setup, engine = world.rules.setup, world.rules.engine
        world.start_round(0)
        work = world.work(0)
        code = setup.shape.blueprints[-1].code
        born = seeds_where(every, Stage.GERMINATED, code, Blend.ADD, newborn=every)
        claims = claims_of(setup.shape, born)
        claim_(world.weights, setup.shape, claims, keys=work.seed_keys)
        active = planned(engine, setup, seeds_where(every, Stage.BLENDING, code, Blend.ADD))
        passes = setup, world.weights, torch.full((NETS, 2), 0.5, dtype=torch.float64), active
        losses = engine.train_(*passes, work.training, 2)
        checked = engine.validate(*passes, work.validation)
        assert checked.accuracy.shape == (NETS, 4)
        numbers = {"trained": losses.loss, "l2": losses.gradients.l2, "seen": checked.loss}
        found.append(dict(world.weights.flatten_keys(".").items()) | numbers)
    alone, shared, together = found
    assert not torch.equal(alone["host.params"], together["host.params"])  # sums of other orders
    for name, rows in alone.items():
        torch.testing.assert_close(rows, together[name], rtol=1e-3, atol=2e-5, msg=name)
        assert torch.equal(rows, shared[name]), name


def test_a_module_called_for_a_network_keeps_its_number_format_and_the_features() -> None:
    x = torch.randn(1, 2, 3, 8, 8)
    before = x.clone()
    writing = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3))
    values = [one.detach()[None] for one in writing.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = call_networks(writing, values, (), x, InputUse(True, writes=True))
    torch.testing.assert_close(out, writing(x[0].clone()))
    assert torch.equal(x, before)


def test_a_buffer_with_two_names_is_that_of_the_network_under_both() -> None:
    norm = nn.BatchNorm2d(3, affine=False)
    norm.register_buffer("running_var", norm.running_mean)
    rows = [torch.full((1, *one.shape), 4.0).to(one.dtype) for one in norm.buffers()]
    x = torch.randn(1, 2, 3, 8, 8)
    out, _ = call_networks(norm.eval(), (), rows, x, InputUse(False, writes=False))
    torch.testing.assert_close(out, (x[0] - 4) / (4 + norm.eps) ** 0.5)


class View(nn.Module):
    """Features as vectors, which those in channels_last are not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


@pytest.mark.parametrize("writes", [False, True])
def test_a_module_gets_images_in_the_memory_format_that_it_takes(writes: bool) -> None:
    def make(classes: int) -> nn.Module:
        head = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), View(), nn.Linear(900, classes))
        return nn.Sequential(nn.ReLU(inplace=writes), head)

    body, head = children_of(UserHost(make, CLASSES))
    assert body.use == InputUse(channels_last=True, writes=writes)
    assert head.use == InputUse(channels_last=False, writes=False)


def test_a_rollback_gives_weights_and_buffers_back_of_the_envs_that_ask_for_it() -> None:
    world = build_world(settings("counting", batch_size=8, train_samples=16), CPU)
    world.start_round(0)
    host = world.weights["host"]
    shape = world.rules.setup.shape
    no_slots = torch.zeros(3, 2, dtype=torch.bool)
    add_snapshot_(world.weights)
    snapshot_where_(world.weights, shape, torch.ones(3, dtype=torch.bool), no_slots, no_slots)
    kept = host.clone()
    trained(world)
    after = host.clone()
    for part in ("params", "statistics"):
        assert not (after[part] == kept[part]).all(1).any()
    where = torch.tensor([False, True, False])
    restore_where_(world.weights, shape, where, no_slots, no_slots[:, 0])
    for part in ("params", "statistics"):
        assert torch.equal(host[part][1], kept[part][1])
        assert torch.equal(host[part][::2], after[part][::2])
    assert torch.equal(kept["statistics"][:, 4], torch.zeros(3))
    assert host["statistics"][:, 4].tolist() == [2.0, 0.0, 2.0]


@pytest.mark.parametrize(("name", "precision"), [("staged", "bfloat16"), ("refined", "float16")])
def test_hosts_are_trained_with_seeds_that_compute_in_16_bits(name: str, precision: str) -> None:
    compute = ComputeConfig(workers=1, engine="torch", precision=precision)
    world = build_world(settings(name, compute=compute), CPU)
    before = world.weights["host", "params"].clone()
    assert len(random_round(world).accuracies) == 3
    assert world.weights["host", "params"].isfinite().all()
    assert not torch.equal(world.weights["host", "params"], before)


@pytest.mark.parametrize("name", ["staged", "refined"])
def test_the_memory_plan_knows_them(name: str) -> None:
    cfg = settings(name, compute=ComputeConfig(workers=1, env_chunk=3))
    images_and_features = {
        "staged": 3 * 1024 + 6 * 256 + 6 * 64 + 10 * 64 + 10,
        "refined": 3 * 1024 + 8 * 1024 + 8 * 256 + 12 * 256 + 12 * 64,
    }
    numbers = cfg.batch_size * images_and_features[name]  # network by network in C
    plan = {need.what: need for need in needs(make_setup(cfg, CPU), cfg.policy)}
    assert plan["activations of the batches in training"].size == 4 * numbers
    weights = build_world(cfg, CPU).weights
    held = sum(one.numel() * 4 for key, one in weights.items(True, True) if "fossil" not in key)
    assert plan["weights"].size == held
    assert all("task." not in setting for need in plan.values() for setting in need.settings)


# --- engines


@pytest.mark.usefixtures("native")
def test_blocks_of_different_kernels_go_to_the_kernels_in_c_and_mean_the_same_there() -> None:
    worlds = []
    reports = []
    for engine in ("native", "torch"):
        given = {"batch_size": 8, "train_samples": 16}
        given["compute"] = ComputeConfig(workers=1, engine=engine)
        world = build_world(settings("uneven", **given), CPU)
        active, alpha = trained(world)
        validation = world.work(0).validation
        rules = world.rules
        reports.append(rules.engine.validate(rules.setup, world.weights, alpha, active, validation))
        worlds.append(world)
    assert [world.rules.engine.chosen.native for world in worlds] == [True, False]
    for part in ("params", "momentum", "statistics"):
        ours, theirs = (world.weights["host", part] for world in worlds)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(reports[0].loss, reports[1].loss, rtol=1e-4, atol=1e-5)
    assert len(random_round(worlds[0]).accuracies) == 3


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain", "avg_pool2d"),
        ("counting", "Average, which does otherwise in eval mode"),
    ],
)
def test_the_kernels_in_c_leave_other_hosts_and_say_so(name: str, words: str) -> None:
    chosen = rules_from(settings(name), CPU).engine.chosen
    assert (chosen.native, chosen.fallback) == (False, True)
    assert chosen.reason.endswith(f"there is none for {words}")
    told = f"compute.engine=native: .*{re.escape(words)}"
    with pytest.raises(SettingError, match=told):
        rules_from(settings(name, compute=ComputeConfig(engine="native")), CPU)


# --- faults, told while building


# Sentences that blueprints share, or check_host, stand with those: here their values.
FAULTS = {
    "nowhere:mine": "No module named .nowhere.*",
    "missing": "missing.*",
    "unmarked": "unmarked.*",
    "empty": "it has less than two segments",
    "headless": "its first segment must be a ConvBlock: images have 3 channels",
    "lonely": "it has less than two segments",
    "tiny": " 5 .*",
    "even": r"a block with a kernel of 4 pixels: must be odd and in \[1, 31\]",
    "wider": " 1 .* 8.*",
    "vacant": (
        r"a residual segment of \(\): must be of a tuple of parts \(Conv, Depthwise, SoftNorm, "
        r"Excite, Dense, CausalAttention, SoftLayerNorm\)"
    ),
    "word": r"host word: it gives chain, no tuple of segments \(ConvBlock, Residual\)",
    "seedlike": "host seedlike: it gives a Conv among its segments, no ConvBlock and no Residual",
    "bare": "host bare: .*",
    "greedy": "number of classes.*",
    "branching": "Branching.*",
    "skipping": (
        r"its forward pass is its own: a host hands images from segment to segment, as "
        r"nn\.Sequential does"
    ),
    "fused": (
        "it has less than two segments: the last gives the logits, and seeds stand behind the "
        "others"
    ),
    "short": r"its last segment 1 gives \[B, 11\], not logits \[B, 10\]",
    "flat": (
        r"none of its segments but the last gives features \[B, C, H, H\], in which a seed "
        r"could stand"
    ),
    "taken": "its segments r0c1, input have names of other parts of a grown network",
    "weightless": r"it has no parameters; its last segment 2 gives \[B, 48\], not logits \[B, 10\]",
    "tied": "two of its parameters.*",
    "frozen": "0.weight, 0.bias.*",
    "passing": "its buffers 1.noise are not persistent, so that grown networks would lack them",
    "hoarding": "scale.*",
    "dropping": "segment body.*",
    "moody": "its segment 0 gives features of another shape in training than in eval mode",
    "lazy": "its parameters 2.weight, 2.bias have no shape before a first pass",
    "broken": "it raises RuntimeError: Given groups=1, weight of size .4, 4, 1, 1., expected .*",
    "reading": "its segment 0 raises RuntimeError for several networks in training mode: vmap: .*",
    "no such word": "one of chain, transformer, or module:name of your own host",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_host_that_cannot_be_trained_is_refused_while_building(name: str) -> None:
    reference = f"{HERE}:{name}" if name.isidentifier() else name
    told = rf"^task.host={reference}: must be .*{FAULTS[name]}\.$"
    with pytest.raises(SettingError, match=told):
        task_shape(TaskConfig(host=reference), ["r0c0"])


class Reader(nn.Conv2d):
    """Reads a number in eval mode, which has no one value for several networks."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x) + (0.0 if self.training else float(x.mean()))
        except RuntimeError as error:
            raise ValueError("no\nnumber") from error


class Rounded(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).long()


def test_what_is_wrong_with_a_chain_is_told_at_once() -> None:
    def repeated(classes: int) -> nn.Module:
        relu = nn.ReLU()
        relu.register_buffer("one", torch.zeros(1), persistent=False)
        relu.register_buffer("two", torch.zeros(1), persistent=False)
        return nn.Sequential(nn.Conv2d(3, 4, 1), relu, relu, Head(4, classes + 1))

    found = host_findings(UserHost(repeated, 5), 5)
    assert found == (
        "two of its segments are one, which rows of weights cannot say",
        "its buffers 1.one, 1.two are not persistent, so that grown networks would lack them",
        "its last segment 3 gives [B, 6], not logits [B, 5]",
    )
    mode = "for several networks in eval mode"
    for segments, fault in (
        ((Reader(3, 4, 1), Head(4, 5)), f"0 raises ValueError {mode}: no\\nnumber"),
        ((nn.Conv2d(3, 4, 1), Rounded(4, 5)), "1 gives torch.int64, no floating-point numbers"),
    ):
        make = host("own")(lambda classes, own=segments: nn.Sequential(*own))
        assert host_findings(UserHost(make, 5), 5) == (f"its segment {fault}",)
    blocks = HostChain((ConvBlock(8), ConvBlock(8)), 10)
    assert host_findings(blocks, 7) == ("it has 10 classes, not task.num_classes=7",)


def test_a_block_has_numbers_within_bounds() -> None:
    assert ConvBlock(MAX_CHANNELS) == ConvBlock(MAX_CHANNELS, kernel=3, pool=False)
    for channels in (0, MAX_CHANNELS + 1):
        told = rf"^a block of {channels} channels: must be in \[1, {MAX_CHANNELS}\]$"
        with pytest.raises(ValueError, match=told):
            ConvBlock(channels)
    for kernel in (-1, 33):
        told = rf"^a block with a kernel of {kernel} pixels: must be odd and in \[1, 31\]$"
        with pytest.raises(ValueError, match=told):
            ConvBlock(8, kernel)
    small = HostChain((*[ConvBlock(2, pool=True)] * 5, ConvBlock(2)), 10)  # the last of one pixel
    assert small.segments({})[-1].input_shape == (2, 1, 1)


def test_a_control_that_widens_hosts_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^control=static_large: .*hosts_of_users:staged"):
        settings("staged", control="static_large")
