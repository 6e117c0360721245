"""What a run needs is asked for before it is built; a failed allocation names settings."""

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_soa.agent.objective import Batch, coefficients, total_loss
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import new_rollout
from esper_soa.config.agent import NetworkConfig, PolicyConfig
from esper_soa.config.nets import DataConfig, TaskConfig, TransformerConfig, sort_slots
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.observation import feature_names
from esper_soa.nets.data.batches import SampleCount
from esper_soa.nets.data.orders import MAX_STORED
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.needs import BUILT, GIB, PASSED, UPDATED, Need, at_once
from esper_soa.nets.seeds.pools import allocate
from esper_soa.nets.seeds.snapshot import add_snapshot_
from esper_soa.nets.setup import Setup
from esper_soa.runtime import memory
from esper_soa.runtime.memory import (
    LEARNED,
    check_room,
    free_memory,
    memory_errors,
    most_envs,
    needs,
)
from esper_soa.system.errors import RunMemoryError, SettingError, UserError
from esper_soa.training.loop.build import make_setup
from tests.builders.program import finished

CPU = torch.device("cpu")
NOTHING = SampleCount(0, 0)
SMALL = ("+experiment=smoke", "rounds=1", "steps=2", "compute.engine=torch")


def test_the_weights_are_counted_as_they_are_allocated() -> None:
    cfg = TrainConfig(envs=3, slots=["r0c0", "r1c1"])
    weights = allocate(host_shape(cfg.task, sort_slots(cfg.task, cfg.slots)), 3, CPU, torch.float32)
    add_snapshot_(weights)
    numbers = sum(one.numel() for one in weights.values(True, True) if one.dtype == torch.float32)
    assert sizes(cfg)["weights"] == pytest.approx(4 * numbers, rel=0.02)


def needs_of(
    cfg: TrainConfig, device: torch.device = CPU, unread: SampleCount = NOTHING
) -> list[Need]:
    setup = make_setup(cfg, device, loaded=True)._replace(unread=unread)
    return needs(setup, cfg.policy)


def check(cfg: TrainConfig, processes: int = 1) -> None:
    check_room(make_setup(cfg, CPU)._replace(processes=processes), cfg.policy)


NETWORK = NetworkConfig(hidden=512, features=512, slot_features=64)


def sizes(cfg: TrainConfig) -> dict[str, int]:
    return {need.what: need.size for need in needs_of(cfg)}


def test_every_part_is_counted_by_hand() -> None:
    """Of 3 hosts with 6418 weights and 112 statistics, and seeds of 1265 and 4817 with their gates;
    the layers of a host give 14336 numbers.
    """
    compute = ComputeConfig(engine="torch", env_chunk=2, workers=2)
    cfg = TrainConfig(envs=3, steps=5, batch_size=4, train_samples=8, compute=compute)
    cfg = replace(cfg, slots=["r0c0", "r0c1"])
    cfg.policy.network = NETWORK
    cfg.policy.ppo.minibatches = 2
    host = 3 * 6418
    row = 512 * (23 + 2 * 64)  # of the policy's first layer, and so many numbers in four gates
    width = "task.base_channels", "task.kernel_size"
    batch = "batch_size", "compute.env_chunk", "task.base_channels"
    nets = "compute.workers", "compute.env_chunk", *width
    drawn = "data.synthetic_train", "data.synthetic_test"
    sizes_of_policy = ("hidden", "layers", "features", "slot_features")
    policy = tuple(f"policy.network.{name}" for name in sizes_of_policy)
    lasting = {
        # weights, snapshot and momentum, statistics twice
        Need("weights", 4 * (3 * (host + 3 * (1265 + 4817)) + 3 * 2 * 112), ("envs", *width)),
        Need("losses", 0, batch, PASSED),
        Need("drawing the weights of the hosts", (16 + 4) * host, ("envs", *width), BUILT),
        Need("the order of the images", 3 * (8 * 8 + 4 * 100), ("train_samples", "envs")),
        Need("drawing the synthetic images", 0, drawn, BUILT),
        Need("the images", 100 * (3072 + 2 * 4800) + 30 * 2 * 3072, ("data.root",)),
        Need("the boosts of seeds that help each other", 4 * 3 * 5, ("steps", "envs", "slots")),
        Need("the rollout", 5 * 3 * (4 * (23 + 2 * 31) + 8 * (2 + 12)), ("steps", "envs")),
        Need("the policy", 4 * 4 * (row + 8 * 512**2), policy),
        Need(
            "activations of the update",  # of the 2 envs of the larger minibatch
            4 * 5 * 2 * ((3 + 20 + 12) * 512 + 2 * (3 * 64 + 256)),
            ("steps", "envs", *policy),
            LEARNED,
        ),
    }

    def activations(networks: int) -> Need:
        numbers = networks * 4 * (3072 + 14336)
        return Need("activations of the batches in training", 4 * numbers, batch, PASSED)

    copies = {Need("networks in training", 2 * 4 * host, nets, at) for at in (PASSED, UPDATED)}
    copies.add(Need("gradients of the hosts", 3 * 4 * host, nets, UPDATED))
    on_gpu = replace(compute, workers=1, env_chunk=3)
    for asked, device, found in (
        (replace(compute, engine="auto"), CPU, {activations(2)}),
        (compute, CPU, {activations(3), *copies}),
        (on_gpu, torch.device("meta"), {activations(3)}),
    ):
        parts = needs_of(replace(cfg, compute=asked), device, SampleCount(100, 30))
        assert {*parts} == lasting | found
    assert "the policy" not in sizes(replace(cfg, policy=PolicyConfig(name="wait")))


def test_of_many_hosts_so_many_numbers_are_drawn_at_once() -> None:
    many = sizes(TrainConfig(envs=1000))["drawing the weights of the hosts"]
    assert many == 16 * 2**18 + 4 * 1000 * 6418


MEMINFO = "MemTotal: 9 kB\nMemFree: 2 kB\nMemAvailable: 8 kB\n"
V2 = {"memory.max": "5000\n", "memory.current": "1000\n"}
V1 = {"memory/memory.limit_in_bytes": "4500", "memory/memory.usage_in_bytes": "1000"}


@pytest.mark.parametrize(
    ("meminfo", "groups", "free"),
    [
        (MEMINFO, {}, 8192),
        (MEMINFO, V2, 4000),
        (MEMINFO, V1, 3500),
        (MEMINFO, V2 | {"memory.max": "max\n"}, 8192),
        (MEMINFO, V2 | {"memory.max": "90000\n"}, 8192),
        (MEMINFO, {"memory.max": "5000"}, 8192),
        ("", V2, 4000),
        ("", {}, None),
    ],
)
def test_the_machine_or_its_container_says_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    meminfo: str,
    groups: dict[str, str],
    free: int | None,
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in (groups | {"meminfo": meminfo} if meminfo else groups).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    assert free_memory(CPU) == free


def test_on_a_gpu_what_torch_keeps_for_itself_is_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 90))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 30)
    assert free_memory(torch.device("cuda")) == 45


def test_a_refusal_says_the_largest_parts_and_what_makes_them_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parts(setup: Setup, *_: object) -> list[Need]:
        steps = Need("a rollout", 2 * GIB, ("steps", "envs"))
        sizes = "batch_size", "compute.env_chunk", "envs"
        return [
            steps,
            Need("weights", 3 * GIB * setup.num_envs, sizes),
            Need("c", GIB, ()),
            Need("d", 1, ()),
        ]

    monkeypatch.setattr(memory, "needs", parts)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10 * GIB)
    cfg = TrainConfig(envs=3, compute=ComputeConfig(env_chunk=1))
    with pytest.raises(SettingError) as caught:
        check(cfg)
    assert str(caught.value) == (
        "batch_size=32: must be so small that cpu holds the run. It needs at least 12.0 GiB (9.0 "
        "for weights, 2.0 for a rollout, 1.0 for c), and 10.0 GiB are free. Lower batch_size or "
        "envs. At most 2 envs can fit."
    )
    check(replace(cfg, envs=2))
    told = (
        r"^batch_size=32: must be so small that cpu holds the run\. It needs at least 12\.0 GiB "
        r"\(9\.0 for weights, 2\.0 for a rollout, 1\.0 for c\), and 2\.0 GiB are free\. Lower "
        r"batch_size or envs\.$"
    )
    with pytest.raises(SettingError, match=told):
        check(cfg, processes=5)
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    check(cfg)


def with_network(slots: list[str], **network: int) -> TrainConfig:
    policy = PolicyConfig(network=replace(NETWORK, **network))
    policy.ppo.minibatches = 1
    return TrainConfig(envs=8, steps=8, slots=slots, policy=policy)


def test_the_policy_is_counted_by_the_width_and_the_number_of_its_slots() -> None:
    one = sizes(with_network(["r0c0"]))
    three = sizes(with_network(["r0c0", "r0c1", "r0c2"]))
    assert three["the policy"] == one["the policy"]
    # of two more slots in 64 env-steps: layer, norm and encoding of 64 numbers, and the 256 that
    # score it
    more = three["activations of the update"] - one["activations of the update"]
    assert more == 2 * 64 * 4 * (3 * 64 + 256)
    wide = sizes(with_network(["r0c0"], slot_features=128))
    # mean and largest of 64 numbers more enter a layer of 512; parameters, gradients and two
    # moments
    assert wide["the policy"] - one["the policy"] == 4 * 4 * 512 * 2 * 64
    shown = with_network(["r0c0"])
    shown.reward.rent_weight = "[1,2]"
    shown.policy.observe = ["reward.rent_weight"]
    assert sizes(shown)["the policy"] - one["the policy"] == 4 * 4 * 512
    assert sizes(shown)["the rollout"] - one["the rollout"] == 8 * 8 * 4


def test_samples_and_their_order_are_counted_unless_it_is_looked_up_or_split() -> None:
    slots = ["r0c0", "r0c1", "r0c2", "r1c0"]
    cfg = TrainConfig(envs=4, steps=5, slots=slots, train_samples=128)
    split = replace(cfg, data=DataConfig(split=True))
    drawn = 8 * 4 * 128  # int64 of an env-step
    for asked, train, order in (
        (cfg, 1000, drawn + 4 * 4 * 1000),
        (cfg, MAX_STORED // 4, drawn + 4 * MAX_STORED),
        (cfg, MAX_STORED // 4 + 1, drawn),
        (split, 1000, drawn),
        (replace(cfg, data=DataConfig("[fashion32,synthetic]")), 1000, drawn + 4 * 2 * 1000),
    ):
        found = {need.what: need.size for need in needs_of(asked, CPU, SampleCount(train, 300))}
        assert found["the order of the images"] == order
        # bytes of an image, of the same padded and mirrored too, and of a held out one twice
        assert found["the images"] == train * (3072 + 2 * 4800) + 300 * 2 * 3072
        assert found["the boosts of seeds that help each other"] == 4 * 4 * 6 * 5


@pytest.mark.parametrize("largest", ["synthetic_train", "synthetic_test", "validation_images"])
def test_the_largest_part_that_is_drawn_at_once_counts(largest: str) -> None:
    counts = dict.fromkeys(("synthetic_train", "synthetic_test", "validation_images"), 1000)
    data = DataConfig(name="synthetic", **counts | {largest: 3000})
    drawn = sizes(TrainConfig(data=data))["drawing the synthetic images"]
    assert drawn == 16 * 3 * 32 * 32 * 3000  # of every number its place and its hash, int64


def test_what_fits_alone_is_refused_where_another_process_takes_as_much() -> None:
    cfg = TrainConfig(envs=2**20, steps=1)
    free = free_memory(CPU)
    assert free is not None
    assert GIB // 8 < free < 2**46
    fits = replace(cfg, envs=most_envs(make_setup(cfg, CPU), cfg.policy, free * 3 // 4))
    check(fits)
    with pytest.raises(SettingError, match=f"envs={fits.envs}"):
        check(fits, processes=2)


SIZES = TransformerConfig(width=8192, layers=960, segments=1)
TEXT = TaskConfig(host="transformer", blueprints=["norm"], transformer=SIZES, num_classes=50_257)
MANY_TOKENS = replace(TEXT, transformer=TransformerConfig(segments=1, logits_mib=65_536))
READS = {"data": DataConfig(name="text"), "slots": ["r0c0"], "envs": 4}


@pytest.mark.parametrize(
    ("changed", "setting"),
    [
        ({"envs": 2**20, "steps": 1}, "envs=1048576"),
        ({"task": TEXT, **READS, "envs": 1}, "task.transformer.width=8192"),
        (
            {"task": MANY_TOKENS, **READS, "batch_size": 4096, "train_samples": 4096},
            "task.transformer.logits_mib=65536",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_no_machine_holds_is_refused_at_once_and_says_what_to_lower(
    changed: dict, setting: str
) -> None:
    told = rf"^{setting}: must be so small .* GiB are free\. Lower "
    with pytest.raises(SettingError, match=told):
        check(replace(TrainConfig(), **changed))


def test_losses_are_counted_by_the_head_within_their_budget() -> None:
    task = replace(TEXT, transformer=TransformerConfig(segments=1, logits_mib=1), num_classes=1000)
    cfg = replace(TrainConfig(), task=task, **(READS | {"envs": 1}))
    table = 4 * 1000 * task.transformer.width
    assert sizes(cfg)["losses"] == 2**20 + 2 * table
    assert sizes(replace(cfg, batch_size=2))["losses"] == 8 * 2 * 64 * 1000 + 2 * table
    assert sizes(TrainConfig())["losses"] == 0
    assert "gradients of the hosts" in sizes(cfg)  # which no native kernels train in place


def test_what_passes_is_counted_once() -> None:
    parts = [Need("weights", 5, ()), Need("a", 3, (), "one"), Need("b", 2, (), "other")]
    parts.append(Need("c", 2, (), "other"))
    assert at_once(parts) == 5 + 2 + 2
    assert at_once(parts[:1]) == 5


@pytest.mark.parametrize(
    ("network", "slots"),
    [
        ({"hidden": 256}, ["r0c0"]),
        ({"layers": 2, "hidden": 256}, ["r0c0", "r0c1", "r0c2"]),
        ({"features": 128, "hidden": 256}, ["r0c0"]),
        ({"slot_features": 16}, ["r0c0", "r0c1", "r0c2"]),
    ],
)
def test_activations_of_an_update_are_counted_as_autograd_keeps_them(
    network: dict, slots: list[str]
) -> None:
    """No more than it keeps, as a run that fits must never be refused, and not much less."""

    def kept(envs: int) -> int:
        found = dict[int, int]()

        def note(tensor: Tensor) -> Tensor:
            if tensor.is_mkldnn:  # a copy of its own
                found[id(tensor)] = tensor.numel() * tensor.element_size()
            else:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        learner, batch, noise = update_of(cfg, envs)
        weights = coefficients(learner.config, 0, 1)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            evaluation = learner.policy.evaluate(batch.rows, [0], noise)
            total_loss([(evaluation, batch)], learner.config, weights, learner.tables)
        return sum(found.values())

    cfg = with_network(slots, **network)
    measured = kept(16) - kept(8)
    assert 0.7 * measured < sizes(cfg)["activations of the update"] < measured


def update_of(cfg: TrainConfig, envs: int) -> tuple[Learner, Batch, Tensor]:
    """A learner, a batch of rows in which everything is legal, and numbers for its dropout."""
    specs = sort_slots(cfg.task, cfg.slots)
    names = tuple(spec.name for spec in specs)
    learner = Learner(RecurrentPolicy(cfg.policy, specs, 0), cfg.policy.ppo, 1, 0)
    rows = new_rollout(cfg.steps, envs, len(specs), len(feature_names(names)), CPU).rows
    for mask in rows.masks.values():
        mask.fill_(True)
    rows.valid.fill_(True)
    lead = (cfg.steps, envs)
    noise = torch.full((*lead, cfg.policy.network.hidden // 2), 0.5)
    return learner, Batch(rows, torch.zeros(lead), torch.zeros(lead)), noise


def test_an_allocation_that_fails_is_one_line_and_other_errors_pass() -> None:
    told = (
        r"^out of memory\. Lower envs, batch_size, steps, train_samples, the width of the "
        r"hosts \(task\.base_channels or task\.transformer\.width\), "
        r"policy\.network\.hidden or compute\.env_chunk\.$"
    )
    with pytest.raises(UserError, match=told), memory_errors(UserError):
        torch.empty(2**50)
    with pytest.raises(RunMemoryError, match=told), memory_errors(RunMemoryError):
        np.zeros(2**50)
    with pytest.raises(RuntimeError, match="shape"), memory_errors(RunMemoryError):
        torch.zeros(2).view(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "status"),
    [
        (("policy.network.hidden=8192",), 2),
        (("task=cifar_baseline", "data=fashion32", "batch_size=4000", "train_samples=4000"), 1),
    ],
)
def test_memory_that_runs_out_in_a_real_process_is_one_line(
    overrides: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    """In the policy's weights while building, and in the first training batch while playing."""
    limits = {resource.RLIMIT_AS: 2 * GIB}
    done = finished(*SMALL, "run_dir=run", *overrides, folder=tmp_path, limits=limits)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("error: out of memory")
    assert "Lower envs" in done.stderr
    assert "Traceback" not in done.stderr
