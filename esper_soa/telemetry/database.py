"""Runs as a DuckDB database: their tables as they lie on the disk, their lines of JSON, and VIEWS,
all with the column `run`. From Python: `open_database([folder]).sql("select ...")`. Nothing is
copied: a run that goes on, or was killed, is read as far as it has come. See docs/queries.md.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from esper_soa.ops.start import find_run_folders, read_settings
from esper_soa.telemetry.schema import TABLES, TYPES
from esper_soa.telemetry.table_files import table_files

try:
    import duckdb
except ImportError as error:
    raise ImportError("queries need DuckDB: pip install 'esper-soa[query]'") from error

QueryError = duckdb.Error  # what a question raises that cannot be answered
SPREAD = "STRUCT(mean DOUBLE, min DOUBLE, max DOUBLE)"
NUMBERS = "MAP(VARCHAR, DOUBLE)"
COUNTS = "MAP(VARCHAR, BIGINT)"
BLUEPRINT = (
    "STRUCT(germinated BIGINT, fossilized BIGINT, pruned BIGINT, fossilization_rate DOUBLE, "
    "mean_gain DOUBLE, mean_churn DOUBLE, mean_blending_gain DOUBLE, mean_contribution DOUBLE)"
)
SPLIT = "STRUCT(envs BIGINT, accuracy DOUBLE, reward DOUBLE, parameters DOUBLE)"


def _types(columns: str) -> dict[str, str]:
    """Types by name, from `name type; name type`."""
    words = [one.split(maxsplit=1) for one in columns.split(";")]
    return {name: kind.strip() for name, kind in words}


# The lines of metrics.jsonl and of episodes.jsonl.
ROUNDS = _types(
    f"""
    round INTEGER; env_steps BIGINT; accuracy {SPREAD}; val_loss DOUBLE; train_loss DOUBLE;
    train_accuracy DOUBLE; reward {SPREAD}; reward_terms {NUMBERS};
    reward_split MAP(VARCHAR, {SPLIT}); parameters DOUBLE; train_flop DOUBLE; outcome {NUMBERS};
    seeds {COUNTS}; blueprints MAP(VARCHAR, {BLUEPRINT}); rollbacks {COUNTS}; ops {NUMBERS};
    ops_successful {NUMBERS}; alpha_rows DOUBLE;
    pareto STRUCT(front_size BIGINT, hypervolume DOUBLE); eps DOUBLE; collect_seconds DOUBLE;
    update_seconds DOUBLE; update {NUMBERS}; anomalies VARCHAR[]; non_finite VARCHAR[]
    """
)
EPISODES = _types(
    f"""
    round INTEGER; env INTEGER; accuracy DOUBLE; param_ratio DOUBLE; stability DOUBLE;
    reward DOUBLE; reward_mode VARCHAR; success BOOLEAN; compute_cost DOUBLE; seeds {COUNTS};
    rollbacks BIGINT; env_steps BIGINT; ended_by VARCHAR; shapley DOUBLE[]; shapley_error DOUBLE[];
    non_finite VARCHAR[]
    """
)
LINES = (("rounds", "metrics.jsonl", ROUNDS), ("episodes", "episodes.jsonl", EPISODES))
# By name: the question that a view answers, and how.
VIEWS = {
    "runs": (
        "which runs, how long, how good",
        """
        select run, max(round) as rounds, max(env_steps) as env_steps,
               arg_max(accuracy.mean, round) as final_accuracy,
               max(accuracy.mean) as best_accuracy, arg_max(parameters, round) as final_parameters,
               sum(seeds['germinated']) as germinated, sum(seeds['fossilized']) as fossilized,
               sum(seeds['pruned']) as pruned, sum(rollbacks['total']) as rollbacks,
               sum(collect_seconds + update_seconds) as seconds
        from rounds group by run
        """,
    ),
    "seed_lifecycle": (
        "what became of every seed, and what it was worth",
        """
        select born.run, born.round, born.env, born.seed, born.slot, born.blueprint,
               born.step as germinated, told.blended, told.fossilized, told.pruned,
               told.cause as pruned_by,
               case when told.fossilized is not null then 'fossilized'
                    when told.pruned is not null then 'pruned' else 'unfinished' end as fate,
               lived.env_steps, lived.mean_contribution, lived.best_contribution,
               lived.last_contribution, lived.mean_shapley
        from events as born
        left join (select run, round, env, seed,
                          min(step) filter (kind = 'blended') as blended,
                          min(step) filter (kind = 'fossilized') as fossilized,
                          min(step) filter (kind = 'pruned') as pruned,
                          min(cause) filter (kind = 'pruned') as cause
                   from events where seed is not null group by all) as told
            using (run, round, env, seed)
        left join (select run, round, env, seed, count(*) as env_steps,
                          avg(contribution) as mean_contribution,
                          max(contribution) as best_contribution,
                          arg_max(contribution, step) as last_contribution,
                          avg(shapley) as mean_shapley
                   from slots
                   where stage in ('germinated', 'training', 'blending', 'holding', 'fossilized')
                   group by all) as lived
            using (run, round, env, seed)
        where born.kind = 'germinated'
        """,
    ),
    "rewards": (
        "what was paid for what: a row per env-step and term that is not 0",
        """
        select run, round, step, env, term[8:] as term, amount as value
        from (unpivot steps on columns('^reward_.*') into name term value amount)
        where amount != 0
        """,
    ),
}


def open_database(folders: Sequence[str | Path]) -> duckdb.DuckDBPyConnection:
    """A database of the runs in `folders`, those of sweeps among them; `run` is the end of a run's
    path that tells it from others. Raises UserError for a folder that holds no run.
    """
    runs = find_run_folders(folders)
    database = duckdb.connect(":memory:")
    database.execute("set threads = 2")
    for table in TABLES:
        types = {column.name: TYPES[column.type] for column in table.columns}
        parts = {}
        for run, folder in runs.items():
            files = ", ".join(map(_text, table_files(folder, table.name).values()))
            if files:
                parts[run] = f"read_parquet([{files}], union_by_name = true)"
        database.execute(f"create view {table.name} as {_together(parts, types)}")
    for name, file, types in LINES:
        paths = {run: folder / file for run, folder in runs.items()}
        held = {run: path for run, path in paths.items() if path.is_file() and path.stat().st_size}
        parts = {run: _lines(path, types) for run, path in held.items()}
        database.execute(f"create view {name} as {_together(parts, types)}")
    database.execute("create table settings (run varchar, name varchar, value varchar)")
    for run, folder in runs.items():
        for name, value in read_settings(folder / "config.yaml").items():
            database.execute("insert into settings values (?, ?, ?)", [run, name, str(value)])
    for name, (_, sql) in VIEWS.items():
        database.execute(f"create view {name} as {sql}")
    return database


def _text(value: object) -> str:
    """A literal of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def _lines(path: Path, types: Mapping[str, str]) -> str:
    """All whole lines of a file of JSON."""
    columns = ", ".join(f"{_text(name)}: {_text(kind)}" for name, kind in types.items())
    options = f"format = 'newline_delimited', ignore_errors = true, columns = {{{columns}}}"
    return f"read_json({_text(path)}, {options}) where round is not null"


def _together(parts: Mapping[str, str], types: Mapping[str, str]) -> str:
    """What is read of every run, by its name, concatenated; all columns even of nothing."""
    columns = ", ".join(f'null::{kind} as "{name}"' for name, kind in types.items())
    empty = f"select null::varchar as run, {columns} where false"
    selects = [f"select {_text(run)} as run, * from {part}" for run, part in parts.items()]
    return " union all by name ".join([*selects, empty])
