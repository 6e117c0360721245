"""What an env remembers: deltas, plateau, stability, histories, measurements of seeds."""

import math

import pytest
import torch

from esper_soa.env.config import SignalsConfig
from esper_soa.env.lifecycle import empty_slots
from esper_soa.env.signals import (
    age_memories,
    initial_signals,
    record_attribution,
    record_gradients,
    record_signals,
    stable_accuracy,
)
from esper_soa.state import HISTORY, Attribution, GradientStats, Measurements
from esper_soa.vocabulary import Op, Stage

CPU = torch.device("cpu")
CFG = SignalsConfig()  # plateau below a gain of 0.5; stable between -5 % and 3 %, 3 times


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def gradients(num_envs, num_slots, **given):
    shape = (num_envs, num_slots)
    fields = {name: torch.zeros(shape, dtype=torch.float64) for name in ("l2", "health", "ratio")}
    fields |= {
        name: torch.zeros(shape, dtype=torch.bool)
        for name in ("vanishing", "exploding", "measured")
    }
    return GradientStats(**(fields | given), batch_size=shape)


def measured(loss, accuracy):
    """Measurements of one env-step of envs with these validation losses and accuracies; accuracy of
    row 1 is 99.
    """
    num_envs = len(loss)
    return Measurements(
        train_loss=doubles(loss) + 1,
        train_accuracy=doubles(accuracy) / 2,
        val_loss=doubles(loss),
        accuracy=torch.stack(
            (doubles(accuracy), torch.full((num_envs,), 99.0, dtype=torch.float64)), 1
        ),
        subset=torch.tensor([[1, 0]]).expand(num_envs, 2),
        ablated=torch.ones(num_envs, 1, dtype=torch.bool),
        gradients=gradients(num_envs, 1),
        batch_size=[num_envs],
    )


def record(losses, accuracies, signals=None):
    """Signals after env-steps with these losses and accuracies of one env."""
    signals = initial_signals(1, CPU) if signals is None else signals
    for loss, accuracy in zip(losses, accuracies, strict=True):
        signals = record_signals(signals, measured([loss], [accuracy]), CFG)
    return signals


def test_before_the_first_env_step_nothing_has_happened():
    signals = initial_signals(2, CPU)
    assert signals.step.tolist() == [0, 0]
    assert signals.last_op.tolist() == [Op.WAIT, Op.WAIT]
    assert signals.last_success.tolist() == [True, True]


def test_the_first_loss_has_no_delta_and_the_first_accuracy_is_its_own():
    signals = record([2.5], [30.0])
    assert signals.step.item() == 1
    assert signals.loss_delta.item() == 0.0
    assert signals.accuracy_delta.item() == 30.0
    assert signals.train_loss.item() == 3.5
    assert signals.train_accuracy.item() == 15.0


def test_deltas_are_positive_for_progress():
    signals = record([2.5, 2.0], [30.0, 34.0])
    assert signals.loss_delta.item() == 0.5
    assert signals.accuracy_delta.item() == 4.0


def test_histories_shift_left_and_end_with_the_newest():
    signals = record(range(1, HISTORY + 3), range(21, HISTORY + 23))
    assert signals.loss_history[0].tolist() == [float(step) for step in range(3, HISTORY + 3)]
    assert signals.accuracy_history[0].tolist() == [float(step) for step in range(23, HISTORY + 23)]


def test_the_plateau_counts_small_gains_and_ends_with_a_large_one():
    # Gains: 30 (the first), 0.4, -2, 0.5 (not below 0.5).
    signals = record([1.0] * 3, [30.0, 30.4, 28.4])
    assert signals.plateau.item() == 2
    assert record([1.0], [28.9], signals).plateau.item() == 0


def test_three_stable_losses_in_a_row_latch_stability():
    # Changes per previous loss: +2 %, +8 % (too fast), then 0 three times.
    signals = record([1.0, 0.98, 0.9, 0.9, 0.9], [10.0] * 5)
    assert signals.stable_count.item() == 2
    assert not signals.stabilized.item()
    signals = record([0.9], [10.0], signals)
    assert signals.stabilized.item()
    assert record([50.0], [10.0], signals).stabilized.item()


@pytest.mark.parametrize(("second", "count"), [(0.9701, 1), (0.9699, 0), (1.0499, 1), (1.0501, 0)])
def test_stable_means_between_five_percent_up_and_three_percent_down(second, count):
    assert record([1.0, second], [10.0, 10.0]).stable_count.item() == count


def test_a_change_right_at_a_threshold_is_not_stable():
    quarter = SignalsConfig(regression_threshold=0.25, stabilization_threshold=0.25)
    for second, count in ((0.75, 0), (1.25, 0), (0.8125, 1), (1.1875, 1)):  # exact in binary
        first = record_signals(initial_signals(1, CPU), measured([1.0], [10.0]), quarter)
        after = record_signals(first, measured([second], [10.0]), quarter)
        assert after.stable_count.tolist() == [count]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_last_finite_one_and_is_not_stable(broken):
    signals = record([1.0, 1.0, broken], [10.0, 10.0, 10.0])
    assert signals.val_loss.item() == 1.0
    assert signals.loss_delta.item() == 0.0
    assert signals.stable_count.item() == 0
    assert all(value.isfinite().all() for value in signals.to_tensordict().values())
    assert record([0.75], [10.0], signals).loss_delta.item() == 0.25


def test_a_first_loss_that_is_not_finite_gives_no_delta_to_the_second():
    assert record([math.nan, 2.0], [10.0, 10.0]).loss_delta.item() == 0.0


def test_envs_are_recorded_apart():
    signals = record_signals(initial_signals(2, CPU), measured([math.nan, 2.0], [5.0, 7.0]), CFG)
    assert signals.val_loss.tolist() == [0.0, 2.0]
    assert signals.val_accuracy.tolist() == [5.0, 7.0]


def test_stable_accuracy_is_the_smallest_of_the_last_recorded():
    assert stable_accuracy(initial_signals(1, CPU), 3).item() == 0.0
    signals = record([1.0] * 2, [40.0, 50.0])
    assert stable_accuracy(signals, 3).item() == 40.0
    assert stable_accuracy(record([1.0] * 2, [60.0, 55.0], signals), 3).item() == 50.0
    assert stable_accuracy(signals, 100).item() == 40.0


def attribution(contribution, was_measured):
    """One env; interaction 3 in every slot."""
    shape = (1, len(contribution))
    per_slot = {
        name: torch.zeros(shape, dtype=torch.float64) for name in ("shapley", "shapley_error")
    }
    per_env = {name: torch.zeros(1, dtype=torch.float64) for name in ("total", "committed")}
    return Attribution(
        contribution=doubles([contribution]),
        measured=torch.tensor([was_measured]),
        **per_slot,
        **per_env,
        interaction_sum=torch.full(shape, 3.0, dtype=torch.float64),
        pair_boost=torch.zeros(1, shape[1], shape[1], dtype=torch.float64),
        total_known=torch.tensor([True]),
        batch_size=[1],
    )


def test_velocity_averages_changes_once_two_measurements_exist():
    slots = empty_slots(1, 2, "cpu").replace(stage=torch.tensor([[Stage.BLENDING, Stage.TRAINING]]))
    slots = record_attribution(slots, attribution([4.0, 0.0], [True, False]))
    assert slots.contribution.tolist() == [[4.0, 0.0]]
    assert slots.contribution_velocity.tolist() == [[0.0, 0.0]]
    assert slots.contribution_known.tolist() == [[True, False]]
    # 0.7 * 0 + 0.3 * (6 - 4) = 0.6, then 0.7 * 0.6 + 0.3 * (1 - 6) = -1.08.
    slots = record_attribution(slots, attribution([6.0, 0.0], [True, False]))
    torch.testing.assert_close(slots.contribution_velocity, doubles([[0.6, 0.0]]))
    slots = record_attribution(slots, attribution([1.0, 0.0], [True, False]))
    torch.testing.assert_close(slots.contribution_velocity, doubles([[-1.08, 0.0]]))


def test_live_seeds_that_were_not_measured_have_no_interaction():
    slots = empty_slots(1, 2, "cpu").replace(stage=torch.tensor([[Stage.BLENDING, Stage.HOLDING]]))
    slots = record_attribution(slots, attribution([4.0, 5.0], [True, True]))
    slots = record_attribution(slots, attribution([4.0, 9.0], [True, False]))
    assert slots.interaction_sum.tolist() == [[3.0, 0.0]]
    assert slots.contribution.tolist() == [[4.0, 5.0]]


def test_only_measured_contributions_grow_older():
    slots = empty_slots(1, 2, "cpu").replace(stage=torch.tensor([[Stage.BLENDING, Stage.TRAINING]]))
    slots = record_attribution(slots, attribution([4.0, 0.0], [True, False]))
    assert age_memories(age_memories(slots)).contribution_age.tolist() == [[2, 0]]
    again = record_attribution(age_memories(slots), attribution([4.0, 0.0], [True, False]))
    assert again.contribution_age.tolist() == [[0, 0]]


def test_the_gradient_ratio_starts_at_its_first_value():
    slots = empty_slots(1, 2, "cpu")
    one_measured = torch.tensor([[True, False]])
    slots = record_gradients(
        slots, gradients(1, 2, ratio=doubles([[0.5, 0.5]]), measured=one_measured)
    )
    assert slots.gradient_ratio.tolist() == [[0.5, 0.0]]
    # 0.9 * 0.5 + 0.1 * 1.5 = 0.6
    slots = record_gradients(
        slots, gradients(1, 2, ratio=doubles([[1.5, 0.5]]), measured=one_measured)
    )
    torch.testing.assert_close(slots.gradient_ratio, doubles([[0.6, 0.0]]))
    assert slots.gradient_ratio_known.tolist() == [[True, False]]


def test_gradients_persist_until_measured_again_and_stay_finite():
    slots = empty_slots(1, 1, "cpu")
    yes = torch.tensor([[True]])
    broken = gradients(
        1,
        1,
        l2=doubles([[math.inf]]),
        health=doubles([[0.2]]),
        ratio=doubles([[math.nan]]),
        exploding=yes,
        measured=yes,
    )
    slots = record_gradients(slots, broken)
    assert slots.gradient_norm.item() == 0.0
    assert not slots.gradient_ratio_known.item()
    kept = record_gradients(slots, gradients(1, 1))
    assert kept.gradient_health.item() == 0.2
    assert kept.gradient_exploding.item()


def test_the_next_env_step_remembers_the_health_of_this_one():
    slots = empty_slots(1, 2, "cpu").replace(
        gradient_health=doubles([[0.4, 0.0]]), gradient_measured=torch.tensor([[True, False]])
    )
    slots = age_memories(slots)
    assert slots.previous_health.tolist() == [[0.4, 0.0]]
    assert slots.previous_health_known.tolist() == [[True, False]]


def test_every_record_function_compiles_to_one_graph():
    slots = empty_slots(1, 2, "cpu")
    stats = gradients(1, 2)
    calls = (
        (record_signals, (initial_signals(1, CPU), measured([1.0], [2.0]), CFG)),
        (record_attribution, (slots, attribution([1.0, 2.0], [True, False]))),
        (record_gradients, (slots, stats)),
        (age_memories, (slots,)),
        (stable_accuracy, (initial_signals(1, CPU), 3)),
    )
    for function, args in calls:
        torch.compile(function, backend="eager", fullgraph=True)(*args)


def test_a_gradient_ratio_of_zero_is_a_measurement():
    slots = empty_slots(1, 1, "cpu")
    yes = torch.tensor([[True]])
    slots = record_gradients(slots, gradients(1, 1, ratio=doubles([[0.0]]), measured=yes))
    assert slots.gradient_ratio_known.item()
    # 0.9 * 0 + 0.1 * 0.5
    slots = record_gradients(slots, gradients(1, 1, ratio=doubles([[0.5]]), measured=yes))
    torch.testing.assert_close(slots.gradient_ratio, doubles([[0.05]]))
    slots = record_gradients(slots, gradients(1, 1, ratio=doubles([[0.0]]), measured=yes))
    torch.testing.assert_close(slots.gradient_ratio, doubles([[0.045]]))
