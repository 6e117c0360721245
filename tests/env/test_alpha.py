"""Alpha ramps: the properties that blending relies on. Recorded curves and ramps: tests/parity."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_soa.env.alpha import advance_ramp, curve_progress, retarget
from esper_soa.state import Ramp, initial
from esper_soa.vocabulary import Curve
from tests.builders.env_records import numbers


def int64(*values):
    return torch.tensor([values])


def ramp_from(alpha, target, length, curve, steepness):
    """One ramp [1, 1] just set."""
    ramp = initial(Ramp, (1, 1), "cpu").replace(alpha=numbers([alpha]))
    where = torch.ones(1, 1, dtype=torch.bool)
    return retarget(
        ramp, where, numbers([target]), int64(length), int64(curve), numbers([steepness])
    )


def alphas_of(ramp, num_ticks):
    """Alpha after each tick."""
    found = []
    for _ in range(num_ticks):
        ramp, _ = advance_ramp(ramp, torch.ones_like(ramp.done, dtype=torch.bool))
        found.append(ramp.alpha.item())
    return found


def test_a_sigmoid_too_flat_to_stretch_is_a_line_and_a_steep_one_does_not_overflow():
    for steepness, ends in ((0.0, (0.25, 0.75)), (1e5, (0.0, 1.0))):
        progress = curve_progress(numbers([0.25, 0.75]), int64(Curve.SIGMOID), numbers([steepness]))
        torch.testing.assert_close(progress, numbers([*ends]))


@settings(deadline=None, max_examples=20)
@given(
    start=st.floats(0, 1),
    target=st.floats(0, 1),
    length=st.integers(1, 9),
    curve=st.sampled_from([Curve.LINEAR, Curve.COSINE, Curve.SIGMOID]),
    steepness=st.floats(0.1, 1000),
)
def test_alpha_stays_between_its_ends_and_never_turns_back(start, target, length, curve, steepness):
    alphas = [start, *alphas_of(ramp_from(start, target, length, curve, steepness), length)]
    low = min(start, target)
    high = max(start, target)
    assert all(low <= alpha <= high for alpha in alphas)
    assert alphas == pytest.approx(sorted(alphas, reverse=target < start), abs=1e-12)
    assert alphas[-1] == target
