"""What the parts of a run's record must be, before anything goes on from them.

A record comes from a file, so every name, type and range is looked at. Each check returns what is
wrong, in words that name the place, and an empty text where nothing is. Called by resume.py.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields

import torch
from torch import Tensor

from esper_soa.ops.final_table import SeedCounts
from esper_soa.registry import is_reference
from esper_soa.vocabulary import CNN_BLUEPRINTS, NUM_BLUEPRINTS, Blend, Blueprint

LARGEST = 2**53  # of counts and sums
MOST_FLOP = 1e30
PARTS = ("progress", "settings", "data", "versions", "watch", "learner")
POLICY = ("format", "version", "network", "learner", "facts")
PROGRESS = (
    "rounds_done",
    "seconds",
    "alpha_rows",
    "seeds",
    "best_accuracy",
    "front",
    "rewards",
    "recent",
    "cut_off",
)
NO_EARLY_ENDS = {"cut_off": 0}  # of a run that was saved before episodes could end early
PLAYED = {  # lowest and highest number in each list of a round; tables have a row per env
    "accuracies": (0, 100),
    "parameters": (0, LARGEST),
    "train_flop": (0, MOST_FLOP),
    "blueprint": (Blueprint.NONE, max(CNN_BLUEPRINTS)),
    "blend": (Blend.ADD, Blend.GATE),
    "alpha": (0, 1),
}
TABLES = ("blueprint", "blend", "alpha")  # those of PLAYED that have a number per slot
CODES = ("blueprint", "blend")  # those of whole numbers
SEEDS = tuple(field.name for field in fields(SeedCounts))
OUTCOMES = 3  # numbers per point of a Pareto front


def record_fault(content: Mapping[str, object]) -> str:
    """What is wrong with the record `content` of a run."""
    checks: tuple[Callable[[], str], ...] = (
        lambda: _keys("the record", content, PARTS),
        lambda: _progress(content["progress"], _num_own(content["settings"])),
        lambda: _settings("settings", content["settings"]),
        lambda: _texts("data", content["data"], ("name", "source", "identity")),
        lambda: _versions(content["versions"]),
        lambda: _watch(content["watch"]),
        lambda: "" if content["learner"] is None else _mapping("learner", content["learner"]),
        lambda: _hosts(content["progress"], content["settings"]),
    )
    return _first(check() for check in checks)


def policy_fault(content: Mapping[str, object]) -> str:
    """What is wrong with the content of a policy's file; its tensors are for `unlike`."""
    checks: tuple[Callable[[], str], ...] = (
        lambda: _keys("the policy", content, POLICY),
        lambda: _mapping("network", content["network"]),
        lambda: _first(
            _count(f"network.{name}", size) for name, size in _items(content["network"])
        ),
        lambda: _mapping("learner", content["learner"]),
        lambda: _mapping("facts", content["facts"]),
        lambda: _count("facts.rounds", _of(content["facts"], "rounds")),
        lambda: _names("facts.tasks", _of(content["facts"], "tasks")),
        lambda: _names("facts.data", _of(content["facts"], "data")),
        lambda: _names("facts.blueprints", dict(_items(content["facts"])).get("blueprints", [])),
    )
    return _first(check() for check in checks)


def unlike(value: object, like: object, place: str) -> str:
    """Where `value` differs from `like` in names, types, shapes or dtypes; counts and finite
    tensors are asked for.
    """
    if isinstance(like, Tensor):
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (like.shape, like.dtype):
            return f"{place} is {_kind(value)} where {_kind(like)} is wanted"
        return (
            "" if bool(torch.isfinite(value).all()) else f"{place} holds values that are not finite"
        )
    if isinstance(like, Mapping):
        fault = _keys(place, value, tuple(like))
        return fault or _first(
            unlike(_of(value, name), part, f"{place}.{name}") for name, part in like.items()
        )
    return _count(place, value)


def _first(faults: Iterable[str]) -> str:
    return next((fault for fault in faults if fault), "")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _of(mapping: object, name: str) -> object:
    """`mapping[name]`, of something that was found to be a mapping; None where it has no such
    name.
    """
    return mapping.get(name) if isinstance(mapping, Mapping) else None


def _items(mapping: object) -> Iterable[tuple[str, object]]:
    """Names and values of something that was found to be a mapping."""
    return mapping.items() if isinstance(mapping, Mapping) else ()


def _mapping(place: str, value: object) -> str:
    return "" if isinstance(value, Mapping) else f"{place} is {_kind(value)}"


def _keys(place: str, value: object, names: tuple[str, ...]) -> str:
    """`value` must be a mapping of just these names."""
    if not isinstance(value, Mapping):
        return f"{place} is {_kind(value)}"
    missing = [name for name in names if name not in value]
    foreign = [name for name in value if name not in names]
    return _first(
        [f"{place} lacks {name}" for name in missing] + [f"{place} has {name}" for name in foreign]
    )


def _count(place: str, value: object) -> str:
    fine = type(value) is int and 0 <= value <= LARGEST
    return "" if fine else f"{place} is {_shown(value)}, no count"


def _number(place: str, value: object, low: float, high: float) -> str:
    fine = type(value) in (int, float) and isinstance(value, int | float) and low <= value <= high
    return "" if fine else f"{place} is {_shown(value)}, not a number from {low:g} to {high:g}"


def _shown(value: object) -> str:
    return repr(value) if type(value) in (bool, int, float, str) or value is None else _kind(value)


def _numbers(place: str, value: object, low: float, high: float) -> str:
    if not isinstance(value, list):
        return f"{place} is {_kind(value)}"
    return _first(_number(f"{place}[{index}]", item, low, high) for index, item in enumerate(value))


def _floats(place: str, value: object) -> str:
    """A list of any floats, NaN and infinity among them, as rewards may be."""
    fine = isinstance(value, list) and all(type(item) is float for item in value)
    return "" if fine else f"{place} is not a list of numbers"


def _num_own(settings: object) -> int:
    """Blueprints of a user's own that the settings list."""
    listed = _of(_of(settings, "task"), "blueprints")
    return sum(is_reference(str(name)) for name in listed) if isinstance(listed, list) else 0


def _progress(found: object, num_own: int) -> str:
    progress = NO_EARLY_ENDS | dict(found) if isinstance(found, Mapping) else found
    fault = _keys("progress", progress, PROGRESS)
    if fault or not isinstance(progress, Mapping):
        return fault
    front = progress["front"]
    best = progress["best_accuracy"]
    checks = [
        _count("progress.rounds_done", progress["rounds_done"]),
        _count("progress.cut_off", progress["cut_off"]),
        _number("progress.seconds", progress["seconds"], 0, LARGEST),
        _number("progress.alpha_rows", progress["alpha_rows"], 0, LARGEST),
        ""
        if type(best) is float and best == -math.inf
        else _number("progress.best_accuracy", best, 0, 100),
        _mapping("progress.seeds", progress["seeds"]),
        "" if isinstance(front, list) else f"progress.front is {_kind(front)}",
        _floats("progress.rewards", progress["rewards"]),
        _played(progress["recent"], num_own),
    ]
    return _first(checks) or _first(_counted(progress))


def _counted(progress: Mapping) -> Iterable[str]:
    """The parts that hang together, once each is of its type."""
    yield from (
        _count(f"progress.seeds.{name}", count) for name, count in progress["seeds"].items()
    )
    for index, point in enumerate(progress["front"]):
        wrong = _floats(f"progress.front[{index}]", point)
        yield wrong or (
            "" if len(point) == OUTCOMES else f"progress.front[{index}] has {len(point)} numbers"
        )
    if progress["rounds_done"]:
        yield from (
            f"progress.seeds lacks {name}" for name in SEEDS if name not in progress["seeds"]
        )
        kept = len(progress["recent"])
        yield "" if 0 < kept <= progress["rounds_done"] else f"progress.recent is of {kept} rounds"
        lengths = {
            len(progress["rewards"]),
            *(len(round_[name]) for round_ in progress["recent"] for name in PLAYED),
        }
        yield (
            ""
            if len(lengths) == 1 and 0 not in lengths
            else "progress is of different numbers of envs"
        )


def _played(recent: object, num_own: int) -> str:
    """The records of the last rounds; num_own: blueprints of a user's own, with the codes from
    NUM_BLUEPRINTS on.
    """
    most = {"blueprint": NUM_BLUEPRINTS + num_own - 1} if num_own else {}
    if not isinstance(recent, list):
        return f"progress.recent is {_kind(recent)}"
    for index, record in enumerate(recent):
        place = f"progress.recent[{index}]"
        fault = _keys(place, record, tuple(PLAYED))
        for name, (low, high) in PLAYED.items():
            fault = fault or _listed(
                f"{place}.{name}", record[name], name, low, most.get(name, high)
            )
        if fault:
            return fault
    return ""


def _listed(place: str, value: object, name: str, low: float, high: float) -> str:
    """One list of PLAYED, or a list of such lists."""
    if name not in TABLES:
        return _numbers(place, value, low, high)
    if not isinstance(value, list):
        return f"{place} is {_kind(value)}"
    for index, row in enumerate(value):
        fault = _numbers(f"{place}[{index}]", row, low, high)
        whole = fault or all(type(item) is (int if name in CODES else float) for item in row)
        if fault or not whole:
            return (
                fault
                or f"{place}[{index}] holds other than {'codes' if name in CODES else 'numbers'}"
            )
    return ""


def _hosts(progress: object, settings: object) -> str:
    """The numbers of envs and of slots must be the same in both, once a round is done."""
    envs = _of(settings, "envs")
    slots = _of(settings, "slots")
    if not _of(progress, "rounds_done"):
        return ""
    if not isinstance(progress, Mapping) or len(progress["rewards"]) != envs:
        return f"progress is not of settings.envs={_shown(envs)}"
    rows = [row for played in progress["recent"] for name in TABLES for row in played[name]]
    if not isinstance(slots, list) or not all(len(row) == len(slots) for row in rows):
        return "progress is not of settings.slots"
    codes = {code for played in progress["recent"] for row in played["blueprint"] for code in row}
    foreign = [code for code in codes if max(CNN_BLUEPRINTS) < code < NUM_BLUEPRINTS]
    return (
        f"progress has seeds of blueprint {foreign[0]}, which no host here has" if foreign else ""
    )


def _settings(place: str, value: object) -> str:
    """Nested names of plain values and lists of them."""
    if isinstance(value, Mapping):
        return _first(_settings(f"{place}.{name}", part) for name, part in value.items())
    if place == "settings" or isinstance(value, Tensor):
        return f"{place} is {_kind(value)}"
    if isinstance(value, list | tuple):
        return _first(_settings(f"{place}[{index}]", part) for index, part in enumerate(value))
    return ""


def _texts(place: str, value: object, names: tuple[str, ...]) -> str:
    """`value` must be a mapping of just these names to texts."""
    fault = _keys(place, value, names)
    return fault or _first(
        "" if isinstance(_of(value, name), str) else f"{place}.{name} is {_kind(_of(value, name))}"
        for name in names
    )


def _versions(value: object) -> str:
    if not isinstance(value, Mapping):
        return f"versions is {_kind(value)}"
    known = all(version is None or isinstance(version, str) for version in value.values())
    return "" if known else "versions holds what is no version"


def _names(place: str, value: object) -> str:
    fine = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return "" if fine else f"{place} is no list of names"


def _watch(value: object) -> str:
    fault = _keys("watch", value, ("active", "streaks", "gradient_mean"))
    if fault or not isinstance(value, Mapping):
        return fault
    active = value["active"]
    streaks = value["streaks"]
    mean = value["gradient_mean"]
    counts = _mapping("watch.streaks", streaks)
    return (
        _names("watch.active", active)
        or counts
        or _first(_count(f"watch.streaks.{name}", count) for name, count in streaks.items())
        or ("" if mean is None else _number("watch.gradient_mean", mean, 0, math.inf))
    )
