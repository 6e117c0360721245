"""Packing waits for nothing, and a recorded round reads the device no more often than another."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.sync_guard import SyncGuard
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.nets import sort_slots
from esper_soa.lab.telemetry.pack import legend_of, pack
from esper_soa.lab.telemetry.recorder import TableRecorder
from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.system.files import WriteErrors
from esper_soa.training.loop.collect import Player, Round, play_round
from tests.builders.recorded_world import facts_of, made_legend
from tests.builders.tiny_world import (
    play_state,
    quiet_progress,
    tiny_rules,
    tiny_settings,
    tiny_world,
)

READS = ("read_active_seeds", "read_progress")
ROUND_END = (
    "MetricsAccumulator",
    "copy_to_host",
    "episode_records",
    "blueprint_record",
    "spread_of",
)
STEPS = 6
ENVS = 3
SLOTS = 2
EVERY_STEP = dict.fromkeys(READS, STEPS)


def learning() -> Player:
    cfg = tiny_settings(1, SLOTS, 1)
    network = PolicyConfig(network=NetworkConfig(hidden=16, features=16))
    policy = RecurrentPolicy(network, sort_slots(cfg.task, cfg.slots), seed=0)
    return Player(policy, Learner(policy, PPOConfig(minibatches=1), 1, seed=0))


@pytest.mark.parametrize(("level", "learns"), [("events", False), ("full", True)])
def test_a_recorded_round_reads_the_device_no_more(
    level: str, learns: bool, tmp_path: Path
) -> None:
    world = tiny_world(ENVS, SLOTS, STEPS)
    for orders in (torch.zeros(1, SLOTS), None):
        world.rules = world.rules._replace(shapley_orders=orders)
        legend = legend_of(world, learns)
        assert str(legend) == str(made_legend(world.rules, learns))
    recorder = TableRecorder(tmp_path, legend, level, 100.0, WriteErrors())
    player = learning() if learns else Player(RandomPolicy(), None)
    with SyncGuard([*READS, *ROUND_END]) as guard:
        play_round(world, player, Round(0, quiet_progress(), recorder=recorder))
    counted = Counter(sync.function for sync in guard.log)
    assert {name: counted[name] for name in counted if not name.startswith(ROUND_END)} == EVERY_STEP
    recorder.close()
    steps = read_table(tmp_path, "steps")["step"].tolist()
    assert steps == [step for step in range(1, STEPS + 1) for _ in range(ENVS)]


def test_packing_waits_for_nothing_and_runs_on_a_device_that_holds_no_values() -> None:
    for step in play_state(tiny_rules(SLOTS, 2), ENVS, seed=0):
        facts = facts_of(step, 0)
        with SyncGuard():
            packed = [pack(facts, full) for full in (False, True)]
    meta = torch.device("meta")
    (step,) = play_state(tiny_rules(SLOTS, 1, device=meta), ENVS, seed=0, device=meta)
    facts = facts_of(step, 0)._replace(probabilities=None)
    decision = facts.decision.replace(
        log_probs=facts.decision.log_probs.to(meta), value=facts.decision.value.to(meta)
    )
    for full in (False, True):
        far = pack(facts._replace(decision=decision), full)
        assert (far.device, far.shape) == (meta, packed[full].shape)
