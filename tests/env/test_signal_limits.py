"""Counters, latches and averages of an env's memory right at their limits."""

import math

import pytest
import torch
from torch import Tensor

from esper_soa.env.config import SignalsConfig
from esper_soa.env.lifecycle import empty_slots
from esper_soa.env.signals import (
    MIN_PREVIOUS_LOSS,
    age_memories,
    initial_signals,
    record_gradients,
    record_signals,
    stable_accuracy,
)
from esper_soa.state import HISTORY, GradientStats, Measurements, Signals

CPU = torch.device("cpu")
EXACT = SignalsConfig(
    plateau_threshold=0.5, stabilization_threshold=0.25, regression_threshold=0.25
)
TINY_LOSS = 1e-8


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def stats(**given: Tensor) -> GradientStats:
    """Measured gradients of one slot per number."""
    count = max(value.numel() for value in given.values())
    fields = {
        name: torch.zeros(1, count, dtype=torch.float64) for name in ("l2", "health", "ratio")
    }
    fields |= {name: torch.zeros(1, count, dtype=torch.bool) for name in ("vanishing", "exploding")}
    fields |= {"measured": torch.ones(1, count, dtype=torch.bool)}
    return GradientStats(
        **(fields | {name: value.view(1, -1) for name, value in given.items()}),
        batch_size=[1, count],
    )


def recorded(
    signals: Signals, loss: float, accuracy: float = 10.0, cfg: SignalsConfig = EXACT
) -> Signals:
    """One env-step of one env; the training pass said 3 and 4."""
    gradients = stats(l2=doubles(0.0))
    measured = Measurements(
        train_loss=doubles(3.0),
        train_accuracy=doubles(4.0),
        val_loss=doubles(loss),
        accuracy=doubles(accuracy)[None],
        subset=torch.zeros(1, 1, dtype=torch.int64),
        ablated=torch.zeros(1, 1, dtype=torch.bool),
        gradients=gradients,
        batch_size=[1],
    )
    return record_signals(signals, measured, cfg)


def history(losses: list[float], accuracies: list[float] | None = None) -> Signals:
    signals = initial_signals(1, CPU)
    for loss, accuracy in zip(losses, accuracies or [10.0] * len(losses), strict=True):
        signals = recorded(signals, loss, accuracy)
    return signals


@pytest.mark.parametrize(("gain", "plateau"), [(0.5, 0), (0.499, 2), (0.75, 0), (-3.0, 2)])
def test_a_gain_right_at_the_threshold_ends_a_plateau(gain: float, plateau: int) -> None:
    before = history([1.0, 1.0], [1.0, 1.25])  # 1 is a gain of 1 from nothing; 0.25 is small
    assert before.plateau.tolist() == [1]
    assert recorded(before, 1.0, 1.25 + gain).plateau.tolist() == [plateau]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_stability_is_latched_at_the_env_step_that_completes_the_count(steps: int) -> None:
    cfg = SignalsConfig(stabilization_steps=steps)
    signals = initial_signals(1, CPU)
    latched = []
    for _ in range(steps + 2):
        signals = recorded(signals, 1.0, cfg=cfg)
        latched.append(bool(signals.stabilized))
    assert latched == [False] * steps + [True] * 2  # the first loss has nothing to be compared with
    assert signals.stable_count.tolist() == [steps]  # and nothing is counted any more


def test_an_unstable_loss_starts_the_count_again_from_nothing() -> None:
    assert history([1.0, 1.0, 1.0, 2.0]).stable_count.tolist() == [0]
    assert history([1.0, 1.0, 2.0, 2.0]).stable_count.tolist() == [1]


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        (TINY_LOSS, TINY_LOSS, 0),  # nothing is judged from such a loss
        (math.nextafter(TINY_LOSS, 1.0), TINY_LOSS, 1),
        (1.1e-8, 1.1e-8, 1),
        (0.0, 0.0, 0),
        (2.0, 1.0, 0),  # half of it is too fast, a loss of 2 or of 1.5 alike
        (2.0, 1.625, 1),  # 0.1875 of 2
        (0.5, 0.59375, 1),  # 0.1875 of 0.5 up
        (0.5, 0.6875, 0),
    ],
)
def test_a_change_is_judged_relative_to_the_loss_before_it(
    first: float, second: float, count: int
) -> None:
    assert MIN_PREVIOUS_LOSS == TINY_LOSS
    assert history([first, second]).stable_count.tolist() == [count]


def test_a_count_survives_a_loss_from_which_nothing_can_be_judged() -> None:
    # 1 -> 1 is stable; the fall to 0 is not; from 0 nothing is judged; from 1 on the count goes on
    assert history([1.0, 1.0, 1.0]).stable_count.tolist() == [2]
    assert history([1.0, 1.0, 0.0]).stable_count.tolist() == [0]
    assert history([0.0, 1.0, 1.0]).stable_count.tolist() == [1]


@pytest.mark.parametrize(("loss", "delta"), [(0.0, 0.0), (2.0**-60, 2.0**-60 - 1), (-1.0, 0.0)])
def test_a_loss_of_nothing_is_no_loss_to_compare_with(loss: float, delta: float) -> None:
    assert history([loss, 1.0]).loss_delta.tolist() == [delta]


def test_the_env_step_counts_once_and_what_was_measured_is_kept() -> None:
    signals = history([1.0, 0.75], [10.0, 8.0])
    assert signals.step.tolist() == [2]
    assert (signals.train_loss.tolist(), signals.train_accuracy.tolist()) == ([3.0], [4.0])


@pytest.mark.parametrize(
    ("steps", "window", "smallest"), [(1, 3, 20.0), (3, 3, 18.0), (4, 3, 17.0), (12, 10, 9.0)]
)
def test_stable_accuracy_looks_at_recorded_env_steps_alone(
    steps: int, window: int, smallest: float
) -> None:
    falling = history([1.0] * steps, [20.0 - number for number in range(steps)])
    assert stable_accuracy(falling, window).tolist() == [smallest]
    rising = history([1.0] * steps, [20.0 + number for number in range(steps)])
    assert stable_accuracy(rising, window).tolist() == [20.0 + max(0, steps - min(window, HISTORY))]


# --- gradients


def test_a_ratio_of_nothing_counts_as_a_ratio() -> None:
    slots = record_gradients(empty_slots(1, 2, CPU), stats(ratio=doubles(0.0, 0.5)))
    assert slots.gradient_ratio_known.tolist() == [[True, True]]
    slots = record_gradients(slots, stats(ratio=doubles(1.0, 0.0)))
    # 0.9 of the past and 0.1 of the new
    torch.testing.assert_close(slots.gradient_ratio, doubles(0.1, 0.45)[None])


def test_ten_ratios_of_one_leave_of_a_first_ratio_of_nothing_its_weight_of_nine_tenths_each() -> (
    None
):
    slots = record_gradients(empty_slots(1, 1, CPU), stats(ratio=doubles(0.0)))
    for _ in range(10):
        slots = record_gradients(slots, stats(ratio=doubles(1.0)))
    assert slots.gradient_ratio.item() == pytest.approx(1 - 0.9**10)


def test_flags_and_norms_are_those_of_the_last_measurement() -> None:
    yes = torch.tensor([True])
    no = torch.tensor([False])
    slots = record_gradients(
        empty_slots(1, 1, CPU),
        stats(l2=doubles(2.0), health=doubles(0.5), vanishing=yes, exploding=no),
    )
    assert (slots.gradient_norm.item(), slots.gradient_health.item()) == (2.0, 0.5)
    assert (slots.gradient_vanishing.item(), slots.gradient_exploding.item()) == (True, False)
    slots = record_gradients(
        slots, stats(l2=doubles(3.0), health=doubles(0.25), vanishing=no, exploding=yes)
    )
    assert (slots.gradient_norm.item(), slots.gradient_health.item()) == (3.0, 0.25)
    assert (slots.gradient_vanishing.item(), slots.gradient_exploding.item()) == (False, True)


def test_a_health_once_remembered_stays_known() -> None:
    slots = record_gradients(empty_slots(1, 1, CPU), stats(health=doubles(0.5)))
    remembered = age_memories(slots)
    assert remembered.previous_health.item() == 0.5
    forgotten = age_memories(
        remembered.replace(gradient_measured=torch.zeros(1, 1, dtype=torch.bool))
    )
    assert forgotten.previous_health_known.item()
    assert forgotten.previous_health.item() == 0.5
