"""The opponents: loops shared out over processes, the declared work, the same results, errors."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks import opponents
from benchmarks.baseline_env import repeated
from benchmarks.eps import benchmark
from benchmarks.eps_config import EpsConfig
from benchmarks.loops import BareLoop, Loop, PlainLoop, tune
from benchmarks.machine import count_syncs
from benchmarks.opponents import Crowd, Layout, LoopSide, layouts, own_cores
from benchmarks.timing import COLUMNS, BenchmarkError, in_columns
from esper_soa.system.cores import usable_cores
from tests.benchmarks.here import stay_here

CPU = torch.device("cpu")


def tiny(**changed: object) -> EpsConfig:
    """Three envs with a seed each; two batches of four."""
    settings: dict = {"envs": 3, "batch_size": 4, "train_samples": 8, "val_samples": 8, "live": 1}
    settings |= {"num_slots": 2, "steps": 4, "timed_steps": 1, "repeats": 2}
    cfg = EpsConfig(**settings | {"update": False, "limits": False} | changed)
    cfg.compute.compile = "off"
    return cfg


def one_process(loop: PlainLoop | BareLoop, steps: int) -> list[np.ndarray]:
    """What the envs come to in this process, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(steps):
        loop.one_step()
    torch.set_num_threads(threads)
    return loop.results()


@pytest.fixture(scope="module")
def two_processes() -> Iterator[Crowd]:
    found = Crowd("baseline", tiny(), 2)
    yield found
    found.close()


# --- one loop in several processes


@pytest.mark.slow
def test_envs_come_to_the_same_in_several_processes_as_in_one(two_processes: Crowd) -> None:
    # The first process has envs 0 and 2, the other env 1: 2 subsets of 8 images each.
    shares = [played.done for played in two_processes.ask("play", 2)]
    assert shares == [(16, 32), (8, 16)]
    first, second = two_processes.ask("results")
    alone = one_process(PlainLoop(tiny(), range(3)), 2)
    for env, found in zip((0, 2, 1), (*first, *second), strict=True):
        np.testing.assert_array_equal(found, alone[env])
    assert not np.array_equal(alone[0], alone[1])


@pytest.mark.slow
def test_an_error_in_one_process_surfaces() -> None:
    refused = tiny()
    refused.compute.precision = "float16"
    with pytest.raises(BenchmarkError, match="compute.precision=float16"):
        Crowd("bare", refused, 2)
    broken = Crowd("bare", tiny(live=0), 1)
    (pid,) = broken.members[0]._processes
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BenchmarkError, match=r"a process of the loop has ended"):
        broken.ask("facts")
    broken.close()


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_several_processes_have_a_core_each_and_one_has_all() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert own_cores(2) == mine[:2]
    assert own_cores(1) == [None]
    assert own_cores(len(mine) + 1) == [None] * (len(mine) + 1)


# --- the opponents in a benchmark


def test_bare_hosts_do_the_declared_work_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_here(monkeypatch)
    side = benchmark(tiny(live=0, sides=["bare"]))["points"][0]["sides"]["bare"]
    assert (side["train_images"], side["val_images"]) == (24, 24)
    assert (side["how"], side["processes"], side["threads"]) == ("eager", 1, 1)
    assert list(side["columns"]) == list(COLUMNS[:2])
    assert side["syncs"] == 0


@pytest.mark.slow
def test_the_quickest_layout_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opponents, "layouts", lambda *_: [Layout(1, 1), Layout(2, 1)])
    side = LoopSide("baseline", tiny())
    side.warm_up()
    assert list(side.run().columns) == list(COLUMNS[:3])
    facts = side.facts()
    tried = {many: side.tried[f"{many} of 1 threads, all envs"] for many in (1, 2)}
    assert facts["processes"] == min(tried, key=lambda many: tried[many])
    assert facts["pinned"] == (facts["processes"] == 2 and usable_cores() >= 2)
    assert facts["peak_mib"] > 0
    assert side.syncs() == facts["processes"]  # once per env-step of each
    side.close()


def test_images_that_were_not_worked_on_are_an_error() -> None:
    side = LoopSide("baseline", tiny())
    side.images = (24, 47)
    with pytest.raises(BenchmarkError, match=r"baseline: \(24, 47\) .* not \(24, 48\)"):
        side.check()


def test_layouts_are_threads_of_one_process_or_a_process_per_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two, four = (Layout(1, threads) for threads in (1, 2, 4))
    for cores, found in (
        (4, [one, two, four, Layout(3, 1)]),  # three envs need no fourth process
        (1, [one]),
        (6, [one, two, four, Layout(1, 6), Layout(3, 1)]),
    ):
        monkeypatch.setattr(opponents, "usable_cores", lambda cores=cores: cores)
        assert layouts(tiny(), CPU) == found
    assert layouts(tiny(), torch.device("cuda", 0)) == [one]


def test_the_quickest_form_of_each_setting_is_kept() -> None:
    seconds = {("how", "a"): 3.0, ("how", "b"): 1.0, ("size", 5): 2.0, ("size", 6): 4.0}
    chosen: dict[str, int | str] = {}
    last: list[tuple[str, int | str]] = []

    def choose(setting: str, value: int | str) -> None:
        chosen[setting] = value
        last.append((setting, value))

    forms = {"how": ("a", "b"), "only": (7,), "size": (5, 6)}
    tried = tune(forms, choose, lambda: seconds[last[-1]])
    assert chosen == {"how": "b", "only": 7, "size": 5}
    assert tried == {"how a": 3000, "how b": 1000, "size 5": 2000, "size 6": 4000}


def test_what_no_phase_has_counted_belongs_to_the_last_column() -> None:
    found = in_columns({"training": 1.0, "data": 0.5, "state": 0.25}, 2.0)
    assert found == {"training": 1.5, "validation": 0.0, "policy and state machine": 0.5}
    found = in_columns({"training": 1.0, "validation": 0.5}, 2.0, COLUMNS[:2])
    assert found == {"training": 1.0, "validation": 1.0}


# --- what each does


def test_bare_hosts_learn_each_from_its_own_start() -> None:
    loop = BareLoop(tiny(live=0), range(2))
    before = loop.results()
    after = one_process(loop, 1)
    assert not np.array_equal(before[0], before[1])
    for old, new in zip(before, after, strict=True):
        moved = np.abs(new - old).max()
        assert 0 < moved < 0.1  # two clipped steps at a learning rate of 0.01


def test_repeated_images_stay_in_channels_last() -> None:
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    again = repeated(images, 3)
    assert again.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(again, images.repeat(3, 1, 1, 1))


@pytest.mark.parametrize("validation", ["separate", "fused"])
def test_the_loop_waits_once_and_computes_in_the_precision_of_the_engine(validation: str) -> None:
    short = tiny()
    short.compute.precision = "bfloat16"
    results = []
    for cfg, dtype in ((short, "bfloat16"), (tiny(), "float32")):
        loop = PlainLoop(cfg, range(2))
        loop.choose("validation", validation)
        assert loop.facts()["dtype"] == dtype
        assert count_syncs(loop.one_step, CPU) == 1
        results.append(loop.results()[0])
    rounded, exact = results
    assert not np.array_equal(rounded, exact)
    np.testing.assert_allclose(rounded[:-1], exact[:-1], atol=5e-3)


@pytest.mark.slow
def test_compiled_hosts_share_two_graphs_and_learn_as_eager_ones_do() -> None:
    cfg = tiny(live=0, envs=10)  # more than torch recompiles a function for
    eager: Loop = BareLoop(cfg, range(10))
    compiled = BareLoop(cfg, range(10))
    graphs = eager.facts()["graphs"]
    compiled.choose("how", "compile")
    found = one_process(compiled, 2)
    wanted = one_process(eager, 2)
    assert compiled.facts()["graphs"] == graphs + 2
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
