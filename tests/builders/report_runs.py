"""Run folders for tests of the report: lines as a run's, tables by the program's own writer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from esper_soa.lab.report.page import page_of
from esper_soa.lab.report.run_files import find_runs
from esper_soa.lab.telemetry.schema import TABLES
from esper_soa.lab.telemetry.table_files import Texts, Values, table_bytes, table_path
from esper_soa.system.files import write_text
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES

SLOTS = ("r0c0", "r0c1", "r0c2")
TERMS = ("attribution", "compute_rent", "terminal_bonus", "clawback")
LIVES = [("germinated", 0.0)] + [("training", 0.0)] * 6 + [("blending", 0.5)] * 4
LIVES += [("holding", 1.0)] * 3 + [("fossilized", 1.0)] * 1000  # stage and alpha by age
PROGRAM = "/* what draws */"


def line(number: int, accuracy: float, **more: object) -> dict[str, object]:
    """A line of metrics.jsonl."""
    return {
        "round": number,
        "accuracy": {"mean": accuracy, "min": accuracy - 3, "max": accuracy + 2},
        "reward": {"mean": accuracy / 10, "min": 0.5, "max": 9.5},
        "parameters": 7000.0 + number,
        "train_flop": 3e9,
        "val_loss": 2.5 - accuracy / 100,
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


def summary(accuracies: Sequence[float], gain: float = 2.0) -> dict[str, object]:
    """summary.json of a run that has ended, with a control without growth."""

    def score(name: str, values: Sequence[float], size: float) -> dict[str, object]:
        count = len(values)
        sizes = {"parameters": [size] * count, "train_flop": [3e9] * count}
        seen = {"validation_accuracies": [value - 2 for value in values]}
        return {
            "name": name,
            "episodes": [{"test_accuracies": list(values), **seen} | sizes],
            "validation_accuracy": sum(values) / count - 2,
            "test_accuracy": sum(values) / count,
            "size": size,
            "flop": 3e9,
        }

    return {
        "grown": score("ppo", accuracies, 7000.0),
        "controls": [
            score("wait", [value - gain for value in accuracies], 6418.0)
            | {
                "verdict": f"The grown hosts end ahead: {gain:+.2f} points.",
                "difference": {"test_accuracy": {"mean": gain, "low": 1.0, "high": 3.0}},
            }
        ],
        "speed": {"eps": 40.0},
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
    (path / "versions.json").write_text('{"python": "3.11", "packages": {"torch": "2.13"}}')
    write_lines(path / "metrics.jsonl", lines)
    episodes = [
        {"round": one["round"], "env": env, "shapley": [1.0, 2.0, env]}
        for one in lines
        for env in range(2)
    ]
    write_lines(path / "episodes.jsonl", episodes)
    if ended is not None:
        (path / "summary.json").write_text(json.dumps(ended))
    return path


def write_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """One line of JSON for each."""
    write_text(path, "".join(json.dumps(one) + "\n" for one in lines))


def page_text(*folders: Path) -> str:
    """The page of the runs in `folders`."""
    return page_of(find_runs(folders), PROGRAM)


def write_table(run: Path, table: str, number: int, rows: Sequence[Mapping[str, object]]) -> None:
    """A round's table of these rows, with neutral values where they have none."""
    values: dict[str, Values] = {}
    for column in TABLES[table]:
        given = [({"round": number} | dict(row)).get(column.name) for row in rows]
        if column.type == "string":
            neutral = None if column.nullable else "-"
            values[column.name] = texts([neutral if one is None else one for one in given])
        else:
            empty = np.nan if column.nullable else 0
            values[column.name] = np.array([empty if one is None else one for one in given], float)
    path = table_path(run, table, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(table_bytes(TABLES[table], values, {}))


def texts(given: Sequence[object]) -> Texts:
    """Texts and None as a column."""
    names = list(dict.fromkeys(str(one) for one in given if one is not None))
    codes = [-1 if one is None else names.index(str(one)) for one in given]
    return Texts(np.asarray(codes), names or [""])


def write_round(run: Path, number: int, envs: int, steps: int) -> None:
    """The tables of a round in which every slot of every host has a seed, blended in and kept."""
    everyone = [{"step": step, "env": env} for step in range(1, steps + 1) for env in range(envs)]
    slots = [
        at | {"slot": slot} | seed_at(at["step"], at["env"], place)
        for at in everyone
        for place, slot in enumerate(SLOTS)
    ]
    write_table(run, "slots", number, slots)
    steps_rows = [at | measured_at(at["step"], at["env"], number) for at in everyone]
    write_table(run, "steps", number, steps_rows)
    born = [
        at | {"slot": slot, "kind": "germinated", "cause": "action", "blueprint": "norm"}
        for at in everyone
        for place, slot in enumerate(SLOTS)
        if at["step"] == birth(at["env"], place)
    ]
    write_table(run, "events", number, born)


def measured_at(step: int, env: int, number: int) -> dict[str, object]:
    """What the table `steps` has of a host."""
    return {
        "accuracy": 60 * (1 - 0.95**step) + env / 10 + number / 50,
        "reward": step / 10 - env,
        "parameters": 6418.0 + 100 * step,
        "val_loss": 2.0 - step / 20 + env / 100,
        "train_loss": 1.5 - step / 20,
        "train_flop": 1e9 * (1 + env),
    }


def birth(env: int, place: int) -> int:
    """The env-step at which a slot's seed germinates."""
    return 2 + 3 * place + env % 5


def seed_at(step: int, env: int, place: int) -> dict[str, object]:
    """What the table `slots` has of a slot and its seed."""
    age = step - birth(env, place)
    if age < 0:
        return {"stage": "empty", "alpha": 0.0}
    stage, alpha = LIVES[age]
    worth = (place + 1) * (1 + env / 10) + step / 100 if alpha else None
    return {
        "stage": stage,
        "seed": place + 1,
        "blueprint": ("conv_light", "norm", "attention")[(env + place) % 3],
        "alpha": alpha,
        "contribution": worth,
        "shapley": worth,
    }
