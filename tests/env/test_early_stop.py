"""Episodes that end early: when they do, and that a finished env is left out of everything."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from esper_soa.agent.optimizer import flatten
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.agent import ImitationConfig
from esper_soa.config.env import EarlyStopConfig, GovernorConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env.early_stop import Cause, advance
from esper_soa.env.reduction import Reduction
from esper_soa.env.step import initial_state
from esper_soa.simulator import Simulator
from esper_soa.state import Action, EnvState
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.progress import Progress
from tests.builders.env_records import with_values
from tests.builders.lanes import some_of
from tests.builders.reward_cases import make_action
from tests.builders.tiny_world import CPU, quiet_progress, tiny_rules, tiny_settings

STEPS = 12
# Marks of the last env-step before the end, which the next one takes back.
NOTED = {"guard.panic", "guard.reason", "slots.newborn", "slots.fresh_momentum"}


def recorded(state: EnvState, accuracy: list[float], step: int, rollbacks: int = 0) -> EnvState:
    """The state after an env-step in which these accuracies were measured."""
    signals = with_values(state.signals, val_accuracy=accuracy, step=step)
    sunk = torch.zeros_like(state.totals.rollbacks)
    sunk[0, 1] = rollbacks
    return state.replace(signals=signals, totals=state.totals.replace(rollbacks=sunk))


def test_a_plateau_is_so_many_env_steps_without_a_gain_above_the_best_that_counted() -> None:
    cfg = EarlyStopConfig(patience=2, min_delta=1.0, min_steps=1)
    state = initial_state(tiny_rules(1, STEPS), 3, CPU)
    # env 0 creeps, and each little gain is none; env 1 gains every other env-step; env 2 falls
    curves = [[10.0, 10.0, 10.0], [10.5, 10.0, 9.0], [11.0, 11.5, 8.0], [11.5, 11.5, 7.0]]
    causes = []
    for step, accuracy in enumerate(curves, start=1):
        state = advance(recorded(state, accuracy, step), cfg, STEPS)
        causes.append(state.ending.cause.tolist())
    plateau = Cause.PLATEAU
    assert causes[:3] == [[0, 0, 0], [0, 0, 0], [plateau, 0, plateau]]
    assert state.ending.since.tolist() == [0, 1, 3]  # 11.5 is above 10 by more than 1
    assert state.ending.best.tolist() == [11.5, 11.5, 10.0]


def test_no_episode_ends_before_min_steps_nor_is_its_last_env_step_an_early_end() -> None:
    cfg = EarlyStopConfig(patience=1, min_steps=5)
    for step, ends in ((2, False), (4, False), (5, True), (STEPS - 1, True), (STEPS, False)):
        state = initial_state(tiny_rules(1, STEPS), 2, CPU)
        state = advance(recorded(state, [50.0, 50.0], 1), cfg, STEPS)
        state = advance(recorded(state, [50.0, 50.0], step), cfg, STEPS)
        assert state.ending.over.tolist() == [ends, ends], step


def test_a_planned_end_is_one_whatever_else_ends_the_episode_there() -> None:
    cfg = EarlyStopConfig(patience=1, min_steps=1)
    state = initial_state(tiny_rules(1, STEPS), 2, CPU)
    for step in (1, 2):
        state = advance(recorded(state, [50.0, 50.0], step), cfg, STEPS, torch.tensor([2, 3]))
    assert state.ending.cause.tolist() == [Cause.LENGTH, Cause.PLATEAU]


def test_a_host_that_was_rolled_back_too_often_has_diverged() -> None:
    cfg = EarlyStopConfig(rollbacks=2, min_steps=1)
    state = initial_state(tiny_rules(1, STEPS), 2, CPU)
    for rollbacks, cause in ((0, Cause.NONE), (1, Cause.NONE), (2, Cause.DIVERGED)):
        found = advance(recorded(state, [1.0, 1.0], 3, rollbacks), cfg, STEPS)
        assert found.ending.cause.tolist() == [cause, Cause.NONE]


# --- whole episodes


def stopping(envs: int = 5, **early: float) -> TrainConfig:
    """A run in which some episodes end early, at different env-steps, and others do not."""
    early_stop = EarlyStopConfig(**({"patience": 5, "min_delta": 0.0, "min_steps": 3} | early))
    settings = tiny_settings(envs, 2, STEPS)
    task = replace(settings.task, base_channels=4)
    return replace(
        settings,
        early_stop=early_stop,
        batch_size=4,
        train_samples=8,
        val_samples=8,
        task=task,
        compute=replace(settings.compute, engine="torch"),
    )


def episode(cfg: TrainConfig, progress: Progress | None = None) -> EpisodeRunner:
    world = build_world(cfg, CPU)
    player = (
        build_player(cfg.policy, world)
        if cfg.policy.name == "ppo"
        else Player(RandomPolicy(), None)
    )
    return EpisodeRunner(world, player, Round(0, progress or quiet_progress()))


def played_out(cfg: TrainConfig, progress: Progress | None = None) -> EpisodeRunner:
    """An episode after its last env-step."""
    played = episode(cfg, progress)
    while not played.env.over:
        played.step_()
    return played


def waiting(num_envs: int) -> Action:
    nothing = torch.zeros(num_envs, dtype=torch.int64)
    return make_action(nothing, nothing)


def flat(state: EnvState) -> dict[str, Tensor]:
    """Every number of the state, by name."""
    return state.to_tensordict().flatten_keys(".").to_dict()


def test_nothing_happens_to_an_env_whose_episode_is_over() -> None:
    played = episode(stopping(8, patience=6))
    frozen = dict[int, tuple[dict, dict]]()
    world = played.env.world
    while not played.env.over:
        played.step_()
        state = played.env.state
        weights = world.weights
        for env in state.ending.over.nonzero().flatten().tolist():
            mine = {name: value[env].clone() for name, value in flat(state).items()}
            rows = {
                name: value[env].clone()
                for name, value in weights.exclude("snapshot").flatten_keys(".").items()
            }
            before = frozen.setdefault(env, (mine, rows))
            changed = [
                name
                for name in mine
                if not torch.equal(mine[name].nan_to_num(), before[0][name].nan_to_num())
            ]
            assert set(changed) <= NOTED, changed
            assert all(torch.equal(rows[name], before[1][name]) for name in rows)
    over = played.env.state.ending.over
    assert over.any()
    assert not over.all()
    result, _ = played.finish()
    steps = [one["env_steps"] for one in result.episodes]
    assert len(set(steps)) > 1
    assert steps == played.env.state.signals.step.tolist()
    assert result.env_steps == sum(steps)
    causes = [one["ended_by"] for one in result.episodes]
    assert causes == ["plateau" if early else "limit" for early in over.tolist()]
    assert sum(result.record["ops"].values()) == sum(steps)
    assert result.train_flop[steps.index(min(steps))] < result.train_flop[steps.index(max(steps))]


@pytest.mark.parametrize("engine", some_of(["torch", "auto"], "torch"))
def test_an_env_among_others_is_the_env_alone(engine: str) -> None:
    """Each is as a batch of one that begins with it has it; streams of env 0 are alike."""
    cfg = replace(stopping(), compute=replace(stopping().compute, engine=engine))
    many, alone = (played_out(replace(cfg, envs=envs)) for envs in (3, 1))
    theirs = flat(alone.env.state)
    for name, value in flat(many.env.state).items():
        torch.testing.assert_close(value[0], theirs[name][0], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert bool(alone.env.state.ending.over[0])


@pytest.mark.parametrize(
    ("player", "imitated"),
    [("ppo", 0), pytest.param("ppo", 1, marks=pytest.mark.slow), ("random", 0)],
)
def test_a_round_ends_with_its_last_episode_and_comes_to_what_it_would_if_it_were_played_on(
    player: str, imitated: int
) -> None:
    # after the first env-step nothing is a gain
    cfg = stopping(4, patience=1, min_delta=100.0, min_steps=4)
    imitation = ImitationConfig(rounds=imitated, teacher="heuristic")
    cfg = replace(cfg, policy=replace(cfg.policy, name=player, imitation=imitation))
    ended = played_out(cfg)
    idle = episode(cfg)
    assert ended.env.step_number == 4
    while idle.env.step_number < STEPS:
        idle.step_()
    (ours, rollout), (theirs, played_on) = ended.finish(), idle.finish()
    assert ours.env_steps == 4 * 4
    assert repr(ours) == repr(theirs)
    # by which means of several ranks are weighted
    assert ended.metrics.env_steps == idle.metrics.env_steps == 4 * STEPS
    assert ended.metrics.left_out.item() == idle.metrics.left_out.item() == 4 * (STEPS - 4)
    if rollout is None or played_on is None:
        assert player == "random"
        return
    assert (rollout.rows == played_on.rows).all()
    assert torch.equal(rollout.bootstrap, played_on.bootstrap)
    learned = []
    for one, record in ((ended, rollout), (idle, played_on)):
        learner = one.player.learner
        assert learner is not None
        report = learner.imitate(record) if imitated else learner.update(record)
        learned.append((report, flatten(list(learner.policy.parameters()))))
    assert learned[0][0] == learned[1][0]
    assert torch.equal(learned[0][1], learned[1][1])


def test_off_it_is_what_it_was_and_on_without_an_early_end_it_is_the_same() -> None:
    states = []
    for early in ({"patience": 0}, {"patience": 1000}):
        played = played_out(stopping(3, **early))
        states.append(
            flat(played.env.state) | {"weights": played.env.world.weights["host", "params"]}
        )
    off, on = states
    assert all(
        torch.equal(value, on[name]) for name, value in off.items() if not name.startswith("ending")
    )
    assert not on["ending.cause"].any()


@pytest.mark.parametrize(
    ("early", "all_end"), [({"patience": 6}, False), ({"patience": 1, "min_delta": 100.0}, True)]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_bar_counts_the_env_steps_that_are_played_and_ends_full(
    early: dict, all_end: bool, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where other processes have as many envs, which are counted as those here."""
    monkeypatch.setattr(Reduction, "all_envs", lambda self, own: processes * own)
    monkeypatch.setattr(Reduction, "rows_here", lambda self, rows, dim=0: rows.narrow(dim, 0, 8))
    console = Console(file=io.StringIO(), width=200)
    with Progress(processes * 8 * STEPS, console, "plain", interval=1e9) as progress:
        played = played_out(stopping(8, **early), progress)
        result, _ = played.finish()
    assert bool(played.env.state.ending.over.all()) == all_end
    assert result.env_steps < 8 * STEPS
    assert isinstance(console.file, io.StringIO)
    (line,) = console.file.getvalue().splitlines()
    env_steps = processes * result.env_steps
    assert f"{env_steps}/{env_steps} env-steps" in line


def test_an_env_that_a_rollback_has_ended_is_terminated_once() -> None:
    sim = Simulator(stopping(2, patience=0, rollbacks=1, min_steps=1), RandomPolicy())
    sim.reset()
    sim.world.weights["host", "params"][0] = torch.nan
    found = [sim.step(waiting(2))[2:4] for _ in range(STEPS)]
    terminated = torch.stack([one for one, _ in found])
    truncated = torch.stack([one for _, one in found])
    assert terminated.sum(0).tolist() == [1, 0]
    assert truncated[:, 0].tolist() == terminated[:, 0].cummax(0).values.tolist()
    assert truncated[:, 1].tolist() == [False] * (STEPS - 1) + [True]


# --- what a learner is given


@pytest.mark.parametrize("end", ["auto", "terminated", "truncated"])
def test_what_follows_an_episode_counts_where_its_reward_does_not_pay_for_all_of_it(
    end: str,
) -> None:
    """Shaped and net pay the envs in turn; the first two episodes have their own length."""
    cfg = stopping(4, patience=0, length="[3,3,0,0]")
    reward = replace(cfg.reward, mode="[shaped,net]", episode_end=end)
    rollout = played_out(replace(cfg, reward=reward)).finish()[1]
    assert rollout is not None
    rows = rollout.rows
    last = torch.zeros_like(rows.valid)
    last[[2, 2, STEPS - 1, STEPS - 1], range(4)] = True
    continues = {"auto": [True, False] * 2, "terminated": [False] * 4, "truncated": [True] * 4}
    assert torch.equal(rows.truncated, last & torch.tensor(continues[end]) & ~rows.terminal)


def test_an_end_that_was_not_planned_is_cut_off_whatever_the_reward() -> None:
    cfg = stopping(8, patience=6)
    rollout = played_out(replace(cfg, reward=replace(cfg.reward, mode="net"))).finish()[1]
    assert rollout is not None
    truncated = rollout.rows.truncated
    assert truncated[:-1].any()
    assert not truncated[-1].any()


def test_rows_behind_an_early_end_do_not_count_and_the_last_one_is_cut_off() -> None:
    cfg = stopping(8, patience=6)
    cfg = replace(
        cfg, policy=replace(cfg.policy, ppo=replace(cfg.policy.ppo, minibatches=1, epochs=1))
    )
    played = episode(cfg)
    values = []
    ends = torch.full((cfg.envs,), STEPS)
    while not played.env.over:
        step = played.env.step_number
        before = played.env.state.ending.over
        played.step_()
        now = played.env.state.ending.over & ~before
        ends[now] = step + 1
        after = played.player.agent.act(played.env.current_view(), played.memory)[0].value
        values.append(after)
    _, rollout = played.finish()
    assert rollout is not None
    assert ends.min() < STEPS == ends.max()
    rows = rollout.rows
    place = torch.arange(STEPS)[:, None]
    panic = rows.terminal
    assert torch.equal(rows.valid, place < ends)
    assert torch.equal(rows.truncated, (place == ends - 1) & ~panic)
    assert bool((rows.reward[~rows.valid] == 0).all())
    assert bool(rows.features.isfinite().all())
    # the value that stands for the rest is that behind the env's own end, whatever came later
    wanted = torch.stack([values[end - 1][env] for env, end in enumerate(ends.tolist())])
    torch.testing.assert_close(rollout.bootstrap, wanted)
    learner = played.player.learner
    assert learner is not None
    report = learner.update(rollout)
    assert report["valid_rows"] == int(ends.sum())
    assert np.isfinite(list(report.values())).all()


def test_a_simulator_tells_of_every_env_when_its_episode_is_over() -> None:
    sim = Simulator(stopping(8, patience=6), RandomPolicy())
    _, info = sim.reset()
    over = torch.zeros(8, dtype=torch.bool)
    told = []
    while not over.all():
        before = over
        _, reward, _, over, info = sim.step(waiting(8))
        assert bool((over | ~before).all())
        assert not reward[before].any()
        if not over.all():  # behind the last env-step nothing is decided any more
            assert int(info.masks.op[before].sum()) == int(before.sum())
        told.append(int(over.sum()))
    assert 0 < told[-2] < 8 == told[-1]
    assert len(told) == STEPS


def test_a_simulator_whose_episodes_have_all_ended_early_begins_anew() -> None:
    sim = Simulator(stopping(3, patience=1, min_delta=100.0, min_steps=4), RandomPolicy())
    wait = waiting(3)
    for _ in range(2):
        sim.reset()
        assert not sim.env.over
        assert [bool(sim.step(wait)[3].all()) for _ in range(4)] == [False, False, False, True]
        with pytest.raises(RuntimeError, match="call reset"):
            sim.step(wait)
    assert [one.truncated for one in sim.episode()] == [False, False, False, True]


# --- what is refused


def test_rollbacks_that_never_come_end_nothing() -> None:
    with pytest.raises(
        SettingError, match="early_stop.rollbacks=2: must be 0 with governor.enabled=false"
    ):
        TrainConfig(early_stop=EarlyStopConfig(rollbacks=2), governor=GovernorConfig(enabled=False))
