"""The scalar state machine of benchmarks/ against golden timelines and numbers by hand."""

import pytest

from benchmarks.baseline_lifecycle import SlotMachine, TotalsRecord
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.vocabulary import AlphaMode, Blend, Blueprint, Curve, Stage, Style

AUTO = LifecycleConfig(auto_forward_g1=True, auto_forward_g2=True, auto_forward_g3=True)


def machine_of(lifecycle=None, **gates):
    return SlotMachine(lifecycle or LifecycleConfig(), GatesConfig(**gates), TotalsRecord())


def healthy(machine):
    machine.seed.gradient_health = 1.0
    machine.seed.gradient_measured = True


def test_manual_lifecycle_follows_the_golden_timeline():
    """Tempo 5, linear, ADVANCE at 2, 11 (too young), 12, 16 (ramp running), 17, FOSSILIZE at 18."""
    machine = machine_of()
    machine.germinate(Blueprint.NORM, Style.LINEAR_ADD, 5, 1.0, 10.0)
    machine.tick()  # end of env-step 1
    answers = {}
    ages = {}
    stages = {}
    alphas = {}
    for step in range(2, 19):
        machine.record_accuracy(10.0 + step)
        healthy(machine)
        ages[step] = (machine.seed.stage_age, machine.seed.seed_age)
        if step in (2, 11, 12, 16, 17):
            answers[step] = machine.advance()
        if step == 18:
            machine.record_contribution(-1.0)  # permissive G5 asks only that it was measured
            answers[step] = machine.fossilize()
        machine.tick()
        stages[step] = machine.seed.stage
        alphas[step] = machine.seed.alpha
    assert answers == {2: True, 11: False, 12: True, 16: False, 17: True, 18: True}
    assert ages[2] == (1, 1)
    assert ages[11] == (9, 10)
    assert ages[12] == (10, 11)
    assert ages[16] == (4, 15)
    assert ages[18] == (1, 17)
    assert [stages[step] for step in (2, 11, 12, 16, 17, 18)] == [
        Stage.TRAINING,
        Stage.TRAINING,
        Stage.BLENDING,
        Stage.BLENDING,
        Stage.HOLDING,
        Stage.FOSSILIZED,
    ]
    assert [round(alphas[step], 12) for step in range(11, 18)] == [
        0.0,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
        1.0,
    ]
    assert machine.seed.accuracy_initial == 12.0
    assert machine.totals == TotalsRecord(germinated=1, blended=1, fossilized=1, contributing=1)


def test_automatic_lifecycle_follows_the_golden_timeline():
    """Tempo 3, sigmoid: TRAINING from the end of step 1, alpha still 0 at the end of 11, HOLDING at
    the end of 14.
    """
    machine = machine_of(AUTO)
    machine.germinate(Blueprint.NORM, Style.SIGMOID_ADD, 3, 1.0, 0.0)
    machine.tick()
    assert machine.seed.stage == Stage.TRAINING
    alphas = {}
    stages = {}
    for step in range(2, 16):
        machine.record_accuracy(50.0)
        healthy(machine)
        machine.tick()
        alphas[step] = machine.seed.alpha
        stages[step] = machine.seed.stage
    assert stages[10] == Stage.TRAINING
    assert (stages[11], alphas[11]) == (Stage.BLENDING, 0.0)
    assert alphas[12] == pytest.approx(0.117310428, abs=1e-9)
    assert alphas[13] == pytest.approx(0.882689572, abs=1e-9)
    assert (stages[13], stages[14], alphas[14]) == (Stage.BLENDING, Stage.HOLDING, 1.0)


def test_a_partial_target_waits_in_blending_until_it_is_raised():
    machine = machine_of(AUTO)
    machine.germinate(Blueprint.NORM, Style.LINEAR_ADD, 3, 0.7, 0.0)
    machine.tick()
    for _ in range(2, 18):
        machine.record_accuracy(50.0)
        healthy(machine)
        machine.tick()
    assert (machine.seed.stage, machine.seed.alpha) == (Stage.BLENDING, 0.7)
    machine.set_alpha_target(1.0, 0, Curve.LINEAR, 12.0, Blend.ADD)
    assert machine.seed.alpha == 0.7  # the forward pass sees an instant jump at the tick
    machine.tick()
    assert (machine.seed.stage, machine.seed.alpha) == (Stage.HOLDING, 1.0)


def test_embargo_counts_once_per_env_step():
    machine = machine_of()
    machine.germinate(Blueprint.NORM, Style.LINEAR_ADD, 5, 1.0, 0.0)
    assert machine.prune()
    seen = []
    for _ in range(7):
        machine.tick()
        seen.append((machine.seed.stage, machine.seed.stage_age))
        machine.record_accuracy(50.0)  # counts nothing while the slot cools down
    embargoed = [(Stage.EMBARGOED, age) for age in range(5)]
    assert seen == [*embargoed, (Stage.RESETTING, 0), (Stage.EMPTY, 0)]


def test_weights_are_frozen_exactly_while_the_ramp_goes_down():
    """1.0 to 0.5 in three linear steps: trained at .8333 and .6667 frozen, at .5 free again."""
    machine = machine_of()
    machine.germinate(Blueprint.NORM, Style.LINEAR_ADD, 5, 1.0, 0.0)
    machine.seed.stage = Stage.HOLDING
    machine.seed.alpha = machine.ramp.alpha = machine.ramp.target = 1.0
    assert machine.set_alpha_target(0.5, 3, Curve.LINEAR, 12.0, Blend.ADD)
    assert machine.seed.stage == Stage.BLENDING
    seen = []
    for _ in range(4):
        machine.tick()
        seen.append((round(machine.seed.alpha, 4), machine.frozen))
    assert seen == [(0.8333, True), (0.6667, True), (0.5, False), (0.5, False)]


def test_a_scheduled_prune_ends_in_pruned_and_counts_the_seed():
    machine = machine_of()
    machine.germinate(Blueprint.NORM, Style.LINEAR_ADD, 5, 1.0, 0.0)
    machine.seed.stage = Stage.HOLDING
    machine.seed.alpha = machine.ramp.alpha = machine.ramp.target = 1.0
    assert machine.schedule_prune(3, Curve.LINEAR, 12.0)
    stages = []
    for _ in range(4):
        machine.tick()
        stages.append(machine.seed.stage)
    assert stages == [Stage.BLENDING, Stage.BLENDING, Stage.PRUNED, Stage.EMBARGOED]
    assert machine.totals.pruned == 1
    assert (machine.seed.alpha, machine.ramp.length, machine.ramp.mode) == (0.0, 0, AlphaMode.HOLD)


def test_strict_gates_ask_for_improvement_and_gradient_ratio():
    machine = machine_of(permissive=False)
    machine.germinate(Blueprint.NORM, Style.LINEAR_ADD, 5, 1.0, 0.0)
    machine.advance()
    for _ in range(10):
        machine.record_accuracy(50.0)
    machine.seed.accuracy_current = 50.5
    assert not machine.gate_passes(Stage.BLENDING)  # ratio never measured
    machine.record_gradient_ratio(0.1)
    assert machine.gate_passes(Stage.BLENDING)
    machine.seed.accuracy_current = 50.4
    assert not machine.gate_passes(Stage.BLENDING)


def test_moving_averages_start_at_the_first_value():
    machine = machine_of()
    machine.record_gradient_ratio(2.0)
    assert machine.seed.gradient_ratio == 2.0
    machine.record_gradient_ratio(1.0)  # 0.9 * 2 + 0.1 * 1
    assert machine.seed.gradient_ratio == pytest.approx(1.9)
    machine.record_contribution(4.0)
    assert machine.seed.contribution_velocity == 0.0
    machine.record_contribution(6.0)  # 0.3 * (6 - 4)
    machine.record_contribution(5.0)  # 0.7 * 0.6 + 0.3 * (5 - 6)
    assert machine.seed.contribution_velocity == pytest.approx(0.12)
