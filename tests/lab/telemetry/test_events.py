"""Events tell every change of every slot, once, with its cause."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from esper_soa.lab.telemetry.recorder import TABLE_MAKERS
from esper_soa.lab.telemetry.schema import EVENT_KINDS, TABLES
from esper_soa.lab.telemetry.table_files import table_bytes, table_from
from esper_soa.vocabulary import OP_NAMES, STAGE_NAMES, Stage
from tests.builders.recorded_world import Recorded, record

Row = dict[str, object]


def rows_of(recorded: Recorded, name: str) -> list[Row]:
    """The rows of a table, in order."""
    content = table_bytes(TABLES[name], TABLE_MAKERS[name](recorded.played), {})
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
        assert event["cause"] in EVENT_KINDS[str(event["kind"])], event
    # Every kind happens, else the other tests say nothing of it; a loss that diverges needs a
    # longer history than made-up ones have, and test_early_ends.py has episodes that end early.
    rare = {"diverging", "ended_early"}
    rare |= {"refused"} if recorded.rules.lifecycle.auto_forward_g1 else set()
    assert set(EVENT_KINDS) - {event["kind"] for event in events} <= rare


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
        elif event["kind"] != "germinated":
            slot = slots[*at, event["slot"]]
            gone = slot["stage"] in ("embargoed", "resetting")
            names = ("seed", "blueprint") if gone else (*of_seed, "accuracy_gain")
            if slot["stage"] != "empty":
                same |= {name: (event[name], slot[name]) for name in names}
                told += not gone
        for name, (found, wanted) in same.items():
            assert found == wanted or (found != found and wanted != wanted), (name, event)
    assert told > 60


# Env-steps of an env each: op, slot and success; reason and panic of the guard, and the end of an
# episode; stages before and after, by the first letters of STAGE_NAMES; and what happens.
SCENES = """
advance 1 1 | 0 0 0 | tra tra emp | ble ble emp | blended 0 G2 automatic, blended 1 G2 action
prune 0 1 | 0 0 0 | hol ble fos | emb emb fos | pruned 0 - action, pruned 1 - faded, \
    embargoed 0 - automatic, embargoed 1 - automatic
wait 0 1 | 1 1 0 | tra fos emp | emb fos emp | panic - - not_finite, rollback - - not_finite, \
    pruned 0 - rollback, embargoed 0 - automatic
germinate 2 1 | 3 0 1 | emb res emp | res emp ger | diverging - - diverged, \
    germinated 2 - action, emptied 1 - automatic, ended_early - - plateau
prune 0 1 | 0 0 0 | ble emb emp | ble emb emp | fading 0 - action
germinate 0 1 | 0 0 0 | emp emp emp | tra emp emp | germinated 0 - action, advanced 0 G1 automatic
advance 2 1 | 0 0 0 | emp emp tra | emp emp hol | blended 2 G2 action, advanced 2 G3 automatic
advance 1 0 | 0 0 0 | emp ble emp | emp ble emp | refused 1 G3 action
fossilize 1 0 | 0 0 0 | emp hol emp | emp hol emp | refused 1 G5 action
fossilize 1 1 | 0 0 0 | emp hol emp | emp fos emp | fossilized 1 G5 action
set_alpha_target 0 1 | 0 0 3 | hol emp emp | hol emp emp | retargeted 0 - action, \
    ended_early - - length
set_alpha_target 0 0 | 0 0 0 | hol emp emp | hol emp emp |
"""


def test_what_happens_in_an_env_step_is_told_in_order_with_gate_and_cause() -> None:
    scenes = [line.split("|") for line in SCENES.replace("\\\n", "").strip().splitlines()]
    made = record(3, num_envs=len(scenes), steps=1)
    stages = {name[:3]: code for code, name in enumerate(STAGE_NAMES)}
    for env, (action, guard, before, after, _) in enumerate(scenes):
        op, *numbers = action.split()
        codes = [OP_NAMES.index(op), *map(int, [*numbers, *guard.split()])]
        names = ("effective_op", "slot", "success", "reason", "panic", "ending")
        for name, code in zip(names, codes, strict=True):
            made.played.read(name)[0, env] = code
        for name, words in (("slot.stage", before), ("slot.stage_after", after)):
            made.played.read(name)[0, env] = [stages[word] for word in words.split()]
    made.played.read("over")[:] = 0
    places = {name: str(place) for place, name in enumerate(made.legend.slots)}
    told = defaultdict[object, list[str]](list)
    for row in rows_of(made, "events"):
        gate = row["gate"] or "-"
        words = f"{row['kind']} {places.get(str(row['slot']), '-')} {gate} {row['cause']}"
        told[row["env"]].append(words)
    assert [", ".join(told[env]) for env in range(len(scenes))] == [
        " ".join(words.split()) for *_, words in scenes
    ]


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
