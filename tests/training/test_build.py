"""What is built from settings is what they say: each setting that reaches the rules of a run."""

from dataclasses import replace

import pytest
import torch
from tiny_world import CPU, tiny_settings

from esper_soa.config.env import (
    AttributionConfig,
    GatesConfig,
    GovernorConfig,
    LifecycleConfig,
    RewardConfig,
    SignalsConfig,
)
from esper_soa.config.nets import SubsetRows
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.attribution import arrival_orders, prefix_codes
from esper_soa.training import build
from esper_soa.training.build import build_rules
from esper_soa.vocabulary import BLUEPRINT_NAMES, Stage

SLOTS = 5  # more than are evaluated in every subset


def settings(**changed: object) -> TrainConfig:
    return replace(tiny_settings(4, SLOTS, 9), **changed)  # type: ignore[arg-type]


def test_the_rules_are_those_of_the_settings() -> None:
    parts = {
        "lifecycle": LifecycleConfig(embargo_steps=7),
        "gates": GatesConfig(min_blending_steps=4),
        "signals": SignalsConfig(plateau_threshold=0.75),
        "governor": GovernorConfig(snapshot_steps=3),
    }
    reward = RewardConfig(mode="basic", rent_weight=0.25)
    rules = build_rules(settings(max_seeds=2, reward=reward, **parts), CPU)
    for name, part in parts.items():
        assert getattr(rules, name) is part, name
    assert (rules.max_seeds, rules.max_steps, rules.reward.max_steps) == (2, 9, 9)
    found = rules.reward.config
    assert (found.mode, found.rent_weight) == ("basic", 0.25)


def test_only_the_blueprints_of_the_task_are_allowed() -> None:
    cfg = settings()
    task = replace(cfg.task, blueprints=["norm", "conv_heavy"])
    allowed = build_rules(replace(cfg, task=task), CPU).blueprints.nonzero().flatten().tolist()
    assert [BLUEPRINT_NAMES[code] for code in allowed] == task.blueprints


def test_the_networks_are_laid_out_as_the_settings_say() -> None:
    for stages in (["training"], ["training", "holding"]):
        lifecycle = LifecycleConfig(detached_stages=stages)
        found = build_rules(settings(lifecycle=lifecycle), CPU).nets.detached_stages
        assert {*found} == {getattr(Stage, name.upper()) for name in stages}
    compute = ComputeConfig(env_chunk=1, workers=2, precision="bfloat16")
    laid_out = build_rules(settings(compute=compute), CPU).nets
    assert (laid_out.env_chunk, laid_out.workers, laid_out.precision) == (1, 2, torch.bfloat16)


def test_pairs_and_sampled_subsets_are_evaluated_where_they_are_asked_for() -> None:
    for pairs in (True, False):
        rules = build_rules(settings(attribution=AttributionConfig(pairs=pairs)), CPU)
        assert rules.nets.rows == SubsetRows(pairs, ())
    sampled = [
        build_rules(settings(seed=seed, attribution=AttributionConfig(shapley_samples=12)), CPU)
        for seed in (3, 4)
    ]
    for seed, rules in zip((3, 4), sampled, strict=True):
        orders = arrival_orders(SLOTS, 12, seed, CPU)
        assert rules.shapley_orders is not None
        assert torch.equal(rules.shapley_orders, orders)
        assert set(rules.nets.rows.codes) == set(prefix_codes(orders).flatten().tolist())
    assert not torch.equal(arrival_orders(SLOTS, 12, 3, CPU), arrival_orders(SLOTS, 12, 4, CPU))


def test_few_slots_need_no_sampled_subsets() -> None:
    few = replace(tiny_settings(4, 4, 9), attribution=AttributionConfig(shapley_samples=12))
    rules = build_rules(few, CPU)
    assert rules.shapley_orders is None
    assert rules.nets.rows.codes == ()


def test_a_world_takes_its_device_before_anything_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(build, "take_device", taken.append)
    monkeypatch.setattr(
        build, "build_rules", lambda *_: pytest.fail("not yet") if not taken else build_rules(*_)
    )
    build.build_world(settings(), torch.device("cpu"))
    assert taken == [torch.device("cpu")]
