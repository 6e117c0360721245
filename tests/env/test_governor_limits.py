"""The panic rule right at its limits, what its window keeps, and what an env remembers after it was
rolled back.
"""

import math

import pytest
import torch
from reward_cases import empty_state
from torch import Tensor

from esper_soa.env.config import GUARD_WINDOW, GovernorConfig
from esper_soa.env.governor import PanicLimits, PanicReason, initial_guard, judge, watch
from esper_soa.state import EnvState, Guard

CPU = torch.device("cpu")
COLLAPSED = PanicReason.COLLAPSED_TO_CHANCE
DIVERGED = PanicReason.DIVERGED
NONE = PanicReason.NONE
UNLIMITED = PanicLimits(
    chance_loss=1000.0,
    sensitivity=0.0,
    multiplier=0.0,
    absolute_threshold=0.0,
    min_panics=1,
    min_samples=1,
)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def guard_with(*losses: float, garbage: float = 0.0) -> Guard:
    """A guard that has seen these losses; `garbage` lies where none is counted."""
    window = [garbage] * (GUARD_WINDOW - len(losses)) + list(losses)
    return initial_guard(1, CPU).replace(
        losses=numbers(*window)[None], count=torch.tensor([len(losses)])
    )


def reason_of(guard: Guard, loss: float, limits: PanicLimits) -> int:
    return int(judge(guard, numbers(loss), limits)[2])


def above(value: float) -> float:
    return math.nextafter(value, math.inf)


@pytest.mark.parametrize(
    ("limits", "edge"),
    [
        ({"absolute_threshold": 12.0}, 12.0),
        ({"multiplier": 3.0}, 12.0),  # the mean of 2 and 6 is 4
        ({"sensitivity": 4.0}, 12.0),  # 4 and four population deviations of 2
    ],
)
def test_a_loss_right_at_a_threshold_does_not_diverge(
    limits: dict[str, float], edge: float
) -> None:
    guard = guard_with(2.0, 6.0)
    limits = UNLIMITED._replace(**limits)
    assert reason_of(guard, edge, limits) == NONE
    assert reason_of(guard, above(edge), limits) == DIVERGED


def test_what_lies_in_the_window_before_the_first_loss_does_not_count() -> None:
    for sensitivity in (4.0, 0.0):
        limits = UNLIMITED._replace(
            sensitivity=sensitivity, multiplier=3.0 if sensitivity == 0 else 0.0
        )
        guard = guard_with(2.0, 6.0, garbage=1e6)
        assert reason_of(guard, 12.0, limits) == NONE
        assert reason_of(guard, above(12.0), limits) == DIVERGED


def test_one_loss_in_the_window_is_its_mean_and_has_no_deviation() -> None:
    limits = UNLIMITED._replace(sensitivity=1e9)
    assert reason_of(guard_with(5.0), 5.0, limits) == NONE
    assert reason_of(guard_with(5.0), above(5.0), limits) == DIVERGED


@pytest.mark.parametrize(("mean", "reason"), [(599.0, COLLAPSED), (600.0, NONE), (601.0, NONE)])
def test_a_host_has_learned_something_below_six_tenths_of_the_chance_loss(
    mean: float, reason: int
) -> None:
    limits = UNLIMITED._replace(absolute_threshold=1e9)
    assert reason_of(guard_with(mean), 1000.0, limits) == reason


@pytest.mark.parametrize(
    ("loss", "reason"),
    [(935.0, NONE), (935.1, COLLAPSED), (1064.9, COLLAPSED), (1065.0, NONE), (1066.0, NONE)],
)
def test_chance_is_within_6_5_percent_of_the_loss_of_guessing(loss: float, reason: int) -> None:
    limits = UNLIMITED._replace(absolute_threshold=1e9)
    assert reason_of(guard_with(100.0), loss, limits) == reason


def test_as_many_losses_as_asked_for_are_enough_to_judge() -> None:
    for needed, reason in ((2, DIVERGED), (3, NONE)):
        assert (
            reason_of(guard_with(2.0, 2.0), 9.0, UNLIMITED._replace(min_samples=needed)) == reason
        )


def test_only_ordinary_losses_enter_the_window_which_is_as_long_as_it_says() -> None:
    guard = guard_with(*[1.0] * GUARD_WINDOW)
    for loss in (13.0, math.nan):
        after, _, _ = judge(guard, numbers(loss), UNLIMITED)
        assert torch.equal(after.losses, guard.losses)
    after, _, reason = judge(guard, numbers(0.5), UNLIMITED)
    assert int(reason) == NONE
    assert after.losses[0].tolist() == [1.0] * (GUARD_WINDOW - 1) + [0.5]
    assert after.count.tolist() == [GUARD_WINDOW]


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


@pytest.mark.parametrize("min_panics", [1, 2, 3])
def test_after_a_panic_a_run_of_divergent_losses_begins_anew(min_panics: int) -> None:
    cfg = GovernorConfig(min_panics=min_panics)
    state, panics, _ = seen(judged_state(), [13.0] * (3 * min_panics), cfg)
    assert panics == ([False] * (min_panics - 1) + [True]) * 3
    assert state.guard.anomalies.tolist() == [0]


def test_a_loss_that_is_not_finite_ends_a_run_of_divergent_ones_as_the_host_is_put_back() -> None:
    assert seen(judged_state(), [13.0, 13.0, math.nan, 13.0, 13.0, 13.0], GovernorConfig())[1] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]


def test_a_collapse_ends_a_run_of_divergent_losses_too() -> None:
    chance = math.log(10)
    assert seen(judged_state(), [13.0, 13.0, chance, 13.0, 13.0], GovernorConfig())[1] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_snapshots_are_taken_every_few_env_steps_of_a_healthy_env() -> None:
    cfg = GovernorConfig(snapshot_steps=3)
    taken = [seen(judged_state(), [1.0], cfg, step)[2][0] for step in range(7)]
    assert taken == [False, False, True, False, False, True, False]  # after env-steps 3 and 6


def test_a_snapshot_that_is_due_waits_for_health_and_is_taken_once() -> None:
    cfg = GovernorConfig(snapshot_steps=1000)
    last = GovernorConfig(snapshot_steps=1)
    state, _, due = seen(judged_state(), [13.0], last)
    assert due == [False]
    assert state.guard.snapshot_due.tolist() == [True]
    state, panics, due = seen(state, [13.0, 13.0, 1.0, 1.0], cfg)
    assert panics == [False, True, False, False]
    assert due == [False, False, True, False]
