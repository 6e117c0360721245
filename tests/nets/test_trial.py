"""Engines are tried before a run takes one: what agrees with torch is kept, all others are dropped,
with a reason.
"""

import math
import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tiny_world import CPU, tiny_settings
from torch import Tensor

from esper_soa.build import trial_of
from esper_soa.config import ENGINES as NAMES
from esper_soa.config import ComputeConfig
from esper_soa.nets import choose
from esper_soa.nets.choose import ENGINES, Asked, tried_engines, weighed
from esper_soa.nets.data import EnvStepBatches, ValidationImages
from esper_soa.nets.engine import NetsConfig, TrainReport, ValidationReport
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.graphs import StaticStep, StepCache
from esper_soa.nets.layers import Layers
from esper_soa.nets.pools import ActiveSeeds
from esper_soa.nets.sgd import Rule
from esper_soa.nets.trial import (
    Trial,
    Tried,
    _Ground,
    disagreement,
    distances,
    mixture,
    quickest,
    try_engines,
)
from esper_soa.nets.verdicts import keep_verdict, kept_verdict, verdict_key
from esper_soa.vocabulary import CNN_BLUEPRINTS, RUNNING_STAGES, Blend

META = torch.device("meta")


def trial(envs: int = 3, **changed: object) -> Trial:
    cfg = tiny_settings(envs, 3, 4)
    cfg.compute = ComputeConfig(workers=1)
    return trial_of(cfg, CPU)._replace(**changed)  # type: ignore[arg-type]


def asked(on: Trial, **compute: str) -> Asked:
    return Asked(ComputeConfig(**compute), CPU, on.nets.task, on.nets.shape)


@dataclass(frozen=True)
class Faster(TorchEngine):
    """Learns at twice the rate."""

    def train_(
        self,
        nets: NetsConfig,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: EnvStepBatches,
        num_batches: int,
        lr_factor: float = 1.0,
    ) -> TrainReport:
        return super().train_(nets, weights, alpha, active_seeds, feed, num_batches, 2 * lr_factor)


class Broken(TorchEngine):
    """Cannot validate."""

    def validate(
        self,
        nets: NetsConfig,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: ValidationImages,
    ) -> ValidationReport:
        raise RuntimeError("no such\nkernel")


class Lost(TorchEngine):
    """Gives no number for one env."""

    def validate(
        self,
        nets: NetsConfig,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: ValidationImages,
    ) -> ValidationReport:
        report = super().validate(nets, weights, alpha, active_seeds, feed)
        report.loss[1] = math.nan
        return report


class Shuffled(TorchEngine):
    """Validates its subsets under other names."""

    def validate(
        self,
        nets: NetsConfig,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: ValidationImages,
    ) -> ValidationReport:
        report = super().validate(nets, weights, alpha, active_seeds, feed)
        return report._replace(subset=report.subset.flip(1))


@pytest.mark.usefixtures("native")
def test_the_native_kernels_agree_with_torch_on_seeds_of_every_kind() -> None:
    found = {one.name: one for one in tried_engines(asked(trial(24)), trial(24))}
    assert list(found) == ["native", "torch"]
    assert not any(one.dropped for one in found.values())
    assert found["torch"].apart == 0
    assert 0 < found["native"].apart < 1e-4
    assert all(0 < one.seconds < 60 for one in found.values())


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Faster, "momentum is "),
        (Broken, r"it fails with RuntimeError: no such\nkernel"),
        (Lost, "its validation loss is nan from torch in float32"),
        (Shuffled, "its subset is inf from torch in float32"),
    ],
)
def test_an_engine_that_is_not_torch_is_dropped_and_says_why(
    engine: type[TorchEngine], reason: str
) -> None:
    given = {"other": engine, "torch": TorchEngine}
    first, second = try_engines(trial(6), CPU, TorchEngine, "torch", given)
    assert (first.name, first.dropped) == ("torch", "")
    assert second.name == "other"
    assert reason in second.dropped
    assert second.words().startswith("other is left out: ")
    assert quickest([second, first]) is first


def test_all_precisions_are_measured_against_float32() -> None:
    for precision in (torch.bfloat16, torch.float16):
        on = trial(4)
        on = on._replace(nets=on.nets._replace(precision=precision))
        plain, other = try_engines(
            on, CPU, TorchEngine, "torch", {"torch": TorchEngine, "same": TorchEngine}
        )
        assert 1e-4 < plain.apart < 2
        assert (other.dropped, other.apart) == ("", plain.apart)


def test_the_quickest_of_those_that_can_be_had_is_taken() -> None:
    rows = [Tried("a", "no", 0.0, 0.1), Tried("b", "", 0.0, 0.3), Tried("c", "", 0.0, 0.2)]
    assert quickest(rows) is rows[2]
    assert quickest(rows[:1]) is None


def test_a_few_answers_may_flip_and_no_more() -> None:
    right = {"accuracy": torch.full((2, 4), 50.0)}
    for images, apart in ((2, 0.0), (12, 9.5 / 100)):
        moved = {"accuracy": right["accuracy"] + torch.tensor([0.0, 0.0, images, 0.0])}
        assert distances(moved, right, 100)["accuracy"] == pytest.approx((apart, apart))


def test_one_network_among_many_counts() -> None:
    right = {"host.params": torch.ones(100, 4)}
    wrong = {"host.params": torch.ones(100, 4).index_fill(0, torch.tensor([7]), 1.5)}
    apart = distances(wrong, right, 1)
    assert apart["host.params"] == pytest.approx((0.5, 0.005))
    assert disagreement(apart, {"host.params": (0.1, 0.1)}) == (
        "its host.params is 5.0e-01 from torch in float32, and 2.1e-01 is rounding"
    )
    assert disagreement(apart, {"host.params": (0.3, 0.0)}) == ""
    assert disagreement({"host.params": (0.5, 0.4)}, {"host.params": (0.3, 0.1)})


def test_the_seeds_are_of_all_kinds_in_all_states() -> None:
    seeds = mixture(trial(64))
    assert set(seeds.stage[seeds.running]) == set(RUNNING_STAGES)
    assert set(seeds.blueprint[seeds.running]) == set(CNN_BLUEPRINTS)
    assert set(seeds.blend.flatten()) == {Blend.ADD, Blend.MULTIPLY, Blend.GATE}
    assert 0 < seeds.frozen.sum() < seeds.visible.sum() < seeds.running.sum() < seeds.running.size


def test_every_engine_of_the_table_can_be_asked_for() -> None:
    assert list(NAMES) == ["auto", *ENGINES]


class Noting(Layers):
    """Notes whether cuDNN would search for algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def sgd_(self, params: Tensor, momentum: Tensor, grad: Tensor, rule: Rule) -> None:
        self.seen.append(torch.backends.cudnn.benchmark)
        super().sgd_(params, momentum, grad, rule)


@pytest.mark.parametrize("kept", [False, True])
def test_algorithms_are_searched_for_where_steps_are_kept_and_their_shapes_with_them(
    kept: bool,
) -> None:
    layers = Noting()
    before = torch.backends.cudnn.benchmark
    steps = StepCache[StaticStep](capture=False) if kept else None
    _Ground(trial(2), CPU).play(TorchEngine(layers, steps=steps), torch.float32)
    assert set(layers.seen) == {kept}
    assert torch.backends.cudnn.benchmark is before is False


# --- verdicts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "esper_soa" / "engines"


def test_what_was_found_is_found_again(cache: Path) -> None:
    found = [Tried("torch", "", 0.0, 0.25, 7), Tried("other", "it fails", math.nan)]
    assert kept_verdict("key", Tried) is None
    assert keep_verdict("key", found) == ""
    assert kept_verdict("key", Tried)[0] == found[0]
    assert kept_verdict("key", Tried)[1].dropped == "it fails"
    assert [path.name for path in cache.iterdir()] == ["key.json"]
    for damaged in ("", "{}x", '[{"nobody": 1}]', "[3]"):
        (cache / "key.json").write_text(damaged)
        assert kept_verdict("key", Tried) is None


def test_a_verdict_of_a_full_device_is_not_kept(cache: Path) -> None:
    assert keep_verdict(
        "key", [Tried("torch", "it fails with OutOfMemoryError: CUDA out of memory.")]
    )
    assert kept_verdict("key", Tried) is None


def test_a_verdict_that_cannot_be_kept_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache.parent.parent / "esper_soa").write_text("in the way")
    assert "link or no folder" in keep_verdict("key", [])
    assert kept_verdict("key", Tried) is None


def test_a_verdict_holds_for_runs_of_the_same_kind_alone() -> None:
    first = trial()
    keys = [
        verdict_key(first, CPU, ["planes"]),
        verdict_key(first, CPU, ["matmul"]),
        verdict_key(first, META, ["planes"]),
    ]
    keys += [
        verdict_key(first._replace(**{name: 99}), CPU, ["planes"]) for name in Trial._fields[1:]
    ]
    for name, value in (
        ("precision", torch.bfloat16),
        ("env_chunk", 99),
        ("eval_batch", 99),
        ("workers", 99),
    ):
        keys.append(
            verdict_key(first._replace(nets=first.nets._replace(**{name: value})), CPU, ["planes"])
        )
    for one in fields(first.nets.task):
        if isinstance(vars(first.nets.task)[one.name], str | int | float):
            task = type(first.nets.task)(**vars(first.nets.task))
            setattr(task, one.name, 77)
            keys.append(
                verdict_key(first._replace(nets=first.nets._replace(task=task)), CPU, ["planes"])
            )
    assert len(set(keys)) == len(keys)
    assert verdict_key(trial(), CPU, ["planes"]) == keys[0]


@pytest.mark.usefixtures("native", "cache")
def test_a_verdict_is_made_once_and_then_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    on = trial()
    first = weighed(asked(on), on)
    assert "(tried now)" in first.reason
    assert len(first.tried) == 2
    monkeypatch.setattr(choose, "tried_engines", partial(pytest.fail, "tried again"))
    again = weighed(asked(on), on)
    assert again.name == first.name
    assert again.tried == first.tried
    assert "(found at an earlier run)" in again.reason
    assert again.facts()["tried"] == "; ".join(first.tried)


@pytest.mark.usefixtures("cache")
def test_the_quickest_is_taken_by_its_verdict_and_torch_where_none_is_fit() -> None:
    on = trial()
    key = verdict_key(on, CPU, ["channels_last"])
    keep_verdict(key, [Tried("native", "", 0.0, 2.0), Tried("torch", "", 0.0, 1.0)])
    assert weighed(asked(on), on).name == "torch"
    keep_verdict(key, [Tried("native", "", 0.0, 1.0), Tried("torch", "", 0.0, 2.0)])
    assert weighed(asked(on), on).name == "native"
    keep_verdict(key, [Tried("torch", "it fails")])
    chosen = weighed(asked(on), on)
    assert (chosen.name, chosen.fallback, chosen.tried) == (
        "torch",
        True,
        ("torch is left out: it fails",),
    )
    assert weighed(asked(on), None).name == "torch"


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes float16"
)
def test_the_kernels_for_gpus_say_what_they_are_not_for() -> None:
    on = trial()
    assert ENGINES["triton"].obstacle(asked(on, precision="float16")).endswith("not float16")
    assert ENGINES["triton_graphs"].obstacle(asked(on)) == "CUDA graphs need an NVIDIA GPU, not cpu"
