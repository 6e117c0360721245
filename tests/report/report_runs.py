"""Run folders for tests of the report: lines as a run's, tables by the program's own writer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from esper_soa.ops.files import write_text
from esper_soa.telemetry.parquet import Texts, Values, table_bytes
from esper_soa.telemetry.table_files import BY_NAME, table_path
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES

SLOTS = ("r0c0", "r0c1", "r0c2")
TERMS = ("attribution", "compute_rent", "terminal_bonus", "clawback")
LIVES = (
    ("germinated", 1, 0.0),
    ("training", 6, 0.0),
    ("blending", 4, 0.5),
    ("holding", 3, 1.0),
)  # stage, steps, alpha


def line(number: int, accuracy: float, **more: object) -> dict[str, object]:
    """A line of metrics.jsonl."""
    return {
        "round": number,
        "accuracy": {"mean": accuracy, "min": accuracy - 3, "max": accuracy + 2},
        "reward": {"mean": accuracy / 10, "min": 0.5, "max": 9.5},
        "parameters": 7000.0 + number,
        "train_flop": 3e9,
        "val_loss": 2.5 - accuracy / 100,
        "train_loss": 1.25,
        "train_accuracy": 55.0,
        "alpha_rows": 2.0,
        "reward_terms": {name: place * 0.5 for place, name in enumerate(TERMS)},
        "seeds": {"germinated": 4, "fossilized": 2, "pruned": 1},
        "blueprints": {"norm": {"germinated": 4, "fossilized": 2, "pruned": 1, "mean_gain": 1.5}},
        "rollbacks": {"total": 0, "diverged": 0},
        "ops": {name: 10.0 + place for place, name in enumerate(OP_NAMES)},
        "eps": 40.0,
        "collect_seconds": 2.0,
        "update_seconds": 0.5,
        "anomalies": [],
        "update": {f"entropy/{head}": 0.75 for head in HEAD_NAMES}
        | {"approx_kl": 0.001, "explained_variance": 0.3},
    } | more


def episode(number: int, env: int, shapley: Sequence[float]) -> dict[str, object]:
    """A line of episodes.jsonl."""
    return {
        "round": number,
        "env": env,
        "accuracy": 50.0 + env,
        "reward": 4.0,
        "shapley": list(shapley),
    }


def summary(accuracies: Sequence[float], gain: float = 2.0) -> dict[str, object]:
    """summary.json of a run that has ended, with a control without growth."""
    mean = sum(accuracies) / len(accuracies)

    def score(name: str, values: Sequence[float], size: float) -> dict[str, object]:
        episodes = [
            {
                "accuracies": list(values),
                "parameters": [size] * len(values),
                "train_flop": [3e9] * len(values),
            }
        ]
        return {
            "name": name,
            "episodes": episodes,
            "accuracy": sum(values) / len(values),
            "size": size,
            "flop": 3e9,
        }

    return {
        "verdict": f"Growth paid: {gain:+.2f} points.",
        "grown": score("ppo", accuracies, 7000.0),
        "control": score("wait", [value - gain for value in accuracies], 6418.0),
        "difference": {"accuracy": {"mean": gain, "low": 1.0, "high": 3.0}},
        "speed": {"eps": mean},
        "wall_seconds": 60.0,
    }


def make_run(
    path: Path,
    lines: Sequence[Mapping[str, object]] = (),
    seed: int = 1,
    ended: Mapping[str, object] | None = None,
    settings: str = "",
    overrides: Sequence[str] = (),
) -> Path:
    """A run folder of these lines; `ended` is its summary, where it has come to its end."""
    path.mkdir(parents=True)
    plain = (
        f"name: trial\nseed: {seed}\nenvs: 2\nrounds: 4\nsteps: 5\nslots: [{', '.join(SLOTS)}]\n"
    )
    (path / "config.yaml").write_text(plain + "task:\n  name: tiny\n" + settings)
    (path / "overrides.txt").write_text("".join(f"{one}\n" for one in (*overrides, f"seed={seed}")))
    (path / "versions.json").write_text(
        json.dumps({"python": "3.11", "packages": {"torch": "2.13"}})
    )
    write_lines(path / "metrics.jsonl", lines)
    write_lines(
        path / "episodes.jsonl",
        [
            episode(int(str(one["round"])), env, [1.0, 2.0, env])
            for one in lines
            for env in range(2)
        ],
    )
    if ended is not None:
        (path / "summary.json").write_text(json.dumps(ended))
    return path


def write_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """One line of JSON for each."""
    write_text(path, "".join(json.dumps(one) + "\n" for one in lines))


def write_table(
    run: Path, table: str, number: int, columns: Mapping[str, Sequence[object]]
) -> None:
    """A round's table with these columns, and neutral values in all others."""
    rows = len(columns["step"])
    values: dict[str, Values] = {}
    for column in BY_NAME[table].columns:
        given = columns.get(column.name)
        if column.type == "text":
            values[column.name] = texts(
                given if given is not None else [None if column.nullable else "-"] * rows
            )
        else:
            empty = np.nan if column.nullable else 0
            cells = (
                [empty] * rows
                if given is None
                else [empty if one is None else one for one in given]
            )
            plain = np.asarray(cells, np.float64)
            values[column.name] = (
                plain if column.nullable or column.type != "int" else plain.astype(np.int32)
            )
    path = table_path(run, table, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        table_bytes(BY_NAME[table].columns, values, {"table": table, "complete": "true"})
    )


def texts(given: Sequence[object]) -> Texts:
    """Texts and None as a column."""
    names = list(dict.fromkeys(str(one) for one in given if one is not None))
    return Texts(
        np.asarray([-1 if one is None else names.index(str(one)) for one in given]), names or [""]
    )


def write_round(run: Path, number: int, envs: int, steps: int) -> None:
    """The tables of a round in which every slot of every host has a seed, blended in and kept."""
    names = (
        "round",
        "step",
        "env",
        "slot",
        "stage",
        "seed",
        "blueprint",
        "alpha",
        "contribution",
        "shapley",
        "interaction",
    )
    places = [
        (step, env, place)
        for step in range(1, steps + 1)
        for env in range(envs)
        for place in range(len(SLOTS))
    ]
    rows = [
        (number, step, env, SLOTS[place], *seed_at(step, env, place)) for step, env, place in places
    ]
    write_table(run, "slots", number, dict(zip(names, zip(*rows, strict=True), strict=True)))
    everyone = [(step, env) for step in range(1, steps + 1) for env in range(envs)]
    write_table(
        run,
        "steps",
        number,
        {
            "round": [number] * len(everyone),
            "step": [step for step, _ in everyone],
            "env": [env for _, env in everyone],
            "accuracy": [60 * (1 - 0.95**step) + env / 10 + number / 50 for step, env in everyone],
        },
    )
    born = [
        (birth(env, place), env, slot) for env in range(envs) for place, slot in enumerate(SLOTS)
    ]
    born = [one for one in sorted(born) if one[0] <= steps]
    write_table(
        run,
        "events",
        number,
        {
            "round": [number] * len(born),
            "step": [step for step, _, _ in born],
            "env": [env for _, env, _ in born],
            "slot": [slot for _, _, slot in born],
            "kind": ["germinated"] * len(born),
            "cause": ["action"] * len(born),
            "blueprint": ["norm"] * len(born),
            "accuracy": [50.0] * len(born),
        },
    )


def birth(env: int, place: int) -> int:
    """The env-step at which a slot's seed germinates."""
    return 2 + 3 * place + env % 5


def seed_at(step: int, env: int, place: int) -> tuple[object, ...]:
    """What the table `slots` has from the stage on."""
    lives = [(stage, alpha) for stage, times, alpha in LIVES for _ in range(times)]
    age = step - birth(env, place)
    if age < 0:
        return "empty", None, None, 0.0, None, None, None
    stage, alpha = lives[age] if age < len(lives) else ("fossilized", 1.0)
    worth = (place + 1) * (1 + env / 10) + step / 100 if alpha else None
    blueprint = ("conv_light", "norm", "attention")[(env + place) % 3]
    return stage, place + 1, blueprint, alpha, worth, worth, 0.25 if alpha else None
