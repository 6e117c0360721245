"""Engines are tried before a run takes one: what agrees with torch is kept, all others are dropped,
with a reason.
"""

import math
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from tensordict import TensorDict

from esper_soa.config.settings import ENGINES as NAMES
from esper_soa.config.settings import ComputeConfig
from esper_soa.nets import trial as trials
from esper_soa.nets.choose import ENGINES, Kind, fastest_engine, probe_engines, select_engine
from esper_soa.nets.engine import EngineChoice, NetsConfig, Sizes, TrainReport, ValidationReport
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.precision import GOOD_KEY, INITIAL_SCALE, SCALE_KEY
from esper_soa.nets.seeds import pools
from esper_soa.nets.sgd import rules_of
from esper_soa.nets.trial import (
    Trial,
    TrialResult,
    disagreement,
    distances,
    extrapolate,
    mixture,
    release,
    try_engines,
)
from esper_soa.system import streams
from esper_soa.system.errors import UserError
from esper_soa.training.loop.build import trial_of
from esper_soa.vocabulary import CNN_BLUEPRINTS, RUNNING_STAGES, Blend, Stage
from tests.builders.tiny_world import CPU, tiny_settings

EVERY_PASS = trials.PASSES  # before the fixture below


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose time counts alone."""
    monkeypatch.setattr(trials, "PASSES", trials.TIMED)


def trial(envs: int = 3) -> Trial:
    cfg = tiny_settings(envs, 3, 4)
    cfg.compute = ComputeConfig(workers=1)
    return trial_of(cfg, CPU)


def in_precision(precision: torch.dtype) -> Trial:
    given = trial()
    return given._replace(nets=given.nets._replace(precision=precision))


class Faster(TorchEngine):
    """Learns at twice the rate."""

    def train_(self, nets: NetsConfig, *given: object) -> TrainReport:
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
    found = {one.name: one for one in probe_engines(trial(12))}
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
    first, second = try_engines(trial(), TorchEngine, "torch", given)
    assert (first.name, first.dropped) == ("torch", "")
    assert second.name == "other"
    assert reason in second.dropped
    assert second.words().startswith("other is left out: ")


class Full(TorchEngine):
    """Has room for a few envs alone, as on a GPU."""

    most = 2

    def train_(self, nets: NetsConfig, weights: TensorDict, *given: object) -> TrainReport:
        if len(weights) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().train_(nets, weights, *given)  # type: ignore[arg-type]


class Fuller(Full):
    most = 0


def test_where_torch_in_float32_has_no_room_for_all_envs_the_first_of_them_tell() -> None:
    given = {"torch": Full, "wrong": Faster, "same": TorchEngine}
    plain, wrong, same = try_engines(trial(9), Full, "torch", given)
    assert plain.dropped == "it fails with OutOfMemoryError: CUDA out of memory"
    assert "momentum is " in wrong.dropped
    assert same.dropped == ""
    assert same.error < 1e-5


def test_where_torch_in_float32_has_no_room_at_all_nothing_is_believed() -> None:
    (result,) = try_engines(trial(2), Fuller, "same", {"same": TorchEngine})
    assert result.dropped == (
        "torch in float32, which says what is right, does not run: it fails with OutOfMemoryError: "
        "CUDA out of memory"
    )


def test_what_a_pass_costs_beside_its_batches_is_counted_once() -> None:
    # 10 s and 2 s per batch
    assert extrapolate(12.0, 10.0 + 2.0 * trials.BATCHES, 144) == pytest.approx(10 + 2 * 144)
    assert extrapolate(12.0, 16.0, 1) == 12.0
    assert extrapolate(12.0, 11.0, 144) == 12.0  # the clock is not that exact


class Timed(TorchEngine):
    """Takes 10 s and 2 s per batch to train, 6 s to validate, times a factor of the pass; keeps
    what it is given, and computes in its first pass alone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seconds = 0.0
        monkeypatch.setattr(trials.time, "perf_counter", lambda: self.seconds)
        # two warm-ups and a capture do not count; of the last two passes the quicker does
        self.factors = cycle([0.1, 0.1, 0.1, 2.0, 1.0, 0.1, 0.1, 0.1, 1.0, 2.0])
        self.given: list[tuple] = []
        self.weights: list[TensorDict] = []
        self.reports: dict[str, TrainReport | ValidationReport] = {}

    def train_(self, nets: NetsConfig, weights: TensorDict, *given: object) -> TrainReport:
        self.factor = next(self.factors)
        self.seconds += self.factor * (10.0 + 2.0 * given[-1])  # type: ignore[operator]
        self.given.append((nets, *given))
        self.weights.append(weights.clone())
        if "train" not in self.reports:
            self.reports["train"] = super().train_(nets, weights, *given)  # type: ignore[arg-type]
        weights.apply_(lambda leaf: leaf + 1)
        return self.reports["train"]

    def validate(self, *given: object) -> ValidationReport:
        self.seconds += 6.0 * self.factor
        if "validate" not in self.reports:
            self.reports["validate"] = super().validate(*given)  # type: ignore[arg-type]
        return self.reports["validate"]


def test_every_pass_does_the_same_work_and_the_quicker_of_the_last_two_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "PASSES", EVERY_PASS)
    given = in_precision(torch.float16)
    task = replace(given.nets.task, host_lr="[0.25,0.5]", momentum="uniform(0.5,0.75)")
    nets = given.nets._replace(eval_batch=25, accumulate=2, task=task)
    sizes = Sizes(num_envs=3, batch_size=4, train_samples=40, val_samples=100)
    timed = Timed(monkeypatch)
    make = lambda: timed  # noqa: E731
    (result,) = try_engines(given._replace(nets=nets, sizes=sizes), make, "torch", {"torch": make})
    # 10 batches at 12 s and 2 s for each beyond the first; 4 validation batches of 6 s
    assert (result.seconds, result.memory) == (pytest.approx(54), 0)
    assert TrialResult("own", seconds=0.0123).words() == "own takes 12.3 ms per env-step"
    every = [(one[0].precision, one[-1]) for one in timed.given]
    half = torch.float16
    assert every == [(torch.float32, 3)] * 5 + [(half, 3)] * 5 + [(half, 1)] * 5
    fresh = pools.allocate(nets.shape, 3, CPU, torch.float32)
    keys = streams.stream_keys(2**31, streams.HOST_INIT, (0,), torch.arange(3))
    pools.initialise_hosts_(fresh, nets.shape, keys)
    for (own, alpha, seeds, feed, _), weights in zip(timed.given, timed.weights, strict=True):
        assert own.accumulate == 1
        assert (own.task.number("host_lr"), own.task.number("momentum")) == (0.25, 0.5)
        assert torch.equal(alpha, 0.6 * torch.from_numpy(seeds.visible).double())
        assert (feed.draw.order.shape, feed.draw.augment) == ((3, 12), True)
        assert not torch.equal(feed.draw.order[0], feed.draw.order[1])
        for name in ("params", "statistics"):
            assert torch.equal(weights["host", name], fresh["host", name])
        if own.precision == half:
            assert weights[SCALE_KEY].tolist() == [INITIAL_SCALE] * 3
            assert weights[GOOD_KEY].tolist() == [0] * 3
    assert task.host_lr == "[0.25,0.5]"


def test_an_interrupt_is_no_verdict() -> None:
    with pytest.raises(KeyboardInterrupt):
        try_engines(trial(), TorchEngine, "torch", {"torch": Stopped})


def test_all_precisions_are_measured_against_float32() -> None:
    for precision in (torch.bfloat16, torch.float16):
        given = {"torch": TorchEngine, "same": TorchEngine}
        plain, other = try_engines(in_precision(precision), TorchEngine, "torch", given)
        assert 1e-4 < plain.error < 2
        assert (other.dropped, other.error) == ("", plain.error)


def test_a_few_answers_may_flip_and_no_more() -> None:
    right = {"accuracy": torch.full((2, 4), 50.0)}
    for images, error in ((2, 0.0), (12, 9.5 / 100)):
        moved = {"accuracy": right["accuracy"] + torch.tensor([0.0, 0.0, images, 0.0])}
        assert distances(moved, right, 100)["accuracy"] == pytest.approx((error, error))


def test_one_network_among_many_counts() -> None:
    right = {"host.params": torch.ones(100, 4)}
    wrong = {"host.params": torch.ones(100, 4).index_fill(0, torch.tensor([7]), 1.5)}
    errors = distances(wrong, right, 1)
    assert errors["host.params"] == pytest.approx((0.5, 0.005))
    told = "its host.params is 5.0e-01 from torch in float32, and 2.1e-01 is rounding"
    assert disagreement(errors, {"host.params": (0.1, 0.1)}) == told
    assert disagreement(errors, {"host.params": (0.3, 0.0)}) == ""
    assert disagreement({"host.params": (0.5, 0.4)}, {"host.params": (0.3, 0.1)})


def test_networks_of_zeros_agree() -> None:
    zeros = {"momentum": torch.zeros(2, 3)}
    assert distances(zeros, zeros, 1) == {"momentum": (0.0, 0.0)}


def test_a_network_of_small_numbers_is_judged_by_a_tenth_of_what_others_have() -> None:
    right = {"momentum": torch.tensor([[10.0], [0.0]])}
    found = distances({"momentum": torch.tensor([[10.0], [0.01]])}, right, 1)
    assert found["momentum"] == pytest.approx((0.02, 0.01))  # 0.01 beside 0.5; 0 and that


def test_the_seeds_are_of_all_kinds_in_all_states() -> None:
    seeds = mixture(trial(64))
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


def test_a_device_that_an_engine_leaves_unusable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    release(device, "triton")
    assert asked == [device, "emptied"]

    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal\naccess")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    told = (
        r"^compute\.engine=auto: triton has left cuda:1 unusable \(an illegal\\naccess\)\. "
        r"Give compute\.engine=torch$"
    )
    with pytest.raises(UserError, match=told):
        release(device, "triton")


def test_every_engine_of_the_table_can_be_asked_for() -> None:
    assert list(NAMES) == ["auto", *ENGINES]


def test_kernels_that_agree_are_taken_but_where_torch_is_clearly_quicker() -> None:
    names = ("torch", "triton", "graphs")
    torch_, triton, graphs = (TrialResult(name, "", 0.0, 1.0) for name in names)
    assert select_engine([torch_, triton, graphs]) is graphs
    assert select_engine([torch_._replace(seconds=0.6), triton, graphs]).name == "graphs"
    assert select_engine([torch_._replace(seconds=0.4), triton, graphs]).name == "torch"
    assert select_engine([torch_, triton, graphs._replace(dropped="no")]) is triton
    assert select_engine([torch_, TrialResult("triton", "no")]) is torch_
    assert select_engine([TrialResult("torch", "no")]) is None


def test_what_is_tried_is_chosen_and_torch_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = fastest_engine(trial())
    reason = "torch, as compared with torch and timed on cpu"
    assert chosen == EngineChoice(False, reason, name="torch", tried=chosen.tried)
    native, plain = chosen.tried
    assert native.startswith("native takes ")
    assert chosen.facts() == {
        "engine": "torch",
        "kind": reason,
        "sha256": "",
        "tried": f"{native}; {plain}",
    }
    monkeypatch.setitem(ENGINES, "torch", Kind(lambda _: "", lambda *_: Broken(), ""))
    monkeypatch.setitem(ENGINES, "native", Kind(lambda _: "no", lambda *_: Broken(), "cpu"))
    chosen = fastest_engine(trial())
    words = (
        "native is left out: no",
        r"torch is left out: it fails with PanicError: no such\nkernel",
    )
    reason = "plain torch, although it failed when it was tried"
    assert chosen == EngineChoice(False, reason, fallback=True, tried=words)
