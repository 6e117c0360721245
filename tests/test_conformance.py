"""What a user's part does wrong is found and named, all of it at once; what is fine passes."""

import re
from collections.abc import Callable

import pytest
from hosts_of_users import unmarked as unmarked_host
from parts_of_users import Grouped, unmarked

import esper_soa
from esper_soa.conformance import ConformanceError
from esper_soa.errors import SettingError, UserError

HERE = "parts_of_users"


def findings(check: Callable[[str], None], name: str) -> tuple[str, ...]:
    with pytest.raises(ConformanceError) as error:
        check(f"{HERE}:{name}")
    assert isinstance(error.value, UserError)
    assert all(f"\n  - {finding}" in str(error.value) for finding in error.value.findings)
    return error.value.findings


@pytest.mark.parametrize("name", ["twice", "instead", "grouped", "perceptron"])
def test_blueprints_that_can_grow_pass(name: str) -> None:
    esper_soa.check_blueprint(f"{HERE}:{name}")


WITH = r"with 4 channels( of 8x8 pixels)? "
BLUEPRINTS = {
    "narrower": "blueprint narrower: its parts turn 1 channels into 8",
    "counting": WITH + "it keeps buffers",
    "counter": WITH + "a second pass gives something else: it keeps state or draws random numbers",
    "chance": WITH + "its initial values differ though the env is the same",
    "infinite": WITH + "its initial values are not finite",
    "undefined": WITH + "its output is not finite",
    "crowd": WITH + "the output of an image depends on the other images of its batch",
    "deaf": WITH + "no gradient reaches its parameters: its output is cut off from them",
    "keyword": WITH + "it raises TypeError: keyword.. takes 0 positional arguments",
    "leaking": WITH + "a gradient reaches parameters of env 1 from the output of env 0",
    "silent": WITH
    + "the gradient of all of its parameters is 0 as it begins: it could never learn",
}


@pytest.mark.parametrize("name", BLUEPRINTS)
def test_a_faulty_blueprint_is_found_out(name: str) -> None:
    found = findings(esper_soa.check_blueprint, name)
    assert any(re.match(BLUEPRINTS[name], one) for one in found), found


def test_findings_of_every_slot_are_told_at_once() -> None:
    found = findings(
        lambda part: esper_soa.check_blueprint(part, channels=(2, 6), size=4), "shrinking"
    )
    assert [one[:15] for one in found] == ["with 2 channels", "with 6 channels"]


@pytest.mark.parametrize("name", ["uneven", "refined", "staged", "plain", "counting"])
def test_hosts_that_can_be_trained_pass(name: str) -> None:
    esper_soa.check_host(f"hosts_of_users:{name}")


HOSTS = {
    "word": "host word: it gives chain, no tuple of segments (ConvBlock, Residual)",
    "tiny": "its segment 5 pools features of one pixel",
    "branching": "it gives a Branching, which is no nn.Sequential: a host is a chain of segments",
    "chance": (
        "its initial values differ though the env is the same: it has other draws than torch's"
    ),
    "infinite": "its initial values are not finite",
    "undefined": "its output is not finite",
    "crowd": "the output of an image depends on the other images of its batch",
    "deaf": "no gradient reaches its parameters: its output is cut off from them",
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_faulty_host_is_found_out(name: str) -> None:
    with pytest.raises(ConformanceError) as error:
        esper_soa.check_host(f"hosts_of_users:{name}")
    assert [one for one in error.value.findings if one.startswith(HOSTS[name])], (
        error.value.findings
    )


@pytest.mark.parametrize("name", ["gain", "parts"])
def test_rewards_that_can_be_paid_pass(name: str) -> None:
    esper_soa.check_reward(f"{HERE}:{name}")


REWARDS = {
    "per_slot": ["the reward is of shape [5, 3], not [5]"],
    "count": ["the reward is of torch.int64, not of floating-point numbers"],
    "ranked": [
        "what env 0 is paid depends on other envs",
        "what env 0 is paid depends on the number of envs",
    ],
    "divided": ["it pays inf, not a finite number, at the last env-step"],
    "careless": ["it changes its input val_accuracy in place"],
    "branching": ["it reads numbers on the host", "it cannot be compiled as one graph"],
    "random": ["for the same inputs it pays something else the second time"],
    "graph": ["the reward has a gradient, and nobody learns from it"],
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_faulty_reward_is_found_out(name: str) -> None:
    found = findings(esper_soa.check_reward, name)
    for words in REWARDS[name]:
        assert [one for one in found if one.startswith(words)], found


def test_an_agent_that_plays_by_the_rules_passes() -> None:
    esper_soa.check_agent(f"{HERE}:eager")


AGENTS = {
    "lawless": ["at env-step 1: env 0: blueprint 9 for op germinate is not legal"],
    "dicing": [
        "at env-step 1: for the same view and memory it decides something else the second time"
    ],
    "following": ["what it decides for env 0 depends on"],
    "writing": [
        "at env-step 1: it changes the view in place",
        "at env-step 1: it changes its memory in place",
    ],
    "listing": ["its memory is a list, not a tuple of tensors"],
    "loose": [
        "at env-step 1: its value is of torch.float64, not torch.float32",
        "at env-step 1: its value has a gradient",
    ],
    "mute": ["it raises AttributeError: 'Mute' object has no attribute 'act'"],
    "demanding": ["it wants more arguments than the Surroundings"],
    "stumbling": ["it raises KeyError: 'memory'"],
}


@pytest.mark.parametrize("name", AGENTS)
def test_a_faulty_agent_is_found_out(name: str) -> None:
    found = findings(esper_soa.check_agent, name)
    for words in AGENTS[name]:
        assert [one for one in found if words in one], found


def test_a_part_is_checked_by_itself_and_must_be_marked() -> None:
    esper_soa.check_blueprint(Grouped)
    told = r'nothing marks it: @esper_soa.{}\("name"\) belongs above it'
    with pytest.raises(ConformanceError, match=told.format("blueprint")):
        esper_soa.check_blueprint(unmarked)
    with pytest.raises(ConformanceError, match=told.format("host")):
        esper_soa.check_host(unmarked_host)
    with pytest.raises(
        SettingError,
        match="check_reward=parts_of_users:eager: must be a reward that parts_of_users reg",
    ):
        esper_soa.check_reward(f"{HERE}:eager")


def test_the_package_says_what_it_lacks() -> None:
    with pytest.raises(
        AttributeError, match="module 'esper_soa' has no attribute 'check_everything'"
    ):
        esper_soa.check_everything  # noqa: B018
