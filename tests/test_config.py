"""Composition of the configuration files and the checks that span settings; needs no torch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from esper_soa.config import TrainConfig, settings_from
from esper_soa.errors import UserError
from esper_soa.nets.config import host_slots
from esper_soa.train import config_dir

CONFIGS = Path(config_dir())


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def _hydra() -> Iterator[None]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def settings(*overrides: str) -> TrainConfig:
    return settings_from(compose("train", list(overrides)))


def test_the_defaults_compose_and_pass_every_check() -> None:
    assert settings() == TrainConfig()


@pytest.mark.parametrize("group", ["task", "data", "reward", "policy", "gates", "lifecycle", "compute"])
def test_every_option_of_a_group_composes_under_its_own_name(group: str) -> None:
    assert len(options(group)) > 1
    for option in options(group):
        part = getattr(settings(f"{group}={option}", "slots=[r0c0]"), group)
        if group in ("task", "data", "policy"):
            assert part.name == option
        if group == "reward":
            assert part.mode == option


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes(experiment: str) -> None:
    assert settings(f"+experiment={experiment}").name == experiment


@pytest.mark.parametrize("sweep", options("sweep"))
def test_every_sweep_composes(sweep: str) -> None:
    assert settings(f"+sweep={sweep}", "+experiment=smoke").name == "smoke"


# name -> base channels, blocks, kernel, pools, and the slots that follow: one per block and one per pool
TASKS = {
    "cifar_baseline": (8, 3, 3, 3, 6),
    "cifar_multichannel": (8, 3, 3, 3, 6),
    "cifar_scale": (8, 5, 3, 5, 10),
    "cifar_deep_multichannel": (8, 5, 3, 5, 10),
    "cifar_impaired": (1, 3, 1, 3, 6),
    "cifar_minimal": (2, 3, 1, 0, 3),
    "cifar_postpool": (16, 3, 3, 3, 6),
    "cifar_highres": (16, 3, 3, 3, 6),
    "cifar_deep_impaired": (2, 5, 1, 5, 10),
}


def test_the_nine_tasks_have_their_hosts() -> None:
    found = {}
    for name in options("task"):
        task = settings(f"task={name}").task
        found[name] = (task.base_channels, task.num_blocks, task.kernel_size, task.num_pools, len(host_slots(task)))
    assert found == TASKS


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_device_takes_all_four_spellings(device: str) -> None:
    assert settings(f"device={device}").device == device


def test_a_data_folder_is_a_plain_override_beside_the_choice_of_the_set() -> None:
    data = settings("data=auto", "data.root=/some/where").data
    assert (data.name, data.root) == ("auto", "/some/where")


def test_the_drip_of_basic_plus_is_set_and_can_be_overridden() -> None:
    assert settings("reward=basic_plus").reward.drip_fraction == 0.7
    assert settings("reward=basic_plus", "reward.drip_fraction=0.5").reward.drip_fraction == 0.5


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("slots=[r0c0,r9c9]", ("slots=r9c9", "r0c0", "r1c2")),
        ("slots=[r0c0,r0c0]", ("slots=", "once")),
        ("slots=[]", ("slots=", "non-empty")),
        ("envs=0", ("envs=0", "at least 1")),
        ("steps=0", ("steps=0", "at least 1")),
        ("rounds=0", ("rounds=0", "at least 1")),
        ("val_samples=0", ("val_samples=0", "at least 1")),
        ("seed=-1", ("seed=-1", "between")),
        ("max_seeds=-1", ("max_seeds=-1", "at least 0")),
        ("batch_size=1", ("batch_size=1", "BatchNorm")),
        ("train_samples=100", ("train_samples=100", "batch_size=32", "96 or 128")),
        ("train_samples=20", ("train_samples=20", "Nearest: 32.")),
        ("name=a/b", ("name=a/b", "folder name")),
        ("name=..", ("name=..", "folder name")),
        ("device=gpu", ("device=gpu", "cuda:<index>")),
        ("device=cuda:x", ("device=cuda:x", "cuda:<index>")),
        ("task.blueprints=[norm,conv_huge]", ("task.blueprints=conv_huge", "conv_heavy")),
        ("task.kernel_size=2", ("task.kernel_size=2", "odd")),
        ("reward.mode=generous", ("reward.mode=generous", "shaped")),
        ("signals.plateau_threshold=nan", ("signals.plateau_threshold=nan", "finite")),
        ("policy.ppo.entropy_floor.op=inf", ("policy.ppo.entropy_floor.op=inf", "finite")),
        ("+policy.ppo.entropy_floor.tail=0.1", ("policy.ppo.entropy_floor=", "tail")),
        ("policy.ppo.minibatches=9", ("policy.ppo.minibatches=9", "envs=8")),
        ("policy.schedule.blueprint=conv_huge", ("policy.schedule.blueprint=conv_huge", "norm")),
        ("telemetry.progress=loud", ("telemetry.progress=loud", "plain")),
        ("compute.threads=-1", ("compute.threads=-1", "at least 0")),
        ("name=${nowhere}", ("nowhere",)),
        ("+env=4", ("env: there is no such setting", "envs?")),
        ("+task.num_block=4", ("task.num_block: there is no such setting", "num_blocks?")),
    ],
)
def test_a_bad_value_is_one_message_with_setting_value_and_remedy(override: str, told: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as raised:
        settings(override)
    message = str(raised.value)
    assert "\n" not in message
    assert [part for part in told if part not in message] == []


@pytest.mark.parametrize(
    ("policy", "setting"), [("schedule", "policy.schedule.blueprint=norm"), ("heuristic", "blueprint_rotation")]
)
def test_a_scripted_policy_may_only_use_blueprints_of_the_task(policy: str, setting: str) -> None:
    assert settings("policy=wait", "task.blueprints=[conv_small]").policy.name == "wait"
    with pytest.raises(UserError, match=setting):
        settings(f"policy={policy}", "task.blueprints=[conv_small]")


def test_a_split_data_set_needs_no_whole_number_of_batches() -> None:
    assert settings("data.split=true", "train_samples=100").train_samples == 100


@pytest.mark.parametrize(
    "override",
    ["nonsense=1", "task.depth=3", "envs=many", "envs=1.5", "data.augment=perhaps",
     "task=cifar_huge", "slots=r0c0", "reward.loss.unknown=1"],
)  # fmt: skip
def test_unknown_keys_wrong_types_and_unknown_options_are_refused_by_hydra(override: str) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException)):
        compose("train", [override])
