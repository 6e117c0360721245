"""The plain loop of benchmarks/: its ways to validate, and a whole env-step.

That it is an oracle is shown elsewhere: against the recorded vectors in tests/parity, and in
tests/nets/test_batch_equals_loop.py against the engine, whose numbers are also worked out by hand.
"""

import pytest
import torch

from benchmarks.baseline_env import BaselineEnv, ScalarAction
from benchmarks.baseline_text import Gate, Host, make_seed
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.nets import TaskConfig, TransformerConfig, host_slots
from esper_soa.nets.model.blueprints import (
    GATE,
    SEQUENCE_BLUEPRINTS,
    gate_table,
    seed_forward,
    seed_table,
)
from esper_soa.nets.model.host import evaluate_forward, fold_batch_norm, host_shape
from esper_soa.nets.seeds.seeds import SeedFiller
from esper_soa.vocabulary import Blend, Blueprint, Op, Stage, Style
from tests.builders.loop_world import evaluate_fused


def batches(count=1, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, 32, 32, generator=generator, dtype=torch.float64),
            torch.randint(10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def env_of(*slots):
    torch.manual_seed(0)
    task = TaskConfig(max_grad_norm=0.0, gradient_stride=1)
    return BaselineEnv(task, list(slots), LifecycleConfig(), GatesConfig(), torch.float64)


def plant(env, blueprint, stage, alpha, slot=0, style=Style.LINEAR_ADD):
    """A seed put into `stage` at a standing alpha."""
    torch.manual_seed(7 + slot)
    env.apply(ScalarAction(slot=slot, blueprint=blueprint, style=style, op=Op.GERMINATE))
    machine = env.machines[slot]
    machine.seed.stage = stage
    machine.seed.alpha = machine.ramp.alpha = machine.ramp.start = machine.ramp.target = alpha


def test_separate_and_fused_validation_agree_on_every_subset():
    env = env_of("r0c0", "r0c1", "r1c2")
    plant(env, Blueprint.CONV_LIGHT, Stage.BLENDING, 0.3, slot=0)
    plant(env, Blueprint.NORM, Stage.FOSSILIZED, 1.0, slot=1)
    plant(env, Blueprint.DEPTHWISE, Stage.HOLDING, 1.0, slot=2, style=Style.GATED_GATE)
    env.train(batches(2))
    data = batches(2, size=16, seed=3)
    separate = env.evaluate(data)
    fused = evaluate_fused(env, data)
    assert separate.ablated == (0, 2)
    assert list(separate.accuracy) == [5, 4, 1, 0]
    assert separate.accuracy == fused.accuracy
    assert separate.loss == pytest.approx(fused.loss, rel=1e-12)
    env.ablate_fossils = True
    assert env.evaluate(data).ablated == (0, 1, 2)
    assert env.evaluate(data).fossils == (1,)


def test_switching_every_seed_off_leaves_the_host_alone():
    env = env_of("r0c0", "r0c2")
    alone = env_of("r0c0")
    plant(env, Blueprint.CONV_HEAVY, Stage.BLENDING, 0.9, slot=0)
    plant(env, Blueprint.CONV_HEAVY, Stage.BLENDING, 0.9, slot=1)
    data = batches(1, size=64)
    none = env.evaluate(data, codes=[0])
    host_only = alone.evaluate(data)
    assert none.loss == host_only.loss
    assert none.accuracy[0] == host_only.accuracy[0]


def test_an_env_step_trains_evaluates_records_acts_and_ticks():
    env = env_of("r0c1")
    data = (batches(), batches(seed=1))
    germinate = ScalarAction(blueprint=Blueprint.CONV_LIGHT, op=Op.GERMINATE)
    assert env.step(*data, germinate).germinated
    env.step(*data, ScalarAction(op=Op.ADVANCE))
    assert env.machines[0].seed.stage == Stage.TRAINING
    env.step(*data, ScalarAction())
    assert env.machines[0].seed.seed_age == 2
    assert env.machines[0].seed.gradient_measured


def test_the_loop_on_text_has_the_networks_of_the_engine():
    sizes = TransformerConfig(width=8, layers=2, heads=2, context=6, segments=2)
    names = [blueprint.name for blueprint in SEQUENCE_BLUEPRINTS[1:]]
    task = TaskConfig(
        host="transformer", num_classes=256, blueprints=names, optimizer="adamw", transformer=sizes
    )
    shape = host_shape(task, host_slots(task), SEQUENCE_BLUEPRINTS)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (4, 6), generator=generator)
    row = torch.randn(1, shape.parameters.total, generator=generator) / 4
    host = Host(task)
    host.load_flat(row[0])
    folded = fold_batch_norm(shape, shape.parameters.unpack(row), [])
    expected = evaluate_forward(shape, folded, tokens, SeedFiller([], 1))[:, 0].flatten(0, 1)
    torch.testing.assert_close(host(tokens, {}).detach(), expected)
    x = torch.randn(2, 8, 6, generator=generator)
    for blueprint in shape.blueprints[1:]:
        table = seed_table(blueprint, 8)
        seed = make_seed(blueprint.code, 8, Blend.ADD)
        assert seed.num_parameters() == table.total
        numbers = torch.randn(1, table.total, generator=generator)
        seed.load_flat(numbers[0])
        found = seed(x.transpose(1, 2)).detach().transpose(1, 2)
        torch.testing.assert_close(found, seed_forward(blueprint, table.unpack(numbers), x))
    gate = Gate(8)
    numbers = torch.randn(1, gate_table(8).total, generator=generator)
    gate.load_flat(numbers[0])
    amplitudes = GATE.forward(gate_table(8).unpack(numbers), x).squeeze(-1)
    torch.testing.assert_close(gate(x.transpose(1, 2)).detach()[:, 0], amplitudes)
