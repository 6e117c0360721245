"""The answer of `esper-compare --plan`: runs, env-steps, FLOP and time of a study, by a probe of a
run of every group. Nothing is played, and nothing is left.
"""

from rich.console import Console

from esper_soa.lab.compare.lengths import host_flop, length_at, probe
from esper_soa.lab.compare.study import Study, planned_runs
from esper_soa.lab.compare.tables import plain_table, show
from esper_soa.training.results.progress import duration

COLUMNS = ("runs", "number", "env-steps", "hosts of each", "TFLOP", "time")
TERA = 1e12


def show_plan(study: Study, console: Console) -> None:
    """Print what the study takes from its beginning to its end, grids as they are given."""
    plans = {}
    for group, settings in study.settings.items():
        steps = length_at(study.budgets[0], host_flop(settings)) if study.budgets else 0
        plans[group] = probe(study, group, steps)
    table = plain_table("plan", COLUMNS)
    number = 0
    all_flop = 0.0
    all_seconds = 0.0
    for runs, random_seeds in planned_runs(study):
        plan = plans[runs.group]
        cfg = study.settings[runs.group]
        step_flop = plan.took.train_flop / plan.cfg.steps
        steps = length_at(runs.gflop, step_flop) if runs.gflop else cfg.steps
        hosts = cfg.envs * runs.planned
        host_steps = len(random_seeds) * hosts * steps * cfg.rounds
        flop = host_steps * step_flop * len(study.sides(runs.group))
        start = plan.took.build_seconds
        pace = (plan.seconds - start) / (plan.cfg.round_env_steps * plan.cfg.rounds)
        seconds = len(random_seeds) * start + host_steps * pace
        cells = [f"{len(random_seeds)}", f"{steps:,}", f"{hosts}", f"{flop / TERA:,.3g}"]
        table.add_row(runs.place, *cells, duration(seconds))
        number += len(random_seeds)
        all_flop += flop
        all_seconds += seconds
    show(console, table)
    words = f"{number} runs, {all_flop / TERA:,.3g} TFLOP, {duration(all_seconds)}"
    wider = "; grids that are widened come on top" if study.grid else ""
    console.print(f"{words}, by a probe of every group{wider}", highlight=False, soft_wrap=True)
