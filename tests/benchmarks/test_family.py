"""Schedules of the family, what is estimated from them, and the tables of its record."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.family import (
    BEYOND,
    CURVE,
    NUMBERS,
    PARTS,
    PLAYERS,
    Job,
    beyond,
    play_job,
    record_of,
    settings_of,
    training_units,
)
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
from benchmarks.units import Units
from esper_soa.config.errors import UserError
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
    assert (topology.blueprint >= 0).tolist() == [[False] * 3, [True] * 3] * 2
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
    estimate, quality = fit(units)
    assert quality["draws"] == 128
    assert quality["error"] < quality["spread"]
    logarithms = torch.full((5, 5), -1.5, dtype=torch.float64)
    logarithms[:, 1] = torch.tensor([-1.1, -1.9, -1.1, -1.9, -1.1])
    inputs = coordinates(logarithms)
    gain = estimate.best(inputs[:1], torch.zeros(1, dtype=torch.float64))
    assert gain.tolist() == [1]
    prices = torch.tensor([1.0, 1.0, 90.0, 90.0, 11.0], dtype=torch.float64)
    best = estimate.best(inputs, prices)
    # at the price of 11 it costs 7.6 points
    assert (best == 1).tolist() == [True, False, False, False, True]


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


def written(units: Units, part: str, seed: int, name: str, scores: list[float]) -> None:
    """A unit of two envs, one with a low price and rate and one with high ones."""
    settings = {PRICE: [2.0, 40.0], "task.host_lr": [0.03, 0.2]}
    unit = {"settings": settings, "accuracy": [one + 1 for one in scores], "rent": [1.0, 1.0]}
    units.write((part, seed, name), unit | {"growth": [1.0, 2.0], "commit": "abc"})


def test_the_oracle_is_scored_again_and_regions_choose_on_training_draws(tmp_path: Path) -> None:
    units = Units(tmp_path)
    parts = {"training": (1,), "held_out": (5, 6), "again": (5,), "beyond": (5, 6)}
    for number in NUMBERS:
        best = {"3": [9.0, 0.0], "4": [0.0, 9.0], "2": [1.0, 2.0]}.get(number, [0.0, 0.0])
        written(units, "training", 1, number, best[::-1] if number == "4" else best)
        written(units, "held_out", 5, number, best)
        written(units, "again", 5, number, [4.0, 6.0] if number == "3" else [1.0, 3.0])
    for part in ("held_out", "beyond"):
        for seed in parts[part]:
            for name in ("learned-f00", *PLAYERS[1:], "2"):
                written(
                    units, part, seed, name, [5.0, 7.0] if name == "learned-f00" else [1.0, 2.0]
                )
    for price in CURVE:
        for seed in parts["held_out"]:
            written(units, price, seed, "learned-f00", [5.0, 7.0])
    record = record_of(units, parts, 2, "learned-f00")
    found = record["scores"]["held_out"]
    assert (found["learned"], found["wait"], found["single"]) == ([6, 6], [1.5, 1.5], [1.5, 1.5])
    assert found["oracle"] == [9.0]  # schedule 3 in the first env, 4 in the second
    assert found["repeated"] == [3.5]  # 4 and 3 of them
    assert found["single_repeated"] == [2.0]
    assert record["curve"]["25"] == {"accuracy": [7.0, 7.0], "growth": [1.5, 1.5]}
    low, high = record["regions"]  # the classes that have draws
    assert (low["prices"], low["rate"], high["prices"], high["rate"]) == (0, 0, 3, 1)
    assert (low["best"], low["score"], low["single"]) == (str(SCHEDULES[3]), 9.0, 1.0)
    assert (high["best"], high["training"], high["held_out"]) == (str(SCHEDULES[2]), 1, 1)


def test_a_unit_is_an_episode_of_a_player_and_again_has_its_draws(tmp_path: Path) -> None:
    units = Units(tmp_path)
    for part in ("held_out", "again"):
        play_job(Job(part, 5, ("wait", "3"), tmp_path, SMALL))
    first, again, grown = (
        units.read(key)
        for key in (("held_out", 5, "wait"), ("again", 5, "wait"), ("again", 5, "3"))
    )
    assert first["settings"] == again["settings"]
    assert first["accuracy"] != again["accuracy"]
    assert set(first["rent"]) == {0.0}
    assert min(grown["growth"]) > 1
    prices = again["settings"][PRICE]
    extra = [(growth - 1) * 77 / 200 for growth in grown["growth"]]  # over the least of 200
    rents = [price * np.log1p(one) for price, one in zip(prices, extra, strict=True)]
    assert grown["rent"] == pytest.approx(rents, abs=1e-3)


def test_schedules_that_have_not_played_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"64 of 64 units .* benchmarks\.family schedules"):
        training_units(Units(tmp_path), [1])
