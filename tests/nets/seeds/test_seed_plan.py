"""What the running seeds of active seeds do, worked out by hand, and which of them run together."""

import numpy as np
import torch

from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.nets.seeds.seed_plan import THROUGH, Group, SeedPlan, groups_of, seed_plan
from esper_soa.vocabulary import Blend, Blueprint, Stage
from tests.builders.tiny_world import seeds_where

DETACHED = (Stage.TRAINING, Stage.BLENDING)


def active_seeds() -> ActiveSeeds:
    """Four envs with two slots; slot 1 is empty but in env 3."""
    stage = np.array([Stage.TRAINING, Stage.BLENDING, Stage.BLENDING, Stage.FOSSILIZED])
    stages = np.stack([stage, np.full(4, Stage.EMPTY)], axis=1)
    stages[3, 1] = Stage.BLENDING
    found = seeds_where(stages != Stage.EMPTY, stages, Blueprint.NORM, Blend.GATE)
    found.frozen[2, 0] = True
    found.visible[1, 0] = False  # its ramp has not begun
    return found


def training_plan(seeds: ActiveSeeds) -> SeedPlan:
    return seed_plan(seeds, seeds.running, DETACHED)


def test_a_training_plan_says_what_every_running_seed_does() -> None:
    plan = training_plan(active_seeds())
    assert plan.running.tolist() == [[True, False], [True, False], [True, False], [True, True]]
    assert plan.blend[:, 0].tolist() == [THROUGH, Blend.GATE, Blend.GATE, Blend.GATE]
    assert plan.detached[:, 0].tolist() == [True, True, True, False]
    assert plan.frozen[:, 0].tolist() == [False, False, True, False]
    # a frozen seed has no gradient
    assert plan.measured[:, 0].tolist() == [True, True, False, False]


def test_in_validation_only_what_can_be_seen_runs() -> None:
    seeds = active_seeds()
    plan = seed_plan(seeds, seeds.visible, DETACHED)
    assert plan.running.tolist() == [[False, False], [False, False], [True, False], [True, True]]


def test_seeds_that_do_the_same_run_together_slot_by_slot() -> None:
    drawn = active_seeds()
    drawn.frozen[2, 0] = False  # envs 1 and 2 do the same now
    found = groups_of(training_plan(drawn), np.array([1, 2, 3]))
    facts = [group[:6] for group in found]
    norm = Blueprint.NORM
    assert facts == [
        (0, norm, Blend.GATE, False, False, False),
        (0, norm, Blend.GATE, True, False, True),
        (1, norm, Blend.GATE, True, False, True),
    ]
    assert [places(group.nets) for group in found] == [[2], [0, 1], [2]]  # within the chunk
    assert [group.rows.tolist() for group in found] == [[3], [1, 2], [3]]  # of all envs


def test_seeds_that_differ_in_one_fact_alone_do_not_run_together() -> None:
    stages = np.array([[Stage.BLENDING], [Stage.HOLDING], [Stage.TRAINING], [Stage.BLENDING]])
    blueprints = np.array([[4], [4], [5], [5]])
    seeds = seeds_where(np.ones((4, 1)), stages, blueprints, Blend.GATE)
    found = groups_of(seed_plan(seeds, seeds.running, ()), np.arange(4))
    assert sorted((*group[1:3], group.measured) for group in found) == [
        (4, Blend.GATE, False),
        (4, Blend.GATE, True),
        (5, THROUGH, True),
        (5, Blend.GATE, True),
    ]


def test_a_group_of_the_whole_chunk_names_no_places() -> None:
    (group,) = groups_of(training_plan(active_seeds()), np.array([1]))
    assert isinstance(group, Group)
    assert group.nets is None
    assert group.rows.tolist() == [1]


def places(nets: torch.Tensor | None) -> list[int]:
    assert nets is not None
    return nets.tolist()
