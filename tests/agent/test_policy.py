import pytest
import torch

from esper_soa.agent.lstm import segment_starts
from esper_soa.agent.normalize import VARIANCE_EPSILON, Moments
from esper_soa.agent.policy import BLUEPRINT_TABLES, with_blueprints, with_heads, with_observed
from esper_soa.state import Observation, View
from esper_soa.vocabulary import HEAD_NAMES, Op, head_sizes
from tests.builders.agent_world import (
    CPU,
    first_decision,
    masks_of_ops,
    noise_of_heads,
    random_masks,
    random_rollout,
    small_policy,
    width_of,
)


def parts(num_envs: int, num_slots: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_envs, width_of(num_slots), generator=generator)
    blueprints = torch.randint(-1, 13, (num_envs, num_slots), generator=generator)
    masks = random_masks(num_envs, num_slots, generator)
    noise = noise_of_heads(num_envs, generator=generator)
    return Observation(features, blueprints, batch_size=[num_envs]), masks, noise


def test_initial_weights_depend_on_the_seed_only():
    torch.manual_seed(1)
    policy = small_policy(2, seed=3)
    torch.manual_seed(2)
    again = small_policy(2, seed=3)
    other = small_policy(2, seed=4)
    for name, value in policy.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert not torch.equal(policy.embedding.weight, other.embedding.weight)


def test_a_restart_forgets_what_came_before_in_that_env_only():
    policy = small_policy(1)
    inputs = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0))
    reset = torch.tensor([[True, True], [False, False], [True, False], [False, False]])
    changed = inputs.clone()
    changed[1] += 1.0
    before, after = (
        policy.lstm.sequence(x, reset, segment_starts(reset))[0] for x in (inputs, changed)
    )
    assert torch.equal(before[2:, 0], after[2:, 0])
    assert not torch.equal(before[2:, 1], after[2:, 1])


def test_an_env_decides_as_if_it_were_alone():
    policy = small_policy(2)
    observation, masks, noise = parts(4, 2)
    memory = tuple(
        torch.randn(m.shape, generator=torch.Generator().manual_seed(5))
        for m in policy.start(4, CPU)
    )
    decision, after, _ = policy.decide_with_probabilities(observation, masks, noise, memory)
    one = slice(2, 3)
    alone, alone_after, _ = policy.decide_with_probabilities(
        observation[one], masks[one], noise[one], tuple(m[one] for m in memory)
    )
    assert torch.equal(decision.action[one].op, alone.action.op)
    torch.testing.assert_close(decision.log_probs[one], alone.log_probs)
    torch.testing.assert_close(after[1][one], alone_after[1])


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (Op.GERMINATE, ("slot", "blueprint", "style", "tempo", "alpha_target")),
        (Op.PRUNE, ("slot", "alpha_speed", "alpha_curve")),
    ],
)
def test_every_head_chooses_by_a_number_of_its_own(op: int, names: tuple[str, ...]):
    policy = small_policy(3)
    only = torch.arange(6) == op
    masks = masks_of_ops(only.unsqueeze(0), 3)
    features = parts(1, 3)[0].features
    for name in names:
        last = dict(zip(HEAD_NAMES, head_sizes(3), strict=True))[name] - 1
        for number, choice in ((0.0, 0), (0.999999, last)):
            noise = torch.full((1, len(HEAD_NAMES)), 0.5)
            noise[0, HEAD_NAMES.index(name)] = number
            action = first_decision(policy, features, noise=noise, masks=masks)[0].action
            assert action.op.item() == op
            others = [action.get(other).item() for other in names if other != name]
            assert action.get(name).item() == choice, name
            assert 0 not in others


def test_a_policy_that_lacks_a_head_takes_that_of_a_new_one():
    learned, fresh = (small_policy(2, seed=seed).state_dict() for seed in (1, 2))
    own = [name for name in learned if name.startswith("heads.tempo.")]
    found = with_heads({name: learned[name] for name in learned if name not in own}, fresh)
    assert len(own) == 4
    assert found.keys() == learned.keys()
    for name, weight in found.items():
        assert torch.equal(weight, (fresh if name in own else learned)[name]), name


def test_weights_for_other_settings_and_blueprints_keep_what_is_known() -> None:
    seen = torch.arange(56.0).expand(2, 56)
    state = {"feature_net.0.weight": seen, "mean": seen[0], "var": seen[1], "seen": torch.ones(())}
    found = with_observed(state, ["lr", "rent"], ["own", "lr"])
    assert found.keys() == state.keys()
    for name, new in (("feature_net.0.weight", 0.0), ("mean", 0.0), ("var", 1.0)):
        row = torch.tensor([*range(23), new, 23, *range(25, 56)])
        assert torch.equal(found[name], row.expand(state[name].shape)), name
    tables = dict(zip(BLUEPRINT_TABLES, (torch.arange(n).float() for n in (9, 8, 8)), strict=True))
    names = list("abcdefgh")
    found = with_blueprints(tables, names, ["h", "new", "a"])
    # the package's can be germinated from 1 to 7
    rows = [[7.0, 4.0, 0.0, 8.0], [7.0, 4.0, 0.0], [7.0, 4.0, 0.0]]
    assert [found[name].tolist() for name in BLUEPRINT_TABLES] == rows
    for other in (
        state | {"mean": seen[0, 1:]},
        tables | {BLUEPRINT_TABLES[2]: torch.ones(())},
        {},
    ):
        assert with_observed(other, ["lr", "rent"], ["lr"]) == other
        assert with_blueprints(other, names, names[1:]) == other


def test_an_empty_slot_has_its_own_embedding():
    policy = small_policy(1)
    features = torch.zeros(2, width_of(1))
    _, (hidden, _) = first_decision(policy, features, torch.tensor([[-1], [0]]))
    assert (hidden[0] - hidden[1]).abs().max() > 1e-5


def test_the_observation_is_normalised_with_the_statistics_it_was_given():
    policy = small_policy(1)
    shifted = small_policy(1)
    mean = torch.tensor([5.0] * 23 + [-3.0] * 31)
    spread = torch.tensor([2.0] * 23 + [3.0] * 31)
    # so that the spread is so many times that of the other
    var = spread**2 * (1 + VARIANCE_EPSILON) - VARIANCE_EPSILON
    shifted.set_observation_moments_(Moments(mean, var, torch.tensor(9.0)))
    seen, same, other = (
        first_decision(agent, x)[1]
        for agent, x in (
            (policy, torch.ones(1, 54)),
            (shifted, (mean + spread)[None]),
            (shifted, torch.ones(1, 54)),
        )
    )
    torch.testing.assert_close(seen, same)
    assert (seen[0] - other[0]).abs().max() > 0.01


def test_critic_and_contribution_heads_do_not_reach_the_trunk():
    policy = small_policy(2)
    rollout = random_rollout(policy, 3, 2, seed=1)
    evaluation = policy.evaluate(
        rollout.rows, segment_starts(rollout.rows.reset), torch.ones(3, 2, 16)
    )
    (evaluation.q.sum() + evaluation.contribution.sum()).backward()
    assert all(
        p.grad is None
        for part in (policy.slot_encoder, policy.feature_net)
        for p in part.parameters()
    )
    assert policy.embedding.weight.grad is None
    assert policy.q_head[0].weight.grad is not None


def test_acting_keeps_no_graph():
    policy = small_policy(2)
    observation, masks, noise = parts(4, 2)
    view = View(None, observation, masks, noise, batch_size=[4])
    assert not policy.act(view, policy.start(4, CPU))[0].value.requires_grad
