"""One set of weights for any slots: the policy goes by places, never by number or order."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from esper_soa.agent.lstm import segment_starts
from esper_soa.agent.normalize import Moments
from esper_soa.agent.policy import Evaluation, RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Row
from esper_soa.agent.slots import SlotScores, place_table, slot_encoding, summary
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.nets import SlotSpec, TaskConfig, host_slots
from esper_soa.vocabulary import HEAD_NAMES, Op
from tests.builders.agent_world import (
    first_decision,
    masks_of_ops,
    noise_of_heads,
    random_masks,
    random_rollout,
    small_policy,
    some_slots,
    width_of,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SLOT = HEAD_NAMES.index("slot")
# of another host
CRIPPLED = host_slots(TaskConfig(base_channels=2, num_blocks=5, kernel_size=1, num_pools=5))


def opinionated(slots: tuple[SlotSpec, ...], seed: int = 0, layers: int = 1) -> RecurrentPolicy:
    """A policy far from its beginning: no two choices are nearly as likely, none has a floor."""
    network = NetworkConfig(hidden=32, features=32, layers=layers, slot_features=16)
    ppo = PPOConfig(probability_floor=dict.fromkeys(HEAD_NAMES, 0.0))
    policy = RecurrentPolicy(PolicyConfig(network=network, ppo=ppo), slots, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    moments = torch.rand(3, 54, generator=generator)
    policy.set_observation_moments_(Moments(moments[0] - 0.5, moments[1] + 0.5, torch.tensor(9.0)))
    return policy


def evaluated(policy: RecurrentPolicy, rows: Row) -> Evaluation:
    noise = torch.rand(*rows.shape, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return policy.evaluate(rows, segment_starts(rows.reset), noise)


def reordered(rows: Row, order: Tensor) -> Row:
    """The same rows where the slot number i is what was order[i]."""
    env = rows.features[..., :23]
    slots = rows.features[..., 23:].unflatten(-1, (-1, 31))
    number = order.argsort()[rows.action.slot]
    masks = rows.masks.replace(
        slot=rows.masks.slot[..., order], slot_by_op=rows.masks.slot_by_op[..., order]
    )
    return rows.replace(
        features=torch.cat([env, slots[:, :, order].flatten(2)], dim=-1),
        blueprints=rows.blueprints[..., order],
        masks=masks,
        action=rows.action.replace(slot=number),
    )


@pytest.mark.parametrize("num_slots", [2, 10])
def test_renumbering_the_slots_renumbers_what_is_said_of_each_and_changes_nothing_else(
    num_slots: int,
) -> None:
    slots = some_slots(num_slots)
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1))
    order = order.roll(1) if torch.equal(order, torch.arange(num_slots)) else order
    policy = opinionated(slots)
    rows = random_rollout(policy, 6, 5, seed=2).rows
    rows.action.op.copy_(
        torch.where(rows.masks.op[..., Op.GERMINATE], Op.GERMINATE, rows.action.op)
    )
    rows.action.slot.copy_(rows.masks.slot_by_op[..., Op.GERMINATE, :].int().argmax(-1))
    twin = opinionated(tuple(slots[number] for number in order.tolist()))
    first = evaluated(policy, rows)
    second = evaluated(twin, reordered(rows, order))
    # waiting takes the first legal slot, whichever that is
    acting = (rows.action.op != Op.WAIT).unsqueeze(-1)
    torch.testing.assert_close(first.log_probs * acting, second.log_probs * acting, **CLOSE)
    assert (first.log_probs * acting)[..., SLOT].min() < -0.1
    for name in ("value", "q", "hidden", "cell"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), **CLOSE)
    torch.testing.assert_close(first.entropies, second.entropies, **CLOSE)
    torch.testing.assert_close(first.contribution[..., order], second.contribution, **CLOSE)
    assert (first.contribution - second.contribution).abs().max() > 0.01


@pytest.mark.parametrize(("num_slots", "layers"), [(1, 1), (3, 2), (10, 1)])
def test_the_update_gives_the_log_probs_and_values_of_the_rollout_across_restarts(
    num_slots: int, layers: int
) -> None:
    policy = opinionated(some_slots(num_slots), layers=layers)
    rows = random_rollout(policy, 9, 6, seed=1).rows
    assert rows.reset[1:].any()
    found = evaluated(policy, rows)
    torch.testing.assert_close(found.log_probs, rows.log_probs, **CLOSE)
    torch.testing.assert_close(found.value, rows.value, **CLOSE)
    assert rows.log_probs[rows.log_probs != 0].std() > 0.3


def slot_choices(policy: RecurrentPolicy, features: Tensor, op: int = Op.GERMINATE) -> list[Tensor]:
    """Log-probabilities [8] of a first env-step in which `op` goes to each slot, all legal."""
    num_slots = len(policy.places)
    rows = random_rollout(policy, 1, 1, seed=0).rows
    rows.masks.update_(masks_of_ops(torch.ones(1, 6, dtype=torch.bool), num_slots).unsqueeze(0))
    rows.features.copy_(features)
    rows.blueprints.fill_(-1)
    rows.action.op.fill_(op)
    rows.action.blueprint.fill_(5)
    found = []
    for slot in range(num_slots):
        rows.action.slot.fill_(slot)
        found.append(evaluated(policy, rows).log_probs[0, 0])
    return found


def alike(num_slots: int) -> Tensor:
    """Features of one env whose slots have the same ones."""
    env, slot = torch.randn(23 + 31, generator=torch.Generator().manual_seed(4)).split((23, 31))
    return torch.cat([env, slot.repeat(num_slots)])


def test_the_log_probs_of_all_slots_are_one_distribution() -> None:
    found = slot_choices(opinionated(some_slots(10)), torch.randn(width_of(10)))
    assert torch.stack(found)[:, SLOT].exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_slots_of_equal_features_differ_by_their_place_alone() -> None:
    found = torch.stack(slot_choices(opinionated(some_slots(10)), alike(10)))[:, SLOT]
    distances = (found.unsqueeze(0) - found.unsqueeze(1)).abs() + torch.eye(10)
    assert distances.min() > 1e-4
    one_place = (some_slots(1)[0],) * 3
    same = torch.stack(slot_choices(opinionated(one_place), alike(3)))[:, SLOT]
    torch.testing.assert_close(same.exp(), torch.full((3,), 1 / 3))


def test_which_slot_depends_on_the_op() -> None:
    policy = opinionated(some_slots(3))
    features = torch.randn(width_of(3), generator=torch.Generator().manual_seed(5))
    prune, fossilize = (
        torch.stack(slot_choices(policy, features, op))[:, SLOT] for op in (Op.PRUNE, Op.FOSSILIZE)
    )
    assert (prune - fossilize).abs().min() > 1e-4


def test_which_blueprint_depends_on_which_slot_was_chosen() -> None:
    found = torch.stack(slot_choices(opinionated(some_slots(3)), alike(3)))
    for head in ("blueprint", "style", "tempo", "alpha_target"):
        values = found[:, HEAD_NAMES.index(head)]
        assert all(
            (one - other).abs() > 1e-5 for one, other in itertools.combinations(values, 2)
        ), head
    assert len(found[:, HEAD_NAMES.index("op")].unique()) == 1


@pytest.mark.parametrize(("slots", "count"), [(some_slots(2), 2), (CRIPPLED, 10)])
def test_weights_depend_on_no_slot(slots: tuple[SlotSpec, ...], count: int) -> None:
    assert len(slots) == count
    one = small_policy(1, seed=3).state_dict()
    other = RecurrentPolicy(
        PolicyConfig(network=NetworkConfig(32, 32, slot_features=16)), slots, seed=3
    ).state_dict()
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    assert {"mean", "var", "seen"} < one.keys()
    assert "places" not in one


def test_what_two_slots_taught_plays_ten_of_another_host() -> None:
    policy = small_policy(2)
    learner = Learner(policy, PPOConfig(), total_updates=10, seed=0)
    learner.update(random_rollout(policy, 6, 4, seed=1))
    other = RecurrentPolicy(
        PolicyConfig(network=NetworkConfig(32, 32, slot_features=16)), CRIPPLED, seed=9
    )
    places = other.places.clone()
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.places, places)
    generator = torch.Generator().manual_seed(0)
    envs = 300
    masks = random_masks(envs, 10, generator)
    blueprints = torch.randint(-1, 13, (envs, 10), generator=generator)
    features = torch.randn(envs, width_of(10), generator=generator)
    noise = noise_of_heads(envs, generator=generator)
    decision, _ = first_decision(other, features, blueprints, noise, masks)
    action = decision.action
    assert masks.op.gather(1, action.op.unsqueeze(1)).all()
    acting = action.op != Op.WAIT
    assert (
        masks.slot_by_op[torch.arange(envs), action.op]
        .gather(1, action.slot.unsqueeze(1))[acting]
        .all()
    )
    assert set(action.slot[acting].tolist()) == set(range(10))
    assert decision.value.isfinite().all()


def test_the_place_of_a_slot_by_hand() -> None:
    slots = host_slots(TaskConfig(base_channels=8, num_blocks=3, num_pools=3))
    # row, depth, 2 log2(channels) / 8 - 1, 2 log2(size) / 5 - 1: 8, 16, 32 channels; 32, 16, 8
    # pixels, then half
    expected = [
        [-1, -1, -0.25, 1.0],
        [-1, 0, 0.0, 0.6],
        [-1, 1, 0.25, 0.2],
        [1, -1, -0.25, 0.6],
        [1, 0, 0.0, 0.2],
        [1, 1, 0.25, -0.2],
    ]
    torch.testing.assert_close(place_table(slots), torch.tensor(expected))
    assert place_table(slots).dtype == torch.float32
    vectors = SlotSpec("r0c0", row=0, block=0, channels=16, size=0, depth=1.0, axes=0)
    assert place_table([vectors]).tolist() == [[-1, 1, 0, -1]]


@pytest.mark.parametrize("part", range(4))
def test_every_part_of_a_place_reaches_the_encoding(part: int) -> None:
    policy = small_policy(1)
    found = []
    for change in (0.0, 0.5):
        policy.places[0, part] += change
        found.append(first_decision(policy, alike(1).unsqueeze(0))[1][0])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_every_feature_and_the_blueprint_of_a_slot_reach_its_encoding() -> None:
    policy = small_policy(2)

    def remembered(features: Tensor, blueprints: list[int]) -> Tensor:
        return first_decision(policy, features.unsqueeze(0), torch.tensor([blueprints]))[1][0]

    before = remembered(alike(2), [3, 3])
    for place in range(width_of(2)):
        after = remembered(alike(2) + (torch.arange(width_of(2)) == place), [3, 3])
        assert (after - before).abs().max() > 1e-3, place
    assert (remembered(alike(2), [3, -1]) - before).abs().max() > 1e-4


def test_the_summary_is_mean_and_largest_over_slots() -> None:
    slots = torch.tensor([[1.0, 5.0], [4.0, -1.0], [1.0, 2.0]]).expand(7, 3, 2)
    torch.testing.assert_close(summary(slots), torch.tensor([2.0, 2.0, 4.0, 5.0]).expand(7, 4))


def test_the_encoding_of_a_slot_is_that_of_its_number() -> None:
    slots = torch.arange(24.0).reshape(2, 2, 3, 2)
    found = slot_encoding(slots, torch.tensor([[0, 2], [1, 0]]))
    assert found.tolist() == [[[0, 1], [10, 11]], [[14, 15], [18, 19]]]


def test_the_score_of_a_slot_is_the_pointer_written_out() -> None:
    torch.manual_seed(0)
    scores = SlotScores(5, 3, 4)
    context = torch.randn(2, 5)
    slots = torch.randn(2, 6, 3)
    both = nn.Linear(5 + 3, 4)  # of context and slot together
    with torch.no_grad():
        both.weight.copy_(torch.cat([scores.context.weight, scores.slot.weight], dim=1))
        both.bias.copy_(scores.context.bias)
        written_out = scores.score(
            torch.relu(both(torch.cat([context[:, None].expand(2, 6, 5), slots], dim=-1)))
        )
        torch.testing.assert_close(scores(context, slots), written_out.squeeze(-1))


def test_statistics_of_a_feature_are_pooled_over_the_slots_and_count_rows() -> None:
    policy = small_policy(2)
    features = torch.zeros(1, 3, width_of(2))
    features[0, :, 0] = torch.tensor([1.0, 3.0, float("nan")])
    # the first feature of the first slot
    features[0, :, 23] = torch.tensor([1.0, 2.0, float("nan")])
    features[0, :, 54] = torch.tensor([3.0, 6.0, float("nan")])  # and of the second
    policy.update_observations_([(features, torch.tensor([[True, True, False]]))], momentum=0.5)
    assert policy.mean[0].item() == pytest.approx(0.5 * 2.0)
    assert policy.mean[23].item() == pytest.approx(0.5 * 3.0)
    # old variance 1 and mean 0, new variance 1 and mean 2; of 1, 2, 3, 6 variance 3.5 and mean 3
    assert policy.var[0].item() == pytest.approx(0.5 * 1 + 0.5 * 1 + 0.25 * 4)
    assert policy.var[23].item() == pytest.approx(0.5 * 1 + 0.5 * 3.5 + 0.25 * 9)
    assert policy.seen.item() == pytest.approx(2, abs=1e-3)
    others = [place for place in range(54) if place not in (0, 23)]
    assert policy.mean[others].tolist() == [0.0] * 52
    torch.testing.assert_close(policy.var[others], torch.full((52,), 0.5))
