"""What an env remembers: deltas, plateau, stability, histories, measurements of seeds; also at the
limits of its counters, latches and averages.
"""

import math

import pytest
import torch

from esper_soa.config.env import SignalsConfig
from esper_soa.env.signals import (
    age_memories,
    record_attribution,
    record_gradients,
    record_signals,
    stable_accuracy,
)
from esper_soa.state import HISTORY, GradientStats, Measurements, Signals, Slots, initial
from esper_soa.vocabulary import Op, Stage
from tests.builders.env_records import CPU, empty_state, numbers, with_values
from tests.builders.reward_cases import make_attribution

CFG = SignalsConfig()  # plateau below a gain of 0.5; stable between -5 % and 3 %, 3 times
QUARTER = SignalsConfig(stabilization_threshold=0.25, regression_threshold=0.25)  # exact in binary


def gradients(**given: object) -> GradientStats:
    """Of two slots of an env; measured where nothing else is said."""
    none = initial(GradientStats, (1, 2), CPU)
    return with_values(none, **({"measured": True} | given))


def measured(loss: list[float], accuracy: list[float]) -> Measurements:
    """Of one env-step of envs with these validation losses and accuracies; that of row 1 is 99."""
    num_envs = len(loss)
    seen = numbers(*accuracy)
    return Measurements(
        train_loss=numbers(*loss) + 1,
        train_accuracy=seen / 2,
        val_loss=numbers(*loss),
        accuracy=torch.stack((seen, torch.full_like(seen, 99.0)), 1),
        subset=torch.tensor([[1, 0]]).expand(num_envs, 2),
        ablated=torch.ones(num_envs, 1, dtype=torch.bool),
        gradients=initial(GradientStats, (num_envs, 1), CPU),
        batch_size=[num_envs],
    )


def record(
    losses: list[float],
    accuracies: list[float] | None = None,
    signals: Signals | None = None,
    cfg: SignalsConfig = CFG,
) -> Signals:
    """Signals after env-steps with these losses and accuracies of one env; 10 % if none is said."""
    signals = empty_state(1, 1, 1).signals if signals is None else signals
    for loss, accuracy in zip(losses, accuracies or [10.0] * len(losses), strict=True):
        signals = record_signals(signals, measured([loss], [accuracy]), cfg)
    return signals


def test_before_the_first_env_step_nothing_has_happened() -> None:
    signals = empty_state(2, 1, 1).signals
    assert signals.step.tolist() == [0, 0]
    assert signals.last_op.tolist() == [Op.WAIT, Op.WAIT]
    assert signals.last_success.tolist() == [True, True]


def test_deltas_are_positive_for_progress_and_the_first_loss_has_none() -> None:
    signals = record([2.5], [30.0])
    assert (signals.step, signals.loss_delta, signals.accuracy_delta) == (1, 0.0, 30.0)
    assert (signals.train_loss, signals.train_accuracy) == (3.5, 15.0)
    signals = record([2.0], [34.0], signals)
    assert (signals.step, signals.loss_delta, signals.accuracy_delta) == (2, 0.5, 4.0)


@pytest.mark.parametrize(
    ("first", "delta"), [(0.0, 0.0), (2.0**-60, 2.0**-60 - 1), (-1.0, 0.0), (math.nan, 0.0)]
)
def test_a_loss_of_nothing_is_no_loss_to_compare_with(first: float, delta: float) -> None:
    assert record([first, 1.0]).loss_delta.tolist() == [delta]


def test_histories_shift_left_and_end_with_the_newest() -> None:
    count = HISTORY + 2
    signals = record([*range(1, count + 1)], [*range(21, count + 21)])
    assert signals.loss_history[0].tolist() == [*range(3, count + 1)]
    assert signals.accuracy_history[0].tolist() == [*range(23, count + 21)]


@pytest.mark.parametrize(("gain", "plateau"), [(0.5, 0), (0.499, 3), (0.75, 0), (-3.0, 3)])
def test_the_plateau_counts_small_gains_and_ends_with_one_of_the_threshold(
    gain: float, plateau: int
) -> None:
    before = record([1.0] * 3, [1.0, 1.25, 0.25])  # 1 is a gain of 1 from nothing
    assert before.plateau.item() == 2
    assert record([1.0], [0.25 + gain], before).plateau.item() == plateau


@pytest.mark.parametrize("steps", [1, 3])
def test_stability_is_latched_at_the_env_step_that_completes_the_count(steps: int) -> None:
    cfg = SignalsConfig(stabilization_steps=steps)
    signals = empty_state(1, 1, 1).signals
    latched = []
    for _ in range(steps + 2):
        signals = record([1.0], signals=signals, cfg=cfg)
        latched.append(bool(signals.stabilized))
    assert latched == [False] * steps + [True] * 2  # the first loss has nothing to be compared with
    assert signals.stable_count.tolist() == [steps]  # and nothing is counted any more
    assert record([50.0], signals=signals, cfg=cfg).stabilized.item()


@pytest.mark.parametrize(
    ("losses", "count", "cfg"),
    [
        # between five percent up and three percent down
        ([1.0, 0.9701], 1, CFG),
        ([1.0, 0.9699], 0, CFG),
        ([1.0, 1.0499], 1, CFG),
        ([1.0, 1.0501], 0, CFG),
        # right at a threshold; relative to the loss before
        ([1.0, 0.75], 0, QUARTER),
        ([1.0, 1.25], 0, QUARTER),
        ([1.0, 0.8125], 1, QUARTER),
        ([1.0, 1.1875], 1, QUARTER),
        ([2.0, 1.625], 1, QUARTER),  # 0.1875 of 2
        ([2.0, 1.0], 0, QUARTER),
        ([0.5, 0.59375], 1, QUARTER),  # 0.1875 of 0.5 up
        ([0.5, 0.6875], 0, QUARTER),
        # losses too small to judge by
        ([1e-8, 1e-8], 0, QUARTER),
        ([math.nextafter(1e-8, 1.0), 1e-8], 1, QUARTER),
        ([0.0, 0.0], 0, QUARTER),
        # an unstable loss starts the count again; from 0 nothing is judged
        ([1.0, 1.0, 1.0], 2, CFG),
        ([1.0, 1.0, 2.0], 0, CFG),
        ([1.0, 1.0, 2.0, 2.0], 1, CFG),
        ([0.0, 1.0, 1.0], 1, CFG),
    ],
)
def test_calm_env_steps_in_a_row_are_counted(
    losses: list[float], count: int, cfg: SignalsConfig
) -> None:
    assert record(losses, cfg=cfg).stable_count.tolist() == [count]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_last_finite_one_and_is_not_stable(
    broken: float,
) -> None:
    signals = record([1.0, 1.0, broken])
    assert (signals.val_loss, signals.loss_delta, signals.stable_count) == (1.0, 0.0, 0)
    assert all(value.isfinite().all() for value in signals.to_tensordict().values())
    assert record([0.75], signals=signals).loss_delta.item() == 0.25
    apart = record_signals(empty_state(2, 1, 1).signals, measured([broken, 2.0], [5.0, 7.0]), CFG)
    assert apart.val_loss.tolist() == [0.0, 2.0]
    assert apart.val_accuracy.tolist() == [5.0, 7.0]


@pytest.mark.parametrize(
    ("steps", "window", "smallest"), [(1, 3, 20.0), (3, 3, 18.0), (4, 3, 17.0), (12, 100, 9.0)]
)
def test_stable_accuracy_looks_at_recorded_env_steps_alone(
    steps: int, window: int, smallest: float
) -> None:
    falling = record([1.0] * steps, [20.0 - number for number in range(steps)])
    assert stable_accuracy(falling, window).tolist() == [smallest]
    rising = record([1.0] * steps, [20.0 + number for number in range(steps)])
    assert stable_accuracy(rising, window).tolist() == [20.0 + max(0, steps - min(window, HISTORY))]


# --- seeds


def attributed(slots: Slots, contribution: list[float], was_measured: list[bool]) -> Slots:
    """After an env-step with these contributions; interaction 3 in every slot."""
    found = make_attribution(numbers(contribution), torch.tensor([was_measured]), numbers(0.0))
    return record_attribution(slots, with_values(found, interaction_sum=3.0))


def seeds(first: int, second: int) -> Slots:
    return with_values(initial(Slots, (1, 2), CPU), stage=[first, second])


def test_velocity_averages_changes_once_two_measurements_exist() -> None:
    slots = seeds(Stage.BLENDING, Stage.TRAINING)
    velocities = []
    for contribution in (4.0, 6.0, 1.0):
        slots = attributed(slots, [contribution, 0.0], [True, False])
        velocities.append(slots.contribution_velocity[0].tolist())
    # 0.7 * 0 + 0.3 * (6 - 4) = 0.6, then 0.7 * 0.6 + 0.3 * (1 - 6) = -1.08
    assert [one for one, _ in velocities] == pytest.approx([0.0, 0.6, -1.08])
    assert [other for _, other in velocities] == [0.0] * 3
    assert slots.contribution.tolist() == [[1.0, 0.0]]
    assert slots.contribution_known.tolist() == [[True, False]]


def test_live_seeds_that_were_not_measured_have_no_interaction() -> None:
    slots = attributed(seeds(Stage.BLENDING, Stage.HOLDING), [4.0, 5.0], [True, True])
    slots = attributed(slots, [4.0, 9.0], [True, False])
    assert slots.interaction_sum.tolist() == [[3.0, 0.0]]
    assert slots.contribution.tolist() == [[4.0, 5.0]]


def test_only_measured_contributions_grow_older() -> None:
    slots = attributed(seeds(Stage.BLENDING, Stage.TRAINING), [4.0, 0.0], [True, False])
    assert age_memories(age_memories(slots)).contribution_age.tolist() == [[2, 0]]
    again = attributed(age_memories(slots), [4.0, 0.0], [True, False])
    assert again.contribution_age.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("ratios", "averages"),
    [
        # the first counts as it is, also 0; then 0.9 of the past and 0.1 of the new
        ([0.5, 1.5], [0.5, 0.6]),
        ([0.0, 0.5, 0.0], [0.0, 0.05, 0.045]),
        ([math.nan, 1.0], [0.0, 1.0]),
        ([0.5, math.nan, 1.5], [0.5, 0.5, 0.6]),
    ],
)
def test_the_gradient_ratio_starts_at_its_first_value(
    ratios: list[float], averages: list[float]
) -> None:
    slots = initial(Slots, (1, 2), CPU)
    found = []
    for ratio in ratios:
        slots = record_gradients(slots, gradients(ratio=ratio, measured=[True, False]))
        found.append(slots.gradient_ratio[0, 0].item())
    assert found == pytest.approx(averages)
    assert slots.gradient_ratio[0, 1] == 0
    assert slots.gradient_ratio_known.tolist() == [[True, False]]


def test_gradients_are_those_of_the_last_measurement_and_stay_finite() -> None:
    slots = initial(Slots, (1, 2), CPU)
    broken = gradients(l2=math.inf, health=[math.nan, 0.2], ratio=math.nan, exploding=True)
    slots = record_gradients(slots, broken)
    assert not slots.gradient_norm.any()
    assert not slots.gradient_ratio_known.any()
    kept = record_gradients(slots, gradients(measured=False))
    assert kept.gradient_health.tolist() == [[0.0, 0.2]]
    assert kept.gradient_exploding.all()
    given = {"l2": [2.0, 3.0], "health": [0.5, 0.25], "vanishing": [True, False]}
    slots = record_gradients(kept, gradients(**given, exploding=[False, True]))
    assert slots.gradient_norm.tolist() == [given["l2"]]
    assert slots.gradient_health.tolist() == [given["health"]]
    assert slots.gradient_vanishing.tolist() == [[True, False]]
    assert slots.gradient_exploding.tolist() == [[False, True]]


def test_a_health_is_remembered_at_the_next_env_step_and_stays_known() -> None:
    measured_once = {"gradient_health": [0.4, 0.0], "gradient_measured": [True, False]}
    remembered = age_memories(with_values(initial(Slots, (1, 2), CPU), **measured_once))
    for slots in (remembered, age_memories(with_values(remembered, gradient_measured=False))):
        assert slots.previous_health.tolist() == [[0.4, 0.0]]
        assert slots.previous_health_known.tolist() == [[True, False]]
