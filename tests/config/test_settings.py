"""Composition of the configuration files and the checks that span settings; needs no torch."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from esper_soa.config.arguments import expand_slots, prepare_arguments
from esper_soa.config.compose import compose_settings
from esper_soa.config.hydra_versions import INITIALIZE
from esper_soa.config.nets import DataConfig, TaskConfig, TransformerConfig, host_slots
from esper_soa.config.paths import config_dir
from esper_soa.config.ranges import RULE, Items, NumberTable, Range
from esper_soa.config.settings import (
    EvaluateConfig,
    TrainConfig,
    register_schema,
    settings_from,
)
from esper_soa.lab.sweep.resolvers import register_resolvers
from esper_soa.system.errors import SettingError, UserError

CONFIGS = Path(config_dir())

register_schema()
register_resolvers()


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@cache
def defaults() -> DictConfig:
    """Composed once, as that takes most of the time of these tests."""
    return compose("train")


@pytest.fixture(autouse=True, scope="module")
def _hydra() -> Iterator[None]:
    with initialize_config_dir(str(CONFIGS), **INITIALIZE):
        yield


def settings(*overrides: str) -> TrainConfig:
    """The defaults with these values; no groups."""
    composed = copy.deepcopy(defaults())
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        OmegaConf.update(composed, one.key_or_group, one.value(), force_add=one.is_add())
    return settings_from(composed)


def option(group: str, name: str) -> TrainConfig:
    """The defaults with an option of a group, as its file has it."""
    composed = copy.deepcopy(defaults())
    composed[group] = OmegaConf.merge(
        OmegaConf.structured(getattr(TrainConfig(), group)),
        OmegaConf.load(CONFIGS / group / f"{name}.yaml"),
    )
    composed.slots = ["r0c0"]
    return settings_from(composed)


def test_the_defaults_compose_and_pass_every_check() -> None:
    assert settings() == TrainConfig()
    # a data set that is split needs no whole number of batches
    assert settings("data.split=true", "train_samples=100").train_samples == 100


GROUPS = ("task", "data", "reward", "policy", "gates", "lifecycle", "compute", "telemetry")


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_of_a_group_passes_under_its_own_name(group: str) -> None:
    keys = {"reward": "mode", "telemetry": "level"}
    assert len(options(group)) > 1
    for name in options(group):
        part = getattr(option(group, name), group)
        if group in ("task", "data", "policy", *keys):
            assert getattr(part, keys.get(group, "name")) == name


# What a sweep's launcher is part of; without it Hydra cannot compose the sweep.
LAUNCHERS = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "slurm": "hydra_submitit_launcher",
    "ray": "hydra_ray_launcher",
}


def job_settings(*overrides: str, numbers: Sequence[int] = ()) -> list[TrainConfig]:
    """The settings of the jobs of these numbers of a sweep; those of one without, for none."""
    composed = compose("train", list(overrides), return_hydra_config=True)
    found = []
    for number in numbers or (None,):
        job = copy.deepcopy(composed)
        if number is not None:
            job.hydra.job.num = number
        HydraConfig.instance().set_config(job)
        with open_dict(job):
            del job["hydra"]
        try:
            found.append(settings_from(job))
        finally:
            HydraConfig.instance().cfg = None
    return found


@pytest.mark.parametrize("sweep", options("sweep"))
def test_every_sweep_composes_and_its_jobs_take_turns_on_gpus(sweep: str) -> None:
    if sweep in LAUNCHERS:
        pytest.importorskip(f"hydra_plugins.{LAUNCHERS[sweep]}")
    places = ["+hydra.launcher.n_jobs=3"] if sweep == "gpus" else []
    numbers = [0, 1, 2, 3, 7] if sweep == "gpus" else [0]
    jobs = job_settings(f"+sweep={sweep}", "+experiment=smoke", *places, numbers=numbers)
    assert {job.name for job in jobs} == {"smoke"}
    if sweep == "gpus":
        assert [job.device for job in jobs] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("task", "count", "names"),
    [
        ("cifar_baseline", 1, ["r0c0"]),
        ("cifar_baseline", 3, ["r0c0", "r0c1", "r0c2"]),
        ("cifar_multichannel", 5, ["r0c0", "r0c1", "r0c2", "r1c0", "r1c1"]),
    ],
)
def test_slots_are_chosen_by_their_number_or_by_name(
    task: str, count: int, names: list[str]
) -> None:
    chosen = option("task", task)
    assert replace(chosen, slots=[str(count)]).slots == names
    assert replace(chosen, slots=names).slots == names
    for none in (0, 99):
        told = rf"^slots={none}: must be in \[1, 6\] with {task}"
        with pytest.raises(SettingError, match=told):
            replace(chosen, slots=[str(none)])
    with pytest.raises(SettingError, match="^slots=2: .* of mine"):
        settings("task.host=host.py:mine", "slots=[2]")


def test_numbers_of_slots_are_lists_for_hydra_in_sweeps_too() -> None:
    assert prepare_arguments(["slots=1,2,3", "-m", "max_seeds=3"], TrainConfig) == [
        "-m",
        "slots=[1],[2],[3]",
        "max_seeds=3",
    ]
    kept = ["slots=[r0c0]", "+slots=3", "slots=3x", "steps=3", "slots=[r0c0],[r0c1]"]
    assert expand_slots(kept) == kept
    assert compose_settings("smoke", ["slots=3"]).slots == ["r0c0", "r0c1", "r0c2"]


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
TEXT_TASKS = ("text_small", "tinystories")


def test_the_nine_tasks_have_their_hosts() -> None:
    found = {}
    for name in TASKS:
        task = option("task", name).task
        sizes = (task.base_channels, task.num_blocks, task.kernel_size, task.num_pools)
        found[name] = (*sizes, len(host_slots(task)))
    assert found == TASKS
    assert {*options("task")} == {*TASKS, *TEXT_TASKS}


def test_slots_have_the_place_and_the_size_of_their_features() -> None:
    chain = TaskConfig(num_blocks=3, num_pools=2)
    assert host_slots(chain) == (
        *(("r0c0", 0, 0, 8, 32, 0.0, 2), ("r0c1", 0, 1, 16, 16, 0.5, 2)),
        *(("r0c2", 0, 2, 32, 8, 1.0, 2), ("r1c0", 1, 0, 8, 16, 0.0, 2)),
        ("r1c1", 1, 1, 16, 8, 0.5, 2),
    )
    text = TransformerConfig(width=12, heads=6, layers=2, segments=2, context=16)
    task = TaskConfig(host="transformer", transformer=text)
    assert host_slots(task) == (("r0c0", 0, 0, 12, 16, 0.0, 1), ("r0c1", 0, 1, 12, 16, 1.0, 1))
    assert host_slots(replace(task, transformer=replace(text, segments=1)))[0].depth == 0.0
    found = [(slot.topology, slot.shape, slot.positions) for slot in host_slots(task)[:1]]
    assert found == [("sequences", (12, 16), 16)]
    # 4 * 2048 = 8192 channels in the last block; heads of hosts and of seeds divide a width
    assert (chain.widths, task.widths) == (range(8, 2049), range(12, 8193, 12))
    assert (chain.host_name, TaskConfig(host="a:mine").host_name) == ("cifar_baseline", "mine")


FOLDER_NAME = "must be a folder name of at most 60 letters, digits, '_', '-', '+' and '.'."


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("name='a\nb'", rf"name=a\nb: {FOLDER_NAME}"),
        ("name=" + "x" * 5000, f"name={'x' * 200}...: {FOLDER_NAME}"),
        (
            "name=${nowhere}",
            "configuration: Interpolation key 'nowhere' not found full_key: name "
            "object_type=TrainConfig",
        ),
    ],
)
def test_a_bad_value_is_one_message_with_setting_value_and_remedy(override: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        settings(override)
    assert str(raised.value) == told


# Settings that are refused, by themselves or together, one line each, with the whole message.
REFUSED = (Path(__file__).parent / "refused.txt").read_text(encoding="utf-8").splitlines()
# The same, just on the other side.
ACCEPTED = """
task.transformer.heads=4
task.num_pools=3
task.optimizer=sgd task.momentum='[0.5,0.9]'
task.host=transformer task.transformer.width=6 task.blueprints=[norm,lora]
task.host=transformer task.transformer.width=8 task.blueprints=[norm,flex_attention]
task.blueprints=[a:mine,b:other]
data.split=true data.share=1
data.root=mine data.label_noise=0.5
data.name=a:mine data.root=mine
data.name=given data.validation_images=0
data.root=mine.NPZ data.mean=[0.5] data.std=[0.5] data.layout=nchw
data.name=npz data.root=mine data.mean=[0.5,0.5,0.5] data.std=[1,1,1] data.resize=pad
lifecycle.detached_stages=[blending,training]
attribution.shapley_samples=12
reward.mode='[basic,basic_plus]' reward.drip_fraction=0.5
reward.mode=basic reward.drip_fraction=0.5
task.host=a:mine slots=[x] control=static_final
early_stop.rollbacks=1
envs=3 reward.mode='[net,loss,shaped]'
ranks=8 restarts=1
ranks=2 device=cuda
profile=phases telemetry.console=envs device=cuda:1
batch_size=64 accumulate=2 train_samples=128
telemetry.level=full telemetry.console=envs
slots=[r0c0,r0c1] policy.ppo.probability_floor.slot=0.5
policy.schedule.blueprint=lora
task.host_lr='[0.1]'
data.name='[synthetic]'
task.host_lr='uniform(0.1,1000)'
gates.min_blending_steps='[1,2]'
policy.network.features=16
task.kernel_size=5
data.name='[synthetic,fashion32]'
data.name='[synthetic,cifar10]' data.root=mine
policy.ppo.probability_floor.op=0.16
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_settings_that_do_not_go_together_are_one_message(line: str) -> None:
    overrides, message = line.split(" -> ")
    with pytest.raises(UserError) as raised:
        settings(*overrides.split(" "))
    assert str(raised.value) == message


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_settings_that_just_go_together_are_taken(overrides: str) -> None:
    settings(*overrides.split(" "))


def test_a_root_is_of_the_data_sets_that_read_files() -> None:
    sets = DataConfig(name="[synthetic,cifar10]", root="mine").sets
    assert [(one.name, one.root) for one in sets] == [("synthetic", ""), ("cifar10", "mine")]


@pytest.mark.parametrize(
    ("setting", "item", "quote"),
    [
        ("policy.heuristic.blueprint_rotation", "norm", ""),
        ("task.host_lr", "0.1", "'"),
        ("data.name", "synthetic", "'"),
    ],
)
def test_a_list_has_64_items_at_most(setting: str, item: str, quote: str) -> None:
    settings(f"{setting}={quote}[{','.join([item] * 64)}]{quote}")
    with pytest.raises(UserError, match=rf"{setting}=.*\b64\b"):
        settings(f"{setting}={quote}[{','.join([item] * 65)}]{quote}")


FREE = {"run_dir", "resume", "slots", "data.root", "data.tokenizer"}
FREE |= {"checkpoint", "data_root", "policy.init", "tasks", "worlds"}


def parts(path: str, settings: object) -> Iterator[tuple[str, object]]:
    """Every dataclass within `settings` and its path."""
    yield path, settings
    for item in fields(settings):
        value = vars(settings)[item.name]
        if is_dataclass(value):
            yield from parts(f"{path}{item.name}.", value)


PARTS = [*parts("", TrainConfig()), *parts("", EvaluateConfig(checkpoint="run"))]


def is_free(item: Field) -> bool:
    return item.type is not bool and not is_dataclass(item.type)


def test_every_setting_but_paths_switches_and_slots_has_a_rule() -> None:
    every = [(path, item) for path, settings in PARTS for item in fields(settings)]
    bare = [path + item.name for path, item in every if RULE not in item.metadata and is_free(item)]
    assert set(bare) == FREE


@pytest.mark.parametrize(
    ("path", "settings"), PARTS, ids=[path or type(part).__name__ for path, part in PARTS]
)
def test_what_lies_outside_a_range_is_refused_under_the_settings_whole_name(
    path: str, settings: object
) -> None:
    for item in fields(settings):
        rule = item.metadata.get(RULE)
        value = vars(settings)[item.name]
        numbers = rule.rule if isinstance(rule, Items | NumberTable) else rule
        if not isinstance(numbers, Range):
            continue
        below = [numbers.low] if numbers.ends[0] == "(" else [numbers.low - 1]
        above = [numbers.high] if numbers.ends[1] == ")" else [numbers.high + 1]
        for bad in (*below, *above, math.inf, -math.inf, math.nan, 2**63, 10**30):
            wrong = [bad] if isinstance(rule, Items) else bad
            wrong = {**value, "op": bad} if isinstance(rule, NumberTable) else wrong
            with pytest.raises(SettingError) as raised:
                replace(settings, **{item.name: wrong})
            name = f"{path}{item.name}" + (".op" if isinstance(rule, NumberTable) else "")
            assert str(raised.value).startswith(f"{name}={bad}: must be {numbers}")


def test_a_whole_number_from_python_is_read_as_a_float() -> None:
    cfg = TrainConfig()
    cfg.task.host_lr = 1
    assert isinstance(cfg.task.number("host_lr"), float)
