"""Random overrides, composed as the command composes them and, where that is cheap, run: no way
ends in a traceback.

Every case ends well, or in one message: a UserError, Hydra's own error, or memory that ran out. A
case is made from its number alone, so that one that fails can be played again.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from esper_soa.config import TrainConfig, register_schema, settings_from
from esper_soa.errors import OutOfRoomError, UserError
from esper_soa.ops.rundir import RunFolder
from esper_soa.paths import config_dir
from esper_soa.ranges import RULE, Choice, Items, Range, Table
from esper_soa.trainer import run

CLEAN = (UserError, HydraException, OmegaConfBaseException, OutOfRoomError)
NASTY = (
    "0",
    "-1",
    "1",
    "3.7",
    "1e308",
    "-1e308",
    "1e-320",
    "inf",
    "-inf",
    "nan",
    str(2**31),
    str(2**63),
    str(10**30),
    str(-(10**30)),
    "''",
    "x",
    "null",
    "[]",
    "{}",
    "[1,[2]]",
    "[x,x]",
    "{a:1}",
    "[null]",
    "true",
    "'~'",
    "~",
    "/dev/null",
    "../..",
    "'[/x]'",
    "'[bold]'",
    "'${seed}'",
    "${nowhere}",
    "${oc.env:HOME}",
    "???",
    "\u732b",
    "0x10",
    "'1e5'",
    "auto",
    "on",
    "off",
    "cpu",
    "cuda:99999",
    "[r0c0,r9c9]",
    "[norm]",
    "'a b'",
    "1,2",
    "\\,",
    "'\n'",
)
GROUPS = {
    "task": [path.stem for path in (Path(config_dir()) / "task").glob("*.yaml")],
    "reward": [
        "shaped",
        "escrow",
        "basic",
        "basic_plus",
        "sparse",
        "minimal",
        "simplified",
        "loss",
        "net",
        "none",
    ],
    "policy": ["ppo", "random", "wait", "schedule", "heuristic"],
    "gates": ["permissive", "strict"],
    "lifecycle": ["manual", "auto_forward"],
}
# Small enough to play in a second, whatever else is asked for.
SMALL = (
    "envs=2",
    "rounds=1",
    "steps=3",
    "batch_size=8",
    "train_samples=8",
    "val_samples=8",
    "data=synthetic",
    "data.synthetic_train=32",
    "data.synthetic_test=16",
    "telemetry.progress=off",
)
# Too dear to play; and Triton, whose interpreter, which stands in for a GPU in this suite, takes no
# worker threads.
NOT_PLAYED = {
    "compute.compile",
    "compute.engine",
    "run_dir",
    "resume",
    "profile",
    "data.root",
    "data.name",
    "data.synthetic_train",
    "data.synthetic_test",
    "task.base_channels",
    "policy.network.layers",
}
Leaf = tuple[str, object, object]  # setting, its rule or None, its default


def leaves(path: str, settings: object) -> Iterator[Leaf]:
    for item in fields(settings):
        value = vars(settings)[item.name]
        rule = item.metadata.get(RULE)
        if is_dataclass(value):
            yield from leaves(f"{path}{item.name}.", value)
        elif isinstance(rule, Table):
            yield from (
                (f"{path}{item.name}.{key}", rule.rule, number) for key, number in value.items()
            )
        else:
            yield path + item.name, rule, value


LEAVES = [*leaves("", TrainConfig())]


def fitting(rule: object, default: object, draw: random.Random) -> str:
    """A value that the setting's own rule allows, at an end of its range as often as near its
    default.
    """
    if isinstance(rule, Range):
        near = float(default) * 10 ** draw.uniform(-1, 1)
        value = draw.choice(
            [rule.low, rule.high, near, near, float(default) + draw.choice([-1, 1])]
        )
        value = min(max(value, rule.low), rule.high)
        return (
            str(round(value))
            if isinstance(default, int) or math.isclose(value, round(value))
            else f"{value:.6g}"
        )
    if isinstance(rule, Choice):
        return draw.choice(rule.words)
    if isinstance(rule, Items) and isinstance(rule.rule, Choice):
        words = rule.rule.words
        return "[" + ",".join(draw.sample(words, draw.randint(1, len(words)))) + "]"
    if isinstance(rule, Items):
        return "[" + ",".join(str(draw.randint(1, 9)) for _ in range(draw.randint(1, 5))) + "]"
    return draw.choice(["true", "false"]) if isinstance(default, bool) else "x"


def case(number: int, avoid: frozenset[str] = frozenset()) -> list[str]:
    """The overrides of a case: up to four settings, a third of them that fit, sometimes a group."""
    draw = random.Random(number)
    found = [
        f"{group}={draw.choice(options)}"
        for group, options in GROUPS.items()
        if draw.random() < 0.15
    ]
    for name, rule, default in draw.sample(
        [leaf for leaf in LEAVES if leaf[0] not in avoid], draw.randint(1, 4)
    ):
        good = draw.random() < (0.33 if not avoid else 0.9)
        sign = "+" if draw.random() < 0.05 else "++" if draw.random() < 0.05 else ""
        found.append(f"{sign}{name}={fitting(rule, default, draw) if good else draw.choice(NASTY)}")
    return found


def composed(overrides: list[str]) -> TrainConfig | Exception:
    """The settings, or the one message that refuses them."""
    try:
        return settings_from(compose("train", overrides))
    except CLEAN as error:
        return error


@pytest.fixture(autouse=True, scope="module")
def _hydra() -> Iterator[None]:
    register_schema()
    threads = torch.get_num_threads()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        yield
    torch.set_num_threads(threads)


def play(number: int, folder: Path) -> bool:
    """Run a small case; True where it ended well."""
    budget = frozenset(setting.split("=")[0] for setting in SMALL)
    avoid = frozenset(NOT_PLAYED | budget)
    settings = composed(["+experiment=smoke", *SMALL, *case(number, avoid)])
    if isinstance(settings, Exception) or dear(settings):
        return False
    try:
        run(settings, RunFolder(folder))
    except CLEAN:
        return False
    return True


def dear(cfg: TrainConfig) -> bool:
    """More than a second of work."""
    network = cfg.policy.network
    task = cfg.task
    widest = task.channels(task.num_blocks - 1) * task.kernel_size
    wide = (
        max(
            network.hidden,
            network.features,
            network.slot_features,
            network.blueprint_embedding * 4,
            widest,
        )
        > 1024
    )
    return (
        wide
        or cfg.policy.ppo.epochs > 10
        or cfg.attribution.shapley_samples > 100
        or task.num_classes > 1000
    )


def settled(count: int) -> int:
    """How many of the first cases are settings; the messages of the others are one line each."""
    met = [composed(case(number)) for number in range(count)]
    assert [str(one) for one in met if isinstance(one, UserError) and "\n" in str(one)] == []
    return sum(isinstance(one, TrainConfig) for one in met)


def test_random_overrides_are_settings_or_one_message() -> None:
    assert 1 <= settled(30) <= 25  # both sides are met


def test_random_settings_play_or_end_in_one_message(tmp_path: Path) -> None:
    assert sum(play(number, made(tmp_path / str(number))) for number in range(8)) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_random_overrides_are_settings_or_one_message() -> None:
    assert 100 <= settled(2000) <= 1800


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_random_settings_play_or_end_in_one_message(tmp_path: Path) -> None:
    ended_well = sum(play(number, made(tmp_path / str(number))) for number in range(200))
    assert ended_well > 40


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder
