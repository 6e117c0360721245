"""Blueprints and agents of a user's own in the simulator, in adapters and in runs."""

from collections.abc import Mapping
from pathlib import Path

import parts_of_users
import pytest
import torch
from torch import Tensor, nn

import esper_soa
from benchmarks.growth_figure import play, timelines
from esper_soa.adapters.flat import FlatEnvs
from esper_soa.env.legal import illegal_heads
from esper_soa.simulator import Simulator, make
from esper_soa.state import Action
from esper_soa.system.errors import UserError
from esper_soa.training.start.runs import RecordedRun
from esper_soa.vocabulary import Op
from tests.builders.equal_runs import with_own
from tests.builders.tiny_runs import fresh

MINE = (
    "device=cpu",
    "task=cifar_minimal",
    "slots=[r0c0,r0c1]",
    "data.name=synthetic",
    "task.blueprints=[norm,parts_of_users:grouped,parts_of_users:twice]",
)
SIZES = {"envs": 3, "steps": 4, "batch_size": 4, "train_samples": 8, "val_samples": 20}
CODES = 13 + 2


def own_simulator(**more: object) -> Simulator:
    return make("smoke", overrides=MINE, **(SIZES | {"policy": "random"} | more))


def test_seeds_of_own_blueprints_are_called_by_their_names() -> None:
    sim = own_simulator()
    sim.reset()
    sim.step({"op": Op.GERMINATE, "blueprint": [3, 13, 14]})
    assert [sim.seeds(env)[0].blueprint for env in range(3)] == ["norm", "grouped", "twice"]


def test_heads_of_flat_envs_have_a_choice_for_every_blueprint() -> None:
    envs = FlatEnvs(own_simulator(illegal="wait"), "heads")
    shown, _ = envs.reset()
    assert envs.head_sizes[1] == CODES
    assert shown.action_mask.shape == (3, envs.num_actions) == (3, sum(envs.head_sizes))
    columns = shown.action_mask[:, envs.head_sizes[0] : envs.head_sizes[0] + CODES]
    assert columns[0].nonzero().flatten().tolist() == [0, 3, 13, 14]  # 0 stands for none
    germinate = torch.zeros(3, len(envs.head_sizes), dtype=torch.int64)
    germinate[:, 1] = torch.tensor([13, 14, 3])
    germinate[:, -1] = Op.GERMINATE
    assert not envs.step(germinate).info.illegal.any()
    assert envs.sim.state.slots.blueprint[:, 0].tolist() == [13, 14, 3]


def test_a_simulator_is_played_by_an_agent_of_a_module() -> None:
    sim = own_simulator(policy="parts_of_users:eager")
    steps = list(sim.episode())
    assert any((step.action.op == Op.GERMINATE).any() for step in steps)
    with pytest.raises(esper_soa.UserError, match=r"^policy\.name=parts_of_users:nobody: must be"):
        own_simulator(policy="parts_of_users:nobody")


def test_an_agent_that_is_handed_over_is_watched() -> None:
    sim = own_simulator(policy=parts_of_users.Lawless())
    with pytest.raises(
        esper_soa.UserError, match="policy: env 0: blueprint .* for op germinate is"
    ):
        list(sim.episode())


@pytest.mark.parametrize("own", [(), ("grouped", "twice")])
def test_the_policy_of_a_run_is_a_module_always(tmp_path: Path, own: tuple[str, ...]) -> None:
    fresh(with_own(*own, rounds=1), tmp_path / "run")
    policy = RecordedRun(tmp_path / "run").policy()
    assert policy.spec["blueprints"][13:] == list(own)
    esper_soa.save(policy, tmp_path / "policy.safetensors")
    again = esper_soa.load(tmp_path / "policy.safetensors")
    sim = Simulator(with_own(*own))
    observation, info = sim.reset()
    masks: Mapping[str, torch.Tensor] = info.masks.to_dict()
    noise = torch.full((sim.num_envs, 8), 0.3)
    for module in (policy, again):
        choices = module(observation.features, observation.blueprints, masks, noise)
        action = Action.from_dict(choices, batch_size=[sim.num_envs])
        assert not illegal_heads(action, info.masks).any()
    assert policy.policy.embedding.weight.shape[0] == 13 + len(own) + 1
    assert torch.equal(policy.policy.embedding.weight, again.policy.embedding.weight)


def test_the_picture_of_a_run_names_own_blueprints() -> None:
    pyplot = pytest.importorskip("matplotlib.figure")
    played = play(own_simulator(policy="parts_of_users:eager"))
    panel = pyplot.Figure().subplots()
    timelines(panel, played)
    assert {text.get_text() for text in panel.texts} <= {"norm", "grouped", "twice"}
    assert panel.texts


@esper_soa.blueprint("writing")
def writing(channels: int) -> nn.Module:
    """Writes into what it is given."""
    return nn.Sequential(nn.Hardtanh(-0.2, 0.2, inplace=True), nn.Conv2d(channels, channels, 1))


@esper_soa.blueprint("moody")
class Moody(nn.Conv2d):
    """Another module in eval mode."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else 3 - x


def grown_by(part: str, path: Path) -> RecordedRun:
    """A run whose hosts all have that seed at the end."""
    schedule = ["germinate=[1,2,3]", "advance=[1,2,4]", "fossilize=1", f"blueprint={part}"]
    words = [f"task.blueprints=[conv_light,{part}]", "gates.min_blending_steps=1", "steps=12"]
    words += [f"policy.schedule.{word}" for word in schedule]
    words += ["device=cpu", "policy=schedule", "rounds=1", "control=none", "report=false"]
    return esper_soa.train("smoke", [*words, f"run_dir={path}"], verbose=0)


def test_a_network_that_is_taken_out_is_the_one_that_was_measured(tmp_path: Path) -> None:
    run = grown_by(f"{__name__}:writing", tmp_path / "writing")
    net = run.export(0)
    assert net.spec["seeds"]
    loss = run.evaluate(net, "validation").loss
    assert loss == pytest.approx(net.spec["validation_loss"], abs=1e-5)
    with pytest.raises(UserError, match="moody: a network with it, taken out, is another one"):
        grown_by(f"{__name__}:moody", tmp_path / "moody")
