"""Anomalies of policy updates: when they begin, how often they are told, and when they end."""

import math
from dataclasses import asdict

import pytest

from esper_soa.config.settings import AnomalyConfig
from esper_soa.training.results.anomalies import Watch, WatchState

HEALTHY = {
    "steps": 4.0,
    "not_finite_steps": 0.0,
    "ratio_max": 1.5,
    "ratio_min": 0.7,
    "value_loss": 1.0,
    "bellman_error": 1.0,
    "lstm_rms_max": 1.0,
    "lstm_rms_min": 0.1,
    "explained_variance": 0.3,
    "gradient_norm": 1.0,
    "entropy/op": 0.5,
    "head_share/op": 0.1,
    "ratio_error_first": 1e-6,
}


def names(watch: Watch, **changed: float) -> list[str]:
    """What begins with a healthy update in which some numbers are changed; '__' stands for '/'."""
    update = HEALTHY | {name.replace("__", "/"): value for name, value in changed.items()}
    return list(watch.look(update))


@pytest.mark.parametrize(
    ("metric", "limit", "name"),
    [
        ("ratio_max", 5.0, "ratio_explosion"),
        ("ratio_min", 0.1, "ratio_collapse"),
        ("ratio_error_first", 1e-3, "stale_log_probs"),
        ("lstm_rms_max", 10.0, "lstm_explosion"),
        ("lstm_rms_min", 1e-6, "lstm_collapse"),
    ],
)
def test_a_limit_is_told_when_it_is_passed_and_again_only_after_recovery(
    metric: str, limit: float, name: str
) -> None:
    watch = Watch(AnomalyConfig())
    assert names(watch, **{metric: limit}) == []
    worse = limit * (0.999 if metric.endswith("_min") else 1.001)
    assert names(watch, **{metric: worse}) == [name]
    assert names(watch, **{metric: worse}) == []
    assert watch.active == [name]
    assert names(watch) == []
    assert watch.active == []
    assert names(watch, **{metric: worse}) == [name]


@pytest.mark.parametrize(
    ("metric", "value", "name"),
    [("value_loss", 5.1, "value_collapse"), ("bellman_error", 5.1, "bellman_error")],
)
def test_a_critic_may_be_far_off_in_the_first_two_updates(
    metric: str, value: float, name: str
) -> None:
    watch = Watch(AnomalyConfig())
    assert [names(watch, **{metric: value}) for _ in range(4)] == [[], [], [name], []]
    assert [names(watch, **{metric: 5.0}), watch.active] == [[], []]


def test_a_policy_that_begins_with_low_entropy_has_not_collapsed() -> None:
    watch = Watch(AnomalyConfig())
    values = (*[0.01] * 5, 0.119, *[0.01] * 5)  # recovered above 0.12
    assert [names(watch, entropy__op=value) for value in values] == [[]] * 11
    names(watch, entropy__op=0.121)
    assert [names(watch, entropy__op=0.01) for _ in range(3)] == [[], [], ["entropy_collapse/op"]]


def test_entropy_collapses_at_the_third_low_update_in_a_row_and_ends_well_above_the_limit() -> None:
    watch = Watch(AnomalyConfig())  # limit of op: 0.08, recovered above 0.12
    names(watch, entropy__op=0.5)
    assert [names(watch, entropy__op=value) for value in (0.07, 0.07, 0.5, 0.07, 0.07)] == [[]] * 5
    told = watch.look(HEALTHY | {"entropy/op": 0.07})
    assert told == {
        "entropy_collapse/op": "entropy/op is 0.07: low (limit 0.08) for 3 updates. "
        "Raise policy.ppo.entropy_coef or policy.ppo.probability_floor.op."
    }
    assert names(watch, entropy__op=0.11) == []
    assert watch.active == ["entropy_collapse/op"]
    names(watch, entropy__op=0.121)
    assert watch.active == []
    assert watch.explored == ["op"]


def test_gradient_drift_is_measured_from_the_mean_before_the_update() -> None:
    watch = Watch(AnomalyConfig())
    assert names(watch, gradient_norm=1.0) == []  # the first norm is the mean
    assert names(watch, gradient_norm=5.0) == []  # |5 - 1| / 1 = 4, not above
    assert watch.gradient_mean == pytest.approx(1.4)  # 0.9 * 1 + 0.1 * 5
    # drifts of 4.07, 4.05 and 4.05 from means of 1.4, 1.97 and 2.768; from means with these norms
    # in them at most 2.6
    assert [names(watch, gradient_norm=norm) for norm in (7.1, 9.95)] == [[], []]
    assert watch.gradient_mean == pytest.approx(2.768)
    assert watch.look(HEALTHY | {"gradient_norm": 13.98}) == {
        "gradient_drift": "the gradient norm is 14, its running mean 2.77 (drift 4.05, above 4) "
        "for 3 updates or more. Lower policy.ppo.lr."
    }
    assert names(watch, gradient_norm=20.0) == []  # told once
    assert watch.active == ["gradient_drift"]
    patient = Watch(AnomalyConfig())  # 20 is above 5 times the mean, which moves by a tenth
    assert [names(patient, gradient_norm=norm) for norm in (1.0, 20.0, 1.0, 20.0, 40.0)] == [[]] * 5


def test_a_norm_that_is_not_finite_leaves_the_mean_alone_and_a_growing_one_moves_it_slowly() -> (
    None
):
    watch = Watch(AnomalyConfig())
    names(watch, gradient_norm=1.0)
    names(watch, gradient_norm=math.inf)
    assert watch.gradient_mean == 1.0
    names(watch, gradient_norm=11.0)
    assert watch.gradient_mean == pytest.approx(2.0)
    still = Watch(AnomalyConfig())
    assert [names(still, gradient_norm=0.0) for _ in range(4)] == [[]] * 4


def test_a_streak_is_broken_by_one_healthy_update() -> None:
    watch = Watch(AnomalyConfig())
    values = (-0.6, -0.6, 0.3, -0.6, -0.6, -0.6, -0.6, 0.3, -0.6)
    told = [names(watch, explained_variance=value) for value in values]
    assert told == [[]] * 5 + [["explained_variance"]] + [[]] * 3


def test_an_update_without_a_step_is_told_and_leaves_the_gradient_mean_alone() -> None:
    watch = Watch(AnomalyConfig())
    names(watch)
    lost = {"steps": 0.0, "not_finite_steps": 4.0, "value_loss": math.nan, "gradient_norm": 0.0}
    none = "no gradient step was taken"
    again = "If it happens again, lower policy.ppo.lr."
    told = {"skipped_update": f"{none}: no gradient was finite. {again}"}
    assert watch.look(HEALTHY | lost) == told
    assert watch.gradient_mean == 1.0
    far = {"steps": 0.0, "value_loss": 1.0}
    told = {"skipped_update": f"{none}: the policy moved too far before the first. {again}"}
    assert Watch(AnomalyConfig()).look(far) == told


def test_a_resumed_watch_goes_on_with_streaks_and_does_not_tell_twice() -> None:
    watch = Watch(AnomalyConfig())
    names(watch, entropy__op=0.5)
    for _ in range(2):
        names(watch, entropy__op=0.01, ratio_max=9.0)
    resumed = Watch(AnomalyConfig(), WatchState(**asdict(watch)))
    assert names(resumed, entropy__op=0.01, ratio_max=9.0) == ["entropy_collapse/op"]
    assert resumed.active == ["ratio_explosion", "entropy_collapse/op"]
