"""What a user's part does wrong is found and named, all of it at once; what is fine passes."""

import re
from collections.abc import Callable

import pytest
import torch
from hosts_of_users import uneven
from hosts_of_users import unmarked as unmarked_host
from parts_of_users import Grouped, unmarked

import esper_soa
from esper_soa.config.errors import SettingError, UserError
from esper_soa.lab.conformance import ConformanceError
from esper_soa.lab.conformance_networks import host_networks
from esper_soa.nets.model import user_parts

HERE = "parts_of_users"
CHECKS: dict[str, Callable[..., None]] = {
    "blueprint": esper_soa.check_blueprint,
    "host": esper_soa.check_host,
    "reward": esper_soa.check_reward,
    "agent": esper_soa.check_agent,
}
GOOD = {
    "blueprint": ["twice", "instead", "grouped", "perceptron"],
    "host": ["uneven", "refined", "staged", "plain", "counting"],
    "reward": ["gain", "parts"],
    "agent": ["eager"],
}
WITH = r"with 4 channels( of 8x8 pixels)? "
NO_GRADIENT = "no gradient reaches its parameters: its output is cut off from them"
CROWD = "the output of an image depends on the other images of its batch"
CHANCE = "its initial values differ though the env is the same: it has other draws than torch's"
FIRST = "at env-step 1: "
FAULTY: dict[str, dict[str, list[str]]] = {
    "blueprint": {
        "narrower": ["blueprint narrower: its parts turn 1 channels into 8"],
        "counting": [WITH + "it keeps buffers"],
        "counter": [WITH + "a second pass gives something else: it keeps state or draws random"],
        "chance": [WITH + CHANCE],
        "infinite": [WITH + "its initial values are not finite"],
        "undrawn": [WITH + "its initial values are not finite"],
        "random_wide": [
            WITH + r"its output is of shape \[2, 5, 8, 8\]",
            WITH + r"it draws random numbers \(as Dropout does\)",
        ],
        "threefold": [
            WITH + r"its output is of shape \[2, 5, 8, 8\]",
            WITH + r"it draws random numbers \(as Dropout does\)",
            WITH + r"it keeps buffers \(norm.running_mean,",
        ],
        "undefined": [WITH + "its output is not finite"],
        "crowd": [WITH + CROWD],
        "deaf": [WITH + NO_GRADIENT],
        "keyword": [WITH + "it raises TypeError: .* takes 0 positional arguments"],
        "leaking": [WITH + "a gradient reaches parameters of env 1 from the output of env 0"],
        "silent": [WITH + "the gradient of all of its parameters is 0 as it begins"],
        "mess": [WITH + "it keeps tensors", WITH + "its output is not finite"],
        "shrinking": ["with 4 channels of 8x8", "with 24 channels of 8x8"],
    },
    "host": {
        "word": [r"host word: it gives chain, no tuple of segments \(ConvBlock, Residual\)"],
        "tiny": ["its segment 5 pools features of one pixel"],
        "random_wide": [
            r"its last segment 2 gives \[B, 11\]",
            "its segment 1 draws random numbers",
        ],
        "drawing_keeper": [
            r"it keeps tensors that are no parameters or buffers \(strength\)",
            r"its last segment 2 gives \[B, 11\]",
            ".* random operation",
        ],
        "branching": ["it gives a Branching, which is no nn.Sequential: a host is a chain"],
        "chance": [CHANCE],
        "infinite": ["its initial values are not finite"],
        "undefined": ["its output is not finite"],
        "crowd": [CROWD],
        "deaf": [NO_GRADIENT],
    },
    "reward": {
        "per_slot": [r"the reward is of shape \[5, 3\], not \[5\]"],
        "count": ["the reward is of torch.int64, not of floating-point numbers"],
        "ranked": ["what env 0 is paid depends on " + one for one in ("other", "the number of")],
        "divided": ["it pays inf, not a finite number, at the last env-step"],
        "careless": ["it changes its input val_accuracy in place"],
        "branching": ["it reads numbers on the host", "it cannot be compiled as one graph"],
        "random": ["for the same inputs it pays something else the second time"],
        "graph": ["the reward has a gradient, and nobody learns from it"],
    },
    "agent": {
        "lawless": [FIRST + "env 0: blueprint 9 for op germinate is not legal"],
        "dicing": [
            "at env-step .*: for the same view and memory it decides something else the second"
        ],
        "following": ["at env-step .*: what it decides for env 0 depends on"],
        "writing": [FIRST + "it changes the view", FIRST + "it changes its memory in place"],
        "beyond": [FIRST + "env 0: op 6 is not legal"],
        "climbing": [FIRST + "env 0: op 6 is not legal"],  # of one head, so it is told once
        "bare": [FIRST + "its decision is a Action, not a Decision"],
        "listing": ["its memory is a list, not a tuple of tensors"],
        "loose": [FIRST + "its value is of torch.float64, not", FIRST + "its value has a gradient"],
        "mute": ["it raises AttributeError: 'Mute' object has no attribute 'act'"],
        "demanding": ["it wants more arguments than the AgentContext"],
        "stumbling": ["it raises KeyError: 'memory'"],
        "hopeless": [
            FIRST + "env 0: op 9 is not legal",
            FIRST + "its value is not finite",
            FIRST + "for the same view and memory it decides something else",
            "it raises KeyError: 'step'",
        ],
    },
}


def reference(kind: str, name: str) -> str:
    return f"{'hosts_of_users' if kind == 'host' else HERE}:{name}"


@pytest.mark.parametrize(("kind", "name"), [(kind, one) for kind in GOOD for one in GOOD[kind]])
def test_what_a_run_can_take_passes(kind: str, name: str) -> None:
    CHECKS[kind](reference(kind, name))


@pytest.mark.parametrize(("kind", "name"), [(kind, one) for kind in FAULTY for one in FAULTY[kind]])
def test_a_faulty_part_is_found_out_with_all_findings_at_once(kind: str, name: str) -> None:
    with pytest.raises(ConformanceError) as error:
        CHECKS[kind](reference(kind, name))
    found = error.value.findings
    assert isinstance(error.value, UserError)
    assert all(f"\n  - {finding}" in str(error.value) for finding in found)
    assert len(found) == len(set(found)) < 12
    words_of_all = "".join(found)
    assert not ("draws random numbers" in words_of_all and "random operation" in words_of_all)
    assert CHANCE not in words_of_all or name == "chance", "NaN is not another draw"
    for words in FAULTY[kind][name]:
        assert any(re.match(words, one) for one in found), found


def test_a_part_is_checked_by_itself_and_must_be_marked() -> None:
    esper_soa.check_blueprint(Grouped)
    told = (
        r"^{0} <function unmarked.*>: 1 finding\n  - "
        r'nothing marks it: @esper_soa\.{0}\("name"\) belongs above it$'
    )
    with pytest.raises(ConformanceError, match=told.format("blueprint")):
        esper_soa.check_blueprint(unmarked)
    with pytest.raises(ConformanceError, match=told.format("host")):
        esper_soa.check_host(unmarked_host)
    with pytest.raises(
        SettingError,
        match=(
            r"^check_reward=parts_of_users:eager: must be a reward that parts_of_users registers "
            r"\(branching, .*, twofold\)\. @esper_soa\.reward\(\"eager\"\) above a function or "
            r"class there registers it\.$"
        ),
    ):
        esper_soa.check_reward(f"{HERE}:eager")


def test_the_package_says_what_it_lacks() -> None:
    with pytest.raises(
        AttributeError, match="module 'esper_soa' has no attribute 'check_everything'"
    ):
        esper_soa.check_everything  # noqa: B018


def test_hosts_are_tried_with_parameters_of_their_own_in_training() -> None:
    """So that what leaks from one network into another can be seen."""
    nets = host_networks(user_parts.host_of(uneven, "uneven", 10), 10)
    rows, kept = nets.start()
    leaf = rows.clone().requires_grad_()
    losses, _ = nets.train(leaf, kept)
    for env, loss in enumerate(losses):
        (gradient,) = torch.autograd.grad(loss, [leaf], retain_graph=True)
        assert gradient.any(1).nonzero().tolist() == [[env]]
