"""Packing waits for nothing, and a recorded round reads the device no more often than another."""

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_world import facts_of, made_legend
from rich.console import Console
from tiny_world import play_state, tiny_rules, tiny_settings, tiny_world

from benchmarks.sync_guard import SyncGuard
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.nets import enabled_slots
from esper_soa.lab.telemetry.pack import pack, unpack
from esper_soa.lab.telemetry.recorder import TableRecorder
from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.runtime.files import Unwritten
from esper_soa.training.collect import Player, Round, play_round
from esper_soa.training.progress import Progress

READS = ("read_active_seeds", "read_progress")
ROUND_END = ("MetricsAccumulator", "_on_host", "episode_records", "blueprint_record", "_spread")
STEPS = 6
ENVS = 3
SLOTS = 2


def learning() -> Player:
    cfg = tiny_settings(1, SLOTS, 1)
    network = PolicyConfig(network=NetworkConfig(hidden=16, features=16))
    policy = RecurrentPolicy(network, enabled_slots(cfg.task, cfg.slots), seed=0)
    return Player(policy, Learner(policy, PPOConfig(minibatches=1), 1, seed=0))


@pytest.mark.parametrize(("level", "learns"), [("events", False), ("full", True)])
def test_a_recorded_round_reads_the_device_no_more_than_another(
    level: str, learns: bool, tmp_path: Path
) -> None:
    world = tiny_world(ENVS, SLOTS, STEPS)
    recorder = TableRecorder(tmp_path, made_legend(world.rules, learns), level, 100.0, Unwritten())
    player = learning() if learns else Player(RandomPolicy(), None)
    with (
        Progress(1, Console(file=io.StringIO()), "off") as quiet,
        SyncGuard([*READS, *ROUND_END]) as guard,
    ):
        play_round(world, player, Round(0, quiet, recorder=recorder))
    counted = Counter(
        sync.function for sync in guard.log if not sync.function.startswith(ROUND_END)
    )
    assert counted == dict.fromkeys(READS, STEPS)
    recorder.close()
    assert read_table(tmp_path, "steps")["step"].tolist() == [
        step for step in range(1, STEPS + 1) for _ in range(ENVS)
    ]


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


def test_every_number_is_unpacked_as_what_it_was() -> None:
    """Every field has numbers of its own, so that none can stand for another."""
    (step,) = play_state(tiny_rules(SLOTS, 1), ENVS, seed=0)
    facts = facts_of(step, 0)
    state = step.view.state
    after = step.result.state
    attribution = step.observed.attribution
    measured = facts.observed.measured
    records = [state.signals, state.slots, state.ramp, state.guard, attribution, measured]
    records += [after.slots, after.ramp, step.result.outcome, step.result.terms]
    fields = [record.get(name) for record in records for name in record.keys(leaves_only=True)]
    for place, tensor in enumerate(fields):
        numbers = 100 * place + torch.arange(tensor.numel()).view(tensor.shape)
        # the bits of its number tell one field of flags from another
        flags = (place + 1 >> torch.arange(tensor.numel())).view(tensor.shape) & 1
        tensor.copy_(flags if tensor.dtype == torch.bool else numbers)
    legend = made_legend(tiny_rules(SLOTS, 1))
    packed = unpack(legend, 1, np.ones(1), pack(facts, True).numpy()[None])
    slots = "stage stage_age seed_age blueprint blend alpha contribution_velocity escrow"
    slots += " gradient_ratio_known gradient_vanishing gradient_exploding accuracy_initial"
    slots += " accuracy_current gradient_norm gradient_ratio gradient_health"
    told = [
        (measured, "", "val_loss train_loss train_accuracy"),
        (step.result.outcome, "", "effective_op success"),
        (state.guard, "", "reason panic"),
        (attribution, "", "total_known"),
        (step.action, "", "slot op"),
        (state.slots, "slot.", slots),
        (attribution, "slot.", "measured contribution shapley shapley_error"),
    ]
    expected = {
        prefix + name: one.get(name) for one, prefix, names in told for name in names.split()
    }
    expected |= {
        "accuracy": state.signals.val_accuracy,
        "total_contribution": attribution.total,
        "committed_accuracy": attribution.committed,
        "reward": step.result.terms.total,
        "reward_clawback": step.result.terms.clawback,
        "value": facts.decision.value,
        "slot.stage_after": after.slots.stage,
        "slot.blueprint_after": after.slots.blueprint,
        "slot.gradient_measured": measured.gradients.measured,
        "slot.alpha_target": state.ramp.target,
        "slot.alpha_target_after": after.ramp.target,
        "slot.interaction": attribution.interaction_sum,
        "subset_accuracy": step.trusted.accuracy,
        "legal": step.view.masks.op,
    }
    for name, tensor in expected.items():
        assert packed.read(name)[0].tolist() == tensor.double().tolist(), name
