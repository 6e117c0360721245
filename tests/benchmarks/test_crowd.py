"""Loops shared out over processes: the declared work, the same results, no orphans, errors."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import opponents
from benchmarks.baseline_env import repeated
from benchmarks.crowd import Crowd, own_cores
from benchmarks.eps import benchmark
from benchmarks.eps_config import EpsConfig, cores
from benchmarks.loops import BareLoop, Loop, PlainLoop, bare_host, precision_of, tune
from benchmarks.machine import count_syncs
from benchmarks.opponents import Layout, LoopSide, layouts
from benchmarks.timing import COLUMNS, BenchmarkError, in_columns
from esper_soa.errors import UserError
from esper_soa.nets.config import TaskConfig

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def tiny(**changed: object) -> EpsConfig:
    """Three envs, the first two with a seed; two batches of four."""
    settings: dict = {
        "envs": 3,
        "batch_size": 4,
        "train_samples": 8,
        "val_samples": 8,
        "num_slots": 2,
        "live": 1,
        "live_share": 0.67,
        "steps": 4,
        "timed_steps": 1,
        "repeats": 2,
        "update": False,
        "limits": False,
        "baseline_validation": "separate",
        "bare_how": "eager",
    }
    return EpsConfig(**settings | changed)


def one_process(loop: Loop, steps: int) -> list[np.ndarray]:
    """What the envs come to in this process, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(steps):
        loop.one_step()
    torch.set_num_threads(threads)
    return loop.results()


@pytest.fixture(scope="module")
def two_processes() -> Iterator[Crowd]:
    found = Crowd(PlainLoop, tiny(), 2)
    yield found
    found.close()


# --- one loop in several processes


@pytest.mark.slow
def test_envs_come_to_the_same_in_several_processes_as_in_one(two_processes: Crowd) -> None:
    two_processes.ask("play", 2)
    first, second = two_processes.ask("results")
    alone = one_process(PlainLoop(tiny(), range(3)), 2)
    assert len(first) == 2  # envs 0 and 2
    for env, found in zip((0, 2, 1), (*first, *second), strict=True):
        np.testing.assert_array_equal(found, alone[env])
    assert not np.array_equal(alone[0], alone[1])


@pytest.mark.slow
def test_shares_that_are_not_equal_do_the_declared_images(two_processes: Crowd) -> None:
    # Env 0 has a seed: 2 subsets of 8 images; so has env 1, in the other process; env 2 has none.
    first, second = (played.done for played in two_processes.ask("play", 1))
    assert (first.train, first.val) == (16, 24)
    assert (second.train, second.val) == (8, 16)
    assert (first.train + second.train, first.val + second.val) == tiny().images


@pytest.mark.slow
def test_an_error_in_one_process_surfaces_and_ends_them_all() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(BenchmarkError, match="process 2 of 2 of the loop: env 1 is not to be had"):
        Crowd(refuse_env_1, tiny(), 2)
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.mark.slow
def test_a_process_that_breaks_is_named_with_its_status() -> None:
    broken = Crowd(BareLoop, tiny(live=0), 1)
    broken.members[0].pipe.send(("nonsense", ()))
    with pytest.raises(BenchmarkError, match=r"process 1 of 1 of the loop has ended with status 1"):
        broken.ask("facts")
    assert broken.members == []


def refuse_env_1(cfg: EpsConfig, numbers: Sequence[int]) -> Loop:
    if 1 in numbers:
        raise UserError("env 1 is not to be had")
    return BareLoop(tiny(live=0), numbers)


@pytest.mark.slow
def test_no_process_outlives_a_parent_that_is_killed() -> None:
    script = (
        "from benchmarks.crowd import Crowd\nfrom benchmarks.loops import BareLoop\nfrom "
        "benchmarks.eps_config import EpsConfig\nimport time\nif __name__ == '__main__':\n    c = "
        "Crowd(BareLoop, EpsConfig(envs=1, batch_size=2, train_samples=2, val_samples=2), 1)\n    "
        "print(*[m.process.pid for m in c.members], flush=True)\n    time.sleep(600)\n"
    )
    path = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ | path
    ) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(children) == 1
        assert all(alive(pid) for pid in children)
        parent.send_signal(signal.SIGKILL)
    ending = time.monotonic() + 60
    while any(alive(pid) for pid in children):
        assert time.monotonic() < ending, "a child goes on without its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """The process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(cores() < 2, reason="needs two cores")
def test_several_processes_have_a_core_each_and_one_has_all() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert own_cores(2) == mine[:2]
    assert own_cores(1) == [None]
    assert own_cores(len(mine) + 1) == [None] * (len(mine) + 1)


# --- the opponents in a benchmark


@pytest.mark.slow
def test_both_opponents_do_the_declared_work_and_no_more() -> None:
    cfg = tiny(live=0, sides=["baseline", "bare"], baseline_processes=2)
    sides = benchmark(cfg)["points"][0]["sides"]
    for side in sides.values():
        assert (side["train_images"], side["val_images"]) == (24, 24)
        assert (side["processes"], side["threads"], side["pinned"]) == (2, 1, cores() >= 2)
        assert side["peak_mib"] > 0
    assert list(sides["bare"]["columns"]) == list(COLUMNS[:2])
    assert list(sides["baseline"]["columns"]) == list(COLUMNS[:3])
    # once per env-step of each process
    assert (sides["baseline"]["syncs"], sides["bare"]["syncs"]) == (2, 0)


def test_images_that_were_not_worked_on_are_an_error() -> None:
    side = LoopSide("baseline", tiny())
    side.images = (24, 39)
    with pytest.raises(BenchmarkError, match=r"baseline: \(24, 39\) .* not \(24, 40\)"):
        side.check()


def test_threads_of_one_process_and_one_process_per_core_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opponents, "cores", lambda: 4)
    one, two, four = (Layout(1, threads) for threads in (1, 2, 4))
    # three envs need no fourth process
    assert layouts(tiny(), CPU) == [one, two, four, Layout(3, 1)]
    assert layouts(tiny(baseline_processes=1), CPU) == [one, two, four]
    assert layouts(tiny(baseline_processes=2), CPU) == [Layout(2, 1)]
    assert layouts(tiny(baseline_threads=2), CPU) == [two]
    assert layouts(tiny(), torch.device("cuda", 0)) == [one]


def test_the_quickest_form_of_each_setting_is_kept() -> None:
    seconds = {("how", "a"): 3.0, ("how", "b"): 1.0, ("size", 5): 2.0, ("size", 6): 4.0}
    chosen: dict[str, int | str] = {}
    last: list[tuple[str, int | str]] = []

    def choose(setting: str, value: int | str) -> None:
        chosen[setting] = value
        last.append((setting, value))

    tried = tune(
        {"how": ("a", "b"), "only": (7,), "size": (5, 6)}, choose, lambda: seconds[last[-1]]
    )
    assert chosen == {"how": "b", "only": 7, "size": 5}
    assert tried == {"how a": 3000, "how b": 1000, "size 5": 2000, "size 6": 4000}


def test_what_no_phase_has_counted_belongs_to_the_last_column() -> None:
    found = in_columns({"training": 1.0, "data": 0.5, "state": 0.25}, 2.0)
    assert found == {"training": 1.5, "validation": 0.0, "policy and state machine": 0.5}
    found = in_columns({"training": 1.0, "validation": 0.5}, 2.0, COLUMNS[:2])
    assert found == {"training": 1.0, "validation": 1.0}


# --- what each does


def test_bare_hosts_are_the_hosts_of_the_task() -> None:
    for task, weights, pools in (
        (TaskConfig(), 6418, 3),
        (TaskConfig(num_pools=1), 6418, 1),
        (TaskConfig(base_channels=16), 24346, 3),
    ):
        host = bare_host(task)
        assert sum(weight.numel() for weight in host.parameters()) == weights
        assert sum(isinstance(layer, torch.nn.MaxPool2d) for layer in host) == pools


def test_bare_hosts_learn_each_from_its_own_start() -> None:
    cfg = tiny(live=0)
    before = BareLoop(cfg, range(2)).results()
    after = one_process(BareLoop(cfg, range(2)), 1)
    assert not np.array_equal(before[0], before[1])
    for old, new in zip(before, after, strict=True):
        moved = np.abs(new - old).max()
        assert 0 < moved < 0.1  # two clipped steps at a learning rate of 0.01


def test_a_whole_env_step_of_the_loop_waits_once() -> None:
    loop = PlainLoop(tiny(), range(3))
    assert count_syncs(loop.one_step, CPU) == 1
    loop.choose("validation", "fused")
    assert count_syncs(loop.one_step, CPU) == 1


def test_repeated_images_stay_in_channels_last() -> None:
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    again = repeated(images, 3)
    assert again.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(again, images.repeat(3, 1, 1, 1))


@pytest.mark.parametrize("validation", ["separate", "fused"])
def test_the_loop_computes_in_the_precision_of_the_engine(validation: str) -> None:
    cfg = tiny(baseline_validation=validation)
    cfg.compute.precision = "bfloat16"
    short = PlainLoop(cfg, range(1))
    full = PlainLoop(tiny(baseline_validation=validation), range(1))
    assert (short.facts()["dtype"], full.facts()["dtype"]) == ("bfloat16", "float32")
    (rounded,), (exact,) = one_process(short, 1), one_process(full, 1)
    assert not np.array_equal(rounded, exact)
    np.testing.assert_allclose(rounded[:-1], exact[:-1], atol=5e-3)


def test_loss_scales_that_the_loops_do_not_have_are_refused() -> None:
    cfg = tiny()
    cfg.compute.precision = "float16"
    with pytest.raises(BenchmarkError, match="compute.precision=float16"):
        precision_of(cfg, CPU)


@pytest.mark.slow
def test_compiled_hosts_share_two_graphs_and_learn_as_eager_ones_do() -> None:
    cfg = tiny(live=0, envs=10)  # more than torch recompiles a function for
    eager = BareLoop(cfg, range(10))
    compiled = BareLoop(cfg, range(10))
    graphs = eager.facts()["graphs"]
    compiled.choose("how", "compile")
    found = one_process(compiled, 2)
    wanted = one_process(eager, 2)
    assert isinstance(graphs, int)
    assert compiled.facts()["graphs"] == graphs + 2
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
