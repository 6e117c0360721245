"""The panic rule: each reason with losses chosen so that only it applies, right at its limits; what
its window keeps, and when a snapshot is taken.
"""

import math

import pytest
import torch
from torch import Tensor

from esper_soa.config.env import GUARD_WINDOW, GovernorConfig
from esper_soa.env.governor import PanicReason, check_panic, watch
from esper_soa.state import EnvState, Guard
from tests.builders.env_records import empty_state, numbers

# 6 deviations, 3 times the mean, above 12; 3 in a row; judged from 10 losses on
CFG = GovernorConfig()
CHANCE = math.log(10)
NONE = PanicReason.NONE
NOT_FINITE = PanicReason.NOT_FINITE
COLLAPSED = PanicReason.COLLAPSED_TO_CHANCE
DIVERGED = PanicReason.DIVERGED


def unlimited(**limits: float) -> GovernorConfig:
    """Every loss above these limits diverges at once."""
    none = dict.fromkeys(("sensitivity", "multiplier", "absolute_threshold"), 0.0)
    return GovernorConfig(**(none | {"min_panics": 1, "min_samples": 1} | limits))


def guard_with(*losses: float, garbage: float = 0.0) -> Guard:
    """A guard that has seen these losses; `garbage` lies where none is counted."""
    window = [garbage] * (GUARD_WINDOW - len(losses)) + list(losses)
    return empty_state(1, 1, 1).guard.replace(
        losses=numbers(window), count=torch.tensor([len(losses)])
    )


def reason_of(guard: Guard, loss: float, cfg: GovernorConfig, chance: float = 1000.0) -> int:
    return int(check_panic(guard, numbers(loss), chance, cfg)[2])


def above(value: float) -> float:
    return math.nextafter(value, math.inf)


def judged(rows: Tensor) -> tuple[Guard, list, list]:
    """Losses [T, N] one after the other: the guard, panics and reasons of every env-step."""
    guard = empty_state(rows.shape[1], 1, 1).guard
    panics = []
    reasons = []
    for row in rows:
        guard, panic, reason = check_panic(guard, row, CHANCE, CFG)
        panics.append(panic.tolist())
        reasons.append(reason.tolist())
    return guard, panics, reasons


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([2.0, math.inf], NOT_FINITE),
        ([2.0, -math.inf], NOT_FINITE),
        # mean 1.0 is below 0.6 ln 10 = 1.38; 2.4 is within 0.065 ln 10 = 0.15 of 2.30, 2.5 is not
        ([1.0] * 10 + [2.4], COLLAPSED),
        ([1.0] * 10 + [2.5], NONE),
        ([CHANCE] * 15, NONE),  # it never learned
        ([1.0] * 9 + [1000.0], NONE),  # not judged before ten losses
        # 13 is above 12 but not above 3 * 5 = 15; 11 is not above 12; in the last the mean is 1.95
        # and the deviation sqrt(20.95 - 1.95^2) = 4.14: 13 is below 1.95 + 6 * 4.14 = 26.8
        ([5.0] * 10 + [13.0], NONE),
        ([1.0] * 10 + [11.0], NONE),
        ([1.0] * 9 + [20.0] + [1.0] * 10 + [13.0], NONE),
        ([1.0] * 10 + [13.0], DIVERGED),
    ],
)
def test_each_reason_applies_to_its_losses(losses: list[float], reason: int) -> None:
    _, panics, reasons = judged(numbers(losses).T)
    assert reasons[-1] == [reason]
    assert panics[-1] == [reason in (NOT_FINITE, COLLAPSED)]
    assert not any(panic for (panic,) in panics[:-1])


def test_the_window_keeps_the_newest_ordinary_losses_of_every_env() -> None:
    count = GUARD_WINDOW + 5
    rows = torch.stack((torch.arange(1.0, count + 1), torch.full((count,), math.nan)), 1).double()
    rows[0, 1] = 2.0
    guard, panics, _ = judged(rows)
    assert guard.count.tolist() == [GUARD_WINDOW, 1]
    assert guard.losses[0].tolist() == [float(step) for step in range(6, count + 1)]
    assert guard.losses.isfinite().all()
    assert panics == [[False, False]] + [[False, True]] * (count - 1)
    full = guard_with(*[1.0] * GUARD_WINDOW)
    for loss in (13.0, math.nan):
        assert torch.equal(
            check_panic(full, numbers(loss), 1000.0, unlimited())[0].losses, full.losses
        )


@pytest.mark.parametrize(
    "limits",
    [
        {"absolute_threshold": 12.0},
        {"multiplier": 3.0},  # the mean of 2 and 6 is 4
        {"sensitivity": 4.0},  # 4 and four population deviations of 2
    ],
)
def test_a_loss_right_at_a_threshold_does_not_diverge(limits: dict[str, float]) -> None:
    # what lies in the window before the first loss does not count
    guard = guard_with(2.0, 6.0, garbage=1e6)
    assert reason_of(guard, 12.0, unlimited(**limits)) == NONE
    assert reason_of(guard, above(12.0), unlimited(**limits)) == DIVERGED


def test_one_loss_in_the_window_is_its_mean_and_has_no_deviation() -> None:
    cfg = unlimited(sensitivity=1e6)
    assert reason_of(guard_with(5.0), 5.0, cfg) == NONE
    assert reason_of(guard_with(5.0), above(5.0), cfg) == DIVERGED


@pytest.mark.parametrize(
    ("mean", "loss", "reason"),
    [
        (599.0, 1000.0, COLLAPSED),  # learned: below six tenths of the loss of guessing
        (600.0, 1000.0, NONE),
        (100.0, 935.0, NONE),  # at chance: within 6.5 percent of it
        (100.0, 935.1, COLLAPSED),
        (100.0, 1064.9, COLLAPSED),
        (100.0, 1065.0, NONE),
    ],
)
def test_a_host_that_had_learned_is_back_at_chance(mean: float, loss: float, reason: int) -> None:
    assert reason_of(guard_with(mean), loss, unlimited(absolute_threshold=1e6)) == reason


def test_as_many_losses_as_asked_for_are_enough_to_judge() -> None:
    for needed, reason in ((2, DIVERGED), (3, NONE)):
        assert reason_of(guard_with(2.0, 2.0), 9.0, unlimited(min_samples=needed)) == reason
    # and one that could not be judged does not end a run of divergent ones
    for count, anomalies in ((9, 2), (10, 0)):
        guard = guard_with(*[1.0] * count).replace(anomalies=torch.tensor([2]))
        assert check_panic(guard, numbers(1.0), CHANCE, CFG)[0].anomalies.tolist() == [anomalies]


# --- watch: the verdict in the state, and when a snapshot is taken


def seen(
    state: EnvState, losses: list[float], cfg: GovernorConfig, step: int = 0
) -> tuple[EnvState, list, list]:
    """The state after these losses of an env, panics and snapshots on the way; `step` stays."""
    state = state.replace(signals=state.signals.replace(step=torch.tensor([step])))
    panics = []
    due = []
    for loss in losses:
        state, taken = watch(state, numbers(loss), 10, cfg)
        panics.append(bool(state.guard.panic))
        due.append(bool(taken))
    return state, panics, due


def judged_state() -> EnvState:
    """One env whose window holds ten losses of 1."""
    return empty_state(1, 2, 6).replace(guard=guard_with(*[1.0] * 10))


@pytest.mark.parametrize(
    ("losses", "panics"),
    [
        ([13.0] * 6, [False, False, True] * 2),  # after a panic a run begins anew
        ([13.0, 13.0, 1.0, 13.0, 13.0], [False] * 5),  # an ordinary loss ends it
        ([13.0, 13.0, math.nan, 13.0, 13.0, 13.0], [False, False, True] * 2),
        ([13.0, 13.0, CHANCE, 13.0, 13.0], [False, False, True, False, False]),
    ],
)
def test_the_third_divergent_loss_in_a_row_panics(losses: list[float], panics: list[bool]) -> None:
    state, found, _ = seen(judged_state(), losses, CFG)
    assert found == panics
    assert state.guard.anomalies.tolist() == [0 if panics[-1] else 2]


def test_so_many_divergent_losses_make_a_panic_as_are_set() -> None:
    assert seen(judged_state(), [13.0] * 2, GovernorConfig(min_panics=1))[1] == [True, True]


def test_snapshots_are_taken_every_few_env_steps_of_a_healthy_env() -> None:
    cfg = GovernorConfig(snapshot_steps=3)
    taken = [seen(judged_state(), [1.0], cfg, step)[2][0] for step in range(7)]
    assert taken == [False, False, True, False, False, True, False]  # after env-steps 3 and 6


def test_a_snapshot_that_is_due_waits_for_health_and_is_taken_once() -> None:
    state, _, due = seen(judged_state(), [13.0], GovernorConfig(snapshot_steps=1))
    assert due == [False]
    assert state.guard.snapshot_due.tolist() == [True]
    state, panics, due = seen(
        state, [13.0, 13.0, math.nan, 1.0, 1.0], GovernorConfig(snapshot_steps=1000)
    )
    assert panics == [False, True, True, False, False]
    assert due == [False, False, False, True, False]
