"""Large products of the policy by oneDNN, on several threads: the same bits, or one thread."""

from collections.abc import Callable

import pytest
import torch
from agent_world import CPU, random_rollout, small_policy, some_slots
from test_policy import parts
from torch import Tensor, nn

from esper_soa.agent import lstm, products
from esper_soa.agent.lstm import ResidualLSTM
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.products import NARROW, Product, on_threads
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.state import View, same_bits


@pytest.mark.parametrize("bias", [True, False])
def test_a_large_product_is_by_onednn_and_has_the_bits_of_one_thread(bias: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(12, 80, 192, requires_grad=True)
    product = Product(192, 128, bias=bias)
    assert inputs.numel() * 128 > products.WORK
    results = []
    for number in (0, 1, 2, 3):
        product.threads = number
        output = product(inputs)
        gradients = torch.autograd.grad(output.square().sum(), [inputs, *product.parameters()])
        with torch.no_grad():
            results.append([output.detach(), *gradients, product(inputs)])
        assert torch.get_num_threads() == 1
    by_torch, *by_onednn = results
    assert torch.equal(by_torch[0], nn.functional.linear(inputs, product.weight, product.bias))
    for one, other in zip(by_torch, by_onednn[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
    assert same_bits(by_onednn[0], by_onednn[1])
    assert same_bits(by_onednn[0], by_onednn[2])
    for number in (0, 1):
        product.threads = number
        last = product(inputs).grad_fn
        assert last is not None
        assert (last.name() == "ToDenseBackward0") == (number == 1)


@pytest.mark.parametrize(("inputs", "threads"), [(64, 1), (127, 1), (128, 2), (320, 5), (512, 5)])
def test_a_weight_of_few_inputs_has_few_threads(
    monkeypatch: pytest.MonkeyPatch, inputs: int, threads: int
) -> None:
    taken = []

    def note(number: int, function: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
        taken.append(number)
        return [function(*given)]

    monkeypatch.setattr(products, "on_threads", note)
    monkeypatch.setattr(products, "WORK", 1)
    products.linear(5, torch.ones(2, inputs), torch.ones(NARROW, inputs))
    assert taken == [threads]


def test_both_passes_have_the_threads_and_nothing_else_has() -> None:
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return gradient

    x = torch.ones(2, requires_grad=True)
    (inner,) = on_threads(2, Watch.apply, x)
    torch.autograd.grad(Watch.apply(inner).sum(), x)
    assert seen == [2, 1, 1, 2]
    with torch.no_grad():
        on_threads(2, Watch.apply, x)
    assert seen[4:] == [2]
    on_threads(1, Watch.apply, x)
    assert seen[5:] == [1]
    with pytest.raises(RuntimeError):
        on_threads(2, torch.mm, x, x)
    assert torch.get_num_threads() == 1


def test_small_and_narrow_products_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, *given: object) -> None:
        raise AssertionError

    monkeypatch.setattr(products, "on_threads", refuse)
    monkeypatch.setattr(products, "WORK", 10 * 8 * NARROW)
    for rows, outputs, wide in ((10, NARROW, True), (9, NARROW, False), (20, NARROW - 8, False)):
        product = Product(8, outputs)
        product.threads = 2
        if wide:
            with pytest.raises(AssertionError):
                product(torch.ones(rows, 8))
        else:
            product(torch.ones(rows, 8))


def test_small_layers_of_the_memory_stay_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()

    def note(number: int, function: Callable[..., object], *given: Tensor) -> object:
        taken.append(given[0].shape[-2])
        return function(*given)

    monkeypatch.setattr(lstm, "on_threads", note)
    monkeypatch.setattr(lstm, "WORK", 8 * 16 * 16 * 4)  # of four rows
    layers = ResidualLSTM(16, 16, 1)
    layers.threads = 2
    for envs in (3, 4):
        layers.sequence(torch.ones(1, envs, 16), torch.zeros(1, envs, dtype=torch.bool), [0])
    assert taken == [4]


def test_the_memory_of_an_env_step_is_that_of_torch_and_has_the_bits_of_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "WORK", 1)
    torch.manual_seed(0)
    layers = ResidualLSTM(128, 128, 2)
    memory = (torch.randn(7, 2, 128), torch.randn(7, 2, 128))
    x = torch.randn(7, 128)
    results = []
    for number in (0, 1, 2):
        layers.threads = number
        output, after = layers.step(x, memory)
        results.append([output.detach(), *(part.detach() for part in after)])
    assert same_bits(*results[1:])
    for one, other in zip(*results[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_policy_decides_and_learns_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WORK", 1_000_000)
    envs = 64
    network = NetworkConfig(hidden=256, features=256, slot_features=64)
    observation, masks, noise = parts(envs, 2)
    results = []
    for number in (1, 2):
        policy = RecurrentPolicy(PolicyConfig(network=network), some_slots(2), seed=0)
        rollout = random_rollout(policy, 5, envs, seed=0)
        policy.use_threads_(number)
        view = View(None, observation, masks, noise, batch_size=[envs])
        decision, memory = policy.act(view, policy.start(envs, CPU))
        Learner(policy, PPOConfig(), total_updates=9, seed=0).update(rollout)
        parameters = [parameter.detach() for parameter in policy.parameters()]
        results.append([decision.log_probs, decision.value, *memory, *parameters])
        # with several threads both were proven
        assert (policy.threads, len(policy.unproven)) == (number, 2 if number == 1 else 0)
    assert same_bits(*results)


def test_threads_that_give_other_bits_are_not_used() -> None:
    policy = small_policy(1)
    policy.use_threads_(2)
    policy.prove_threads_("act", lambda: [torch.tensor([1.0])])
    assert policy.threads == 2
    other = [torch.tensor([torch.nan]), torch.tensor([1.0 + 1e-7])]
    policy.prove_threads_("evaluate", lambda: [other[policy.threads - 1]])
    assert {part.threads for part in policy.modules() if isinstance(part, Product)} == {1}
    policy.use_threads_(2)
    policy.prove_threads_("evaluate", lambda: [other[policy.threads - 1]])  # asked once
    assert policy.threads == 2
    elsewhere = policy.for_slots(some_slots(2))  # and once for hosts with other slots
    elsewhere.prove_threads_("evaluate", lambda: [other[policy.threads - 1]])
    assert policy.threads == 1
