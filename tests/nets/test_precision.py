"""Host training in 16 bits: close to float32, a loss scale per env, and a policy that never
notices.
"""

from dataclasses import fields

import pytest
import torch

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.settings import ComputeConfig
from esper_soa.nets import precision
from esper_soa.nets.precision import (
    GOOD_KEY,
    SCALE_KEY,
    LossScales,
    add_loss_scales_,
    choose_precision,
)
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.resume import may_change
from tests.builders.loop_world import Setting, StackedEnvs
from tests.builders.tiny_world import CPU, quiet_progress, tiny_settings

IDS = list(range(5))


def envs_in(dtype: torch.dtype) -> StackedEnvs:
    """Five envs with seeds of all kinds whose hosts compute in `dtype`."""
    envs = StackedEnvs(Setting(dtype=torch.float32), IDS)
    envs.rules = envs.rules._replace(setup=envs.rules.setup._replace(precision=dtype))
    if dtype == torch.float16:
        add_loss_scales_(envs.weights)
        precision.reset_loss_scales_(envs.weights)
    return envs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_first_env_step_in_16_bits_is_close_to_one_in_float32(dtype: torch.dtype) -> None:
    plain = envs_in(torch.float32)
    short = envs_in(dtype)
    if dtype == torch.float16:
        # at the first scale one of these small hosts skips an update
        short.weights[SCALE_KEY].fill_(256.0)
    expected = plain.measure()
    measured = short.measure()
    assert not torch.equal(measured.train_loss, expected.train_loss)
    assert torch.allclose(measured.train_loss, expected.train_loss, rtol=0.02)
    assert torch.allclose(measured.val_loss, expected.val_loss, rtol=0.02)
    rows, wanted = (envs.weights["host", "params"] for envs in (short, plain))
    assert rows.dtype == torch.float32
    assert torch.allclose(rows, wanted, atol=2e-3)


def test_an_overflow_costs_its_env_one_update_and_half_its_scale_and_no_other_anything() -> None:
    calm = envs_in(torch.float16)
    hit = envs_in(torch.float16)
    for envs in (calm, hit):
        envs.play(6)
    sick = 2
    well = [0, 1, 3, 4]
    hit.weights[SCALE_KEY][sick] = 2.0**24  # times a gradient of an activation: beyond 65504
    before = hit.weights.clone()
    wanted = calm.measure().gradients
    found = hit.measure().gradients
    assert wanted.measured[sick].any()
    assert not found.measured[sick].any()
    assert (found[well] == wanted[well]).all()
    assert hit.weights[SCALE_KEY][sick] == 2.0**22  # two batches, both skipped
    assert hit.weights[GOOD_KEY][sick] == 0
    for name in ("params", "momentum", "statistics"):
        assert torch.equal(hit.weights["host", name][sick], before["host", name][sick]), name
        assert torch.equal(hit.weights["host", name][well], calm.weights["host", name][well]), name
        assert not torch.equal(hit.weights["host", name][well], before["host", name][well]), name
    for slot in hit.weights["seeds"].sorted_keys:
        pools = (envs.weights["seeds", slot, "momentum"] for envs in (hit, calm))
        assert torch.equal(*(rows[well] for rows in pools))
    assert torch.equal(hit.weights[SCALE_KEY][well], calm.weights[SCALE_KEY][well])
    hit.play(16)
    assert hit.weights[GOOD_KEY][sick] > 0  # it has come down and trains again


def test_a_scale_halves_on_overflow_and_doubles_later() -> None:
    weights = envs_in(torch.float16).weights
    weights[GOOD_KEY][1:3] = 1997  # updates in a row; after 2000 a scale grows
    scales = LossScales(weights, torch.tensor([1, 2]))
    # Env 1 overflows in the second update, env 2 never does: 65536 / 2 with one good update, and
    # 65536 * 2 with none.
    for finite in ([True, True], [False, True], [True, True]):
        scales.update_(torch.tensor(finite))
    scales.write_back_(torch.tensor([1, 2]))
    assert weights[SCALE_KEY].tolist() == [65536, 32768, 131072, 65536, 65536]
    assert weights[GOOD_KEY].tolist() == [0, 1, 0, 0, 0]


def test_scales_stay_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 1)
    weights = envs_in(torch.float16).weights
    bounds = [2.0**24, 2.0**-14]
    weights[SCALE_KEY][:2] = torch.tensor(bounds)
    scales = LossScales(weights, torch.tensor([0, 1]))
    scales.update_(torch.tensor([True, False]))  # one would grow, one would shrink
    assert scales.scale.tolist() == bounds


def test_fresh_hosts_start_at_the_first_scale() -> None:
    cfg = tiny_settings(2, 1, 2)
    cfg.compute = ComputeConfig(workers=1, precision="float16")
    world = build_world(cfg, CPU)
    world.weights[SCALE_KEY][1] = 4.0
    world.weights[GOOD_KEY][1] = 7
    world.start_round(1)
    assert world.weights[SCALE_KEY].tolist() == [65536, 65536]
    assert world.weights[GOOD_KEY].tolist() == [0, 0]


def test_a_gpu_gets_the_16_bits_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    none = "the GPU has no bfloat16; each env has a loss scale of its own"
    wanted = {
        True: (torch.bfloat16, "the GPU computes in it natively"),
        False: (torch.float16, none),
    }
    for native in wanted:
        have = lambda including_emulation=True, own=native: own or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", have)
        assert choose_precision("auto", torch.device("cuda")) == wanted[native]


def test_the_policy_computes_in_float32_and_its_first_pass_has_ratio_one() -> None:
    cfg = tiny_settings(3, 2, 5)
    cfg.compute = ComputeConfig(workers=1, precision="bfloat16")
    world = build_world(cfg, CPU)
    assert world.rules.setup.precision == torch.bfloat16
    assert SCALE_KEY not in world.weights
    slots = world.rules.setup.shape.slots
    network = NetworkConfig(hidden=32, features=32)
    policy = RecurrentPolicy(PolicyConfig(network=network), slots, seed=0)
    learner = Learner(policy, PPOConfig(minibatches=1, epochs=1), 1, seed=0)
    _, rollout = play_round(world, Player(policy, learner), Round(0, quiet_progress()))
    assert rollout is not None
    assert rollout.rows.log_probs.dtype == torch.float32
    update = learner.update(rollout)
    assert update["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert update["ratio_min"] == pytest.approx(1, abs=1e-5)


def test_a_cpu_stays_with_float32_unless_asked_and_a_resumed_run_with_what_it_had() -> None:
    why = "fastest on cpu for networks of few channels"
    assert choose_precision("auto", CPU) == (torch.float32, why)
    asked = choose_precision("bfloat16", CPU)
    assert (asked, asked.name) == ((torch.bfloat16, "as compute.precision asks"), "bfloat16")
    names = [field.name for field in fields(ComputeConfig)]
    assert [one for one in names if not may_change(f"compute.{one}")] == ["precision"]
