"""What a run can be asked in SQL: the types of its lines of JSON, and a view for each kind of
question.

Given to DuckDB by database.py, in this order, as a view may use those before it; docs/queries.md
has its list from here. Every view begins with `run`, the folder that its rows are of.
"""

from typing import NamedTuple

SPREAD = "STRUCT(mean DOUBLE, min DOUBLE, max DOUBLE)"
NUMBERS = "MAP(VARCHAR, DOUBLE)"
COUNTS = "MAP(VARCHAR, BIGINT)"
BLUEPRINT = (
    "STRUCT(germinated BIGINT, fossilized BIGINT, pruned BIGINT, fossilization_rate DOUBLE, "
    "mean_gain DOUBLE, "
    "mean_churn DOUBLE, mean_blending_gain DOUBLE, mean_contribution DOUBLE)"
)
SPLIT = "STRUCT(envs BIGINT, accuracy DOUBLE, reward DOUBLE, parameters DOUBLE)"
ROUNDS = {  # a line of metrics.jsonl
    "round": "INTEGER",
    "env_steps": "BIGINT",
    "accuracy": SPREAD,
    "val_loss": "DOUBLE",
    "train_loss": "DOUBLE",
    "train_accuracy": "DOUBLE",
    "reward": SPREAD,
    "reward_terms": NUMBERS,
    "reward_split": f"MAP(VARCHAR, {SPLIT})",
    "parameters": "DOUBLE",
    "train_flop": "DOUBLE",
    "outcome": NUMBERS,
    "seeds": COUNTS,
    "blueprints": f"MAP(VARCHAR, {BLUEPRINT})",
    "rollbacks": COUNTS,
    "ops": NUMBERS,
    "ops_successful": NUMBERS,
    "alpha_rows": "DOUBLE",
    "pareto": "STRUCT(front_size BIGINT, hypervolume DOUBLE)",
    "eps": "DOUBLE",
    "collect_seconds": "DOUBLE",
    "update_seconds": "DOUBLE",
    "update": NUMBERS,
    "anomalies": "VARCHAR[]",
    "non_finite": "VARCHAR[]",
}
EPISODES = {  # a line of episodes.jsonl
    "round": "INTEGER",
    "env": "INTEGER",
    "accuracy": "DOUBLE",
    "param_ratio": "DOUBLE",
    "stability": "DOUBLE",
    "reward": "DOUBLE",
    "reward_mode": "VARCHAR",
    "success": "BOOLEAN",
    "compute_cost": "DOUBLE",
    "seeds": COUNTS,
    "rollbacks": "BIGINT",
    "env_steps": "BIGINT",
    "ended_by": "VARCHAR",
    "shapley": "DOUBLE[]",
    "shapley_error": "DOUBLE[]",
    "non_finite": "VARCHAR[]",
}
SETTINGS = {"name": "VARCHAR", "value": "VARCHAR"}  # a row per setting of config.yaml


class View(NamedTuple):
    """A view, by the question that it answers."""

    name: str
    question: str
    sql: str


VIEWS = (
    View(
        "runs",
        "which runs, how long, how good",
        """
        select run, max(round) as rounds, max(env_steps) as env_steps, arg_max(accuracy.mean, round) as final_accuracy,
               max(accuracy.mean) as best_accuracy, arg_max(parameters, round) as final_parameters,
               sum(seeds['germinated']) as germinated, sum(seeds['fossilized']) as fossilized,
               sum(seeds['pruned']) as pruned, sum(rollbacks['total']) as rollbacks,
               sum(collect_seconds + update_seconds) as seconds
        from rounds group by run""",  # noqa: E501
    ),
    View(
        "epochs",
        "what every host measured and was paid at every env-step: `steps` by the reference's name",
        """
        select * from steps""",
    ),
    View(
        "batch_epochs",
        "how each round ended; rolling accuracy over ten rounds",
        """
        select run, round, env_steps, accuracy.mean as accuracy, reward.mean as reward, val_loss, train_loss,
               parameters, eps, rollbacks['total'] as rollbacks,
               avg(accuracy.mean) over (partition by run order by round rows between 9 preceding and current row)
                   as rolling_accuracy
        from rounds""",  # noqa: E501
    ),
    View(
        "trends",
        "is it getting better: change of the rolling accuracy, beyond half a point or not",
        """
        select run, round, rolling_accuracy, change,
               case when change > 0.5 then 'improvement' when change < -0.5 then 'degradation'
                    else 'plateau' end as trend
        from (select run, round, rolling_accuracy,
                     rolling_accuracy - lag(rolling_accuracy) over (partition by run order by round) as change
              from batch_epochs)
        where change is not null""",  # noqa: E501
    ),
    View(
        "ppo_updates",
        "is the update healthy: a row per diagnostic and round",
        """
        select run, round, unnest(map_keys(update)) as metric, unnest(map_values(update)) as value from rounds""",  # noqa: E501
    ),
    View(
        "seed_lifecycle",
        "what became of every seed, and what it was worth",
        """
        select born.run, born.round, born.env, born.seed, born.slot, born.blueprint, born.step as germinated,
               told.blended, told.fossilized, told.pruned, told.cause as pruned_by,
               case when told.fossilized is not null then 'fossilized' when told.pruned is not null then 'pruned'
                    else 'unfinished' end as fate,
               lived.env_steps, lived.mean_contribution, lived.best_contribution, lived.last_contribution,
               lived.mean_shapley
        from events as born
        left join (select run, round, env, seed, min(step) filter (kind = 'blended') as blended,
                          min(step) filter (kind = 'fossilized') as fossilized,
                          min(step) filter (kind = 'pruned') as pruned, min(cause) filter (kind = 'pruned') as cause
                   from events where seed is not null group by all) as told using (run, round, env, seed)
        left join (select run, round, env, seed, count(*) as env_steps, avg(contribution) as mean_contribution,
                          max(contribution) as best_contribution, arg_max(contribution, step) as last_contribution,
                          avg(shapley) as mean_shapley
                   from slots where stage in ('germinated', 'training', 'blending', 'holding', 'fossilized')
                   group by all) as lived using (run, round, env, seed)
        where born.kind = 'germinated'""",  # noqa: E501
    ),
    View(
        "morphology_causal_log",
        "what happened to seeds and envs, with the decision that brought it about",
        """
        select told.*, done.op, done.op_probability, done.value, done.reward
        from events as told left join steps as done using (run, round, step, env)""",
    ),
    View(
        "decisions",
        "what was decided, how sure the policy was, what it paid",
        """
        select run, round, step, env, op, effective_op, success, slot, blueprint, style, tempo, alpha_target,
               alpha_speed, alpha_curve, op_probability, value, reward, accuracy
        from steps""",  # noqa: E501
    ),
    View(
        "action_distribution",
        "which ops were taken how often, and how often with success",
        """
        select run, round, op, count(*) as chosen,
               count(*) / sum(count(*)) over (partition by run, round) as share,
               count(*) filter (success) as successful, avg(op_probability) as mean_probability
        from steps group by run, round, op""",
    ),
    View(
        "rewards",
        "what was paid for what: a row per env-step and term that is not 0",
        """
        select run, round, step, env, term[8:] as term, amount as value
        from (unpivot steps on columns('^reward_.*') into name term value amount)
        where amount != 0""",
    ),
    View(
        "phase_occupancy",
        "how slots spent their time: shares of the stages",
        """
        select run, round, stage, count(*) as slot_steps,
               count(*) / sum(count(*)) over (partition by run, round) as share
        from slots group by run, round, stage""",
    ),
    View(
        "shapley_computed",
        "what each seed adds at the end of an episode, fairly shared",
        """
        select run, round, env, slot, blueprint, shapley, shapley_error, contribution, interaction
        from (select * from slots qualify step = max(step) over (partition by run, round, env))
        where shapley is not null""",
    ),
    View(
        "blueprint_scores",
        "which blueprints earn their place",
        """
        select run, blueprint, count(*) as germinated, count(*) filter (fate = 'fossilized') as fossilized,
               count(*) filter (fate = 'pruned') as pruned,
               count(*) filter (fate = 'fossilized') / nullif(count(*) filter (fate != 'unfinished'), 0)
                   as fossilization_rate,
               avg(last_contribution) as mean_last_contribution
        from seed_lifecycle group by run, blueprint""",  # noqa: E501
    ),
    View(
        "anomalies",
        "what went wrong: unhealthy updates, and hosts that were rolled back",
        """
        select run, round, null::integer as step, null::integer as env, unnest(anomalies) as what from rounds
        union all
        select run, round, step, env, 'rollback: ' || cause from events where kind = 'rollback'""",  # noqa: E501
    ),
    View(
        "episode_outcomes",
        "how each host ended: `episodes` by the reference's name",
        """
        select * from episodes""",
    ),
    View(
        "reward_calibration",
        "does the reward say what we want: its correlation with the accuracy in the end",
        """
        select run, correlation, episodes,
               case when correlation >= 0.7 then 'well' when correlation >= 0.3 then 'moderate'
                    when correlation >= 0 then 'weak' when correlation < 0 then 'inverted' end as calibration
        from (select run, corr(reward, accuracy) as correlation, count(*) as episodes from episodes group by run)""",  # noqa: E501
    ),
    View(
        "topology_manifests",
        "what each host ended with",
        """
        select run, round, env, slot, seed, blueprint, blend, stage, alpha
        from (select * from slots qualify step = max(step) over (partition by run, round, env))
        where alpha > 0""",
    ),
    View(
        "run_confounders",
        "what else differs between the runs",
        """
        select name, run, value from settings
        qualify count(*) over (partition by name) > 0
            and min(value) over (partition by name) is distinct from max(value) over (partition by name)
        order by name, run""",  # noqa: E501
    ),
)
