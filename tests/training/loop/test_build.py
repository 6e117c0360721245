"""What is built from settings is what they say: each setting that reaches the rules of a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper_soa.config.agent import PolicyConfig
from esper_soa.config.env import (
    AttributionConfig,
    EarlyStopConfig,
    GatesConfig,
    GovernorConfig,
    LifecycleConfig,
    RewardConfig,
    SignalsConfig,
)
from esper_soa.config.nets import DataConfig, SubsetRows
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.attribution import arrival_orders, prefix_codes
from esper_soa.env.step import EAGER, EnvRules, StepKernels
from esper_soa.nets.data.datasets import load_samples
from esper_soa.nets.needs import at_once
from esper_soa.runtime import memory
from esper_soa.runtime.ranks import Ranks
from esper_soa.system.errors import SettingError
from esper_soa.training.loop import build
from esper_soa.training.loop.build import build_rules, make_setup
from esper_soa.vocabulary import BLUEPRINT_NAMES, Stage
from tests.builders import user_files
from tests.builders.tiny_world import CPU, rules_from, tiny_settings

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
    rules = rules_from(settings(max_seeds=2, reward=reward, **parts))
    for name, part in parts.items():
        assert getattr(rules, name) is part, name
    assert (rules.max_seeds, rules.max_steps, rules.reward.max_steps) == (2, 9, 9)
    found = rules.reward.config
    assert (found.mode, found.rent_weight) == ("basic", 0.25)


def test_settings_of_envs_reach_observation_and_the_kernels_that_read_them() -> None:
    read = ["reward.rent_weight", "gates.min_blending_steps", "lifecycle.embargo_steps"]
    cfg = settings(
        reward=RewardConfig(rent_weight="[1,2]"),
        gates=GatesConfig(min_blending_steps="[1,2]"),
        lifecycle=LifecycleConfig(embargo_steps="[1,2]"),
        early_stop=EarlyStopConfig(length=4),
        policy=PolicyConfig(observe=["data.share", "reward.rent_weight"]),
    )
    cfg = replace(cfg, data=replace(cfg.data, share="[0.5,1]"))
    rules = rules_from(cfg)
    assert sorted(rules.differing) == sorted(["data.share", *read])
    assert rules.observed == ("data.share", "reward.rent_weight")
    assert rules.kernel_settings == (*read, "early_stop.length", "data.share")


def test_modes_of_envs_are_built_once_each_and_given_to_the_kernels() -> None:
    rules = rules_from(settings(reward=RewardConfig(mode="[shaped,escrow,loss,shaped]")))
    assert [part.config.mode for part in rules.reward.by_mode] == ["shaped", "escrow", "loss"]
    assert rules.differing == rules.kernel_settings == ("reward.mode",)


def test_ranks_of_a_device_share_its_memory() -> None:
    two = Ranks()
    two.beside = 2
    assert rules_from(settings(), CPU, two).setup.processes == 2


@pytest.mark.parametrize("setting", ["auto", "on"])
def test_kernels_are_waited_for_where_the_settings_insist(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    asked: list[tuple[int, int, bool]] = []

    def stored(rules: EnvRules, num_envs: int, env_steps: int, wait: bool) -> StepKernels:
        asked.append((num_envs, env_steps, wait))
        return EAGER._replace(reason="none")

    monkeypatch.setattr(build, "stored_kernels", stored)
    monkeypatch.setattr(build, "unsupported", lambda rules: "")
    monkeypatch.setattr(build, "keep_compiled", lambda: "kept")
    monkeypatch.setattr(torch.compiler, "reset", lambda: asked.append((0, 0, False)))
    monkeypatch.setattr(torch, "compile", lambda kernel, **how: (kernel, how))
    cfg = settings(rounds=3, compute=ComputeConfig(compile=setting))
    *kernels, reason = build.build_kernels(rules_from(replace(cfg, envs=2)), 27, num_envs=4)[:3]
    if setting == "auto":
        assert (reason, asked) == ("none", [(2, 27, False)])
    else:  # what jobs before it compiled is forgotten
        assert (reason, asked[0]) == ("compiled (compute.compile=on); kept", (2, 27, True))
        assert asked[1:] == [(0, 0, False)]
        whole = {"fullgraph": True, "dynamic": False}
        assert kernels == [(kernel, whole) for kernel in EAGER[:2]]


def test_what_compiling_saves_is_weighed_by_all_envs_of_the_run() -> None:
    cfg = settings(rounds=3)
    weighed = "compiling takes about 70 s and saves less than 1 s in 27 env-steps of 4 envs"
    kernels = build.build_kernels(rules_from(replace(cfg, envs=2)), 27, num_envs=4)  # of this rank
    assert kernels == EAGER._replace(reason=f"not compiled: {weighed}")


def test_only_the_blueprints_of_the_task_are_allowed() -> None:
    cfg = settings()
    task = replace(cfg.task, blueprints=["norm", "conv_heavy"])
    allowed = rules_from(replace(cfg, task=task)).blueprints.nonzero().flatten().tolist()
    assert [BLUEPRINT_NAMES[code] for code in allowed] == task.blueprints


def test_the_networks_are_laid_out_as_the_settings_say() -> None:
    for stages in (["training"], ["training", "holding"]):
        lifecycle = LifecycleConfig(detached_stages=stages)
        found = rules_from(settings(lifecycle=lifecycle)).setup.detached_stages
        assert {*found} == {getattr(Stage, name.upper()) for name in stages}
    compute = ComputeConfig(env_chunk=1, workers=2, precision="bfloat16")
    laid_out = rules_from(settings(compute=compute)).setup
    assert (laid_out.env_chunk, laid_out.workers, laid_out.precision) == (1, 2, torch.bfloat16)


def test_pairs_and_sampled_subsets_are_evaluated_where_they_are_asked_for() -> None:
    for pairs in (True, False):
        rules = rules_from(settings(attribution=AttributionConfig(pairs=pairs)))
        assert rules.setup.rows == SubsetRows(pairs, ())
    sampled = [
        rules_from(settings(seed=seed, attribution=AttributionConfig(shapley_samples=12)))
        for seed in (3, 4)
    ]
    for seed, rules in zip((3, 4), sampled, strict=True):
        orders = arrival_orders(SLOTS, 12, seed, CPU)
        assert rules.shapley_orders is not None
        assert torch.equal(rules.shapley_orders, orders)
        assert set(rules.setup.rows.codes) == set(prefix_codes(orders).flatten().tolist())
    assert not torch.equal(arrival_orders(SLOTS, 12, 3, CPU), arrival_orders(SLOTS, 12, 4, CPU))


def test_few_slots_need_no_sampled_subsets() -> None:
    few = replace(tiny_settings(4, 4, 9), attribution=AttributionConfig(shapley_samples=12))
    rules = rules_from(few)
    assert rules.shapley_orders is None
    assert rules.setup.rows.codes == ()


def test_a_world_needs_room_for_samples_that_it_loads_and_beside_other_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = load_samples(settings().data, CPU)
    cfg = settings(data=DataConfig(root=str(user_files.write(tmp_path / "mine.npz"))))
    setups = (make_setup(cfg, CPU, loaded=given) for given in (True, False))
    handed, loaded = (at_once(memory.needs(setup, cfg.policy)) for setup in setups)
    assert handed < loaded
    monkeypatch.setattr(memory, "free_memory", lambda device: loaded - 1)
    build.build_world(cfg, CPU, data=data)
    with pytest.raises(SettingError, match="must be so small that cpu holds the run"):
        build.build_world(cfg, CPU)
    two = Ranks()
    two.beside = 2
    with pytest.raises(SettingError, match="must be so small that cpu holds the run"):
        build.build_world(cfg, CPU, data=data, ranks=two)


def test_a_world_takes_its_device_before_anything_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(build, "take_device", taken.append)
    monkeypatch.setattr(build, "keep_freed_memory", taken.append)
    monkeypatch.setattr(
        build, "build_rules", lambda *_: pytest.fail("not yet") if not taken else build_rules(*_)
    )
    build.build_world(settings(), torch.device("cpu"))
    assert taken == [torch.device("cpu")] * 2
