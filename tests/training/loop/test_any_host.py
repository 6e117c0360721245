"""What was learned on one host plays another: two slots, a checkpoint, a host of ten slots."""

from dataclasses import replace
from pathlib import Path

import torch

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.slots import place_table
from esper_soa.config.agent import NetworkConfig, PPOConfig
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.evaluation import build_agent
from esper_soa.training.loop.players import build_player
from esper_soa.vocabulary import Op
from tests.builders.recording_agent import witnessed_round
from tests.builders.tiny_runs import run
from tests.builders.tiny_world import CPU, tiny_settings

STEPS = 8


def test_the_checkpoint_of_two_slots_plays_ten_slots_of_another_host(tmp_path: Path) -> None:
    small = tiny_settings(3, 2, STEPS)
    large = tiny_settings(3, 10, STEPS)
    network = NetworkConfig(hidden=32, features=32)
    ppo = PPOConfig(epochs=1)
    small.policy, large.policy = (
        replace(cfg.policy, network=network, ppo=ppo) for cfg in (small, large)
    )
    assert small.task != large.task
    folder = RunFolder(tmp_path)
    run(small, folder)
    saved = read_run(folder.checkpoint(1), CPU)
    world = build_world(large, CPU)
    agent = build_agent("ppo", large, world, saved)
    assert isinstance(agent, RecurrentPolicy)
    played = witnessed_round(world, agent, 0)
    ops = torch.stack([action.op for action in played.actions])
    slots = torch.stack([action.slot for action in played.actions])
    for view, action in zip(played.views, played.actions, strict=False):
        assert view.masks.op.gather(1, action.op.unsqueeze(1)).all()
        rows = view.masks.slot_by_op[torch.arange(3), action.op]
        assert rows.gather(1, action.slot.unsqueeze(1))[action.op != Op.WAIT].all()
    assert (ops == Op.GERMINATE).any()
    assert slots[ops != Op.WAIT].max() > 1, "no slot was used that the small host does not have"
    fresh = build_player(large, world).agent
    assert isinstance(fresh, RecurrentPolicy)
    for policy in (agent, fresh):
        assert torch.equal(policy.places, place_table(world.rules.nets.shape.slots))
    assert any(
        not torch.equal(value, agent.state_dict()[name])
        for name, value in fresh.state_dict().items()
    )
    for name, value in agent.state_dict().items():
        assert saved.learner is not None
        assert torch.equal(value, saved.learner["policy"][name]), name
