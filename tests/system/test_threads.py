"""Chunks of envs on threads of their own: the same results to the bit, and failures that are
seen.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.config.settings import ComputeConfig
from esper_soa.nets.data.images import ImageCrops, TrainingImages
from esper_soa.system.threads import Call, PieceCancelled, run_pieces
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Blend, Stage
from tests.builders.loop_world import Setting, StackedEnvs
from tests.builders.tiny_world import CPU, planned, seeds_where, tiny_settings


def test_results_come_in_the_order_of_the_pieces() -> None:
    last = threading.Event()
    pieces = [lambda call: last.wait(60) and 0, lambda call: last.set() or 1]
    assert run_pieces(pieces, 2) == [0, 1]


def test_workers_have_one_thread_per_operation_and_the_caller_keeps_its_own() -> None:
    torch.set_num_threads(3)  # for this test; every one begins with one
    assert run_pieces([lambda call: torch.get_num_threads()] * 4, 2) == [1] * 4
    assert torch.get_num_threads() == 3


def test_one_piece_or_one_worker_stays_in_the_calling_thread() -> None:
    here = threading.get_ident()
    assert run_pieces([lambda call: threading.get_ident()] * 3, 1) == [here] * 3
    assert run_pieces([lambda call: threading.get_ident()], 2) == [here]
    assert here not in run_pieces([lambda call: threading.get_ident()] * 2, 2)


IN_A_CHILD = """
import os, signal, sys
import torch
torch.set_num_threads(4)
torch.ones(1 << 22).exp().sum()  # in threads, which a child has not
import esper_soa
if sys.argv[1] == "1":
    from esper_soa.system.threads import run_pieces
    run_pieces([lambda call: 0] * 2, 2)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(100)
if sys.argv[1] == "1":
    given = {"device": "cpu", "envs": 2, "steps": 2, "compute.workers": 2, "compute.env_chunk": 1}
    esper_soa.make("smoke", overrides=[f"{name}={value}" for name, value in given.items()]).reset()
else:
    from esper_soa.system.torch_state import package_state
    with package_state():
        torch.ones(1 << 22).exp().sum()
    assert torch.get_num_threads() == 4
    esper_soa.make("smoke", overrides=["device=cpu", "compute.threads=2"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("num_threads", "told"), [(1, ""), (2, "spawn")])
def test_a_forked_process_has_pools_of_its_own_or_says_how_to_start_it(
    num_threads: int, told: str
) -> None:
    words = [sys.executable, "-c", IN_A_CHILD, str(num_threads)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, told in done.stderr) == (num_threads - 1, True), done.stderr


def wait_to_be_given_up(call: Call) -> None:
    while True:
        call.check()
        time.sleep(0.001)


def explode(call: Call) -> None:
    raise ValueError("piece 1 is broken")


def test_a_failure_ends_the_call_and_shows_where_it_happened() -> None:
    """The pieces beside it end only because they are given up."""
    with pytest.raises(ValueError, match="piece 1 is broken") as failure:
        run_pieces([explode, wait_to_be_given_up, wait_to_be_given_up], 2)
    assert "explode" in {frame.name for frame in traceback.extract_tb(failure.tb)}
    assert run_pieces([lambda call: 1, lambda call: 2], 2) == [1, 2]


def test_a_failure_is_told_though_an_earlier_piece_still_runs() -> None:
    with pytest.raises(ValueError, match="piece 1 is broken"):
        run_pieces([wait_to_be_given_up, explode], 2)


def test_an_interrupt_gives_the_pieces_up() -> None:
    ended: list[bool] = []

    def piece(call: Call) -> None:
        try:
            wait_to_be_given_up(call)
        except PieceCancelled:
            ended.append(True)
            raise

    # a shell may have started this process with interrupts ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_pieces([piece, piece], 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True, True]


class Failing:
    """Batches of a feed: the first env has none, the other one takes its time."""

    def __init__(self, feed: TrainingImages) -> None:
        self.feed = feed
        self.draw = feed.draw
        self.begun = threading.Event()
        self.taken = 0

    def take(self, envs: Tensor) -> None:
        if 0 in envs:
            self.begun.wait(60)
            raise ValueError("no batch")
        self.begun.set()
        self.taken += 1
        time.sleep(0.001)

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        self.take(envs)
        return self.feed.batch(envs, 0)

    def crops(self, envs: Tensor, index: int, count: int) -> ImageCrops:
        self.take(envs)
        return self.feed.crops(envs, 0, count)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_training_ends_behind_a_batch_where_another_chunk_fails(engine: str) -> None:
    cfg = tiny_settings(2, 1, 2)
    cfg.compute = ComputeConfig(workers=2, env_chunk=1, engine=engine)
    world = build_world(cfg, CPU)
    rules = world.rules
    none = seeds_where(np.zeros((2, 1)), Stage.EMPTY, 0, Blend.ADD)
    feed = Failing(world.work(0).training)
    alpha = torch.zeros(2, 1, dtype=torch.float64)
    plan = planned(rules.engine, rules.setup, none)
    given = rules.setup, world.weights, alpha, plan, feed
    with pytest.raises(ValueError, match="no batch"):
        rules.engine.train_(*given, 2000)
    assert 0 < feed.taken < 2000


def played(workers: int, dtype: torch.dtype) -> StackedEnvs:
    """Seven envs, three chunks and one env over, whose seeds are of all kinds; host 3 loses its way
    and is put back.
    """
    setting = Setting(workers=workers, dtype=dtype, governed=True, reward="basic_plus")
    envs = StackedEnvs(setting, list(range(7)))
    envs.play(6)
    envs.weights["host", "params"][3] = torch.nan
    envs.play(4)
    return envs


@pytest.mark.parametrize(
    ("workers", "dtype"),
    [
        (2, torch.float32),
        pytest.param(3, torch.float32, marks=pytest.mark.slow),
        pytest.param(2, torch.float64, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_workers_changes_no_bit(workers: int, dtype: torch.dtype) -> None:
    alone = played(1, dtype)
    assert alone.state.slots.running.any()
    assert alone.state.totals.rollbacks.sum() > 0
    shared = played(workers, dtype)
    assert_equal(alone.weights, shared.weights)
    assert_equal(alone.state.to_tensordict(), shared.state.to_tensordict())


def assert_equal(one: TensorDict, other: TensorDict) -> None:
    for name, value in one.flatten_keys(".").items():
        assert torch.equal(value.nan_to_num(), other.flatten_keys(".")[name].nan_to_num()), name
