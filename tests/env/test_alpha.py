"""Alpha ramps: the table of curve values, the rules of a new target, and the two properties that
blending relies on.
"""

import pytest
import torch
from env_records import numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_soa.env.alpha import advance_ramp, curve_progress, retarget
from esper_soa.state import Ramp, initial
from esper_soa.vocabulary import AlphaMode, Curve

# Curve, steepness and the alphas after ticks 1, 2, ... from 0 to 1, as the reference has them.
RAMPS_UP = [
    (Curve.LINEAR, 12.0, [1 / 3, 2 / 3, 1]),
    (Curve.LINEAR, 12.0, [0.2, 0.4, 0.6, 0.8, 1]),
    (Curve.COSINE, 12.0, [0.25, 0.75, 1]),
    (Curve.COSINE, 12.0, [0.095491503, 0.345491503, 0.654508497, 0.904508497, 1]),
    (Curve.SIGMOID, 6.0, [0.244728471, 0.755271529, 1]),
    (Curve.SIGMOID, 6.0, [0.104320139, 0.339080167, 0.660919833, 0.895679861, 1]),
    (Curve.SIGMOID, 12.0, [0.117310428, 0.882689572, 1]),
    (
        Curve.SIGMOID,
        12.0,
        [0.008556634, 0.045176660, 0.180847235, 0.5, 0.819152765, 0.954823340, 0.991443366, 1],
    ),
    (Curve.SIGMOID, 24.0, [0.000739894, 0.083167574, 0.916832426, 0.999260106, 1]),
]


def int64(*values):
    return torch.tensor([values])


def ramp_from(alpha, target, length, curve=Curve.LINEAR, steepness=12.0):
    """One ramp [1, 1] just set."""
    ramp = initial(Ramp, (1, 1), "cpu").replace(alpha=numbers([alpha]))
    where = torch.ones(1, 1, dtype=torch.bool)
    return retarget(
        ramp, where, numbers([target]), int64(length), int64(curve), numbers([steepness])
    )


def run(ramp, num_ticks):
    """Alphas, modes and arrivals after each tick."""
    running = torch.ones_like(ramp.done, dtype=torch.bool)
    rows = []
    for _ in range(num_ticks):
        ramp, reached = advance_ramp(ramp, running)
        rows.append((ramp.alpha.item(), ramp.mode.item(), reached.item()))
    return rows


@pytest.mark.parametrize(("curve", "steepness", "alphas"), RAMPS_UP)
@pytest.mark.parametrize(("start", "target"), [(0.0, 1.0), (0.2, 0.7), (1.0, 0.0)])
def test_alpha_after_each_tick_follows_the_table_between_any_two_ends(
    curve, steepness, alphas, start, target
):
    rows = run(ramp_from(start, target, len(alphas), curve, steepness), len(alphas))
    assert [alpha for alpha, _, _ in rows] == pytest.approx(
        [start + (target - start) * a for a in alphas], abs=1e-9
    )
    assert [reached for _, _, reached in rows] == [False] * (len(alphas) - 1) + [True]
    assert rows[-1][:2] == (target, AlphaMode.HOLD)  # the last tick sets the target exactly


def test_progress_is_clamped_in_time():
    for curve in (Curve.LINEAR, Curve.COSINE, Curve.SIGMOID):
        progress = curve_progress(numbers([-0.5, 0.0, 1.0, 1.5]), int64(curve), numbers([12.0]))
        torch.testing.assert_close(progress, numbers([0, 0, 1, 1]))


def test_a_sigmoid_too_flat_to_stretch_is_a_line_and_a_steep_one_does_not_overflow():
    for steepness, ends in ((0.0, (0.25, 0.75)), (1e5, (0.0, 1.0))):
        progress = curve_progress(numbers([0.25, 0.75]), int64(Curve.SIGMOID), numbers([steepness]))
        torch.testing.assert_close(progress, numbers([*ends]))


def test_a_ramp_of_no_ticks_jumps_and_never_leaves_hold():
    ramp = ramp_from(0.25, 0.75, 0)
    assert (ramp.alpha.item(), ramp.start.item(), ramp.mode.item()) == (0.75, 0.25, AlphaMode.HOLD)
    assert run(ramp, 2) == [(0.75, AlphaMode.HOLD, False)] * 2


def test_a_ramp_to_where_alpha_is_stays_in_hold_with_its_length():
    ramp = ramp_from(0.5, 0.5, 3)
    assert (ramp.mode.item(), ramp.length.item(), ramp.done.item()) == (AlphaMode.HOLD, 3, 0)
    assert run(ramp, 1) == [(0.5, AlphaMode.HOLD, False)]


def test_targets_lengths_and_steepness_are_clamped():
    ramp = ramp_from(0.5, 1.5, -2, Curve.SIGMOID, 0.0)
    assert (ramp.target, ramp.alpha, ramp.length, ramp.steepness) == (1.0, 1.0, 0, 0.1)


def test_the_mode_names_the_direction():
    assert ramp_from(0.5, 0.75, 3).mode.item() == AlphaMode.UP
    assert ramp_from(0.5, 0.25, 3).mode.item() == AlphaMode.DOWN


def test_only_the_chosen_slots_get_a_target_and_only_running_ones_move():
    ramp = initial(Ramp, (1, 3), "cpu")
    where = torch.tensor([[True, True, False]])
    ramp = retarget(ramp, where, numbers([1.0]), int64(2), int64(Curve.LINEAR), numbers([6.0]))
    assert ramp.length.tolist() == [[2, 2, 0]]
    assert ramp.steepness.tolist() == [[6, 6, 12]]
    ramp, reached = advance_ramp(ramp, torch.tensor([[True, False, True]]))
    assert ramp.alpha.tolist() == [[0.5, 0, 0]]
    assert ramp.done.tolist() == [[1, 0, 0]]
    assert not reached.any()


@settings(deadline=None, max_examples=20)
@given(
    start=st.floats(0, 1),
    target=st.floats(0, 1),
    length=st.integers(1, 9),
    curve=st.sampled_from([Curve.LINEAR, Curve.COSINE, Curve.SIGMOID]),
    steepness=st.floats(0.1, 1000),
)
def test_alpha_stays_between_its_ends_and_never_turns_back(start, target, length, curve, steepness):
    alphas = [start] + [
        alpha for alpha, _, _ in run(ramp_from(start, target, length, curve, steepness), length)
    ]
    low = min(start, target)
    high = max(start, target)
    assert all(low <= alpha <= high for alpha in alphas)
    assert alphas == pytest.approx(sorted(alphas, reverse=target < start), abs=1e-12)
    assert alphas[-1] == target


def test_ramps_keep_the_dtype_of_their_record():
    where = torch.ones(1, 1, dtype=torch.bool)
    ramp = initial(Ramp, (1, 1), "cpu")
    floats = {name: one.float() for name, one in ramp.items() if one.is_floating_point()}
    one = torch.ones(1, 1)
    ramp = retarget(ramp.replace(**floats), where, one, int64(3), int64(Curve.SIGMOID), 12 * one)
    ramp, _ = advance_ramp(ramp, where)
    assert ramp.alpha.dtype == ramp.target.dtype == torch.float32
    assert ramp.done.dtype == torch.int64
