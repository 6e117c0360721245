"""The panic rule: each reason with losses chosen so that only it applies."""

import math

import pytest
import torch

from esper_soa.env.config import GUARD_WINDOW, NUM_REASONS, GovernorConfig
from esper_soa.env.governor import REASON_NAMES, PanicReason, initial_guard, inspect

# 6 deviations, 3 times the mean, above 12; 3 in a row; judged from 10 losses on
CFG = GovernorConfig()
CHANCE = math.log(10)


def watch(losses):
    """Losses [T] (one env) or [T, N]; the guard, panics and reasons of every env-step."""
    rows = torch.tensor(losses, dtype=torch.float64).reshape(len(losses), -1)
    guard = initial_guard(rows.shape[1], torch.device("cpu"))
    panics = []
    reasons = []
    for row in rows:
        guard, panic, reason = inspect(guard, row, 10, CFG)
        panics.append(panic.tolist())
        reasons.append(reason.tolist())
    return guard, panics, reasons


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_panics_at_once_and_is_forgotten(loss):
    guard, panics, reasons = watch([2.0, loss])
    assert panics == [[False], [True]]
    assert reasons[1] == [PanicReason.NOT_FINITE]
    assert guard.count.tolist() == [1]
    assert guard.losses.isfinite().all()


def test_a_learned_host_back_at_chance_panics_at_once():
    # Mean 1.0 is below 0.6 ln 10 = 1.38; 2.4 is within 0.065 ln 10 = 0.15 of 2.30, and 2.5 is not.
    _, panics, reasons = watch([1.0] * 10 + [2.4])
    assert panics[-1] == [True]
    assert reasons[-1] == [PanicReason.COLLAPSED_TO_CHANCE]
    assert watch([1.0] * 10 + [2.5])[1][-1] == [False]


def test_a_host_that_never_learned_may_stay_at_chance():
    assert watch([CHANCE] * 15)[1] == [[False]] * 15


def test_a_loss_that_could_not_be_judged_does_not_end_a_run_of_divergent_ones():
    for count, anomalies in ((9, 2), (10, 0)):  # judged from 10 losses on
        guard = initial_guard(1, torch.device("cpu"))
        guard = guard.replace(
            losses=torch.ones_like(guard.losses),
            count=guard.count + count,
            anomalies=guard.anomalies + 2,
        )
        after, _, _ = inspect(guard, torch.ones(1, dtype=torch.float64), 10, CFG)
        assert after.anomalies.tolist() == [anomalies]


def test_the_codes_of_the_reasons_are_places_in_the_table_of_names():
    codes = (
        PanicReason.NONE,
        PanicReason.NOT_FINITE,
        PanicReason.COLLAPSED_TO_CHANCE,
        PanicReason.DIVERGED,
    )
    assert [REASON_NAMES[code] for code in codes] == [
        "none",
        "not_finite",
        "collapsed_to_chance",
        "diverged",
    ]
    assert len(REASON_NAMES) == NUM_REASONS


def test_the_third_divergent_loss_in_a_row_panics():
    guard, panics, reasons = watch([1.0] * 10 + [13.0] * 3)
    assert panics[10:] == [[False], [False], [True]]
    assert reasons[10:] == [[PanicReason.DIVERGED]] * 3
    assert guard.anomalies.tolist() == [3]
    assert guard.count.tolist() == [10]  # divergent losses stay out of the window


def test_an_ordinary_loss_ends_a_run_of_divergent_ones():
    guard, panics, _ = watch([1.0] * 10 + [13.0, 13.0, 1.0, 13.0, 13.0])
    assert not any(panic for (panic,) in panics)
    assert guard.anomalies.tolist() == [2]


def test_divergence_needs_all_three_thresholds():
    # Mean 5, deviation 0: 13 is above 12 but not above 3 * 5 = 15; with mean 1, 11 is not above 12.
    assert watch([5.0] * 10 + [13.0])[2][-1] == [PanicReason.NONE]
    assert watch([1.0] * 10 + [11.0])[2][-1] == [PanicReason.NONE]
    # Mean (19 * 1 + 20) / 20 = 1.95 and deviation sqrt(20.95 - 1.95^2) = 4.14: 13 is below 1.95 + 6
    # * 4.14 = 26.8.
    assert watch([1.0] * 9 + [20.0] + [1.0] * 10 + [13.0])[2][-1] == [PanicReason.NONE]


def test_nothing_finite_panics_before_ten_losses():
    assert watch([1.0] * 9 + [1000.0])[1][-1] == [False]


def test_the_window_keeps_the_newest_losses():
    guard, _, _ = watch([float(step) for step in range(1, GUARD_WINDOW + 6)])
    assert guard.count.tolist() == [GUARD_WINDOW]
    assert guard.losses[0].tolist() == [float(step) for step in range(6, GUARD_WINDOW + 6)]


def test_envs_are_judged_apart():
    guard, panics, _ = watch([[1.0, 1.0], [math.nan, 2.0]])
    assert panics[1] == [True, False]
    assert guard.count.tolist() == [1, 2]


def test_the_rule_compiles_to_one_graph():
    compiled = torch.compile(inspect, backend="eager", fullgraph=True)
    guard = initial_guard(2, torch.device("cpu"))
    _, panic, reason = compiled(guard, torch.tensor([1.0, math.nan], dtype=torch.float64), 10, CFG)
    assert panic.tolist() == [False, True]
    assert reason.tolist() == [PanicReason.NONE, PanicReason.NOT_FINITE]
