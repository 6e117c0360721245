"""Env-steps of a group at a budget of training FLOP of a host.

The length of hosts that do not grow is known beforehand. That of others follows from what they
cost: a probe tells the first length, and runs that have ended correct it. lengths.json in the
folder of a study keeps them. No torch before a host's FLOP are asked for.
"""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from esper_soa.config.compose import compose_settings
from esper_soa.config.lab import find_in_lab
from esper_soa.config.settings import TrainConfig
from esper_soa.lab.compare.study import GIGA, Runs, Study, planned_runs
from esper_soa.system.errors import check
from esper_soa.system.files import write_text
from esper_soa.system.json_lines import json_line
from esper_soa.system.plain_files import make_folder, read_text
from esper_soa.system.signals import torch_import_guard

if TYPE_CHECKING:
    from esper_soa.lab.plan.plan import Plan

TOLERANCE = 0.01  # of a budget, by which a mean cost may miss it; or by an env-step
MOST_PROBES = 6  # of a group and budget
LENGTHS_FILE = "lengths.json"


def host_flop(settings: TrainConfig) -> float:
    """FLOP of training a host without growth for an env-step; raises SettingError."""
    with torch_import_guard():
        import torch

        from esper_soa.nets.data.datasets import with_classes
        from esper_soa.nets.model.flops import training_flop
        from esper_soa.nets.model.user_parts import task_shape
    task = with_classes(settings.task, settings.data)
    shape = task_shape(task, settings.slots, settings.data.image_shape)
    costs = training_flop(shape, torch.device("cpu"))
    return settings.train_samples * costs.host


def length_at(gflop: float, step_flop: float) -> int:
    """The number of env-steps of so many FLOP that comes nearest to the budget, one at least."""
    return max(1, round(gflop * GIGA / step_flop))


def misses(gflop: float, flop: float, steps: int) -> bool:
    """Whether hosts that cost `flop` in so many env-steps are not at the budget; NaN does not."""
    return abs(flop - gflop * GIGA) > max(TOLERANCE * gflop * GIGA, flop / steps)


def corrected(gflop: float, costs: Mapping[int, float], steps: int) -> int:
    """A length at which hosts are nearer to the budget than at `steps`: the same where they are at
    it, to TOLERANCE or an env-step, or where nothing is known of the cost (NaN).

    costs: FLOP by lengths that are known. Between one that costs less than the budget and one that
    costs more, what the cost of `steps` lets expect is taken, or else the middle.
    """
    budget = gflop * GIGA
    flop = costs[steps]
    if not misses(gflop, flop, steps):
        return steps
    low = max((length for length in costs if costs[length] < budget), default=0)
    high = min((length for length in costs if costs[length] > budget and length > low), default=0)
    expected = length_at(gflop, flop / steps)
    if not high or low < expected < high:
        return expected
    return (low + high) // 2 or 1


def check_runs(study: Study) -> None:
    """Raise UserError where settings are invalid at a budget or with a value; nothing is played."""
    steps = {group: host_flop(cfg) for group, cfg in study.settings.items() if study.budgets}
    for runs, random_seeds in planned_runs(study):
        if study.is_plain or (study.grid and not runs.values):
            continue  # the settings of the study have been checked, or are with all values
        if runs.gflop:
            step = steps[runs.group]
            allowed = f"at least {step / GIGA:.3g}, an env-step of {runs.group}"
            check(runs.gflop * GIGA >= step, "gflop", f"{runs.gflop:g}", allowed=allowed)
            runs = runs._replace(steps=length_at(runs.gflop, step))
        compose_settings(study.experiment, runs.overrides(random_seeds[0]))


class Lengths:
    """The lengths of a study's groups at its budgets that are known so far."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.path = study.out / LENGTHS_FILE
        self.known: dict[str, int] = json.loads(read_text(self.path)) if self.path.exists() else {}

    def of_tuning(self, group: str, gflop: float) -> int:
        """Env-steps of the runs that tune a group; 0 without a budget."""
        return self._known_or_first(f"{group} {gflop:g} tuning", group, gflop)

    def of_table(self, group: str, gflop: float, tuned_flop: float) -> int:
        """Env-steps of the runs of a table; 0 without a budget.

        tuned_flop: what hosts cost in the tuning; NaN where there was none.
        """
        key = f"{group} {gflop:g}"
        if gflop and key not in self.known and not math.isnan(tuned_flop):
            steps = self.of_tuning(group, gflop)
            return corrected(gflop, {steps: tuned_flop}, steps)
        return self._known_or_first(key, group, gflop)

    def keep_of_table(self, group: str, gflop: float, steps: int) -> None:
        """Write down a better length for the runs of a table."""
        self._keep(f"{group} {gflop:g}", steps)

    def _known_or_first(self, key: str, group: str, gflop: float) -> int:
        """The length of hosts that do not grow, or what was written down, or by probes."""
        settings = self.study.settings[group]
        steps = length_at(gflop, host_flop(settings)) if gflop else 0
        if key in self.known or not steps or settings.policy.name == "wait":
            return self.known.get(key, steps)
        costs: dict[int, float] = {}
        while steps not in costs and len(costs) < MOST_PROBES:
            costs[steps] = probe(self.study, group, steps).took.train_flop
            steps = corrected(gflop, costs, steps)
        self._keep(key, steps)
        return steps

    def _keep(self, key: str, steps: int) -> None:
        self.known[key] = steps
        make_folder(self.study.out)
        write_text(self.path, json_line(self.known) + "\n")


def probe(study: Study, group: str, length: int = 0) -> "Plan":
    """The plan of a run of a group that is so long, by a probe of its first round."""
    overrides = [
        *Runs(study, group, "", steps=length).overrides(study.random_seeds[0]),
        "resume=''",
    ]
    settings = compose_settings(study.experiment, [*overrides, "run_dir=''"])
    make_plan = find_in_lab("plan of a study", "gflop= for a group that grows, or --plan,")
    return cast("Plan", make_plan(settings))
