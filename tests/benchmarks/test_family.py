"""Schedules of the family, what is estimated from them, and the tables of its record."""

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.family import BEYOND, PARTS, beyond, settings_of
from benchmarks.family_tables import NAMES, family_lines
from benchmarks.schedules import (
    AXES,
    PRICE,
    SCHEDULES,
    Estimate,
    Plan,
    Schedule,
    coordinates,
    fit,
    settings_seen,
)
from esper_soa.env.env import Env
from esper_soa.env.topology import Topology
from esper_soa.env.world import World
from esper_soa.runtime.device import apply_threads
from esper_soa.state import View
from esper_soa.training.build import build_world
from esper_soa.training.collect import Player, Round, play_round
from esper_soa.training.progress import Progress
from esper_soa.vocabulary import BLUEPRINT_NAMES

SMALL = ("envs=4", "steps=24", "train_samples=32", "val_samples=32", "data.name=synthetic")


def test_there_are_64_schedules_and_seeds_are_used_once() -> None:
    assert len(SCHEDULES) == len(set(SCHEDULES)) == 64
    assert str(SCHEDULES[0]) == "no growth"
    assert not set(PARTS["training"]) & set(PARTS["held_out"])


def test_a_schedule_is_told_in_the_order_of_its_births() -> None:
    told = str(Schedule(("norm", "conv_light", "conv_heavy"), (11, 0, 1)))
    assert told == "conv_heavy in r0c2 at 1, norm in r0c0 at 11"


@pytest.fixture(scope="module")
def played() -> tuple[World, View, Topology]:
    """What envs of drawn settings show at first, and what the mixed schedules leave in them."""
    apply_threads(1)
    world = build_world(settings_of("training", 1, SMALL), torch.device("cpu"))
    env = Env(world)
    env.begin_(0)
    view = env.observe_().view
    plan = Plan(
        [0, SCHEDULES.index(Schedule(("norm", "conv_light", "conv_light"), (11, 6, 1)))] * 2
    )
    result, _ = play_round(world, Player(plan, None), Round(0, Progress(0, Console(), "off")))
    return world, view, result.topology


def test_the_teacher_reads_the_settings_of_its_env(played: tuple) -> None:
    world, view, _ = played
    inputs, prices = settings_seen(view)
    own = torch.tensor([world.settings[name] for name in AXES], dtype=torch.float64).T
    assert prices.tolist() == pytest.approx(world.settings[PRICE], rel=1e-5)
    torch.testing.assert_close(inputs, coordinates(own.log10()), rtol=1e-4, atol=1e-4)
    # momentum 0.9 counts by the 0.1 that is not kept
    logarithms = torch.tensor([[-1.2, 0.0, 0.9, -3.5, 0.75]], dtype=torch.float64)
    logarithms[:, 2] = logarithms[:, 2].log10()
    assert coordinates(logarithms)[0].tolist() == pytest.approx([-1, 0, 1, -1, 0.5])


def test_every_env_follows_its_schedule(played: tuple) -> None:
    _, _, topology = played
    assert topology.present.tolist() == [[False] * 3, [True] * 3] * 2
    names = [BLUEPRINT_NAMES[code] for code in topology.blueprint[1].tolist()]
    assert names == ["norm", "conv_light", "conv_light"]


def test_an_estimate_knows_which_schedule_pays_where() -> None:
    """Schedule 1 brings 10 points where seeds learn fast, and loses 10 where they do not; it costs
    ln 2 times the price.
    """
    rng = np.random.default_rng(0)
    units = []
    for _ in range(2):
        settings = {name: (10 ** rng.uniform(-2, -1, 64)).tolist() for name in AXES}
        settings[PRICE] = (10 ** rng.uniform(-1, 2, 64)).tolist()
        fast = np.array(settings["task.seed_lr"]) > 10**-1.5
        seed = {}
        for number in range(len(SCHEDULES)):
            accuracy = 50 + rng.normal(0, 1, 64) + (number == 1) * np.where(fast, 10, -10)
            growth = np.full(64, 1 + (number == 1))
            rent = np.array(settings[PRICE]) * np.log(growth)
            unit = {"accuracy": accuracy, "growth": growth, "rent": rent}
            seed[str(number)] = {name: own.tolist() for name, own in unit.items()}
            seed[str(number)]["settings"] = settings
        units.append(seed)
    estimate, told = fit(units)
    assert told["draws"] == 128
    assert told["error"] < told["spread"]
    logarithms = torch.full((4, 5), -1.5, dtype=torch.float64)
    logarithms[:, 1] = torch.tensor([-1.1, -1.9, -1.1, -1.9])
    inputs = coordinates(logarithms)
    best = estimate.best(inputs, torch.tensor([1.0, 1.0, 90.0, 90.0], dtype=torch.float64))
    assert (best == 1).tolist() == [True, False, False, False]


def test_the_best_schedule_of_a_price_is_that_of_its_class() -> None:
    prices = torch.arange(10, dtype=torch.float64)
    scores = torch.zeros(10, len(SCHEDULES), dtype=torch.float64)
    scores[:2, 7] = 1  # the lowest fifth
    scores[8:, 9] = 1
    scores[4, 3] = 5
    none = torch.zeros(0)
    estimate = Estimate(none, none, none, none, 1.0, scores, prices)
    assert estimate.by_price([0.5, 9.5, 4.4]) == [7, 9, 3]
    assert estimate.single == 3


def test_draws_beyond_lie_outside_of_the_training_ranges() -> None:
    drawn = beyond(5)
    for name, ((lowest, low), (high, highest)) in BEYOND.items():
        values = np.array(drawn[name])
        below, above = (values >= lowest) & (values <= low), (values >= high) & (values <= highest)
        assert (below | above).all()
        assert below.any()
        assert above.any()
    own = settings_of("beyond", 5, SMALL)
    assert settings_of("25", 5, SMALL).reward.rent_weight == "[25.0]"
    assert own.task.host_lr == f"[{','.join(map(repr, drawn['task.host_lr']))}]"


def test_the_tables_say_how_far_the_policy_comes() -> None:
    """Two seeds: 3 and 5 points, the single schedule 1 and 1. In the first the best schedule of
    each env has 9, and when it is played again 5 where the single one has 1.
    """
    own = {name: [2.0, 2.0] for name in NAMES}
    own |= {"learned": [3.0, 5.0], "single": [1.0, 1.0]}
    held_out = own | {"oracle": [9.0], "repeated": [5.0], "single_repeated": [1.0]}
    region = {"prices": 1, "rate": 0, "best": "no growth", "training": 4, "held_out": 5}
    record = {
        "schedule": "norm in r0c2 at 1",
        "curve": {"25": {"accuracy": [20.0, 22.0], "growth": [1.0, 1.5]}},
        "scores": {"held_out": held_out, "beyond": own},
        "classes": [(1.0, 3.0), 0.03],
        "envs": 7,
        "regions": [region | {"score": 2.0, "single": 1.5}],
    }
    lines = family_lines(record)
    learned = next(line for line in lines if "learned policy" in line)
    assert learned.startswith(
        "| learned policy | 4.00 [-8.71, 16.71] | +3.00 [-9.71, +15.71] | 2 of 2 |"
    )
    told = next(line for line in lines if "of the way" in line)
    assert "+2.00 points over the single schedule" in told
    assert "comes 25% and 50% of the way" in told
    assert "| 25 | 21.00 [8.29, 33.71] | 1.25 [-1.93, 4.43] |" in lines
    assert "| 1 to 3 | at most 0.03 | no growth | 2.00 | 1.50 | 4, 5 |" in lines
