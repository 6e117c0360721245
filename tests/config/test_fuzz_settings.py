"""Random overrides, composed as the command composes them and, where that is cheap, run: no way
ends in a traceback.

Every case ends well, or in one message: a UserError, Hydra's own error, or memory that ran out. A
case is made from its number alone, so that one that fails can be played again.
"""

import math
import random
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from esper_soa.config.hydra_versions import INITIALIZE
from esper_soa.config.paths import config_dir
from esper_soa.config.ranges import RULE, Choice, Items, NumberTable, Range
from esper_soa.config.settings import TrainConfig, register_schema, settings_from
from esper_soa.system.errors import RunMemoryError, UserError
from esper_soa.training.files.run_folder import RunFolder
from tests.builders.tiny_runs import run

CLEAN = (UserError, HydraException, OmegaConfBaseException, RunMemoryError)
NASTY = [
    *shlex.split("0 -1 1 3.7 1e308 -1e308 1e-320 inf -inf nan 0x10 2147483648 9223372036854775808"),
    *shlex.split("x null true [] {} [1,[2]] [x,x] {a:1} [null] ~ /dev/null ../.. ${nowhere} ???"),
    *shlex.split("${oc.env:HOME} auto on off cpu cuda:99999 [r0c0,r9c9] [norm] 1,2 \u732b"),
    *(str(10**30), str(-(10**30)), "\\,", "''", "'~'", "'[/x]'", "'[bold]'", "'${seed}'", "'1e5'"),
    *("'a b'", "'\n'"),
]
GROUPS = {
    group: [path.stem for path in sorted(Path(config_dir(), group).glob("*.yaml"))]
    for group in ("task", "reward", "policy", "gates", "lifecycle")
}
# Small enough to play in a second, whatever else is asked for.
SMALL = shlex.split(
    "envs=2 rounds=1 steps=3 batch_size=8 train_samples=8 val_samples=8 data=synthetic "
    "data.synthetic_train=32 data.synthetic_test=16 telemetry.progress=off"
)
# Too dear to play; and Triton, whose interpreter, which stands in for a GPU in this suite, takes no
# worker threads.
NOT_PLAYED = shlex.split(
    "compute.compile compute.engine run_dir resume profile data.root data.name task.base_channels "
    "data.synthetic_train data.synthetic_test policy.network.layers"
)
Leaf = tuple[str, object, object]  # setting, its rule or None, its default


def leaves(path: str, settings: object) -> Iterator[Leaf]:
    for item in fields(settings):
        value = vars(settings)[item.name]
        rule = item.metadata.get(RULE)
        if is_dataclass(value):
            yield from leaves(f"{path}{item.name}.", value)
        elif isinstance(rule, NumberTable):
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
        beside = float(default) + draw.choice([-1, 1])
        value = min(
            max(draw.choice([rule.low, rule.high, near, near, beside]), rule.low), rule.high
        )
        whole = isinstance(default, int) or math.isclose(value, round(value))
        return str(round(value)) if whole else f"{value:.6g}"
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
    with initialize_config_dir(config_dir(), **INITIALIZE):
        yield
    torch.set_num_threads(threads)


def play(number: int, folder: Path) -> bool:
    """Run a small case; True where it ended well."""
    folder.mkdir()
    budget = frozenset(setting.split("=")[0] for setting in SMALL)
    avoid = budget.union(NOT_PLAYED)
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
    widest = cfg.task.channels(cfg.task.num_blocks - 1) * cfg.task.kernel_size
    widths = (network.hidden, network.features, network.slot_features, widest)
    return (
        max(*widths, network.blueprint_embedding * 4) > 1024
        or cfg.policy.ppo.epochs > 10
        or cfg.attribution.shapley_samples > 100
        or cfg.task.num_classes > 1000
    )


def settled(count: int) -> int:
    """How many of the first cases are settings; the messages of the others are one line each."""
    met = [composed(case(number)) for number in range(count)]
    assert [str(one) for one in met if isinstance(one, UserError) and "\n" in str(one)] == []
    return sum(isinstance(one, TrainConfig) for one in met)


@pytest.mark.parametrize("count", [12, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_random_overrides_are_settings_or_one_message(count: int) -> None:
    assert count // 20 < settled(count) < count  # both sides are met


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_random_settings_play_or_end_in_one_message(tmp_path: Path, count: int) -> None:
    assert sum(play(number, tmp_path / str(number)) for number in range(count)) > count // 5
