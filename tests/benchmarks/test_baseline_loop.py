"""The plain loop of benchmarks/: what it is an oracle for, against numbers worked out by hand."""

import pytest
import torch
from loop_world import evaluate_fused

from benchmarks.baseline_attribution import ValidationReading, attribute, subset_codes
from benchmarks.baseline_env import BaselineEnv, ScalarAction
from benchmarks.baseline_modules import SEEDS, Gate, Host
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.nets import TaskConfig
from esper_soa.vocabulary import AlphaMode, Blueprint, Op, Stage, Style


def batches(count=1, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, 32, 32, generator=generator, dtype=torch.float64),
            torch.randint(10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def env_of(slots=("r0c1",), seed=0, **task):
    torch.manual_seed(seed)
    settings = {"max_grad_norm": 0.0, "gradient_stride": 1} | task
    return BaselineEnv(
        TaskConfig(**settings), list(slots), LifecycleConfig(), GatesConfig(), torch.float64
    )


def plant(env, blueprint, stage, alpha, slot=0, style=Style.LINEAR_ADD):
    """A seed put into `stage` at a standing alpha."""
    torch.manual_seed(7 + slot)
    env.apply(ScalarAction(slot=slot, blueprint=blueprint, style=style, op=Op.GERMINATE))
    machine = env.machines[slot]
    machine.seed.stage = stage
    machine.seed.alpha = machine.ramp.alpha = machine.ramp.start = machine.ramp.target = alpha
    return machine


# --- parameter counts


@pytest.mark.parametrize(
    ("task", "count"),
    [
        (TaskConfig(), 6418),
        (TaskConfig(num_blocks=5, num_pools=5), 99922),
        (TaskConfig(base_channels=1, kernel_size=1), 77),
        (TaskConfig(base_channels=2, kernel_size=1, num_pools=0), 164),
        (TaskConfig(base_channels=16), 24346),
        (TaskConfig(base_channels=2, num_blocks=5, kernel_size=1, num_pools=5), 1140),
    ],
)
def test_hosts_have_as_many_parameters_as_the_reference_tasks(task, count):
    assert Host(task).num_parameters() == count


@pytest.mark.parametrize(
    ("blueprint", "counts"),
    [
        (Blueprint.NORM, (3, 17, 33, 257)),
        (Blueprint.ATTENTION, (3, 40, 144, 8320)),
        (Blueprint.CONV_SMALL, (3, 80, 288, 16640)),
        (Blueprint.BOTTLENECK, (594, 720, 864, 17664)),
        (Blueprint.DEPTHWISE, (12, 152, 432, 17792)),
        (Blueprint.CONV_LIGHT, (11, 592, 2336, 147712)),
        (Blueprint.CONV_HEAVY, (22, 1184, 4672, 295424)),
    ],
)
def test_seeds_have_as_many_parameters_as_the_reference_blueprints(blueprint, counts):
    assert (
        tuple(SEEDS[blueprint](channels).num_parameters() for channels in (1, 8, 16, 128)) == counts
    )


def test_gates_have_as_many_parameters_as_the_reference():
    assert [Gate(channels).num_parameters() for channels in (8, 16, 32, 64, 128)] == [
        81,
        145,
        273,
        1057,
        4161,
    ]


# --- weights as vectors


def test_flat_vectors_come_back_as_they_were_put_in():
    host = Host(TaskConfig())
    vector = torch.arange(host.num_parameters(), dtype=torch.float32)
    host.load_flat(vector)
    assert torch.equal(host.flat(), vector)
    # conv weight 8 x 3 x 3 x 3 = 216 numbers, then BatchNorm weight and bias of 8 each, then the
    # second block
    assert host.blocks[0].bn.weight[0] == 216
    assert host.blocks[0].bn.bias[0] == 224
    assert host.blocks[1].conv.weight.flatten()[0] == 232
    assert host.classifier.bias[-1] == 6417


def test_a_vector_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="takes 6418 numbers"):
        Host(TaskConfig()).load_flat(torch.zeros(6417))


def test_running_statistics_come_back_as_they_were_put_in():
    host = Host(TaskConfig())
    vector = torch.arange(112.0)  # 2 x (8 + 16 + 32)
    host.load_flat_statistics(vector)
    assert torch.equal(host.flat_statistics(), vector)
    assert host.blocks[1].bn.running_mean[0] == 16
    assert host.blocks[2].bn.running_var[0] == 80


# --- subsets


def test_up_to_four_seeds_every_subset_is_evaluated_beyond_only_the_corners():
    assert subset_codes(()) == [0]
    assert subset_codes((0, 2)) == [5, 4, 1, 0]
    assert len(subset_codes((0, 1, 2, 3))) == 16
    # full, five left out, five alone, none, and ten pairs
    pairs = [3, 5, 9, 17, 6, 10, 18, 12, 20, 24]
    assert subset_codes((0, 1, 2, 3, 4)) == [31, 30, 29, 27, 23, 15, 1, 2, 4, 8, 16, 0, *pairs]


def test_contributions_interactions_and_shapley_values_of_two_seeds():
    # f(0)=10, f(slot 0)=14, f(slot 2)=11, f(both)=20
    found = attribute(ValidationReading(1.0, {5: 20.0, 1: 14.0, 4: 11.0, 0: 10.0}, (0, 2), ()))
    assert found.contribution == {0: 9.0, 2: 6.0}
    assert found.interaction_sum == {0: 5.0, 2: 5.0}  # 20 - 14 - 11 + 10
    assert found.shapley == {0: 6.5, 2: 3.5}  # (4 + 9) / 2 and (1 + 6) / 2
    assert (found.total, found.committed) == (10.0, 10.0)


def test_negative_interactions_add_up_but_boost_nothing():
    found = attribute(ValidationReading(1.0, {3: 12.0, 1: 14.0, 2: 11.0, 0: 10.0}, (0, 1), (1,)))
    assert found.interaction_sum == {0: -3.0, 1: -3.0}
    assert found.pair_boost == {(0, 1): 0.0, (1, 0): 0.0}
    assert found.committed == 11.0  # the fossil stays on


# --- training


def test_a_seed_in_training_learns_without_disturbing_its_host():
    alone = env_of()
    grown = env_of()
    plant(grown, Blueprint.CONV_LIGHT, Stage.TRAINING, 0.0)
    before = grown.plants[0].seed.flat()
    data = batches(2)
    alone.train(data)
    reading = grown.train(data)
    assert torch.equal(alone.host.flat(), grown.host.flat())
    assert torch.equal(alone.host.flat_statistics(), grown.host.flat_statistics())
    assert not torch.equal(before, grown.plants[0].seed.flat())
    assert reading.gradients[0].health == 1.0


@pytest.mark.parametrize(
    ("blueprint", "health"),
    [
        (
            Blueprint.NORM,
            1 - 0.5 * 2 / 3,
        ),  # the scale is 0, so GroupNorm gets nothing: 2 tensors of 3
        (Blueprint.ATTENTION, 1 - 0.5 / 3),  # W2 is 0, so W1 gets nothing
        (
            Blueprint.BOTTLENECK,
            1 - 0.5 * 3 / 5,
        ),  # up is 0: down and mid get nothing, and GN's scale of a zero map
        (Blueprint.CONV_SMALL, 1.0),
        (Blueprint.CONV_HEAVY, 1.0),
    ],
)
def test_health_of_the_first_gradient(blueprint, health):
    env = env_of()
    plant(env, blueprint, Stage.TRAINING, 0.0)
    assert env.train(batches()).gradients[0].health == pytest.approx(health)


def test_host_decays_and_gathers_momentum_and_seeds_do_not_decay():
    """Two steps at rate .01: p1 = p0 - .01 (g0 + wd p0); p2 = p1 - .01 (.9 v0 + g1 + wd p1)."""
    env = env_of()
    plant(env, Blueprint.CONV_LIGHT, Stage.BLENDING, 0.3)
    data = batches(2)
    expected_host = env.host.flat()
    expected_seed = env.plants[0].seed.flat()
    velocity_host = torch.zeros_like(expected_host)
    velocity_seed = torch.zeros_like(expected_seed)
    for batch in data:
        env.train([batch])
        gradient_host = torch.cat([p.grad.flatten() for p in env.host.parameters()])
        gradient_seed = torch.cat([p.grad.flatten() for p in env.plants[0].seed.parameters()])
        velocity_host = 0.9 * velocity_host + gradient_host + 5e-4 * expected_host
        velocity_seed = 0.9 * velocity_seed + gradient_seed
        expected_host = expected_host - 0.01 * velocity_host
        expected_seed = expected_seed - 0.01 * velocity_seed
    torch.testing.assert_close(env.host.flat(), expected_host)
    torch.testing.assert_close(env.plants[0].seed.flat(), expected_seed)


def test_host_and_seed_are_clipped_separately():
    env = env_of(max_grad_norm=1e-3, weight_decay=0.0)
    plant(env, Blueprint.CONV_LIGHT, Stage.BLENDING, 0.5)
    host = env.host.flat()
    seed = env.plants[0].seed.flat()
    env.train(batches())
    # first step moves by lr times the clipped gradient, whose norm is 1e-3 (up to the 1e-6 in its
    # denominator)
    assert (env.host.flat() - host).norm().item() == pytest.approx(1e-5, rel=1e-3)
    assert (env.plants[0].seed.flat() - seed).norm().item() == pytest.approx(1e-5, rel=1e-3)


def test_a_frozen_seed_stands_still_is_not_measured_and_keeps_its_momentum():
    env = env_of()
    machine = plant(env, Blueprint.CONV_LIGHT, Stage.BLENDING, 1.0)
    env.train(batches())
    optimiser = env.plants[0].optimiser
    momentum = optimiser.state[env.plants[0].parameters()[0]]["momentum_buffer"].clone()
    machine.ramp.mode = AlphaMode.DOWN
    seed = env.plants[0].seed.flat()
    host = env.host.flat()
    assert env.train(batches(seed=1)).gradients == {}
    assert torch.equal(env.plants[0].seed.flat(), seed)
    assert torch.equal(optimiser.state[env.plants[0].parameters()[0]]["momentum_buffer"], momentum)
    assert not torch.equal(env.host.flat(), host)
    machine.ramp.mode = AlphaMode.HOLD
    assert env.train(batches(seed=1)).gradients[0].l2 > 0
    assert not torch.equal(env.plants[0].seed.flat(), seed)


def test_a_gate_learns_with_its_seed_once_it_blends():
    env = env_of()
    machine = plant(env, Blueprint.CONV_LIGHT, Stage.TRAINING, 0.0, style=Style.GATED_GATE)
    gate = env.plants[0].gate.flat()
    env.train(batches())
    assert torch.equal(env.plants[0].gate.flat(), gate)
    machine.seed.stage = Stage.BLENDING
    machine.seed.alpha = 0.5
    env.train(batches())
    assert not torch.equal(env.plants[0].gate.flat(), gate)


@pytest.mark.parametrize(("stage", "blocked"), [(Stage.BLENDING, True), (Stage.HOLDING, False)])
def test_at_full_alpha_the_layers_before_a_seed_learn_unless_it_is_detached(stage, blocked):
    env = env_of()
    plant(env, Blueprint.CONV_LIGHT, stage, 1.0)
    env.train(batches())
    assert (env.host.blocks[0].conv.weight.grad.abs().sum() == 0).item() == blocked


def test_a_fossil_starts_with_fresh_momentum_and_goes_on_learning():
    env = env_of()
    machine = plant(env, Blueprint.CONV_LIGHT, Stage.HOLDING, 1.0)
    env.train(batches())
    machine.record_contribution(2.0)
    assert env.apply(ScalarAction(op=Op.FOSSILIZE)).fossilized
    seed = env.plants[0].seed.flat()
    env.train(batches(seed=1))
    gradient = torch.cat([p.grad.flatten() for p in env.plants[0].seed.parameters()])
    torch.testing.assert_close(env.plants[0].seed.flat(), seed - 0.01 * gradient)


# --- the env


def test_separate_and_fused_validation_agree_on_every_subset():
    env = env_of(("r0c0", "r0c1", "r1c2"))
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
    env = env_of(("r0c0", "r0c2"))
    alone = env_of(("r0c0",))
    plant(env, Blueprint.CONV_HEAVY, Stage.BLENDING, 0.9, slot=0)
    plant(env, Blueprint.CONV_HEAVY, Stage.BLENDING, 0.9, slot=1)
    data = batches(1, size=64)
    none = env.evaluate(data, codes=[0])
    host_only = alone.evaluate(data)
    assert none.loss == host_only.loss
    assert none.accuracy[0] == host_only.accuracy[0]


def test_recording_writes_measurements_into_live_slots_only():
    env = env_of(("r0c0", "r0c1", "r0c2"))
    first = plant(env, Blueprint.CONV_LIGHT, Stage.BLENDING, 0.25, slot=0)
    second = plant(env, Blueprint.CONV_LIGHT, Stage.HOLDING, 1.0, slot=2)
    trained = env.train(batches())
    evaluated = ValidationReading(1.0, {5: 20.0, 1: 14.0, 4: 11.0, 0: 10.0}, (0, 2), ())
    env.record(trained, evaluated)
    assert env.accuracy == first.seed.accuracy_current == 20.0
    assert (first.seed.contribution, second.seed.contribution) == (9.0, 6.0)
    assert first.seed.gradient_measured
    assert not second.seed.gradient_measured  # HOLDING is not measured
    assert env.machines[1].seed.seed_age == 0


def test_actions_go_through_only_where_they_apply():
    env = env_of(("r0c0", "r0c1"))
    wait = env.apply(ScalarAction())
    assert (wait.effective_op, wait.success) == (Op.WAIT, True)
    assert env.apply(ScalarAction(slot=1, blueprint=Blueprint.NORM, op=Op.GERMINATE)).germinated
    again = env.apply(ScalarAction(slot=1, blueprint=Blueprint.NORM, op=Op.GERMINATE))
    assert (again.effective_op, again.success) == (Op.WAIT, False)
    assert env.apply(ScalarAction(slot=1, op=Op.PRUNE)).effective_op == Op.WAIT  # younger than 5
    env.machines[1].seed.seed_age = 5
    assert env.apply(ScalarAction(slot=1, op=Op.PRUNE)).effective_op == Op.PRUNE
    assert env.plants == {}


def test_a_failed_gate_is_a_valid_action_without_success():
    env = env_of()
    plant(env, Blueprint.NORM, Stage.TRAINING, 0.0)
    outcome = env.apply(ScalarAction(op=Op.ADVANCE))
    assert (outcome.effective_op, outcome.success) == (Op.ADVANCE, False)


def test_an_env_step_trains_evaluates_records_acts_and_ticks():
    env = env_of()
    outcome = env.step(
        batches(), batches(seed=1), ScalarAction(blueprint=Blueprint.CONV_LIGHT, op=Op.GERMINATE)
    )
    assert outcome.germinated
    env.step(batches(), batches(seed=1), ScalarAction(op=Op.ADVANCE))
    assert env.machines[0].seed.stage == Stage.TRAINING
    env.step(batches(), batches(seed=1), ScalarAction())
    assert env.machines[0].seed.seed_age == 2
    assert env.machines[0].seed.gradient_measured
