"""What an untrained policy is made of: every weight and buffer, and what it does at first."""

import math

import pytest
import torch
from torch import Tensor, nn

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.products import Product
from esper_soa.config.agent import NetworkConfig, PolicyConfig
from esper_soa.env.legal import relevant_heads
from esper_soa.vocabulary import HEAD_NAMES, Op, head_sizes
from tests.builders.agent_world import first_decision, small_policy, some_slots, width_of

NUM_SLOTS = 3
CRITICS = ("value_head", "q_head", "contribution_head")


@pytest.fixture(scope="module", params=[1, 3])
def policy(request: pytest.FixtureRequest) -> RecurrentPolicy:
    """Features of another width than the memory, so with a projection, and one or three layers."""
    torch.manual_seed(5)
    network = NetworkConfig(
        hidden=32, features=48, layers=request.param, slot_features=24, blueprint_embedding=6
    )
    return RecurrentPolicy(PolicyConfig(network=network), some_slots(NUM_SLOTS), seed=11)


def linears(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def assert_orthogonal(weight: Tensor, gain: float) -> None:
    """Rows, or columns where there are more rows, at right angles and of length `gain`."""
    weight = weight.detach() / gain
    product = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    torch.testing.assert_close(product, torch.eye(len(product)), rtol=0, atol=2e-5)


def last_layers(policy: RecurrentPolicy) -> dict[nn.Linear, float]:
    """The layers that speak for the policy, with their gains."""
    gains = {linears(head)[-1]: 0.01 for head in policy.heads.values()}
    return gains | {linears(policy.get_submodule(name))[-1]: 0.1 for name in CRITICS}


def test_every_linear_layer_is_orthogonal_with_root_two_but_the_last_of_each_head(
    policy: RecurrentPolicy,
) -> None:
    special = last_layers(policy)
    layers = linears(policy)
    assert len(special) == len(HEAD_NAMES) + 3
    # slots, features and projection; heads of two layers, blueprint and slot with three; two
    # critics of four, and contribution with its trunk and three
    assert len(layers) == 3 + (len(HEAD_NAMES) - 2) * 2 + 2 * 3 + 2 * 4 + 1 + 3
    for layer in layers:
        assert_orthogonal(layer.weight, special.get(layer, math.sqrt(2)))
    biases = [layer.bias for layer in layers if layer.bias is not None]
    # what is said of a slot has one bias: that of the context
    assert len(biases) == len(layers) - 2
    assert all((bias == 0).all() for bias in biases)
    # those that may be large can take several threads
    assert all(isinstance(layer, Product) or layer.out_features == 1 for layer in layers)


def test_the_memory_is_orthogonal_and_forgets_by_a_bias_that_grows_with_the_layers(
    policy: RecurrentPolicy,
) -> None:
    forget = 1 + math.log(len(policy.lstm.layers))
    # input, forget, candidate, output
    gates = torch.tensor([0.0, forget, 0.0, 0.0]).repeat_interleave(32)
    for layer in policy.lstm.layers:
        assert_orthogonal(layer.weight_ih, 1.0)
        assert_orthogonal(layer.weight_hh, 1.0)
        torch.testing.assert_close(layer.bias_ih.detach(), gates)
        torch.testing.assert_close(layer.bias_hh.detach(), gates)


def test_embeddings_are_normal_with_a_deviation_of_a_fiftieth() -> None:
    network = NetworkConfig(hidden=8, features=8, blueprint_embedding=800)
    weight = RecurrentPolicy(PolicyConfig(network=network), some_slots(1), seed=0).embedding.weight
    assert weight.shape == (14, 800)  # thirteen blueprints and the empty slot
    # 11,200 numbers: standard error of the deviation 0.02 / sqrt(22400), of the mean 0.02 /
    # sqrt(11200)
    assert weight.std().item() == pytest.approx(0.02, abs=6e-4)
    assert weight.mean().item() == pytest.approx(0.0, abs=8e-4)


def test_no_two_layers_of_one_shape_begin_alike(policy: RecurrentPolicy) -> None:
    weights = [
        parameter for name, parameter in policy.named_parameters() if name.endswith("weight")
    ]
    matrices = [weight for weight in weights if weight.ndim == 2]
    for place, weight in enumerate(matrices):
        for other in matrices[place + 1 :]:
            assert weight.shape != other.shape or not torch.equal(weight, other)


def test_a_network_has_the_size_that_was_counted_by_hand() -> None:
    network = NetworkConfig(hidden=512, features=512, slot_features=64, blueprint_embedding=4)
    policy = RecurrentPolicy(PolicyConfig(network=network), some_slots(NUM_SLOTS), 0)
    later = [policy.heads[name] for name in HEAD_NAMES[8:]]  # that came after it was counted
    total, uncounted = (
        sum(parameter.numel() for module in modules for parameter in module.parameters())
        for modules in ([policy], later)
    )
    assert total - uncounted == 4_160_994


@pytest.mark.parametrize("op", [Op.GERMINATE, Op.PRUNE, Op.SET_ALPHA_TARGET])
def test_every_head_keeps_the_probability_floor_of_its_own(op: int) -> None:
    floors = {name: 0.01 * (place + 1) for place, name in enumerate(HEAD_NAMES)}
    policy = small_policy(2, probability_floor=floors)
    policy.deterministic = True
    with torch.no_grad():
        for name, head in policy.heads.items():
            if name == "slot":
                head.score.weight.mul_(1e6)  # sure of one of the two
            else:
                head[-1].bias[op if name == "op" else -1] = 50.0  # sure of this choice
    decision, _ = first_decision(policy, torch.ones(1, width_of(2)))
    assert decision.action.op.item() == op
    sizes = head_sizes(2)
    relevant = relevant_heads(decision.action.op)[0].tolist()
    assert sum(relevant) > 1
    for place, name in enumerate(HEAD_NAMES):
        left = 1 - (sizes[place] - 1) * floors[name] if relevant[place] else 1.0
        assert decision.log_probs[0, place].exp().item() == pytest.approx(left, abs=1e-5), name


def test_observations_are_clipped_where_the_settings_say() -> None:
    policy = small_policy(1, observation_clip=1.5)
    features = torch.tensor([1.4, 1.6, 99.0]).unsqueeze(1).expand(3, width_of(1))
    below, above, beyond = first_decision(policy, features)[0].value.tolist()
    assert above == pytest.approx(beyond, rel=1e-5)  # rows of a batch may be rounded differently
    assert below != pytest.approx(above, rel=1e-3)
