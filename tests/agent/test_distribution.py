import torch

from esper_soa.agent.distribution import choose, entropy, masked_log_probs
from esper_soa.env.legal import available_heads, head_masks, relevant_heads
from esper_soa.state import Masks, chosen
from esper_soa.vocabulary import HEAD_NAMES, Op, head_sizes


def probabilities(logits: list[float], mask: list[bool], floor: float) -> torch.Tensor:
    return masked_log_probs(torch.tensor(logits), torch.tensor(mask), floor).exp()


def test_the_floor_mixes_with_the_uniform_over_legal_choices():
    logits = torch.tensor([0.95, 0.01, 0.01, 0.01, 0.01, 0.01]).log().tolist()
    # n f = 0.9: 0.1 * 0.95 + 0.15 and 0.1 * 0.01 + 0.15
    expected = torch.tensor([0.245, 0.151, 0.151, 0.151, 0.151, 0.151])
    torch.testing.assert_close(probabilities(logits, [True] * 6, 0.15), expected)


def test_illegal_choices_have_probability_zero_and_do_not_count_for_the_floor():
    # two legal: p = sigmoid(6) = 0.99752738, q = 0.7 p + 0.15
    actual = probabilities([3.0, 50.0, -3.0], [True, False, True], 0.15)
    torch.testing.assert_close(actual, torch.tensor([0.84826916, 0.0, 0.15173084]))
    assert actual[1] == 0.0


def test_a_floor_that_would_take_everything_is_cut_to_its_share():
    # n = 4: f = 0.99 / 4 = 0.2475, so the likeliest gets 0.01 + 0.2475
    actual = probabilities([100.0, 0.0, 0.0, 0.0], [True] * 4, 0.5)
    torch.testing.assert_close(actual, torch.tensor([0.2575, 0.2475, 0.2475, 0.2475]))


def test_without_a_floor_the_least_likely_keep_their_log_probability_and_its_gradient():
    logits = torch.tensor([[0.0, -200.0]], requires_grad=True)
    floors = torch.tensor([[0.0]])
    log_probs = masked_log_probs(logits, torch.tensor([[True, True]]), floors)
    assert log_probs[0].tolist() == [0.0, -200.0]
    (gradient,) = torch.autograd.grad(log_probs[0, 1], logits)
    assert gradient[0].tolist() == [-1.0, 1.0]


def test_a_choice_at_the_floor_keeps_its_gradient():
    logits = torch.tensor([4.0, -4.0], requires_grad=True)
    masked_log_probs(logits, torch.tensor([True, True]), 0.15)[1].backward()
    assert logits.grad is not None
    assert logits.grad[1] > 1e-4


def test_entropy_is_one_for_the_uniform_and_exactly_zero_for_one_choice():
    mask = torch.tensor([[True, True, True], [True, False, True], [False, True, False]])
    log_probs = masked_log_probs(torch.zeros(3, 3), mask, 0.0)
    actual = entropy(log_probs, mask)
    torch.testing.assert_close(actual, torch.tensor([1.0, 1.0, 0.0]))
    assert actual[2] == 0.0
    assert log_probs[2, 1] == 0.0


def test_choose_never_takes_an_illegal_choice_even_at_the_ends():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4000, 13, generator=generator) < 0.4
    mask[:, 5] = True
    log_probs = masked_log_probs(10 * torch.randn(4000, 13, generator=generator), mask, 0.0)
    for noise in (0.0, 0.5, 1 - 2**-24, 1.0):  # the last as if sums were rounded
        picked = choose(log_probs, torch.full((4000,), noise))
        assert mask.gather(1, picked.unsqueeze(1)).all()
        assert (chosen(log_probs, picked) > -200).all()


def full_masks(num_envs: int, num_slots: int) -> Masks:
    heads = {
        name: torch.ones(num_envs, size, dtype=torch.bool)
        for name, size in zip(HEAD_NAMES, head_sizes(num_slots), strict=True)
    }
    heads["blueprint"][:, 0] = False
    by_op = torch.zeros(num_envs, 6, num_slots, dtype=torch.bool)
    by_op[:, Op.WAIT, 1:] = True
    by_op[:, Op.PRUNE, 2] = True
    by_op[:, Op.GERMINATE, :2] = True
    return Masks(**heads, slot_by_op=by_op, batch_size=[num_envs])


def test_irrelevant_heads_keep_only_their_placeholder():
    legal = head_masks(full_masks(1, 3), torch.tensor([Op.WAIT]))
    # first legal slot, NOOP, SIGMOID_ADD, STANDARD, FULL, INSTANT, LINEAR
    expected = {
        "slot": 1,
        "blueprint": 0,
        "style": 2,
        "tempo": 1,
        "alpha_target": 2,
        "alpha_speed": 0,
        "alpha_curve": 0,
    }
    for name, choice in expected.items():
        assert legal[name][0].nonzero().flatten().tolist() == [choice], name
    assert legal["op"].all()
    assert tuple(legal) == HEAD_NAMES


def test_relevant_heads_keep_their_own_masks_and_slots_follow_the_op():
    legal = head_masks(full_masks(2, 3), torch.tensor([Op.GERMINATE, Op.PRUNE]))
    assert legal["slot"].tolist() == [[True, True, False], [False, False, True]]
    assert legal["blueprint"].sum(-1).tolist() == [12, 1]
    assert legal["alpha_speed"].sum(-1).tolist() == [1, 4]


def names_where(heads: torch.Tensor) -> set[str]:
    return {name for name, one in zip(HEAD_NAMES, heads.tolist(), strict=True) if one}


def test_relevance_follows_the_op_and_availability_its_legal_ops():
    expected = {
        Op.WAIT: {"op"},
        Op.GERMINATE: {"slot", "blueprint", "style", "tempo", "alpha_target", "op"},
        Op.SET_ALPHA_TARGET: {"slot", "style", "alpha_target", "alpha_speed", "alpha_curve", "op"},
        Op.PRUNE: {"slot", "alpha_speed", "alpha_curve", "op"},
        Op.FOSSILIZE: {"slot", "op"},
        Op.ADVANCE: {"slot", "op"},
    }
    known = set[str]().union(*expected.values())
    for op, names in expected.items():
        assert names_where(relevant_heads(torch.tensor(op))) & known == names
    legal = torch.zeros(6, dtype=torch.bool)
    legal[[Op.WAIT, Op.PRUNE, Op.FOSSILIZE]] = True
    assert names_where(available_heads(legal)) & known == expected[Op.PRUNE]


def test_choose_inverts_the_cumulative_distribution_and_takes_the_later_at_a_border():
    log_probs = torch.tensor([0.25, 0.5, 0.0, 0.25]).log()  # exact in binary
    noise = torch.tensor([0.0, 0.25 - 2**-24, 0.25, 0.75 - 2**-24, 0.75, 1 - 2**-24])
    assert choose(log_probs.expand(6, 4), noise).tolist() == [0, 0, 1, 1, 3, 3]
