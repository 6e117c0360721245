"""Settings composed from Python: the command line's, without a trace in a caller's Hydra."""

import copy
import re
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import OmegaConf

from esper_soa.config.compose import compose_settings, experiments, job_settings
from esper_soa.config.hydra_versions import INITIALIZE
from esper_soa.config.paths import config_dir
from esper_soa.config.settings import TrainConfig, register_schema, settings_from
from esper_soa.system.errors import UserError

register_schema()  # for Hydra's own composing, that ours is set beside


def test_settings_are_those_of_the_command_line() -> None:
    overrides = ["envs=4", "task=cifar_impaired", "policy.ppo.lr=0.5", "slots=[r0c1]"]
    with initialize_config_dir(config_dir(), **INITIALIZE):
        wanted = settings_from(compose("train", ["+experiment=cifar_3seed", *overrides]))
    found = compose_settings("cifar_3seed", overrides)
    assert asdict(found) == asdict(wanted)
    assert (found.envs, found.task.name, found.policy.ppo.lr) == (4, "cifar_impaired", 0.5)
    assert compose_settings() == TrainConfig()


def test_every_experiment_that_ships_composes() -> None:
    assert "cifar_3seed" in experiments()
    for name in experiments():
        assert compose_settings(name).name == name


def test_a_budget_changes_how_much_is_played_and_nothing_else() -> None:
    plain = asdict(compose_settings("cifar_3seed"))
    changed = {}
    for file in sorted(Path(config_dir(), "budget").glob("*.yaml")):
        found = asdict(compose_settings("cifar_3seed", [f"+budget={file.stem}"]))
        changed[file.stem] = {name: found[name] for name in found if found[name] != plain[name]}
    assert changed == {"hour": {"rounds": 80}, "minute": {"envs": 4}}


def test_the_hydra_of_the_caller_stays_as_it_is() -> None:
    assert not GlobalHydra.instance().is_initialized()
    Singleton._instances.pop(Plugins, None)
    compose_settings("smoke")
    assert Plugins in Singleton._instances, "found once per process"
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_dir(config_dir(), job_name="mine", version_base="1.3"):
        mine = GlobalHydra.instance().hydra
        base = VersionBase.instance().getbase()
        compose_settings("smoke")
        with pytest.raises(UserError):
            compose_settings("smoke", ["envs=none"])
        assert GlobalHydra.instance().hydra is mine
        assert VersionBase.instance().getbase() == base
        assert JobRuntime.instance().get("name") == "mine"
        assert compose("train", ["rounds=3"]).rounds == 3
    assert not GlobalHydra.instance().is_initialized()


def test_threads_compose_one_after_the_other() -> None:
    with ThreadPool(4) as pool:
        found = pool.map(lambda rounds: compose_settings("", [f"rounds={rounds}"]), range(1, 5))
    assert [cfg.rounds for cfg in found] == [1, 2, 3, 4]


@dataclass
class Mine:
    """A caller's schema of a name that we use too."""

    rounds: int = 1


def test_schemas_and_resolvers_of_the_caller_stay_as_they_are() -> None:
    store = ConfigStore.instance()
    before = dict(vars(ConfigStore.instance()))
    schemas = dict(store.repo)
    try:
        store.store(name="train_schema", node=Mine)
        OmegaConf.register_new_resolver("now", lambda _: "mine", replace=True)
        compose_settings("smoke")
        assert OmegaConf.to_container(store.load("train_schema.yaml").node) == {"rounds": 1}
        assert OmegaConf.create({"when": "${now:%Y}"}).when == "mine"
        assert vars(store).get("__deepcopy__") is before.get("__deepcopy__")
        assert copy.deepcopy(store) is store, "which takes most of the time of composing"
    finally:
        OmegaConf.clear_resolver("now")
        store.repo = schemas


@pytest.mark.parametrize(
    ("experiment", "override", "message"),
    [
        (
            "cifar_3sed",
            "",
            r"^experiment=cifar_3sed: must be cifar_1seed, cifar_3seed, growth_family, imitate, "
            r"learn_baseline, learn_impaired, smoke, text_3seed\. Did you mean cifar_3seed\?$",
        ),
        (
            "smoke",
            "--policy.ppo.lr=1",
            r"^--policy.*: settings have no dashes\. Give policy.ppo.lr=1",
        ),
        (
            "smoke",
            "env=4",
            r"^env: there is no such setting\. Did you mean envs\?$",
        ),
        (
            "smoke",
            "+compute.engin=torch",
            r"^compute\.engin: there is no such setting\. Did you mean compute\.engine\?$",
        ),
        (
            "smoke",
            "envs=many",
            r"^envs=many: must be a whole number\.$",
        ),
        (
            "smoke",
            "task=cifar",
            r"^task=cifar: must be cifar_baseline, cifar_deep_impaired, "
            r"cifar_deep_multichannel, cifar_highres, cifar_impaired, cifar_minimal, "
            r"cifar_multichannel, cifar_postpool, cifar_scale, text_small, tinystories\. Did "
            r"you mean cifar_scale\?$",
        ),
        (
            "smoke",
            "envs=0",
            r"^envs=0: must be in \[1, 1048576\]\.$",
        ),
        ("smoke", "envs=", "envs"),
        ("smoke", "envs=4 steps", "^envs=4 steps: must be a whole number"),
        ("smoke", "tasks=${nowhere}", "^overrides: Interpolation key 'nowhere' not found"),
        ("smoke", f"policy.ppo.lr={'x' * 300}", r"^overrides: .{200}\.\.\.$"),
        ("+experiment=smoke", "", r"must be a name, without \+experiment="),
    ],
)
def test_what_cannot_be_composed_is_told_in_one_line(
    experiment: str, override: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        compose_settings(experiment, [override] if override else [])
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_configuration_of_a_users_own_without_ours_is_told_how_it_begins() -> None:
    with pytest.raises(UserError, match=r"begins with the lines defaults: \[train, _self_\]"):
        job_settings(OmegaConf.create({"seed": 3}))


def test_times_of_a_schedule_can_be_shares_of_the_env_steps() -> None:
    times = ["policy.schedule.germinate=[50%,2.5%, 0%]", "policy.schedule.fossilize=20%"]
    for steps, germinate, fossilize in ((40, [20, 1, 1], 8), (400, [200, 10, 1], 80)):
        schedule = compose_settings("smoke", [*times, f"steps={steps}"]).policy.schedule
        assert (schedule.germinate, schedule.fossilize) == (germinate, fossilize)
