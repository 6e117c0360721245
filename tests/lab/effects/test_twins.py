"""A twin is its source to the bit until their actions differ, on every engine; a row that sleeps
stays as it is.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.nets import DataConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.env import Env
from esper_soa.env.legal import obey
from esper_soa.lab.effects.twins import Twins, measured
from esper_soa.state import Action, EnvState
from esper_soa.system.errors import UserError
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import HEAD_NAMES, Op
from tests.builders.tiny_world import CPU, SMALL_TASK, tiny_settings

STEPS, WOKEN = 12, 4
SOURCE = 2  # of N = 3 envs
ROW, ASLEEP = 1, 0  # of two rows
TAKES_ALL = -1  # the slot of a twin that takes every action
# torch's batched operations round by the place of an env among others
ENGINES = {"native": {}, "torch": {"env_chunk": 1}}


def settings(engine: str = "native", **changed: object) -> TrainConfig:
    cfg = tiny_settings(3, 2, STEPS)
    compute = ComputeConfig(engine=engine, workers=1, **ENGINES[engine])
    return TrainConfig(**(vars(cfg) | {"compute": compute} | changed))


def row_of(weights: object, state: EnvState, row: int) -> list[Tensor]:
    """All that is known of a host but whether its episode is over."""
    parts = {name: part for name, part in state.items() if name != "ending"}
    leaves = [leaf for part in parts.values() for leaf in _leaves(part)]
    return [leaf[row].clone() for leaf in [*weights.values(True, True), *leaves]]  # type: ignore[attr-defined]


def _leaves(part: object) -> list[Tensor]:
    return [part] if isinstance(part, Tensor) else list(part.values(True, True))  # type: ignore[attr-defined]


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, theirs, strict=True)
    )


def play(cfg: TrainConfig, slot: int) -> list[tuple[bool, bool, bool]]:
    """By env-step from the first after the action on: whether the twin is its source to the bit,
    whether the row that sleeps is as it was, and whether the source has a seed in `slot` at work.
    """
    world = build_world(cfg, CPU)
    env = Env(world)
    env.begin_(0)
    twins = Twins(world, 2)
    policy = RandomPolicy()
    found = []
    before = row_of(twins.env.world.weights, twins.env.state, ASLEEP)
    fresh = torch.tensor([False, True])
    for step in range(STEPS):
        seen = env.observe_()
        if step > WOKEN:
            mine = twins.observe_(step)[ROW]
            state = twins.env.observed.view.state  # type: ignore[union-attr]
            theirs = row_of(world.weights, seen.view.state, SOURCE)
            is_twin = same(row_of(twins.env.world.weights, state, ROW), theirs)
            is_asleep = same(row_of(twins.env.world.weights, state, ASLEEP), before)
            assert torch.equal(mine, measured(world, seen.view.state)[SOURCE]) or not is_twin
            found.append((is_twin, is_asleep, bool(seen.view.state.slots.alpha[SOURCE].any())))
        action = policy.act(seen.view, ())[0].action
        if step == WOKEN:
            source = torch.tensor([ASLEEP, SOURCE])
            twins.wake_(seen, source, torch.tensor([TAKES_ALL, slot]), fresh=fresh)
        env.apply_action_(action)
        if step >= WOKEN:
            twins.act_(action)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_twin_that_takes_every_action_is_its_source_to_the_bit(engine: str) -> None:
    found = play(settings(engine), TAKES_ALL)
    assert len(found) == STEPS - WOKEN - 1
    assert [is_twin for is_twin, _, _ in found] == [True] * len(found)
    assert all(is_asleep for _, is_asleep, _ in found)
    assert any(blends for _, _, blends in found), "or it would be so without a twin"


def test_a_twin_that_spares_a_slot_is_another_host() -> None:
    found = play(settings(), 0)
    assert not all(is_twin for is_twin, _, _ in found)
    assert all(is_asleep for _, is_asleep, _ in found)


def test_the_slot_of_a_twin_stays_empty_however_often_its_source_fills_it() -> None:
    world = build_world(settings(), CPU)
    env = Env(world)
    env.begin_(0)
    twins = Twins(world, 2)
    source = torch.full((2,), SOURCE)
    filled = []
    for step in range(STEPS):
        seen = env.observe_()
        slots = seen.view.state.slots
        if step > 0:
            twins.observe_(step)
            assert twins.env.observed.view.state.slots.blueprint[0, 0] == -1  # type: ignore[union-attr]
        is_empty = slots.blueprint[:, 0] < 0
        filled.append(not is_empty[SOURCE])
        none = torch.zeros_like(slots.stage[:, 0])
        action = Action.from_dict(dict.fromkeys(HEAD_NAMES, none), batch_size=[3])
        op = torch.where(is_empty, Op.GERMINATE, Op.PRUNE)
        action = obey(action.replace(op=op, blueprint=none + 1), seen.view.masks)[0]
        if step < 2:  # the second wakes later, and spares another slot
            fresh = torch.tensor([step == 0, step == 1])
            twins.wake_(seen, source, torch.full((2,), step), fresh=fresh)
        env.apply_action_(action)
        twins.act_(action)
    assert filled.index(True) < filled.index(False, filled.index(True)) < STEPS - 1
    assert filled[-1]


def test_a_twin_has_the_settings_of_its_source() -> None:
    cfg = settings(task=replace(SMALL_TASK, host_lr="[0.01,0.02,0.03]"))
    assert all(is_twin for is_twin, _, _ in play(cfg, TAKES_ALL))


def test_data_that_envs_share_out_have_no_twins() -> None:
    data = DataConfig(name="synthetic", synthetic_train=16, synthetic_test=8, split=True)
    world = build_world(settings(data=data), CPU)
    with pytest.raises(UserError, match=r"data\.split"):
        Twins(world, 2)
