import torch
from torch import nn

from esper_soa.agent.optimizer import adam_state, adam_step, flatten, write_parameters_

YES = torch.tensor(True)
NO = torch.tensor(False)


def test_steps_are_those_of_the_library_optimizer():
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(5, generator=generator).requires_grad_()
    library = torch.optim.Adam([theirs], lr=0.01, eps=1e-5)
    ours = theirs.detach().clone()
    state = adam_state(ours)
    for _ in range(4):
        theirs.grad = torch.randn(5, generator=generator)
        library.step()
        ours, state = adam_step(ours, theirs.grad, state, 0.01, 1e-5, YES)
    torch.testing.assert_close(ours, theirs.detach())


def test_a_refused_step_changes_nothing_whatever_the_gradient_holds():
    start = torch.tensor([1.0, 2.0])
    before, state = adam_step(start, torch.tensor([1.0, -1.0]), adam_state(start), 0.1, 1e-5, YES)
    after, kept = adam_step(before, torch.tensor([float("nan"), 1.0]), state, 0.1, 1e-5, NO)
    assert torch.equal(after, before)
    assert all(torch.equal(new, old) for new, old in zip(kept, state, strict=True))


def test_parameters_survive_the_way_through_a_flat_vector():
    module = nn.Linear(3, 2)
    parameters = list(module.parameters())
    flat = flatten(parameters)
    assert flat.shape == (8,)
    write_parameters_(parameters, torch.arange(8.0))
    assert module.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert module.bias.tolist() == [6, 7]
    write_parameters_(parameters, flat)
    assert torch.equal(flatten(parameters), flat)
