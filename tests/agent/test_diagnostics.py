import pytest
import torch

from esper_soa.agent.diagnostics import (
    action_shares,
    calibration,
    memory_health,
    memory_means,
    read_diagnostics,
    spread,
)
from esper_soa.agent.rollout import GatheredRollout
from esper_soa.vocabulary import HEAD_NAMES, Op
from tests.builders.agent_world import IMITATION, LISTED, kind, learner_of, random_rollout


def report_of(**ppo: object) -> dict[str, float]:
    learner = learner_of(**ppo)
    return learner.update(random_rollout(learner.policy, 6, 5, seed=1))


def test_the_report_holds_exactly_what_the_list_explains():
    assert {kind(name) for name in report_of()} == LISTED - IMITATION


def test_every_head_and_every_other_part_has_its_gradient_norm():
    report = report_of(epochs=1)
    others = {
        "embedding",
        "slot_encoder",
        "feature_net",
        "lstm",
        "value_head",
        "q_head",
        "contribution_head",
    }
    norms = {
        name.removeprefix("gradient_norm/"): value
        for name, value in report.items()
        if name[:14] == "gradient_norm/"
    }
    assert set(norms) == set(HEAD_NAMES) | others
    # the parts are disjoint and complete: their squares add up to that of the whole
    assert sum(norm**2 for norm in norms.values()) == pytest.approx(
        report["gradient_norm"] ** 2, rel=1e-5
    )


def test_calibration_is_the_line_of_returns_on_values():
    # valid pairs (0, 1), (1, 3), (2, 5): return = 1 + 2 value; the last one does not count
    values = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    returns = torch.tensor([[1.0, 3.0, 5.0, -9.0]])
    report = calibration(
        values, returns, torch.tensor([[True, True, True, False]]), torch.tensor(10.0)
    )
    expected = {
        "calibration_slope": 2.0,
        "calibration_intercept": 1.0,
        "value_correlation": 1.0,
        "value_mean": 10.0,
        "return_mean": 30.0,
        "return_std": 10 * (8 / 3) ** 0.5,
    }
    assert {name: value.item() for name, value in report.items()} == pytest.approx(expected)


def test_a_correlation_is_at_most_1_whatever_is_rounded():
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        values = torch.randn(1, 3, generator=g)
        returns = 10 * torch.rand((), generator=g) * values
        report = calibration(values, returns, torch.ones(1, 3).bool(), torch.tensor(1.0))
        assert 1 - 1e-12 < report["value_correlation"] <= 1


def test_calibration_of_constant_values_or_returns_is_finite():
    names = ("calibration_slope", "calibration_intercept", "value_correlation")
    same, other = torch.ones(1, 3), torch.tensor([[1.0, 2.0, 6.0]])
    for values, returns, wanted in ((same, other, 3.0), (other, same, 1.0)):
        report = calibration(values, returns, same.bool(), torch.tensor(1.0))
        assert [report[name].item() for name in names] == [0.0, wanted, 0.0]


def test_memory_health_by_hand():
    # two env-steps of one env with two units: RMS 0.5 and 1 (saturated); cells 6 and 8: RMS
    # sqrt(50)
    played = torch.tensor([[0.5, -0.5], [1.0, -1.0]]).reshape(2, 1, 1, 2)
    cell = torch.tensor([6.0, -8.0]).reshape(1, 1, 1, 2)
    # not played: uncounted
    hidden = torch.cat([played, torch.full_like(played, 0.1), torch.full_like(played, 100.0)])
    valid = torch.tensor([True, True, False, False, False, False])[:, None]
    report = memory_health(memory_means(hidden, cell, valid), [(hidden, cell, valid)])
    expected = {
        "lstm_rms_max": 50**0.5,
        "lstm_rms_min": 0.5,
        "lstm_hidden_rms": 0.625**0.5,
        "lstm_hidden_max": 1.0,
        "lstm_cell_rms": 50**0.5,
        "lstm_cell_max": 8.0,
        "lstm_saturated": 0.5,
    }
    assert {name: value.item() for name, value in report.items()} == pytest.approx(expected)


def test_spread_counts_valid_rows_only():
    report = spread(
        "advantage", torch.tensor([[1.0, 5.0, float("nan")]]), torch.tensor([[True, True, False]])
    )
    assert {name: value.item() for name, value in report.items()} == {
        "advantage_mean": 3.0,
        "advantage_std": 2.0,
    }


def test_play_tells_what_was_done():
    learner = learner_of()
    rollout = random_rollout(learner.policy, 2, 2, seed=0)
    rows = rollout.rows
    rows.masks.op.fill_(True)
    rows.masks.op[0, 0] = torch.tensor([True, False, False, False, False, False])
    rows.action.op.copy_(torch.tensor([[Op.WAIT, Op.PRUNE], [Op.PRUNE, Op.ADVANCE]]))
    rows.effective_op.copy_(torch.tensor([[Op.WAIT, Op.WAIT], [Op.PRUNE, Op.ADVANCE]]))
    rows.valid[1, 1] = False
    report = {
        name: value.item() for name, value in action_shares(GatheredRollout.of(rollout)).items()
    }
    third = pytest.approx(1 / 3)
    assert report["valid_rows"] == 3
    assert report["forced_share"] == report["vetoed_share"] == report["op_share/prune"] == third
    assert report["op_share/wait"] == pytest.approx(2 / 3)
    assert report["op_share/advance"] == 0.0


def passes(*rows: tuple[bool, bool, float, float]) -> list[dict[str, torch.Tensor]]:
    """Of go, looked_at, approx_kl and loss; ratios 1 + kl and 1 - kl / 2."""
    return [
        {
            name: torch.tensor(float(value))
            for name, value in {
                "go": go,
                "looked_at": looked_at,
                "not_finite": False,
                "stopped": looked_at and not go,
                "approx_kl": kl,
                "gradient_norm": 10 * kl,
                "loss": loss,
                "ratio_max": 1 + kl,
                "ratio_min": 1 - kl / 2,
                "lstm_rms_max": kl,
                "lstm_rms_min": kl,
                "lstm_hidden_max": kl,
                "lstm_cell_max": kl,
            }.items()
        }
        for go, looked_at, kl, loss in rows
    ]


def test_means_are_over_steps_extremes_over_passes_and_what_follows_the_stop_is_left_out():
    # two minibatches; the first pass of the second epoch stops, the last one is looked at no more
    history = passes(
        (True, True, 0.1, 2.0),
        (True, True, 0.2, 4.0),
        (False, True, 0.5, 50.0),
        (False, False, 9.0, 90.0),
    )
    report = read_diagnostics(history, {"valid_rows": torch.tensor(7)}, epochs=2)
    expected = {
        "loss": 3.0,
        "approx_kl": 0.8 / 3,
        "kl_last": 0.5,
        "kl_epoch/1": 0.15,
        "kl_epoch/2": 0.5,
        "ratio_max": 1.5,
        "ratio_min": 0.75,
        "ratio_error_first": 0.1,
        "gradient_norm": 2.0,
        "steps": 2,
        "early_stop": 1,
        "epochs_begun": 2,
        "lstm_rms_max": 0.5,
        "lstm_rms_min": 0.1,
        "valid_rows": 7,
    }
    assert {name: report[name] for name in expected} == pytest.approx(expected)


def test_an_epoch_that_was_not_begun_is_not_reported():
    report = read_diagnostics(
        passes((True, True, 0.1, 1.0), (False, True, 0.5, 1.0), (False, False, 0.0, 1.0)),
        {},
        epochs=3,
    )
    assert [name for name in report if name.startswith("kl_epoch")] == ["kl_epoch/1", "kl_epoch/2"]
