"""Every column of every table says what the tensors said that training used."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_soa.config.env import REWARD_TERMS
from esper_soa.env.legal import head_masks, relevant_heads
from esper_soa.env.parameters import flop_per_image, occupied_params, total_params
from esper_soa.lab.telemetry.recorder import TABLE_MAKERS
from esper_soa.lab.telemetry.rows import RoundRecord, seed_numbers
from esper_soa.lab.telemetry.schema import TABLES
from esper_soa.lab.telemetry.table_files import table_bytes, table_from
from esper_soa.nets.model.flops import training_flop
from esper_soa.vocabulary import (
    BLEND_NAMES,
    CURVE_NAMES,
    HEAD_NAMES,
    OP_NAMES,
    STAGE_NAMES,
    STYLE_NAMES,
    Stage,
)
from tests.builders.recorded_world import TRAIN_SAMPLES, Recorded, record

STEPS = 36


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record(seed=3, steps=STEPS)


def read(recorded: Recorded, table: str) -> dict[str, np.ndarray]:
    """The table as it comes back from its file."""
    content = table_bytes(TABLES[table], TABLE_MAKERS[table](recorded.played), {})
    return table_from(content, TABLES[table]).values


def assert_column(
    column: np.ndarray, expected: list[Tensor], known: list[Tensor] | None = None
) -> None:
    """`column` holds the tensors of all env-steps in order; null where they are not `known`."""
    wanted = torch.stack(expected).flatten().double().numpy()
    if known is not None:
        wanted = np.where(torch.stack(known).flatten().numpy(), wanted, np.nan)
    np.testing.assert_array_equal(column.astype(np.float64), wanted)


def names_of(codes: list[Tensor], names: tuple[str, ...], known: list[Tensor]) -> list[str | None]:
    """Names by code, None where nothing is known."""
    both = (torch.stack(one).flatten().tolist() for one in (codes, known))
    return [names[code] if there else None for code, there in zip(*both, strict=True)]


def test_measurements_and_rewards_are_those_of_training(recorded: Recorded) -> None:
    table = read(recorded, "steps")
    steps = recorded.steps
    assert any(step.before.guard.panic.any() for step in steps), "no panic: the test says less"
    assert_column(table["accuracy"], [step.view.state.signals.val_accuracy for step in steps])
    for name in ("val_loss", "train_loss", "train_accuracy"):
        assert_column(table[name], [step.trusted.get(name) for step in steps])
    assert_column(table["reward"], [step.result.terms.total for step in steps])
    for name in REWARD_TERMS:
        assert_column(table[f"reward_{name}"], [step.result.terms.get(name) for step in steps])
    attribution = [step.observed.attribution for step in steps]
    totals, known = zip(*((one.total, one.total_known) for one in attribution), strict=True)
    assert_column(table["total_contribution"], totals, known)
    assert_column(table["committed_accuracy"], [one.committed for one in attribution])
    assert_column(table["subsets"], [(step.trusted.subset >= 0).sum(1) for step in steps])
    assert_column(table["panic"], [step.before.guard.panic for step in steps])


def test_sizes_and_costs_are_those_that_rent_and_metrics_go_by(recorded: Recorded) -> None:
    counts = recorded.rules.reward.counts
    flop = training_flop(recorded.rules.setup.shape, torch.device("cpu"))
    slots = [step.view.state.slots for step in recorded.steps]
    table = read(recorded, "steps")
    assert_column(table["parameters"], [total_params(one, counts) for one in slots])
    assert_column(table["train_flop"], [TRAIN_SAMPLES * flop_per_image(one, flop) for one in slots])
    occupied = [occupied_params(one, counts) for one in slots]
    assert_column(read(recorded, "slots")["parameters"], occupied)


def test_actions_are_told_by_name_where_they_matter(recorded: Recorded) -> None:
    table = read(recorded, "steps")
    actions = [step.action for step in recorded.steps]
    matters = {
        name: [relevant_heads(one.op)[:, place] for one in actions]
        for place, name in enumerate(HEAD_NAMES)
    }
    for name, names in (
        ("slot", recorded.legend.slots),
        ("blueprint", recorded.legend.blueprints),
        ("style", STYLE_NAMES),
        ("alpha_curve", CURVE_NAMES),
        ("op", OP_NAMES),
    ):
        wanted = names_of([one.get(name) for one in actions], names, matters[name])
        assert table[name].tolist() == wanted, name
    tempo = torch.tensor([3, 5, 8])
    speed = torch.tensor([0, 3, 5, 8])
    assert_column(table["tempo"], [tempo[one.tempo] for one in actions], matters["tempo"])
    speeds = [speed[one.alpha_speed] for one in actions]
    assert_column(table["alpha_speed"], speeds, matters["alpha_speed"])
    target = torch.tensor([0.5, 0.7, 1.0], dtype=torch.float64)
    targets = [target[one.alpha_target] for one in actions]
    assert_column(table["alpha_target"], targets, matters["alpha_target"])
    outcome = [step.result.outcome for step in recorded.steps]
    everywhere = [torch.ones_like(one.op, dtype=torch.bool) for one in actions]
    wanted = names_of([one.effective_op for one in outcome], OP_NAMES, everywhere)
    assert table["effective_op"].tolist() == wanted
    assert_column(table["success"], [one.success for one in outcome])


def test_masks_and_probabilities_are_those_of_the_policy(recorded: Recorded) -> None:
    table = read(recorded, "steps")
    facts = recorded.facts
    for place, name in enumerate(HEAD_NAMES):
        likely = [one.decision.log_probs[:, place].exp() for one in facts]
        matters = [relevant_heads(one.decision.action.op)[:, place] for one in facts]
        both = (torch.stack(one).flatten().numpy() for one in (matters, likely))
        wanted = np.where(*both, np.nan)
        np.testing.assert_allclose(table[f"{name}_probability"], wanted, rtol=1e-6)
    assert_column(table["value"], [one.decision.value for one in facts])
    legal = torch.stack([step.view.masks.op for step in recorded.steps]).flatten(0, 1)
    assert table["ops_legal"].tolist() == (legal * (1 << torch.arange(6))).sum(1).tolist()
    choices = read(recorded, "choices")
    masks = [head_masks(step.view.masks, step.action.op) for step in recorded.steps]
    for name in HEAD_NAMES:
        wanted = torch.cat([one[name] for one in masks])
        np.testing.assert_array_equal(choices[f"{name}_legal"], wanted.numpy())
    together = np.concatenate([choices[f"{name}_probability"] for name in HEAD_NAMES], 1)
    np.testing.assert_array_equal(together, torch.cat([one.probabilities for one in facts]))


def test_slots_are_those_that_were_trained_and_measured(recorded: Recorded) -> None:
    table = read(recorded, "slots")
    attribution = [step.observed.attribution for step in recorded.steps]
    slots = [step.view.state.slots for step in recorded.steps]
    taken = [one.stage != Stage.EMPTY for one in slots]
    everywhere = [torch.ones_like(one) for one in taken]
    for name, names, known in (
        ("stage", STAGE_NAMES, everywhere),
        ("blueprint", recorded.legend.blueprints, taken),
        ("blend", BLEND_NAMES, taken),
    ):
        assert table[name].tolist() == names_of([one.get(name) for one in slots], names, known)
    for name in ("stage_age", "alpha", "contribution_velocity", "escrow"):
        assert_column(table[name], [one.get(name) for one in slots])
    assert_column(table["seed_age"], [one.seed_age for one in slots], taken)
    assert_column(table["alpha_target"], [step.view.state.ramp.target for step in recorded.steps])
    assert_column(table["accuracy_gain"], [one.total_improvement for one in slots], taken)
    measured = [one.measured for one in attribution]
    for field in ("contribution", "interaction_sum", "shapley", "shapley_error"):
        column = table[field.removesuffix("_sum")]
        assert_column(column, [one.get(field) for one in attribution], measured)
    gradients = [step.trusted.gradients.measured for step in recorded.steps]
    for name in ("norm", "health", "vanishing", "exploding", "ratio"):
        name = f"gradient_{name}"
        assert_column(table[name], [one.get(name) for one in slots], gradients)


def test_a_ratio_of_gradients_is_null_where_it_is_not_known(recorded: Recorded) -> None:
    numbers = recorded.played.numbers.copy()
    place = recorded.played.places["slot.gradient_ratio_known"]
    numbers[::2, :, place] = 0
    rows = TABLE_MAKERS["slots"](recorded.played._replace(numbers=numbers))
    known = numbers[:, :, place].astype(bool) & recorded.played.flag("slot.gradient_measured")
    assert 0 < known.sum() < known.size
    ratios = rows["gradient_ratio"]
    assert isinstance(ratios, np.ndarray)
    np.testing.assert_array_equal(np.isnan(ratios), ~known.flatten())


def test_a_seed_that_was_born_in_env_steps_that_are_missing_is_another_than_its_predecessor(
    recorded: Recorded,
) -> None:
    """Env-steps 5 to 8 are missing: in the first slot a seed has died and another is there, as one
    that grows no younger tells; in the second the same has grown older.
    """
    stages = [[Stage.TRAINING, Stage.BLENDING], [Stage.TRAINING, Stage.HOLDING]]
    ages = [[3, 3], [1, 8]]
    numbers = np.stack(
        [np.concatenate((*both, both[0])) for both in zip(stages, ages, strict=True)]
    )
    names = ("slot.stage", "slot.seed_age", "slot.stage_after")
    places = {name: slice(2 * place, 2 * place + 2) for place, name in enumerate(names)}
    kept = RoundRecord(recorded.legend, 1, np.array([4, 9]), numbers[:, None], places)
    before, after = seed_numbers(kept)
    assert before.tolist() == after.tolist() == [[[1, 2]], [[3, 2]]]


def test_subsets_are_those_that_were_validated(recorded: Recorded) -> None:
    table = read(recorded, "subsets")
    rows = []
    for step, one in enumerate(recorded.steps, 1):
        for at in map(tuple, (one.trusted.subset >= 0).nonzero().tolist()):
            found = (part[at].item() for part in (one.trusted.subset, one.trusted.accuracy))
            rows.append((step, at[0], *found))
    columns = (table[name].tolist() for name in ("step", "env", "subset", "accuracy"))
    assert list(zip(*columns, strict=True)) == rows


def test_a_policy_that_does_not_learn_has_no_probabilities() -> None:
    scripted = record(seed=1, num_envs=2, steps=8, learns=False)
    steps = read(scripted, "steps")
    choices = read(scripted, "choices")
    assert np.isnan(steps["value"]).all()
    assert all(np.isnan(steps[f"{name}_probability"]).all() for name in HEAD_NAMES)
    assert all(choices[f"{name}_probability"].shape == (16, 0) for name in HEAD_NAMES)
    assert choices["op_legal"].any()


def test_sampled_shapley_values_of_many_seeds_are_null_unless_they_are_sampled() -> None:
    crowd = record(seed=2, num_envs=2, num_slots=10, steps=64, by_itself=True)
    measured = torch.stack([step.observed.attribution.measured for step in crowd.steps])
    many = (measured.sum(2, keepdim=True) > 4) & measured
    assert many.any(), "never more than four seeds at once"
    rows = TABLE_MAKERS["slots"](crowd.played)["shapley"]
    assert isinstance(rows, np.ndarray)
    assert (np.isnan(rows) == (~measured | many).flatten().numpy()).all()
    sampled = replace(crowd.legend, sampled_shapley=True)
    rows = TABLE_MAKERS["slots"](crowd.played._replace(legend=sampled))["shapley"]
    assert isinstance(rows, np.ndarray)
    assert (np.isnan(rows) == ~measured.flatten().numpy()).all()
