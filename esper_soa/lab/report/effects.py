"""Effects of actions, as twins have measured them, beside what seeds were said to be worth, and the
floor below which an effect is chance. Needs no torch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from esper_soa.lab.report.run_files import Columns, Row, RunRecord, read_round, rows_of
from esper_soa.lab.telemetry.table_files import table_files

MAX_ROUNDS = 64  # newest ones of a run that are read
FLOOR_SHARE = 0.95  # of the placebos whose differences are below the floor
RESAMPLES = 4000  # means of placebos that the floor of a mean is found of
NUMBERS = ("loss", "train_flop", "parameters", "test_accuracy", "test_loss")
EFFECT_COLUMNS = (
    *("step", "env", "op", "slot", "blueprint", "placebo", "horizon", "after"),
    *("accuracy", *NUMBERS),
)
Numbers: TypeAlias = Sequence[float] | np.ndarray
WORTHS = ("contribution", "shapley")
SEED_COLUMNS = ("step", "env", "slot", "seed", *WORTHS)


def effects_of(run: Path) -> Columns:
    """The table `effects` of a run, and beside each action what its seed was last said to be worth
    up to the horizon: `contribution` and `shapley`, NaN where neither was measured.
    """
    rounds = [*table_files(run, "effects")][-MAX_ROUNDS:]
    parts = [part for number in rounds if (part := _effects_in(run, number))]
    names = ("round", *EFFECT_COLUMNS, *WORTHS)
    return {name: np.concatenate([part[name] for part in parts]) for name in names if parts}


def _effects_in(run: Path, number: int) -> Columns:
    effects = read_round(run, "effects", number, names=EFFECT_COLUMNS)
    if not len(effects.get("step", ())):
        return {}
    slots = read_round(run, "slots", number, names=SEED_COLUMNS)
    rows = len(effects["step"])
    worths = {name: np.full(rows, np.nan) for name in WORTHS}
    by_env = np.argsort(slots["env"], kind="stable") if slots else np.zeros(0, int)
    hosts = {name: column[by_env] for name, column in slots.items()}
    for row in range(rows) if slots else ():
        env, slot, step = (effects[name][row] for name in ("env", "slot", "step"))
        span = slice(*np.searchsorted(hosts["env"], [env, env + 1]))
        host = {name: column[span] for name, column in hosts.items()}
        here = host["slot"] == slot
        begin = step + (effects["op"][row] == "germinate")
        seeds = host["seed"][here & (host["step"] == begin)]
        if not len(seeds):
            continue
        lived = here & (host["seed"] == seeds[0]) & (host["step"] <= step + effects["after"][row])
        for name in WORTHS:
            known = host[name][lived]
            known = known[~np.isnan(known)]
            worths[name][row] = known[-1] if len(known) else np.nan
    return {"round": np.full(rows, number)} | effects | worths


def chosen(effects: Columns, placebo: bool, horizon: str = "") -> Columns:
    """The rows of placebos, or of others, at a horizon; "" is the last."""
    if not effects:
        return {}
    horizon = horizon or last_horizon(effects)
    where = (effects["placebo"] == placebo) & (effects["horizon"] == horizon)
    return {name: column[where] for name, column in effects.items()}


def last_horizon(effects: Columns) -> str:
    """The name of the horizon up to which twins did without their actions."""
    names = effects["horizon"].astype(str)
    return "end" if "end" in names else str(names[effects["after"].argmax()])


def finite(values: Numbers) -> np.ndarray:
    """Those that are numbers."""
    numbers = np.asarray(values, float)
    return numbers[np.isfinite(numbers)]


def floor_of(placebos: Numbers, count: int = 1) -> float:
    """The bound that FLOOR_SHARE of the means of so many placebos keep in absolute value; NaN
    without placebos.

    Means are of placebos drawn with replacement, each of either sign, as nothing says which of two
    hosts was moved.
    """
    known = finite(placebos)
    if not len(known):
        return float("nan")
    if count == 1:
        return float(np.quantile(np.abs(known), FLOOR_SHARE))
    draws = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for _ in range(count):
        means += draws.choice(known, RESAMPLES) * draws.choice([-1, 1], RESAMPLES)
    return float(np.quantile(np.abs(means / count), FLOOR_SHARE))


def rank_correlation(values: Numbers, others: Numbers) -> tuple[float, int]:
    """Spearman's correlation of the ranks of pairs that are both known, and how many there are; NaN
    where all of a side are equal.
    """
    pairs = np.array([values, others], float)
    pairs = pairs[:, np.isfinite(pairs).all(0)]
    count = pairs.shape[1]
    ranks = np.array([_ranks(side) for side in pairs])
    if count < 2 or not np.ptp(ranks, 1).all():
        return float("nan"), count
    return float(np.corrcoef(ranks)[0, 1]), count


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, those of equal values their mean."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return np.asarray((ends - (counts - 1) / 2)[places])


def effect_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per action at its last horizon, with the floor of a single twin as a band."""
    for run in runs:
        effects = effects_of(run.path)
        floor = floor_of(chosen(effects, True).get("accuracy", ()))
        for row in rows_of(chosen(effects, False)):
            known = {name: row[name] for name in ("round", "step", "op", "slot", "blueprint")}
            known |= {"run": run.label, "host": row["env"], "effect": row["accuracy"]}
            known |= {name: row[name] for name in (*WORTHS, "test_accuracy")}
            yield known if np.isnan(floor) else known | {"floor_low": -floor, "floor_high": floor}


def by_name(effects: Columns, name: str) -> dict[str, Columns]:
    """The rows by the values of a column, in the order of these."""
    values = np.unique(effects[name].astype(str)) if effects else ()
    return {
        value: {key: column[effects[name].astype(str) == value] for key, column in effects.items()}
        for value in values
    }
