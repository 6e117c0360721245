"""The host never waits for the device inside an env-step, but in the reads named here."""

import ast
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from benchmarks.sync_guard import HostSyncError, SyncGuard
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Agent
from esper_soa.agent.scripted import HeuristicPolicy, RandomPolicy, SchedulePolicy, WaitPolicy
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.env import REWARD_MODES, EarlyStopConfig, RewardConfig
from esper_soa.config.nets import sort_slots
from esper_soa.env.step import apply_action, guard_, look, measure_, record_and_observe
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.results.metrics import MetricsAccumulator
from esper_soa.training.results.progress import Progress
from tests.builders.lanes import some_of
from tests.builders.tiny_world import (
    CPU,
    guarded,
    play_state,
    tiny_rules,
    tiny_settings,
    tiny_world,
    view_of,
)

META = torch.device("meta")
PACKAGE = Path(__file__).parents[3] / "esper_soa"
# which seeds run at all decides what is launched; the one read that an env-step waits for
ACTIVE_SEEDS = "read_active_seeds"
# A copy of two numbers that is started, not waited for; read one env-step late, for the progress
# bar.
READ_PROGRESS = "read_progress"
# MetricsAccumulator.read: the sums of a whole round by one copy after its last env-step, and what
# the host makes of it.
NEVER = EarlyStopConfig()
METRICS = ("MetricsAccumulator", "copy_to_host", "episode_records", "blueprint_record", "spread_of")

VALUES = torch.arange(4.0)
SYNCS: dict[str, Callable[[], object]] = {
    "item": lambda: VALUES[0].item(),
    "tolist": lambda: VALUES.tolist(),
    "numpy": lambda: VALUES.numpy(),
    "asarray": lambda: np.asarray(VALUES),
    "cpu": lambda: VALUES.cpu(),
    "to_cpu": lambda: VALUES.to("cpu"),
    "to_object": lambda: VALUES.to(CPU),
    "to_named_object": lambda: VALUES.to(device=torch.device("cpu"), dtype=torch.float64),
    "blocking_upload": lambda: torch.arange(3).to(CPU),
    "to_device_cpu": lambda: VALUES.to(device="cpu", non_blocking=True),
    "bool": lambda: bool(VALUES[0]),
    "int": lambda: int(VALUES[0]),
    "float": lambda: float(VALUES[0]),
    "range": lambda: range(VALUES.long()[1]),
    "nonzero": lambda: VALUES.nonzero(),
    "where_without_values": lambda: torch.where(VALUES > 1),
    "masked_select": lambda: VALUES.masked_select(VALUES > 1),
    "read_by_mask": lambda: VALUES[VALUES > 1],
    "write_by_mask": lambda: VALUES.clone().__setitem__(VALUES > 1, VALUES[:2]),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "unique": lambda: VALUES.unique(),
    "bincount": lambda: VALUES.long().bincount(),
    "tensor_on_device": lambda: torch.tensor([1, 2], device="cpu"),
    "array_on_device": lambda: torch.as_tensor(np.ones(2), device="cpu"),
    "asarray_on_device": lambda: torch.asarray([1, 2], device=CPU),
    "new_tensor": lambda: VALUES.new_tensor(4),
    "read_by_list": lambda: VALUES[[2, 0]],
    "read_by_array": lambda: VALUES.view(2, 2)[:, np.array([1, 0])],
    "read_by_host": lambda: VALUES[torch.tensor([2, 0])],
    "write_by_list": lambda: VALUES.clone().__setitem__([2, 0], VALUES[:2]),
    "number_as_item": lambda: VALUES.clone().__setitem__(0, 1.0),
    "host_into_slice": lambda: VALUES.clone().__setitem__(slice(0, 2), torch.zeros(2)),
    "host_to_other": lambda: torch.zeros(2).to(VALUES),
    "number_at_places": lambda: VALUES.clone().__setitem__(VALUES.long(), 1.0),
    "copied_from_host": lambda: VALUES.clone().copy_(torch.zeros(4)),
}


@pytest.mark.parametrize("name", SYNCS)
def test_the_guard_raises_on_a_sync(name: str) -> None:
    SYNCS[name]()
    with pytest.raises(HostSyncError), SyncGuard():
        SYNCS[name]()


def test_the_guard_names_the_function_of_the_program_whatever_the_folder_of_the_clone() -> None:
    own = str(PACKAGE / "made_up.py")
    helper = "/home/esper_soa/benchmarks/made_up.py"
    known: dict[str, Callable[..., float]] = {}
    exec(compile("def read(values): return values[0].item()", helper, "exec"), known)
    exec(compile("def program(values): return read(values)", own, "exec"), known)
    with SyncGuard(["program"]) as guard:
        known["program"](VALUES)
    assert {sync.function for sync in guard.log} == {"program"}


def test_the_guard_lets_device_work_pass_and_moves_that_wait_for_nothing() -> None:
    index = torch.tensor([2, 0])
    with SyncGuard() as guard:
        VALUES.clone()[1:] = 2.0
        picked = VALUES[index] + torch.where(VALUES > 1, VALUES, 0.0).sum()
        torch.zeros_like(VALUES).index_copy_(0, index, picked)
        moved = torch.as_tensor(np.arange(3)).to(CPU, non_blocking=True)
        assert ((moved + 1).to(torch.float64) * 2).to(VALUES.dtype).shape == (3,)
    assert guard.log == []
    assert picked.tolist() == [7.0, 5.0]


def test_the_guard_logs_what_is_allowed_and_forgives_reads_of_what_is_on_the_host() -> None:
    def allowed_read() -> list[float]:
        return (VALUES + 1).cpu().tolist()

    with SyncGuard(["allowed_read"]) as guard:
        assert allowed_read() == [1.0, 2.0, 3.0, 4.0]
    assert [sync.operation for sync in guard.log] == ["Tensor.cpu"]
    with pytest.raises(HostSyncError, match="allowed_read"), SyncGuard(["another"]):
        allowed_read()


def agents(num_slots: int, device: torch.device) -> dict[str, Agent]:
    cfg = tiny_settings(1, num_slots, 1)
    network = PolicyConfig(network=NetworkConfig(hidden=32, features=32))
    policy = RecurrentPolicy(network, sort_slots(cfg.task, cfg.slots), seed=0)
    return {
        "random": RandomPolicy(),
        "wait": WaitPolicy(),
        "schedule": SchedulePolicy(cfg.policy.schedule, cfg.task.blueprints),
        "heuristic": HeuristicPolicy(cfg.policy.heuristic, cfg.task.blueprints),
        "ppo": policy.to(device),
    }


@pytest.mark.parametrize("name", ["random", "wait", "schedule", "heuristic", "ppo"])
def test_no_decision_waits_for_the_device(name: str) -> None:
    agent = agents(3, CPU)[name]
    rules = tiny_rules(3, 6)
    memory = agent.start(4, CPU)
    for step in play_state(rules, 4, seed=2):
        with SyncGuard():
            _, memory = agent.act(step.view, memory)


@pytest.mark.parametrize("mode", some_of(REWARD_MODES, "basic_plus", "shaped"))
def test_no_kernel_of_an_env_step_waits_for_the_device(mode: str) -> None:
    rules = tiny_rules(3, 4, RewardConfig(mode=mode))
    for step in play_state(rules, 4, seed=5):
        with SyncGuard():
            before, trusted = guarded(rules, step.before, step.measured)
            recorded = record_and_observe(rules, before, trusted)
            apply_action(rules, *recorded[:2], step.action)


def test_counting_a_round_waits_for_the_device_only_at_its_end() -> None:
    rules = tiny_rules(2, 5)
    metrics = MetricsAccumulator(rules, 3, 4)
    for step in play_state(rules, 3, seed=1):
        with SyncGuard():
            metrics.add_(step.observed, step.result)
    with SyncGuard(METRICS) as guard:
        metrics.read(step.result.state)
    assert [sync.operation for sync in guard.log].count("Tensor.cpu") == 1


def learning_player(num_slots: int) -> Player:
    policy = agents(num_slots, CPU)["ppo"]
    assert isinstance(policy, RecurrentPolicy)
    return Player(policy, Learner(policy, PPOConfig(minibatches=1), 1, seed=0))


def syncs_of_a_round(
    num_envs: int, num_slots: int, steps: int, player: Player, early: EarlyStopConfig = NEVER
) -> Counter[str]:
    world = build_world(replace(tiny_settings(num_envs, num_slots, steps), early_stop=early), CPU)
    assert world.rules.setup.workers == 1, "the guard sees its own thread alone"
    quiet = Progress(num_envs * steps, Console(file=io.StringIO()), "off")
    with quiet as progress, SyncGuard([ACTIVE_SEEDS, READ_PROGRESS, *METRICS]) as guard:
        play_round(world, player, Round(0, progress))
    return Counter(sync.function for sync in guard.log if not sync.function.startswith(METRICS))


@pytest.mark.parametrize(
    ("num_envs", "num_slots"), [(2, 10), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_an_env_step_reads_the_device_twice_whatever_its_size(
    num_envs: int, num_slots: int
) -> None:
    steps = 3
    counted = syncs_of_a_round(num_envs, num_slots, steps, Player(RandomPolicy(), None))
    assert counted == {ACTIVE_SEEDS: steps, READ_PROGRESS: steps}


def test_where_episodes_may_end_early_an_env_step_reads_the_device_no_more() -> None:
    """How many have ended travels with the numbers of the progress bar."""
    early = EarlyStopConfig(patience=1, min_delta=100.0, min_steps=3)
    counted = syncs_of_a_round(2, 2, 6, Player(RandomPolicy(), None), early)
    assert counted == {ACTIVE_SEEDS: 3, READ_PROGRESS: 3}


@pytest.mark.parametrize("teacher", some_of(["", "schedule", "heuristic"], "heuristic"))
def test_a_round_with_a_learner_reads_the_device_no_more_than_without(teacher: str) -> None:
    player = learning_player(2)
    if teacher:
        player = player._replace(teacher=agents(2, CPU)[teacher])
    assert syncs_of_a_round(3, 2, 3, player) == {ACTIVE_SEEDS: 3, READ_PROGRESS: 3}


def test_training_and_validation_read_the_active_seeds_and_nothing_else() -> None:
    world = tiny_world(4, 3, 8)
    agent = RandomPolicy()
    assert world.rules.setup.workers == 1, "the guard sees its own thread alone"
    state = world.start_round(0)
    seeds = newborn = 0
    for index in range(8):
        work = world.work(index)
        newborn += int(state.slots.newborn.sum())
        with SyncGuard([ACTIVE_SEEDS]) as guard:
            state, measured = measure_(world.rules, world.weights, state, work)
        assert [sync.operation for sync in guard.log] == ["Tensor.cpu"]
        seeds += int(state.slots.running.sum())
        with SyncGuard():
            state, measured = guard_(world.rules, world.weights, state, measured)
        recorded = record_and_observe(world.rules, state, measured)
        decision, _ = agent.act(view_of(recorded, index), ())
        state = apply_action(world.rules, *recorded[:2], decision.action).state
    assert seeds, "no seed was trained: the test says nothing"
    assert newborn, "no seed was initialised under the guard"


STEP_CODE = (
    "agent",
    "env",
    "nets",
    "training/loop/collect.py",
    "training/results/metrics.py",
    "state.py",
)
# Functions that name the host: a copy there that is started and not waited for, buffers of a policy
# that is being built, orders of Shapley values and a user's images and reward before a run. What
# the native kernels read is on the host anyway.
HOST_NAMED = {
    ("training/results/metrics.py", "read_progress"),
    ("agent/policy.py", "__init__"),
    ("env/attribution.py", "shapley_orders"),
    ("nets/data/user_images.py", "check_images"),
    ("env/user_reward.py", "changed_inputs"),
}


def named_hosts(path: Path) -> set[tuple[str, str]]:
    """(file, function) of every call with an argument "cpu", in a folder or file of the package."""
    found = set()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                body = [node for part in function.body for node in ast.walk(part)]
                given = [
                    value
                    for call in body
                    if isinstance(call, ast.Call)
                    for value in (*call.args, *(word.value for word in call.keywords))
                ]
                texts = [value.value for value in given if isinstance(value, ast.Constant)]
                if any(str(text).startswith("cpu") for text in texts):
                    found.add((file.relative_to(PACKAGE).as_posix(), function.name))
    return found


def test_nothing_in_an_env_step_names_the_host() -> None:
    """On a CPU the guard cannot tell a copy to torch.device("cpu") from one to the tensors' own."""
    found = set().union(*(named_hosts(PACKAGE / part) for part in STEP_CODE))
    assert {place for place in found if not place[0].startswith("nets/engines/cpu/")} == HOST_NAMED


def assert_on(device: torch.device, record: TensorDict) -> None:
    for name, value in record.flatten_keys(".").items():
        assert value.device == device, name


@pytest.mark.parametrize("mode", some_of(REWARD_MODES, "basic_plus", "escrow"))
def test_an_env_step_runs_on_a_device_that_holds_no_values(mode: str) -> None:
    # On meta every read of a value raises, and so does every operation between two devices.
    rules = tiny_rules(3, 1, RewardConfig(mode=mode), META)
    metrics = MetricsAccumulator(rules, 2, 4)
    for step in play_state(rules, 2, seed=0, device=META):
        metrics.add_(step.observed, step.result)
        assert_on(META, step.result.state.to_tensordict())
        assert_on(META, step.result.terms.to_tensordict())
        assert_on(META, step.view.observation.to_tensordict())
    masks, _ = look(rules, step.result.state)
    assert_on(META, masks.to_tensordict())


@pytest.mark.parametrize(
    "name", some_of(["random", "wait", "schedule", "heuristic", "ppo"], "heuristic", "ppo")
)
def test_every_agent_decides_on_a_device_that_holds_no_values(name: str) -> None:
    for step in play_state(
        tiny_rules(3, 1, device=META), 2, seed=0, agent=agents(3, META)[name], device=META
    ):
        assert_on(META, step.action.to_tensordict())
