"""What a user's part does wrong is found and named, all of it at once; what is fine passes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hosts_of_users import uneven
from hosts_of_users import unmarked as unmarked_host
from parts_of_users import Grouped, unmarked

import esper_soa
from esper_soa.lab.conformance import ConformanceError
from esper_soa.lab.conformance_networks import host_networks
from esper_soa.nets.model import user_parts
from esper_soa.system.errors import SettingError, UserError

HERE = "parts_of_users"
CHECKS: dict[str, Callable[..., object]] = {
    "blueprint": esper_soa.check_blueprint,
    "host": esper_soa.check_host,
    "reward": esper_soa.check_reward,
    "agent": esper_soa.check_agent,
}
GOOD = {
    "blueprint": ["twice", "instead", "grouped", "perceptron", "linear"],
    "host": ["uneven", "refined", "staged", "plain", "counting"],
    "reward": ["gain", "parts"],
    "agent": ["eager"],
}
# Parts with faults, each with all that is found, in order; * stands for words of torch and for
# numbers that are drawn.
FAULTY = re.split(r"\n(?! )", (Path(__file__).parent / "findings.txt").read_text("utf-8").strip())


def reference(kind: str, name: str) -> str:
    return f"{'hosts_of_users' if kind == 'host' else HERE}:{name}"


@pytest.mark.parametrize(("kind", "name"), [(kind, one) for kind in GOOD for one in GOOD[kind]])
def test_what_a_run_can_take_passes(kind: str, name: str) -> None:
    CHECKS[kind](reference(kind, name))


@pytest.mark.parametrize("told", FAULTY, ids=[one.partition(":")[0] for one in FAULTY])
def test_a_faulty_part_is_found_out_with_all_findings_at_once(told: str) -> None:
    kind, name = told.partition(":")[0].split(" ")
    with pytest.raises(ConformanceError) as error:
        CHECKS[kind](reference(kind, name))
    assert isinstance(error.value, UserError)
    assert re.fullmatch(re.escape(told).replace(r"\*", ".*"), str(error.value)), str(error.value)
    found = error.value.findings
    assert str(error.value).partition("\n")[2] == "\n".join(f"  - {one}" for one in found)


@pytest.mark.parametrize(
    ("check", "name", "engine"),
    [
        ("host", "hosts_of_users:refined", "native"),
        ("host", "hosts_of_users:plain", "torch: no native kernels, .*avg_pool2d"),
        ("blueprint", "parts_of_users:grouped", "native"),
        ("blueprint", "parts_of_users:perceptron", "torch: no native kernels, .*add_ in forward.*"),
    ],
)
def test_the_engine_that_computes_a_part_is_returned(check: str, name: str, engine: str) -> None:
    assert re.fullmatch(engine, str(CHECKS[check](name)))


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
