"""Steps kept by key: the same results as steps of their own, at addresses that stay; on a GPU from
CUDA graphs.
"""

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.nets.graphs import (
    WARM_UPS,
    CapturedCall,
    GraphRecorder,
    Replay,
    StepCache,
    captured_call,
    copy_all_,
)
from esper_soa.runtime.compilation import GRADIENTS, POLICY, REPLAYED_PARTS, STATE, choose_replay
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop import build
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.players import build_player
from esper_soa.training.loop.run import Run
from tests.builders.stand_in import stand_in
from tests.builders.tiny_runs import run
from tests.builders.tiny_world import tiny_settings

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Growth:
    """total = total * factor + variant, once per step."""

    def __init__(self, total: float, factor: float) -> None:
        self.total = torch.full((2,), total, device=DEVICE)
        self.factor = torch.full((2,), factor, device=DEVICE)

    def buffers(self) -> list[Tensor]:
        return [self.total, self.factor]

    def step_(self, variant: int) -> None:
        self.total.mul_(self.factor).add_(variant)


def test_a_second_step_of_the_same_key_uses_the_buffers_of_the_first() -> None:
    cache = StepCache[Growth](capture=False)
    first = cache.run_("key", Growth(1.0, 2.0), [0, 1])
    assert first.total.tolist() == [5.0, 5.0]  # (1 * 2 + 0) * 2 + 1
    place = first.total.data_ptr()
    second = cache.run_("key", Growth(3.0, 10.0), [1])
    assert second is first
    assert second.total.data_ptr() == place
    assert second.total.tolist() == [31.0, 31.0]
    assert cache.counts == {"plain": 3}


def test_on_a_gpu_the_setting_insists_forbids_or_leaves_out(happened: list[str]) -> None:
    ways = ("on", "off", "auto")
    insisted, forbidden, left = (choose_replay(one, SECOND, False, 1) for one in ways)
    assert insisted == Replay(
        REPLAYED_PARTS, "all are replayed (compute.cuda_graphs=on)", (), insists=True
    )
    assert forbidden == Replay((), "no CUDA graphs (compute.cuda_graphs=off)", (), insists=True)
    every = "state machine, policy, gradient steps (compute.cuda_graphs=auto)"
    assert left == Replay(REPLAYED_PARTS, every, (), insists=False)
    kept = [insisted.steps(part, SECOND) for part in REPLAYED_PARTS]
    assert len({id(one) for one in kept}) == 3
    assert all(one is not None and one.capture for one in kept)
    assert happened == ["enter cuda:1", "leave cuda:1"] * 3
    shared = choose_replay("auto", SECOND, False, 2)
    assert shared.parts == (STATE, POLICY)
    assert shared.left_out == ("gradient steps: left out, as ranks take them together",)
    paid = choose_replay("auto", SECOND, True, 1)
    assert paid.parts == (POLICY, GRADIENTS)
    replayed = "policy, gradient steps"
    why = "a reward of your own may do what a graph does not do again"
    assert paid.facts() == {
        "replayed": replayed,
        "reason": f"{replayed} (compute.cuda_graphs=auto)",
        "left_out": f"state machine: left out, as {why}",
    }


class Pair(NamedTuple):
    total: Tensor
    parts: dict[str, Tensor]


def both(pair: Pair, scale: tuple[Tensor]) -> Pair:
    """Leaves one of its arguments as it is and gives it back."""
    return Pair(pair.total * scale[0] + pair.parts["a"], pair.parts)


def test_calls_give_copies_and_leave_their_arguments() -> None:
    cache = StepCache[CapturedCall](capture=False)
    ten = (torch.tensor(10.0, device=DEVICE),)

    def pair_of(start: float, count: int = 2) -> Pair:
        total = torch.full((count,), start, device=DEVICE)
        return Pair(total, {"a": torch.full_like(total, 0.5)})

    pairs = [pair_of(start) for start in (1.0, 2.0, 3.0)]
    found = [captured_call(cache, "both", both, pair, ten) for pair in pairs]
    for start, pair, given in zip((1.0, 2.0, 3.0), pairs, found, strict=True):
        assert given.total.tolist() == [10 * start + 0.5] * 2
        assert pair.total.tolist() == [start] * 2
        assert given.parts["a"].data_ptr() != pair.parts["a"].data_ptr()
    assert len({given.parts["a"].data_ptr() for given in found}) == 3
    assert len(cache._cached) == 1
    captured_call(cache, "both", both, pair_of(1.0, 3), ten)
    assert len(cache._cached) == 2  # other shapes are another step
    for number in (1.0, 2.0):
        given = torch.tensor([number], device=DEVICE)
        found = captured_call(cache, "none", lambda one, none: none or one, given, None)
        assert found.item() == number
        negated = captured_call(cache, "negated", lambda one, none: -one, given, None)
        assert negated.item() == -number


def test_tensors_are_copied_together_by_dtype_and_those_that_differ_alone() -> None:
    sources = [torch.arange(6.0), torch.arange(4), torch.ones(2, 3)]
    sources += [torch.arange(6.0).view(2, 3).T, torch.ones(1)]
    sources += [torch.tensor([True, False]), torch.arange(3, dtype=torch.int32)]
    targets = [torch.zeros(shape) for shape in ((6,), (4,), (2, 3), (3, 2), (4,))]
    targets = [target.to(source.dtype) for target, source in zip(targets, sources, strict=False)]
    targets += [torch.zeros(2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)]
    sources.append(torch.ones(2, 3))
    targets.append(torch.zeros(3, 2).T)
    with Operations() as made:
        copy_all_(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.expand_as(target).to(target.dtype))
    assert made.counts == {"_foreach_copy_": 3, "copy_": 4}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_graphs_equal_plain_steps() -> None:
    plain = StepCache[Growth](capture=False)
    captured = StepCache[Growth](capture=True)
    for start in (1.0, 2.0, 3.0):
        wanted = plain.run_("key", Growth(start, 1.5), [0, 1, 1, 0, 1]).total.clone()
        assert torch.equal(captured.run_("key", Growth(start, 1.5), [0, 1, 1, 0, 1]).total, wanted)
    warm = 2 * WARM_UPS
    assert captured.counts == {"plain": warm, "captured": 2, "replayed": 15 - warm - 2}


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch.cuda, in order."""
    return stand_in(monkeypatch)


SECOND = torch.device("cuda", 1)


def test_work_is_captured_on_its_own_device_and_memory_stays(happened: list[str]) -> None:
    recorder = GraphRecorder(SECOND)
    assert happened == ["enter cuda:1", "leave cuda:1"]
    happened.clear()
    recorder.recorded(lambda: happened.append("work"))
    before = ["enter cuda:1", "wait", "enter stream", "begin thread_local in pool"]
    assert happened == [*before, "work", "end", "leave stream", "leave cuda:1"]


def test_each_variant_is_captured_once_it_has_run_twice_and_replayed_from_then_on(
    happened: list[str],
) -> None:
    cache = StepCache[Growth](capture=True, device=SECOND)
    happened.clear()
    assert not cache.is_cached("key")
    done = cache.run_("key", Growth(1.0, 1.0), [0, 1, 1, 0, 1, 0, 1])
    assert cache.is_cached("key")
    assert happened.count("enter cuda:1") == 2
    assert [one for one in happened if one in ("end", "replay")] == ["end", "replay"] * 2 + [
        "replay"
    ]
    assert cache.counts == {"plain": 4, "captured": 2, "replayed": 1}
    assert done.total.tolist() == [
        4.0,
        4.0,
    ]  # what is captured runs here, what is replayed does not


def test_a_compiler_that_fails_in_a_capture_ends_no_run(happened: list[str]) -> None:
    def compiled(one: Tensor) -> Tensor:
        if happened[-1].startswith("begin"):
            raise subprocess.CalledProcessError(1, ["gcc"])
        return one + 1

    cache = Replay((POLICY,), insists=False).steps(POLICY, SECOND)
    assert cache is not None
    given = [captured_call(cache, "more", compiled, torch.ones(1)) for _ in range(WARM_UPS + 2)]
    assert [one.item() for one in given] == [2.0] * (WARM_UPS + 2)
    assert cache.counts == {"plain": WARM_UPS + 2}


# --- what a run notices of it


def learning() -> TrainConfig:
    cfg = tiny_settings(2, 2, 2)
    network = NetworkConfig(hidden=32, features=16)
    ppo = PPOConfig(epochs=1, minibatches=2)
    policy = PolicyConfig(network=network, ppo=ppo)
    return replace(cfg, policy=policy, control="none", report=False)


@pytest.mark.parametrize("part", REPLAYED_PARTS)
def test_a_run_keeps_the_steps_of_what_is_replayed(
    part: str, happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "choose_replay", lambda *_, **__: Replay((part,)))
    cfg = learning()
    world = build_world(cfg, CPU)
    player = build_player(cfg.policy, world)
    assert player.learner is not None
    kept = {STATE: world.kernels.steps, GRADIENTS: player.learner.steps}
    assert isinstance(player.agent, RecurrentPolicy)
    kept[POLICY] = player.agent.steps
    assert [name for name, steps in kept.items() if steps is not None and steps.capture] == [part]


def test_what_is_replayed_stands_in_the_log_and_the_versions(tmp_path: Path) -> None:
    cfg = learning()
    assert cfg.compute.cuda_graphs == "auto"
    folder = RunFolder(tmp_path)
    with session(folder) as within:
        job = Run(cfg, within)
        (task,) = job.tasks.values()
        task.world.kernels = task.world.kernels._replace(replay=Replay((), "none", ("a", "b")))
        task.announce()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    told = [line.split(" ", 2)[2] for line in lines if "graphs   " in line]
    assert told == ["DEBUG graphs   none", "WARNING graphs   a", "WARNING graphs   b"]
    (tmp_path / "run").mkdir()
    run(cfg, RunFolder(tmp_path / "run"))
    words = "no CUDA graphs (compute.cuda_graphs=auto on cpu)"
    written = json.loads((tmp_path / "run" / "versions.json").read_text())["graphs"]
    assert written == {"replayed": "", "reason": words, "left_out": ""}
