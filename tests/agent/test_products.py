"""Large products of the policy by oneDNN, small ones by torch; the memory of an env-step."""

import pytest
import torch
from torch import Tensor, nn

from esper_soa.agent import products
from esper_soa.agent.lstm import ResidualLSTM, segment_starts
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.products import NARROW, Product
from esper_soa.config.agent import NetworkConfig, PolicyConfig
from esper_soa.state import View
from tests.agent.test_policy import parts
from tests.builders.agent_world import CPU, random_rollout, some_slots

WIDE = NetworkConfig(hidden=128, features=128, slot_features=32)


@pytest.mark.parametrize("bias", [True, False])
def test_a_large_product_is_by_onednn(bias: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(12, 80, 192, requires_grad=True)
    product = Product(192, 128, bias=bias)
    assert inputs.numel() * 128 > products.LARGE_WORK
    by_torch = nn.functional.linear(inputs, product.weight, product.bias)
    results = []
    for output in (by_torch, product(inputs)):
        gradients = torch.autograd.grad(output.square().sum(), [inputs, *product.parameters()])
        results.append([output.detach(), *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
    assert is_by_onednn(product, inputs)


@pytest.mark.parametrize(
    ("rows", "outputs", "is_large"),
    [(10, NARROW, True), (9, NARROW, False), (20, NARROW - 8, False)],
)
def test_small_and_narrow_products_stay_with_torch(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, is_large: bool
) -> None:
    monkeypatch.setattr(products, "LARGE_WORK", 10 * 8 * NARROW)
    product, inputs = Product(8, outputs), torch.ones(rows, 8)
    assert is_by_onednn(product, inputs) == is_large
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not is_by_onednn(product, inputs)


def is_by_onednn(product: Product, inputs: torch.Tensor) -> bool:
    last = product(inputs).grad_fn
    assert last is not None
    return last.name() == "ToDenseBackward0"


def test_products_in_double_precision_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE_WORK", 1)
    layer = Product(NARROW, NARROW).double()
    inputs = torch.randn(4, NARROW, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))


def test_the_memory_of_an_env_step_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE_WORK", 1)
    torch.manual_seed(0)
    layers = ResidualLSTM(128, 128, 2)
    memory = (torch.randn(7, 2, 128), torch.randn(7, 2, 128))
    x = torch.randn(7, 128)
    output, after = layers.step(x, memory)
    for i, (layer, norm) in enumerate(zip(layers.layers, layers.layer_norms, strict=True)):
        hidden, cell = layer(x, tuple(part[:, i] for part in memory))
        x = norm(hidden) + x
        for one, other in ((after[0][:, i], hidden), (after[1][:, i], cell)):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output, x, rtol=1e-5, atol=1e-6)


def test_a_policy_gives_by_onednn_what_it_gives_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RecurrentPolicy(PolicyConfig(network=WIDE), some_slots(2), seed=0)
    rows = random_rollout(policy, 5, 6, seed=0).rows
    noise = torch.rand(*rows.shape, 64, generator=torch.Generator().manual_seed(1))
    observation, masks, actions = parts(6, 2)
    view = View(None, observation, masks, actions, batch_size=[6])
    results = []
    for work in (10**9, 1):
        monkeypatch.setattr(products, "LARGE_WORK", work)
        decision, memory = policy.act(view, policy.start(6, CPU))
        found = policy.evaluate(rows, segment_starts(rows.reset), noise)
        outputs = [one for one in found if one.requires_grad]
        loss = torch.stack([one.square().sum() for one in outputs]).sum()
        gradients = torch.autograd.grad(loss, [*policy.parameters()])
        outputs = [one.detach() for one in outputs]
        results.append([decision.log_probs, decision.value, *memory, *outputs, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 + 1e-4 * float(one.abs().max()))


def test_heads_share_the_copy_of_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE_WORK", 1)
    policy = RecurrentPolicy(PolicyConfig(network=WIDE), some_slots(2), seed=0)
    rows = random_rollout(policy, 2, 3, seed=0).rows
    with torch.profiler.profile() as profile:
        policy.evaluate(rows, segment_starts(rows.reset), torch.rand(*rows.shape, 64))
    counts = {one.key: one.count for one in profile.key_averages()}
    # three copies for eleven products of the heads, and one for each of eight more
    assert (counts["aten::to_mkldnn"], counts["aten::mkldnn_linear"]) == (11, 19)


def test_decisions_are_by_onednn_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RecurrentPolicy(PolicyConfig(network=WIDE), some_slots(2), seed=0)
    observation, masks, numbers = parts(6, 2)
    view = View(None, observation, masks, numbers, batch_size=[6])

    def decided() -> list[Tensor]:
        decision, memory = policy.act(view, policy.start(6, CPU))
        return [decision.log_probs, decision.value, *memory]

    by_torch = decided()
    monkeypatch.setattr(products, "LARGE_WORK", 1)
    with torch.profiler.profile() as profile:
        found = decided()
    counts = {one.key: one.count for one in profile.key_averages()}
    # one for every layer of 32 outputs or more
    assert counts["mkldnn::_linear_pointwise"] == 16
    assert "aten::to_mkldnn" not in counts
    for one, expected in zip(found, by_torch, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
