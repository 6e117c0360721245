"""Hosts as plain modules: the same network as in the engine that trained it, with every kind of
seed in every stage.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper_soa.env.parameters import total_params
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture, seed_layers, seed_table
from esper_soa.nets.model.modules import layer_of, network_of, sequence
from esper_soa.nets.seeds.pools import parameter_table
from esper_soa.vocabulary import Blend, Stage
from tests.builders.grown_hosts import EVERY_KIND, KINDS, SLOTS, Measured, measured_hosts, score

ENVS = list(range(len(KINDS)))


@pytest.fixture(scope="module")
def plain() -> Measured:
    return measured_hosts("torch")


def assert_agrees(hosts: Measured, kinds: list = KINDS) -> None:
    images, labels = hosts.validation()
    for env, net in enumerate(hosts.networks(list(range(len(kinds))))):
        accuracy, loss = score(net, images, labels)
        assert accuracy == hosts.report.accuracy[env, 0], kinds[env]
        assert abs(loss - hosts.report.loss[env]) < 1e-5, kinds[env]


@pytest.mark.slow
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_every_blueprint_in_every_blend_and_stage_is_the_network_of_its_engine(engine: str) -> None:
    assert_agrees(measured_hosts(engine, len(EVERY_KIND), EVERY_KIND), EVERY_KIND)


def test_every_kind_of_seed_in_every_stage_and_slot_is_the_network_of_the_torch_engine(
    plain: Measured,
) -> None:
    assert_agrees(plain)
    assert len(set(plain.report.accuracy[:, 0].tolist())) > 5  # the hosts differ


@pytest.mark.usefixtures("native")
def test_every_kind_of_seed_in_every_stage_and_slot_is_the_network_of_the_engine_in_c() -> None:
    hosts = measured_hosts("native")
    assert hosts.world.rules.engine.chosen.native
    assert_agrees(hosts)


def test_parameters_are_those_of_the_state_less_the_seeds_that_the_host_does_not_feel(
    plain: Measured,
) -> None:
    counts = parameter_table(plain.world.rules.setup.shape, torch.device("cpu"))
    felt = plain.slots.replace(
        stage=torch.where(plain.slots.stage == Stage.TRAINING, Stage.EMPTY, plain.slots.stage)
    )
    told = total_params(felt, counts).tolist()
    nets = plain.networks(ENVS)
    assert [sum(one.numel() for one in net.parameters()) for net in nets] == told
    assert [net.spec["parameters"] for net in nets] == told
    whole = [env for env in ENVS if (plain.slots.stage[env] != Stage.TRAINING).all()]
    assert len(whole) > len(ENVS) // 2
    assert [told[env] for env in whole] == total_params(plain.slots, counts)[whole].tolist()


def test_names_follow_the_way_of_the_images_and_a_seed_in_training_is_left_out(
    plain: Measured,
) -> None:
    blending, training = (
        next(env for env in ENVS if KINDS[env][2:] == way)
        for way in ((Stage.BLENDING, 0.37), (Stage.TRAINING, 0.0))
    )
    one, other = plain.networks([blending, training])
    standing = [name for name, _ in one.named_children()]
    assert [name for name in standing if name not in SLOTS] == [
        "input",
        "block0",
        "pool0",
        "block1",
        "pool1",
        "classifier",
    ]
    assert standing[:3] == ["input", "block0", "r0c0"]
    assert one.get_submodule("r0c0.blend").alpha == torch.tensor(0.37)
    assert "r0c0" not in dict(other.named_children())
    assert other.spec["slots"] == SLOTS
    assert isinstance(one.get_submodule("block0.conv"), nn.Conv2d)
    assert not any(module.training for module in one.modules())


def test_the_spec_is_plain_json_and_says_how_images_go_in(plain: Measured) -> None:
    env = next(env for env in ENVS if KINDS[env] == (7, Blend.GATE, Stage.BLENDING, 0.37))
    spec = plain.networks([env])[0].spec
    assert json.loads(json.dumps(spec)) == spec
    assert spec["input"] == {
        "shape": [3, 32, 32],
        "range": [0.0, 1.0],
        "channels": "RGB",
        "mean": list(plain.world.data.mean),
        "std": list(plain.world.data.std),
    }
    (seed,) = [seed for seed in spec["seeds"] if seed["slot"] == "r0c0"]
    assert (seed["blueprint"], seed["blend"], seed["alpha"], seed["stage"]) == (
        "conv_heavy",
        "gate",
        0.37,
        "blending",
    )


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, 1, 32, 32)]
)
def test_images_that_would_be_misread_are_refused(plain: Measured, images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"floats from 0 to 1 \[B, 3, H, W\], not .* \[2, "):
        plain.networks([0])[0](images)


def test_a_spec_and_its_tensors_give_the_same_bits_and_nothing_else_does(plain: Measured) -> None:
    images, _ = plain.validation()
    (net,) = plain.networks([3])
    again = network_of(json.loads(json.dumps(net.spec)), net.state_dict())
    assert torch.equal(again(images), net(images))
    assert not again.training
    assert all(parameter.requires_grad for parameter in again.parameters())
    with pytest.raises(RuntimeError, match=r"block0\.conv\.weight"):
        network_of(
            net.spec,
            {
                name: value
                for name, value in net.state_dict().items()
                if name != "block0.conv.weight"
            },
        )
    with pytest.raises(ValueError, match="a layer of the kind Sudden"):
        layer_of({"name": "x", "kind": "Sudden", "arguments": {}})


@pytest.mark.parametrize("channels", [1, 8, 24, 64])
@pytest.mark.parametrize("blueprint", BLUEPRINTS, ids=lambda one: one.name)
def test_the_layers_of_a_blueprint_have_the_parameters_of_its_table(
    blueprint: Architecture, channels: int
) -> None:
    made = sequence([layer._asdict() for layer in seed_layers(blueprint, channels)])
    shapes = [tuple(parameter.shape) for parameter in made.parameters()]
    assert shapes == [one.shape for one in seed_table(blueprint, channels).parameters]


def test_an_epoch_of_plain_sgd_fine_tunes_it(plain: Measured) -> None:
    env = next(env for env in ENVS if KINDS[env] == (7, Blend.GATE, Stage.BLENDING, 0.37))
    (net,) = plain.networks([env])
    images = plain.world.data
    data = images.train_images.permute(0, 3, 1, 2).float() / 255
    labels = images.train_labels
    before = score(net, data, labels)[1]
    net.train()
    descent = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for part in torch.arange(len(labels)).split(8):
        descent.zero_grad()
        F.cross_entropy(net(data[part]), labels[part]).backward()
        descent.step()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert score(net.eval(), data, labels)[1] < before - 0.1
