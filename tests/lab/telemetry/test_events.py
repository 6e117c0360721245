"""Events tell every change of every slot, once, with its cause."""

from collections import Counter

import numpy as np
import pytest
from recorded_world import Recorded, record

from esper_soa.config.env import GatesConfig
from esper_soa.lab.telemetry.recorder import MAKERS
from esper_soa.lab.telemetry.schema import KINDS, TABLES
from esper_soa.lab.telemetry.table_files import table_bytes, table_from
from esper_soa.vocabulary import STAGE_NAMES, Stage

Row = dict[str, object]


def rows_of(recorded: Recorded, name: str) -> list[Row]:
    """The rows of a table, in order."""
    content = table_bytes(TABLES[name], MAKERS[name](recorded.played), {})
    values = table_from(content, TABLES[name]).values
    return [
        dict(zip(values, row, strict=True))
        for row in zip(*(part.tolist() for part in values.values()), strict=True)
    ]


@pytest.fixture(scope="module", params=[False, True], ids=["asked", "by_itself"])
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return record(seed=5, num_envs=6, steps=96, by_itself=request.param)


@pytest.fixture(scope="module")
def events(recorded: Recorded) -> list[Row]:
    return rows_of(recorded, "events")


def test_every_kind_and_cause_is_one_of_the_schema(events: list[Row], recorded: Recorded) -> None:
    for event in events:
        assert event["cause"] in KINDS[str(event["kind"])], event
    # Every kind happens, else the other tests say nothing of it; a loss that diverges needs a
    # longer history than made-up ones have, and test_early_ends.py has episodes that end early.
    rare = {"diverging", "ended_early"}
    rare |= {"refused"} if recorded.rules.lifecycle.auto_forward_g1 else set()
    assert set(KINDS) - {event["kind"] for event in events} <= rare


def test_counts_are_those_of_the_metrics(events: list[Row], recorded: Recorded) -> None:
    totals = recorded.steps[-1].result.state.totals
    counted = Counter((event["kind"], event["env"]) for event in events)
    for kind, count in (
        ("germinated", totals.germinated),
        ("blended", totals.blended),
        ("pruned", totals.pruned),
        ("fossilized", totals.fossilized),
        ("rollback", totals.rollbacks.sum(1)),
    ):
        assert [counted[kind, env] for env in range(6)] == count.tolist(), kind


def test_the_last_event_says_where_a_slot_stands(events: list[Row], recorded: Recorded) -> None:
    """A slot changes between two env-steps just where an event says so, and goes where it says."""
    told = {(one["step"], one["env"], one["slot"]): one for one in events if one["slot"]}
    names = recorded.legend.slots
    changes = 0
    for number, step in enumerate(recorded.steps, 1):
        before = step.view.state.slots.stage.tolist()
        after = step.result.state.slots.stage.tolist()
        for env, stages in enumerate(zip(before, after, strict=True)):
            for slot, (was, now) in enumerate(zip(*stages, strict=True)):
                event = told.get((number, env, names[slot]))
                if was != now and {was, now} != {Stage.EMBARGOED, Stage.RESETTING}:
                    assert event is not None, (number, env, slot)
                    changes += 1
                if event is not None:
                    told_stages = [event["stage_from"], event["stage_to"]]
                    assert told_stages == [STAGE_NAMES[was], STAGE_NAMES[now]]
    assert changes > 60


def test_an_event_tells_of_its_seed_and_host_what_the_other_tables_say(
    events: list[Row], recorded: Recorded
) -> None:
    slots = {(row["step"], row["env"], row["slot"]): row for row in rows_of(recorded, "slots")}
    hosts = {(row["step"], row["env"]): row for row in rows_of(recorded, "steps")}
    of_seed = ("seed", "blueprint", "seed_age", "stage_age", "alpha", "contribution")
    told = 0
    for event in events:
        at = event["step"], event["env"]
        same = {"accuracy": (event["accuracy"], hosts[at]["accuracy"])}
        if event["slot"] is None:
            same |= {name: (event[name], None) for name in ("blueprint", "stage_from", "stage_to")}
            same |= {name: (event[name], np.nan) for name in ("seed", "alpha", "accuracy_gain")}
        elif event["kind"] not in ("germinated", "emptied"):
            slot = slots[*at, event["slot"]]
            if slot["stage"] not in ("empty", "embargoed", "resetting"):
                names = (*of_seed, "accuracy_gain")
                same |= {name: (event[name], slot[name]) for name in names}
                told += 1
        for name, (found, wanted) in same.items():
            assert found == wanted or (found != found and wanted != wanted), (name, event)
    assert told > 60


SOURCES = {"G1": "germinated", "G2": "training", "G3": "blending", "G5": "holding"}


def test_a_seed_that_is_not_let_pass_as_a_fossil_is_refused_by_the_last_gate() -> None:
    """Where seeds come to HOLDING by themselves, no other gate refuses."""
    strict = GatesConfig(
        permissive=False,
        min_blending_steps=1,
        min_gradient_ratio=0.0,
        min_training_improvement=-100.0,
        min_fossilize_contribution=20.0,
    )
    played = record(seed=5, num_envs=6, steps=96, by_itself=True, gates=strict)
    refused = [event for event in rows_of(played, "events") if event["kind"] == "refused"]
    assert refused
    for event in refused:
        assert (event["gate"], event["stage_from"], event["stage_to"]) == ("G5", *["holding"] * 2)


def test_gates_are_those_between_the_stages(events: list[Row]) -> None:
    goals = {"G1": "training", "G2": "blending", "G3": "holding", "G5": "fossilized"}
    passed = [event for event in events if event["kind"] in ("advanced", "blended", "fossilized")]
    once = [event for event in passed if event["stage_from"] == SOURCES[str(event["gate"])]]
    assert len(once) > 20
    fixed = {"blended": "G2", "fossilized": "G5"}
    assert all(fixed.get(str(one["kind"]), one["gate"]) == one["gate"] for one in passed)
    gates_passed = Counter((one["step"], one["env"], one["slot"]) for one in passed)
    for event in once:
        if gates_passed[event["step"], event["env"], event["slot"]] == 1:
            assert event["stage_to"] == goals[str(event["gate"])]
    for event in events:
        if event["kind"] == "refused":
            assert event["stage_from"] == SOURCES[str(event["gate"])]
        elif event not in passed:
            assert event["gate"] is None


def test_an_action_is_the_cause_where_it_was_done(events: list[Row], recorded: Recorded) -> None:
    by_op = [[], ["germinated"], ["retargeted"], ["fading", "pruned"], ["fossilized", "refused"]]
    by_op.append(["advanced", "blended", "refused"])
    seen = set()
    for event in (one for one in events if one["cause"] == "action"):
        step = recorded.steps[int(str(event["step"])) - 1]
        env = int(str(event["env"]))
        assert recorded.legend.slots[int(step.action.slot[env])] == event["slot"]
        assert event["kind"] in by_op[int(step.result.outcome.effective_op[env])]
        assert bool(step.result.outcome.success[env]) == (event["kind"] != "refused")
        if event["kind"] == "retargeted":
            chosen = int(step.action.alpha_target[env])
            assert event["alpha_target"] == (0.5, 0.7, 1.0)[chosen]
        seen.add(event["kind"])
    assert "retargeted" in seen


def test_rollbacks_have_a_reason_and_cost_all_but_fossils(
    events: list[Row], recorded: Recorded
) -> None:
    found = [event for event in events if event["kind"] == "rollback"]
    assert found
    for event in found:
        step = recorded.steps[int(str(event["step"])) - 1]
        env = int(str(event["env"]))
        assert int(step.before.guard.reason[env]) == 1
        assert event["cause"] == "not_finite"
        stages = step.before.slots.stage[env].tolist()
        there = (event["step"], env, "pruned")
        lost = [one for one in events if (one["step"], one["env"], one["kind"]) == there]
        assert len(lost) == sum(stage in (2, 3, 4, 6) for stage in stages)
        assert {one["cause"] for one in lost} <= {"rollback"}


def test_seeds_are_numbered_in_order_of_germination(events: list[Row], recorded: Recorded) -> None:
    places = [(event["step"], event["env"]) for event in events]
    assert places == sorted(places)
    born = {(one["env"], one["seed"]): one for one in events if one["kind"] == "germinated"}
    germinated = enumerate(recorded.steps[-1].result.state.totals.germinated.tolist())
    assert sorted(born) == [(env, seed + 1) for env, count in germinated for seed in range(count)]
    for row in rows_of(recorded, "slots"):
        if row["stage"] == "empty":
            assert row["seed"] is None or np.isnan(row["seed"])
        else:
            birth = born[row["env"], int(str(row["seed"]).removesuffix(".0"))]
            assert (birth["slot"], birth["blueprint"]) == (row["slot"], row["blueprint"])
            assert int(str(birth["step"])) < int(str(row["step"]))
