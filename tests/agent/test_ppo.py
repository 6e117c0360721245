import copy
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper_soa.agent.optimizer import flatten
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.config.agent import ImitationConfig, PPOConfig
from esper_soa.env.reduction import Reduction
from tests.builders.agent_world import learner_of, play_recall, random_rollout, small_policy


def weights(learner: Learner) -> Tensor:
    return flatten(learner.policy.parameters())


def test_the_policy_learns_to_remember_a_cue():
    history = play_recall(25)
    assert history[0] < 0.7
    assert min(history[-3:]) > 0.9


def test_the_first_pass_has_no_divergence_and_an_update_moves_the_weights():
    learner = learner_of(epochs=1)
    before = weights(learner)
    report = learner.update(random_rollout(learner.policy, 6, 4, seed=1))
    assert report["approx_kl"] < 1e-8
    assert report["clip_fraction"] == 0.0
    assert report["steps"] == 1
    assert not torch.equal(weights(learner), before)


def broken(rollout: Rollout, reward: float = float("nan")) -> Rollout:
    rollout.rows.reward[2, 1] = reward
    return rollout


def test_an_update_without_a_finite_gradient_is_skipped_and_the_third_in_a_row_ends_the_run():
    learner = learner_of()
    before = weights(learner)
    for _ in range(2):
        report = learner.update(broken(random_rollout(learner.policy, 6, 4, seed=1)))
        assert report["steps"] == 0
        assert report["not_finite_steps"] == 4
        assert math.isnan(report["value_loss"]), "a mean over no gradient step"
    assert torch.equal(weights(learner), before)
    assert learner.train_steps == 0
    told = "3 updates in a row had no finite gradient, .* in rewards and observations, or lower "
    resumed = learner_of()
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    for one in (learner, resumed):
        with pytest.raises(RuntimeError, match=f"{told}policy.ppo.lr"):
            one.update(broken(random_rollout(one.policy, 6, 4, seed=1)))


def test_a_loss_that_overflows_where_its_gradient_does_not_is_no_step_either():
    learner = learner_of()
    report = learner.update(broken(random_rollout(learner.policy, 6, 4, seed=1), 2e19))
    assert (report["steps"], report["not_finite_steps"]) == (0, 4)


def test_a_good_update_forgives_skipped_ones():
    learner = learner_of()
    for _ in range(2):
        learner.update(broken(random_rollout(learner.policy, 6, 4, seed=1)))
    assert learner.update(random_rollout(learner.policy, 6, 4, seed=1))["steps"] > 0
    assert learner.skipped == 0
    assert torch.isfinite(weights(learner)).all()
    assert learner.value.mean.isfinite()


def test_rows_that_are_not_valid_do_not_teach():
    first = learner_of(epochs=2)
    second = learner_of(epochs=2)
    for learner, noise in ((first, 0.0), (second, 50.0)):
        rollout = random_rollout(learner.policy, 6, 4, seed=1)
        rollout.rows.valid[4:, 2] = False
        rollout.rows.reward[4:, 2] += noise
        rollout.rows.features[4:, 2] += noise
        rollout.rows.contribution[4:, 2] += noise
        learner.update(rollout)
    assert torch.equal(weights(first), weights(second))
    assert torch.equal(first.policy.mean, second.policy.mean)


def test_a_resumed_learner_goes_on_bit_for_bit():
    learner = learner_of(minibatches=2)
    learner.scale_rewards_(torch.tensor([1.0, 4.0]), torch.tensor([True, True]))
    learner.update(random_rollout(learner.policy, 6, 4, seed=1))
    resumed = learner_of(minibatches=2)
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    rollout = random_rollout(learner.policy, 6, 4, seed=2)
    assert learner.update(rollout) == resumed.update(rollout)
    assert torch.equal(weights(learner), weights(resumed))
    assert torch.equal(learner.policy.var, resumed.policy.var)
    assert torch.equal(learner.reward.squares, resumed.reward.squares)


@pytest.mark.parametrize("taught", [False, True])
def test_a_gradient_step_asks_other_processes_for_one_sum_of_means_and_one_of_gradients(
    taught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counter[str]()
    for name in ("total", "total_gradients", "extremes"):

        def counted(*given: object, name: str = name, plain: Callable = getattr(Reduction, name)):
            asked[name] += 1
            return plain(*given)

        monkeypatch.setattr(Reduction, name, counted)
    ppo = PPOConfig(epochs=2, minibatches=3, target_kl=0.0)
    learner = Learner(small_policy(2), ppo, 100, 0, imitation=ImitationConfig(epochs=2))
    rollout = random_rollout(learner.policy, 4, 3, seed=0)
    if taught:
        learner.imitate(rollout._replace(taught=rollout.rows.action))
    else:
        learner.update(rollout)
    assert asked == {"total": 6, "total_gradients": 6, "extremes": 1}


def test_rewards_that_do_not_count_come_back_as_zero():
    learner = learner_of()
    scaled = learner.scale_rewards_(torch.tensor([2.0, float("nan")]), torch.tensor([True, False]))
    assert scaled.tolist() == [2.0, 0.0]
    assert learner.reward.seen == 1


def test_there_are_no_more_minibatches_than_envs():
    learner = learner_of(minibatches=5, target_kl=0.0)
    report = learner.update(random_rollout(learner.policy, 2, 4, seed=1))
    assert report["steps"] == 4 * report["epochs_done"] == 4 * learner.config.epochs


@pytest.mark.parametrize(("margin", "steps"), [(1.49, 4), (1.51, 0)])
def test_all_four_epochs_are_done_below_one_and_a_half_times_the_target_and_none_above(
    margin: float, steps: int
):
    # every stored log-probability is 0.2 too low, so every head diverges by exp(0.2) - 1 - 0.2 =
    # 0.0214028
    learner = learner_of(lr=1e-30, target_kl=0.0214028 / margin)
    rollout = random_rollout(learner.policy, 6, 4, seed=1)
    rollout.rows.log_probs.sub_(0.2)
    report = learner.update(rollout)
    assert report["kl_epoch/1"] == pytest.approx(0.0214028, rel=1e-4)
    assert report["steps"] == steps
    assert report["early_stop"] == float(steps == 0)
    assert learner.train_steps == int(steps > 0)
    assert learner.skipped == 0  # a policy that moved too far is no failure


def test_a_stop_in_a_later_epoch_keeps_the_steps_before_it():
    learner = learner_of(lr=2e-2, epochs=6)
    report = learner.update(random_rollout(learner.policy, 6, 4, seed=1))
    assert 1 < report["steps"] == report["epochs_done"] < 6
    assert report["epochs_begun"] == report["steps"] + 1
    kl = [report[f"kl_epoch/{epoch}"] for epoch in range(1, int(report["epochs_begun"]) + 1)]
    assert max(kl[:-1]) <= 1.5 * 0.015 < kl[-1] == report["kl_last"]


class PatientLearner(Learner):
    """Makes every pass, as on a device that is not to be waited for."""

    def _ended(self, stopped):
        return False


@pytest.mark.parametrize(("minibatches", "sick"), [(1, False), (2, False), (2, True)])
def test_passes_after_the_stop_are_not_made_and_would_have_changed_no_bit(
    minibatches: int, sick: bool
):
    reports = []
    passes = []
    states = []
    for kind in (Learner, PatientLearner):
        policy = small_policy(2)
        config = PPOConfig(lr=2e-2, epochs=6, minibatches=minibatches)
        learner = kind(policy, config, 100, seed=0)
        made = []
        policy.value_head.register_forward_hook(lambda *_, made=made: made.append(1))
        rollout = random_rollout(policy, 6, 4, seed=1)
        if sick:  # in one minibatch too far at once, and without a finite gradient
            rollout.rows.log_probs[:, 1].sub_(1.0)
            rollout.rows.contribution[2, 1] = math.nan
            rollout.rows.contribution_measured[2, 1] = True
        made.clear()
        reports.append(learner.update(rollout))
        passes.append(len(made))
        states.append([*map(torch.clone, (flatten(learner.parameters), *learner.adam))])
    assert passes[0] == reports[0]["steps"] + 1 < passes[1] == 6 * minibatches
    assert reports[0] == pytest.approx(reports[1], rel=0, abs=0, nan_ok=True)
    assert reports[0]["not_finite_steps"] == int(sick)
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_the_value_weight_warms_up_over_rounds_that_took_a_step():
    learner = learner_of(epochs=1, value_warmup_rounds=2, target_kl=0.0)
    rollouts = [random_rollout(learner.policy, 6, 4, seed=1) for _ in range(4)]
    broken(rollouts[1])
    assert [learner.update(rollout)["coefficient/value"] for rollout in rollouts] == pytest.approx(
        [0.05, 0.275, 0.275, 0.5]
    )
