"""Effects beside the floor and what seeds were said to be worth, in reports and in SQL."""

from pathlib import Path

import numpy as np
import pytest

from esper_soa.config.agent import PolicyConfig, ScheduleConfig
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.settings import EffectsConfig, settings_yaml
from esper_soa.lab.report.effects import (
    chosen,
    effects_of,
    floor_of,
    last_horizon,
    rank_correlation,
)
from esper_soa.lab.report.groups import groups_of
from esper_soa.lab.report.page import page_of
from esper_soa.lab.report.run_files import find_runs
from esper_soa.lab.report.sections import make_drawing
from esper_soa.lab.telemetry.table_files import read_table
from tests.builders.tiny_runs import fresh, settings

BORN, STEPS = 2, 14


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hosts, each with a seed that blends in a while, is held, and is fossilized."""
    schedule = ScheduleConfig(germinate=[BORN], fossilize=10, blueprint="conv_light", tempo=1)
    lifecycle = LifecycleConfig(auto_forward_g1=True, auto_forward_g2=True, auto_forward_g3=True)
    cfg = settings(
        "schedule",
        envs=3,
        rounds=2,
        steps=STEPS,
        slots=["r0c0"],
        policy=PolicyConfig(name="schedule", schedule=schedule),
        gates=GatesConfig(min_blending_steps=1, min_gradient_health=0),
        lifecycle=lifecycle,
        effects=EffectsConfig(ops=["germinate", "fossilize"], rows=40, placebo=0.5),
    )
    path = tmp_path_factory.mktemp("runs") / "measured"
    fresh(cfg, path)
    (path / "config.yaml").write_text(settings_yaml(cfg))
    return path


def test_the_floor_holds_most_placebos_of_either_sign() -> None:
    placebos = [*range(-50, 0), *range(51, 101)]  # in absolute value 1 to 100
    assert floor_of(placebos) == pytest.approx(95.05)
    assert floor_of([]) != floor_of([])
    assert floor_of([2.0, np.nan, -2.0]) == 2.0
    # a mean of 4 signs of 2 is 2 with a chance of 1/8 in absolute value, else 1 or 0
    assert floor_of([2.0, -2.0], 4) == 2.0
    # of 100, 2 / sqrt(100) * 1.96
    assert floor_of([2.0], 100) == pytest.approx(0.392, abs=0.03)


def test_ranks_correlate_over_the_pairs_that_are_known() -> None:
    assert rank_correlation([1, 2, 30, np.nan], [5, 6, 7, 0]) == (pytest.approx(1.0), 3)
    # ranks 1, 2.5, 2.5, 4 and 4, 2, 3, 1: -4.5 / sqrt(4.5 * 5)
    value, count = rank_correlation([1, 2, 2, 9], [9, 3, 4, 1])
    assert (value, count) == (pytest.approx(-(0.9**0.5)), 4)
    assert np.isnan(rank_correlation([1, 1], [2, 3])[0])


def test_an_effect_stands_beside_what_its_seed_was_last_worth(run: Path) -> None:
    found = effects_of(run)
    assert last_horizon(found) == "end"
    last = chosen(found, False)
    assert {*last["round"]} == {1, 2}
    slots = read_table(run, "slots")
    for row in range(len(last["step"])):
        here = (slots["round"] == last["round"][row]) & (slots["env"] == last["env"][row])
        known = slots["contribution"][here & (slots["step"] <= STEPS)]
        known = known[~np.isnan(known)]
        assert last["contribution"][row] == known[-1]
    first = chosen(found, False, "1")
    first = first["contribution"][first["op"] == "germinate"]
    assert np.isnan(first).all(), "measured once it blends"
    assert len(chosen(found, True)["step"]) > 3


def test_a_report_has_the_effects_with_their_floor(run: Path) -> None:
    runs = find_runs([run])
    _, tables = make_drawing(groups_of(runs))
    last = chosen(effects_of(run), False)
    assert tables["effects"]["effect"] == pytest.approx(last["accuracy"].tolist())
    floor = floor_of(chosen(effects_of(run), True)["accuracy"])
    assert tables["effects"]["floor_high"] == pytest.approx([floor] * len(last["step"]), rel=1e-5)
    page = page_of(runs, "")
    assert 'id="effects"' in page
    assert "What actions brought" in page
    assert "<td>conv_light</td>" in page


def test_a_view_has_the_same(run: Path) -> None:
    pytest.importorskip("duckdb", reason="extra query")
    from esper_soa.lab.query.database import open_database

    asked = """select round, env, step, effect, floor, contribution from action_effects
               where horizon = 'end' order by round, step, env"""
    rows = np.array(open_database([run]).execute(asked).fetchall(), float)
    last = chosen(effects_of(run), False)
    names = ("round", "env", "step", "accuracy", "contribution")
    order = np.lexsort((last["env"], last["step"], last["round"]))
    expected = np.stack([last[name][order] for name in names], 1)
    assert rows[:, [0, 1, 2, 3, 5]] == pytest.approx(expected)
    floor = floor_of(chosen(effects_of(run), True)["accuracy"])
    assert rows[:, 4] == pytest.approx(np.full(len(rows), floor))
