"""What users hang on a grown network, or compute its weights by, is in its file or refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from esper_soa.grown.module_files import load, save
from esper_soa.grown.plain import current_module
from esper_soa.nets.model.modules import GrownNetwork
from tests.builders.grown_hosts import measured_hosts
from tests.grown.test_module_files import policy


@pytest.fixture
def net() -> GrownNetwork:
    return measured_hosts("torch", 1).networks([0])[0]


WEIGHTS: dict[str, Callable[[nn.Module], object]] = {
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "spectral norm": parametrizations.spectral_norm,
    "dropped": lambda layer: parametrize.register_parametrization(layer, "bias", nn.Dropout()),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_computed_weights_are_saved_as_the_numbers_that_they_are_in_eval_mode(
    kind: str, net: GrownNetwork, tmp_path: Path
) -> None:
    layer = net.get_submodule("classifier.linear")
    WEIGHTS[kind](layer)
    given = torch.rand(3, 3, 32, 32)
    net.train()(given)
    for weights in layer.parameters():
        weights.data.add_(0.5)  # since the last forward
    save(net, tmp_path / "net")
    assert torch.equal(load(tmp_path / "net")(given), net.eval()(given))


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_are_refused_by_their_module_and_kind(kind: str, net: GrownNetwork) -> None:
    wrapper = AveragedModel(net)
    controller = policy()
    for module, part, name in (
        *((wrapper, wrapper, "AveragedModel"), (controller, controller.policy, "policy")),
        (net, net.get_submodule("block0.conv"), "block0.conv"),
    ):
        getattr(part, f"register_{kind}_hook")(print)
        words = kind.removeprefix("full_").replace("_", " ")
        with pytest.raises(ValueError, match=f"^{name}: has a {words}.hook, "):
            current_module(module)


def test_what_computes_otherwise_is_refused_by_its_layer(net: GrownNetwork) -> None:
    sized = GrownNetwork(net.spec)
    sized.get_submodule("block0.norm").eps = 0.5  # type: ignore[assignment]
    net.get_submodule("block0").forward = torch.relu  # type: ignore[assignment]
    for changed, name in ((net, "block0"), (sized, "block0.norm")):
        with pytest.raises(ValueError, match=rf"\({name}\) are not those of its spec"):
            current_module(changed)


def test_networks_of_inference_mode_and_choices_of_policies_are_kept(net: GrownNetwork) -> None:
    with torch.inference_mode():
        net.half()
    assert next(current_module(net).parameters()).dtype == torch.float16
    controller = policy()
    controller.deterministic = not controller.deterministic
    assert current_module(controller).spec["deterministic"] == controller.deterministic
