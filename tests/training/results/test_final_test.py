"""Test accuracy: measured after the last env-step, on images that nothing has seen before."""

from dataclasses import replace

import pytest
import torch

from esper_soa.config.env import EarlyStopConfig
from esper_soa.config.nets import DataConfig
from esper_soa.grown.networks import export_hosts
from esper_soa.state import STATE_FLOAT
from esper_soa.training.loop.build import build_world
from esper_soa.training.results import final_test
from esper_soa.training.results.final_test import measure_test, with_test
from tests.builders.tiny_world import CPU, random_round, tiny_settings


@pytest.mark.parametrize("early_stop", [EarlyStopConfig(), EarlyStopConfig(2, min_steps=4)])
@pytest.mark.parametrize("at_once", [4, 5, 256])
def test_hosts_are_measured_as_they_were_at_the_last_env_step(
    early_stop: EarlyStopConfig, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_test, "AT_ONCE", at_once)
    cfg = replace(tiny_settings(12, 3, 30), val_samples=9, early_stop=early_stop)
    data = DataConfig(name="synthetic", synthetic_train=16, synthetic_test=11)
    world = build_world(replace(cfg, data=data), CPU)
    result = random_round(world)
    before = {name: rows.clone() for name, rows in world.weights.flatten_keys(".").items()}
    seen = world.data
    chosen = world.validation.order  # type: ignore[attr-defined]
    world.data = replace(  # type: ignore[type-var]
        seen,
        test_images=seen.val_images[chosen],  # type: ignore[attr-defined]
        test_labels=seen.val_labels[chosen],
    )
    found = torch.tensor(measure_test(world, result.hosts)[0], dtype=STATE_FLOAT)
    measured = result.hosts.accuracy.isfinite()
    assert measured.sum() > 6
    assert torch.equal(found[measured], result.hosts.accuracy[measured])
    world.data = seen
    assert measure_test(world, result.hosts)[0] != found.tolist()
    for name, rows in world.weights.flatten_keys(".").items():
        assert torch.equal(rows, before[name])


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_answers_are_those_of_the_grown_networks_sample_by_sample(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_test, "AT_ONCE", 4)
    cfg = replace(tiny_settings(24, 3, 20), val_samples=4)
    cfg.compute.engine = engine
    data = DataConfig(name="synthetic", synthetic_train=16, synthetic_test=11)
    world = build_world(replace(cfg, data=data), CPU)
    result = with_test(world, random_round(world))
    assert result.answers is not None
    assert result.answers.dtype == torch.int8
    assert result.answers[:, 0].any(), "the first sample, which padding must not touch"
    inputs, labels = world.data.samples("test", torch.arange(11))
    hosts = export_hosts(world, result.hosts, 1, envs=range(24))
    for host, answers, accuracy in zip(hosts, result.answers, result.test_accuracies, strict=True):
        right = host.network()(inputs).argmax(1) == labels
        assert answers.tolist() == right.long().tolist()
        assert accuracy == 100 * int(answers.sum()) / 11
