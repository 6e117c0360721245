"""Masks, gates, ramps, cooling, Shapley estimates and outcomes right at their limits."""

import math

import pytest
import torch
from env_records import empty_state
from reward_cases import make_inputs, make_settings
from torch import Tensor

from esper_soa.env.alpha import advance_ramp, curve_progress, retarget
from esper_soa.env.config import MIN_SHAPLEY_SAMPLES, GatesConfig, LifecycleConfig, RewardConfig
from esper_soa.env.gates import check_gates
from esper_soa.env.lifecycle import empty_slots, idle_ramp, tick
from esper_soa.env.masks import action_masks
from esper_soa.env.observation import observe
from esper_soa.env.outcome import SUCCESS_ACCURACY, outcomes, stability
from esper_soa.env.reward_modes import score
from esper_soa.env.shapley import estimate, exact_shapley, sampled_shapley
from esper_soa.nets import blend
from esper_soa.state import Ramp, Slots
from esper_soa.vocabulary import CNN_BLUEPRINTS, NUM_BLUEPRINTS, AlphaMode, Blend, Curve, Op, Stage

CPU = torch.device("cpu")


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeds(stages: list[int], **fields: float) -> Slots:
    """One env with these stages; other fields the same in every slot."""
    slots = empty_slots(1, len(stages), CPU)
    given = {name: torch.full_like(slots.get(name), value) for name, value in fields.items()}
    return slots.replace(stage=torch.tensor([stages]), **given)


# --- masks


@pytest.mark.parametrize("max_seeds", [1, 2, 3])
def test_germinating_is_legal_until_there_are_as_many_seeds_as_allowed(max_seeds: int) -> None:
    allowed = torch.ones(NUM_BLUEPRINTS, dtype=torch.bool)
    for count in range(4):
        slots = seeds([Stage.HOLDING] * count + [Stage.EMPTY] * (4 - count))
        masks = action_masks(slots, idle_ramp(1, 4, CPU), allowed, max_seeds, LifecycleConfig())
        assert masks.op[0, Op.GERMINATE].item() is (count < max_seeds)
        assert masks.slot_by_op[0, Op.GERMINATE].tolist() == [False] * count + [
            count < max_seeds
        ] * (4 - count)


@pytest.mark.parametrize("min_age", [0, 1, 5])
def test_pruning_is_legal_from_the_age_that_is_set(min_age: int) -> None:
    lifecycle = LifecycleConfig(min_prune_age=min_age)
    allowed = torch.ones(NUM_BLUEPRINTS, dtype=torch.bool)
    for age in range(7):
        masks = action_masks(
            seeds([Stage.TRAINING], seed_age=age), idle_ramp(1, 1, CPU), allowed, 0, lifecycle
        )
        assert masks.op[0, Op.PRUNE].item() is (age >= min_age)


def test_heads_have_as_many_choices_as_they_have_values_and_only_blueprints_that_exist_are_legal() -> (  # noqa: E501
    None
):
    allowed = torch.zeros(NUM_BLUEPRINTS, dtype=torch.bool)
    allowed[list(CNN_BLUEPRINTS[:2])] = True
    masks = action_masks(
        seeds([Stage.EMPTY] * 2), idle_ramp(1, 2, CPU), allowed, 0, LifecycleConfig()
    )
    names = (
        "slot",
        "blueprint",
        "style",
        "tempo",
        "alpha_target",
        "alpha_speed",
        "alpha_curve",
        "op",
    )
    assert [masks.get(name).shape[1] for name in names] == [2, 13, 4, 3, 3, 4, 5, 6]
    assert masks.blueprint.nonzero()[:, 1].tolist() == list(CNN_BLUEPRINTS[:2])
    assert all(
        masks.get(name).all() for name in ("slot", "style", "tempo", "alpha_target", "alpha_speed")
    )
    waiting = action_masks(
        seeds([Stage.FOSSILIZED]), idle_ramp(1, 1, CPU), allowed, 0, LifecycleConfig()
    )
    assert waiting.style[0].nonzero().flatten().tolist() == [2]  # the placeholders
    assert waiting.alpha_target[0].nonzero().flatten().tolist() == [2]


# --- gates


@pytest.mark.parametrize("age", [0, 1, 3])
def test_gates_open_at_the_age_that_is_set(age: int) -> None:
    ramp = idle_ramp(1, 1, CPU)
    full = ramp.replace(alpha=torch.ones_like(ramp.alpha), target=torch.ones_like(ramp.target))
    for permissive in (True, False):
        cfg = GatesConfig(permissive=permissive, min_blending_steps=age, min_gradient_health=0.5)
        for now in range(5):
            learner = seeds(
                [Stage.TRAINING],
                stage_age=now,
                gradient_measured=True,
                gradient_health=0.5,
                gradient_ratio_known=True,
                gradient_ratio=0.1,
                accuracy_current=0.5,
            )
            found = check_gates(learner, full, cfg)
            assert found.g2.item() is (now >= age)
            assert found.g3.item() is (permissive or now >= age)


@pytest.mark.parametrize(
    ("field", "limit"), [("gradient_ratio", 0.1), ("accuracy_current", 0.5), ("contribution", 1.0)]
)
def test_strict_gates_take_what_is_right_at_their_limit(field: str, limit: float) -> None:
    cfg = GatesConfig(permissive=False, min_blending_steps=0)
    fields = {
        "gradient_ratio_known": True,
        "gradient_ratio": 1.0,
        "accuracy_current": 9.0,
        "contribution": 9.0,
        "contribution_known": True,
    }
    for value, passes in ((limit, True), (math.nextafter(limit, 0.0), False)):
        found = check_gates(
            seeds([Stage.HOLDING], **(fields | {field: value})), idle_ramp(1, 1, CPU), cfg
        )
        assert (found.g5 if field == "contribution" else found.g2).item() is passes


# --- ramps and cooling


@pytest.mark.parametrize("curve", [Curve.LINEAR, Curve.COSINE, Curve.SIGMOID])
@pytest.mark.parametrize("steepness", [0.1, 6.0, 12.0, 24.0])
def test_a_curve_starts_at_0_ends_at_1_and_goes_no_further(curve: int, steepness: float) -> None:
    t = doubles(-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.05, 9.0)
    way = curve_progress(t, torch.full_like(t, curve).long(), torch.full_like(t, steepness))
    assert way[[0, 1]].tolist() == [0.0, 0.0]
    assert way[[5, 6, 7]].tolist() == pytest.approx([1.0] * 3, abs=1e-15)
    assert way[3].item() == pytest.approx(0.5)
    assert (way[2] + way[4]).item() == pytest.approx(1.0)


def ramp_to(target: float, length: int, alpha: float = 0.25) -> Ramp:
    ramp = idle_ramp(1, 1, CPU)
    ramp = ramp.replace(alpha=torch.full_like(ramp.alpha, alpha))
    one = torch.ones(1, 1, dtype=torch.int64)
    return retarget(ramp, one > 0, one * target, one * length, one * Curve.LINEAR, one * 12.0)


@pytest.mark.parametrize(
    ("target", "length", "mode"),
    [
        (0.5, 3, AlphaMode.UP),
        (0.125, 3, AlphaMode.DOWN),
        (0.25, 3, AlphaMode.HOLD),
        (0.5, 0, AlphaMode.HOLD),
        (2.0, 3, AlphaMode.UP),
        (-1.0, -3, AlphaMode.HOLD),
    ],
)
def test_a_new_target_is_clamped_and_decides_the_way(target: float, length: int, mode: int) -> None:
    ramp = ramp_to(target, length)
    assert ramp.mode.item() == mode
    assert ramp.target.item() == min(1.0, max(0.0, target))
    assert ramp.length.item() == max(0, length)
    assert ramp.alpha.item() == (ramp.target.item() if length <= 0 else 0.25)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_ramp_arrives_with_its_last_tick_and_then_rests(length: int) -> None:
    ramp = ramp_to(0.75, length)
    arrivals = []
    for number in range(1, length + 3):
        ramp, reached = advance_ramp(ramp, torch.ones(1, 1, dtype=torch.bool))
        arrivals.append(reached.item())
        assert ramp.alpha.item() == pytest.approx(0.25 + 0.5 * min(1, number / length))
    assert arrivals == [False] * (length - 1) + [True, False, False]
    assert (ramp.alpha.item(), ramp.done.item(), ramp.mode.item()) == (0.75, length, AlphaMode.HOLD)


@pytest.mark.parametrize("embargo", [1, 2, 5])
def test_a_pruned_slot_cools_for_its_embargo_and_two_ticks_around_it(embargo: int) -> None:
    slots = seeds([Stage.PRUNED])
    ramp = idle_ramp(1, 1, CPU)
    stages = []
    for _ in range(embargo + 3):
        slots, ramp = tick(slots, ramp, LifecycleConfig(embargo_steps=embargo), GatesConfig())
        stages.append(slots.stage.item())
    assert stages == [Stage.EMBARGOED] * embargo + [Stage.RESETTING, Stage.EMPTY, Stage.EMPTY]


def test_an_empty_slot_remembers_nothing_and_is_what_a_cooled_slot_becomes() -> None:
    slots = empty_slots(1, 1, CPU)
    ramp = idle_ramp(1, 1, CPU)
    set_ = {
        "stage": Stage.EMPTY,
        "blueprint": -1,
        "blend": Blend.ADD,
        "style": 2,
        "tempo": 5,
        "alpha_goal": 1.0,
    }
    for name, value in slots.items():
        assert value.item() == set_.get(name, 0), name
    for name, value in ramp.items():
        assert value.item() == {"curve": Curve.LINEAR, "steepness": 12.0}.get(name, 0), name
    used = {name: torch.ones_like(value) for name, value in slots.items()} | {
        "stage": torch.full_like(slots.stage, Stage.RESETTING)
    }
    after, at_rest = tick(
        slots.replace(**used),
        ramp.replace(**{name: torch.ones_like(value) for name, value in ramp.items()}),
        LifecycleConfig(),
        GatesConfig(),
    )
    assert all(torch.equal(after.get(name), value) for name, value in slots.items())
    assert all(torch.equal(at_rest.get(name), value) for name, value in ramp.items())


# --- ways into the host


def test_blends_mix_multiply_and_gate_by_the_numbers() -> None:
    host, seed, seen = (
        torch.full((1, 2, 1, 1), value, dtype=torch.float64) for value in (2.0, 5.0, 3.0)
    )
    alpha = doubles(0.5, 0.25)  # of two networks with a channel each
    assert blend.add(host, seed, alpha).flatten().tolist() == [3.5, 2.75]
    expected = [2 * (1 + share * math.tanh(2.0)) for share in (0.5, 0.25)]
    assert blend.multiply(host, seed, seen, alpha).flatten().tolist() == pytest.approx(expected)
    gates = doubles(0.5, 1.0)[None]
    assert blend.gate(host, seed, gates, alpha).flatten().tolist() == [2.75, 2.75]


# --- rewards of a host that neither gained nor lost


@pytest.mark.parametrize(("total", "paid"), [(0.0, True), (-1e-9, False)])
def test_fossilising_is_refused_its_attribution_only_where_all_seeds_together_do_harm(
    total: float, paid: bool
) -> None:
    inputs = make_inputs(
        op=Op.FOSSILIZE,
        stage=Stage.HOLDING,
        contribution=2.0,
        total=total,
        val_accuracy=62.0,
        accuracy_germination=60.0,
        step=40,
        seed_age=20,
    )
    assert (score(inputs, RewardConfig())[0].attribution.item() > 0) is paid


# --- Shapley estimates


def test_an_estimate_is_the_mean_of_pairs_with_the_error_of_a_mean_and_an_interval_of_students_t() -> (  # noqa: E501
    None
):
    # Two players, six observations: 1 .. 6 with mean 3.5 and variance 17.5 / 5; twice of it for the
    # second player.
    observations = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None] * doubles(1.0, 2.0)
    sample = estimate(observations, 7)
    error = (3.5 / 6) ** 0.5
    assert sample.value.tolist() == [3.5, 7.0]
    assert sample.standard_error.tolist() == pytest.approx([error, 2 * error])
    # One in a hundred is shared out over two players and two sides: 0.25 % on each; t with 5
    # degrees is 4.7733
    reach = 4.7733406 * error  # the quantile of 5 degrees of freedom at 0.9975
    assert sample.lower.tolist() == pytest.approx([3.5 - reach, 7 - 2 * reach])
    assert sample.upper.tolist() == pytest.approx([3.5 + reach, 7 + 2 * reach])
    assert sample.num_subsets == 7


@pytest.mark.parametrize("players", [1, 12])
def test_exact_values_are_there_for_one_player_and_for_twelve(players: int) -> None:
    subsets = (torch.arange(2**players)[:, None] >> torch.arange(players)) & 1 == 1
    weights = torch.arange(1.0, players + 1, dtype=torch.float64)
    torch.testing.assert_close(exact_shapley(subsets, subsets.double() @ weights), weights)


@pytest.mark.parametrize("players", [1, 62])
def test_sampled_values_are_there_for_one_player_and_for_sixty_two(players: int) -> None:
    weights = torch.arange(1.0, players + 1, dtype=torch.float64)
    sample = sampled_shapley(
        lambda subsets: subsets.double() @ weights, players, MIN_SHAPLEY_SAMPLES
    )
    torch.testing.assert_close(sample.value, weights)


# --- observation and outcome


def observed(**fields: float) -> Tensor:
    state = empty_state(1, 1, 10)
    return observe(state.replace(slots=seeds([Stage.BLENDING], **fields)), 10).features[0, 23:]


@pytest.mark.parametrize(
    ("points", "seen"), [(5.0, 0.5), (10.0, 1.0), (11.0, 1.0), (-10.0, -1.0), (-25.0, -1.0)]
)
def test_contributions_are_seen_up_to_ten_points(points: float, seen: float) -> None:
    assert observed(contribution=points)[12].item() == seen
    assert observed(contribution_velocity=points)[13].item() == seen


@pytest.mark.parametrize(("age", "seen"), [(0, 0.0), (5, 0.5), (10, 1.0), (11, 1.0)])
def test_ages_are_seen_as_shares_of_the_episode(age: int, seen: float) -> None:
    assert observed(stage_age=age)[28].item() == pytest.approx(seen)
    assert observed(seed_age=age)[30].item() == pytest.approx(seen)


def test_freshness_fades_by_half_a_percent_an_env_step_and_is_minus_1_where_nothing_was_measured() -> (  # noqa: E501
    None
):
    assert observed()[29].item() == -1.0
    for age in (0, 1, 10):
        fresh = observed(contribution_known=True, contribution_age=age)[29].item()
        assert fresh == pytest.approx(0.995**age)


@pytest.mark.parametrize(("accuracy", "success"), [(79.999, False), (80.0, True), (80.001, True)])
def test_success_begins_at_eighty_percent(accuracy: float, success: bool) -> None:
    assert SUCCESS_ACCURACY == 80.0
    state = empty_state(1, 3, 4)
    state = state.replace(signals=state.signals.replace(val_accuracy=doubles(accuracy)))
    assert outcomes(
        state, torch.zeros(1, 20).double(), make_settings().counts
    ).success.tolist() == [success]


@pytest.mark.parametrize(
    ("steps", "variance"), [(0, 0.0), (1, 0.0), (2, 4.0), (3, 32 / 9), (4, 3.0)]
)
def test_stability_is_of_a_population_and_of_rewards_received_alone(
    steps: int, variance: float
) -> None:
    # Of 3, 3, 7, 3 (mean 4): 3; of 3, 7, 3: 32 / 9; of 7, 3: 4; the 100 was never received
    rewards = doubles(100.0, 3.0, 3.0, 7.0, 3.0)[None]
    assert stability(rewards, torch.tensor([steps])).tolist() == pytest.approx([1 / (1 + variance)])
