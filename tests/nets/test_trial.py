"""Engines are tried before a run takes one: what agrees with torch is kept, all others are dropped,
with a reason.
"""

import math
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from esper_soa.config.settings import ComputeConfig
from esper_soa.nets import trial as trials
from esper_soa.nets.choose import probe_engines, select_engine
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.engine import TrainReport, ValidationReport
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import rules_of
from esper_soa.nets.trial import (
    TrialResult,
    distances,
    extrapolate,
    mixture,
    try_engines,
)
from esper_soa.training.loop.build import make_setup
from esper_soa.vocabulary import CNN_BLUEPRINTS, RUNNING_STAGES, Blend, Stage
from tests.builders.tiny_world import CPU, tiny_settings


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose time counts alone."""
    monkeypatch.setattr(trials, "PASSES", trials.TIMED)


def setup(envs: int = 3) -> Setup:
    cfg = tiny_settings(envs, 3, 4)
    cfg.compute = ComputeConfig(workers=1)
    return make_setup(cfg, CPU)


def in_precision(precision: torch.dtype) -> Setup:
    return setup()._replace(precision=precision)


class Faster(TorchEngine):
    """Learns at twice the rate."""

    def train_(self, nets: Setup, *given: object) -> TrainReport:
        return super().train_(nets, *given, rules_of(nets.task, 2.0))  # type: ignore[arg-type]


class PanicError(BaseException):
    """What a compiler in another language raises."""


class Broken(TorchEngine):
    """Cannot validate."""

    def validate(self, *given: object) -> ValidationReport:
        raise PanicError("no such\nkernel")


class Stopped(TorchEngine):
    """Is interrupted."""

    def validate(self, *given: object) -> ValidationReport:
        raise KeyboardInterrupt


class Lost(TorchEngine):
    """Gives no number for one env."""

    def validate(self, *given: object) -> ValidationReport:
        report = super().validate(*given)  # type: ignore[arg-type]
        report.loss[1] = math.nan
        return report


class Shuffled(TorchEngine):
    """Validates its subsets under other names."""

    def validate(self, *given: object) -> ValidationReport:
        report = super().validate(*given)  # type: ignore[arg-type]
        return report._replace(subset=report.subset.flip(1))


@pytest.mark.usefixtures("native")
def test_the_native_kernels_agree_with_torch_on_seeds_of_every_kind() -> None:
    found = {one.name: one for one in probe_engines(setup(12), synthetic)}
    assert list(found) == ["native", "torch"]
    assert not any(one.dropped for one in found.values())
    assert found["torch"].error == 0
    assert 0 < found["native"].error < 1e-4
    assert all(0 < one.seconds < 60 for one in found.values())


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Faster, "momentum is "),
        (Broken, r"it fails with PanicError: no such\nkernel"),
        (Lost, "its validation loss is nan from torch in float32"),
        (Shuffled, "its subset is inf from torch in float32"),
    ],
)
def test_an_engine_unlike_torch_is_dropped_with_why(engine: type[TorchEngine], reason: str) -> None:
    given = {"other": engine, "torch": TorchEngine}
    first, second = try_engines(setup(), synthetic, TorchEngine, "torch", given)
    assert (first.name, first.dropped) == ("torch", "")
    assert second.name == "other"
    assert reason in second.dropped
    assert second.words().startswith("other is left out: ")


class Unreadable(torch.Tensor):
    """A tensor of a device that an engine has broken: whatever reads its values raises."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__float__):
            raise RuntimeError("CUDA error: an illegal memory access")
        return super().__torch_function__(func, types, args, kwargs or {})


class Breaking(TorchEngine):
    """Gives results that nobody can read any more."""

    def validate(self, *given: object) -> ValidationReport:
        report = super().validate(*given)  # type: ignore[arg-type]
        return report._replace(loss=report.loss.as_subclass(Unreadable))


@pytest.mark.parametrize(
    ("exact", "engine", "reason"),
    [
        (TorchEngine, Breaking, "it fails with RuntimeError: CUDA error: an illegal memory access"),
        (Breaking, Broken, r"it fails with PanicError: no such\nkernel"),
    ],
)
def test_where_reads_raise_after_an_engine_has_failed_that_is_its_verdict(
    exact: type[TorchEngine], engine: type[TorchEngine], reason: str
) -> None:
    (result,) = try_engines(setup(), synthetic, exact, "other", {"other": engine})
    assert result.dropped == reason


class Full(TorchEngine):
    """Has room for a few envs alone, as on a GPU."""

    most = 2

    def train_(self, nets: Setup, weights: TensorDict, *given: object) -> TrainReport:
        if len(weights) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().train_(nets, weights, *given)  # type: ignore[arg-type]


class Fuller(Full):
    most = 0


def test_where_torch_in_float32_has_no_room_for_all_envs_the_first_of_them_tell() -> None:
    given = {"torch": Full, "wrong": Faster, "same": TorchEngine}
    plain, wrong, same = try_engines(setup(9), synthetic, Full, "torch", given)
    assert plain.dropped == "it fails with OutOfMemoryError: CUDA out of memory"
    assert "momentum is " in wrong.dropped
    assert same.dropped == ""
    assert same.error < 1e-5


def test_where_torch_in_float32_has_no_room_at_all_nothing_is_believed() -> None:
    (result,) = try_engines(setup(2), synthetic, Fuller, "same", {"same": TorchEngine})
    assert result.dropped == (
        "torch in float32, which says what is right, does not run: it fails with OutOfMemoryError: "
        "CUDA out of memory"
    )


def test_what_a_pass_costs_beside_its_batches_is_counted_once() -> None:
    # 10 s and 2 s per batch
    assert extrapolate(12.0, 10.0 + 2.0 * trials.BATCHES, 144) == pytest.approx(10 + 2 * 144)
    assert extrapolate(12.0, 16.0, 1) == 12.0
    assert extrapolate(12.0, 11.0, 144) == 12.0  # the clock is not that exact


def test_an_interrupt_is_no_verdict() -> None:
    with pytest.raises(KeyboardInterrupt):
        try_engines(setup(), synthetic, TorchEngine, "torch", {"torch": Stopped})


def test_all_precisions_are_measured_against_float32() -> None:
    for precision in (torch.bfloat16, torch.float16):
        given = {"torch": TorchEngine, "same": TorchEngine}
        plain, other = try_engines(in_precision(precision), synthetic, TorchEngine, "torch", given)
        assert 1e-4 < plain.error < 2
        assert (other.dropped, other.error) == ("", plain.error)


def test_a_network_of_small_numbers_is_judged_by_a_tenth_of_what_others_have() -> None:
    right = {"momentum": torch.tensor([[10.0], [0.0]])}
    found = distances({"momentum": torch.tensor([[10.0], [0.01]])}, right, 1)
    assert found["momentum"] == pytest.approx((0.02, 0.01))  # 0.01 beside 0.5; 0 and that


def test_the_seeds_are_of_all_kinds_in_all_states() -> None:
    seeds = mixture(setup(64))
    assert set(seeds.stage[seeds.running]) == set(RUNNING_STAGES)
    assert set(seeds.blueprint[seeds.running]) == set(CNN_BLUEPRINTS)
    assert set(seeds.blend.flatten()) == {Blend.ADD, Blend.MULTIPLY, Blend.GATE}
    assert 0 < seeds.frozen.sum() < seeds.visible.sum() < seeds.running.sum() < seeds.running.size
    assert set(seeds.stage[seeds.frozen]) == {Stage.BLENDING}
    assert set(seeds.blueprint[~seeds.running]) == {-1}
    running = seeds.stage != Stage.EMPTY
    visible = running & (seeds.stage != Stage.TRAINING)
    ablated = visible & (seeds.stage != Stage.FOSSILIZED)
    flags = {"running": running, "newborn": running, "fresh_momentum": running}
    for name, wanted in (flags | {"visible": visible, "ablated": ablated}).items():
        assert (getattr(seeds, name) == wanted).all(), name


def test_kernels_that_agree_are_taken_but_where_torch_is_clearly_quicker() -> None:
    names = ("torch", "triton", "graphs")
    torch_, triton, graphs = (TrialResult(name, "", 0.0, 1.0) for name in names)
    assert select_engine([torch_, triton, graphs]) is graphs
    assert select_engine([torch_._replace(seconds=0.6), triton, graphs]).name == "graphs"
    assert select_engine([torch_._replace(seconds=0.4), triton, graphs]).name == "torch"
    assert select_engine([torch_, triton, graphs._replace(dropped="no")]) is triton
    assert select_engine([torch_, TrialResult("triton", "no")]) is torch_
    assert select_engine([TrialResult("torch", "no")]) is None
