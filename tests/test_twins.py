"""Envs that are copied in mid-episode: equal to the bit as long as their actions are, on every
engine; whatever else is played stays as it was.
"""

import re

import pytest
import torch

import esper_soa
from esper_soa import Op, as_decision, obey, seed_action
from esper_soa.agent.protocol import Agent, Memory
from esper_soa.simulator import Simulator
from esper_soa.state import Decision, View
from esper_soa.system.errors import UserError
from tests.builders.lanes import some_of

SOURCE, TARGET = 0, 2
TINY = ("device=cpu", "task=cifar_minimal", "slots=[r0c0,r0c1]", "data.name=synthetic")
SIZES = {"envs": 3, "steps": 8, "batch_size": 4, "train_samples": 8, "val_samples": 20}
# torch's batched operations round by the place of an env among others
ENGINES = ["native", "torch compute.env_chunk=1"]
GERMINATE = {"op": "germinate", "slot": "r0c0", "blueprint": "conv_light"}
WAIT = {"op": "wait"}


def make(*overrides: str, policy: str | Agent = "ppo", **sizes: object) -> Simulator:
    words = (*TINY, "gates.min_blending_steps=1", "gates.min_gradient_health=0", *overrides)
    return esper_soa.make("smoke", policy=policy, overrides=words, **(SIZES | sizes))


def rows_of(sim: Simulator, env: int) -> list[torch.Tensor]:
    """All that is known of an env, its weights included."""
    leaves = *sim.world.weights.values(True, True), *sim.state.values(True, True)
    return [rows[env].clone() for rows in leaves]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, two, strict=True))


class Patient:
    """Germinates in every third of its env-steps, counted from the number of the env; in the second
    slot from the tenth on.
    """

    def start(self, num_envs: int, device: torch.device) -> Memory:
        return (torch.arange(num_envs, device=device),)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        (count,) = memory
        op = torch.where(count % 3 == 0, Op.GERMINATE, Op.WAIT)
        wanted = seed_action(op, (count >= 9).long(), torch.ones_like(op))
        return as_decision(obey(wanted, view.masks)[0]), (count + 1,)


@pytest.mark.parametrize("engine", some_of(ENGINES, "native"))
def test_a_policy_plays_a_twin_as_its_source_and_all_others_as_before(engine: str) -> None:
    words = *f"compute.engine={engine}".split(), "lifecycle=auto_forward"
    apart = make(*words, policy=Patient(), steps=12)
    before = [apart.world.weights.clone() for _ in apart.episode()]
    sim = make(*words, policy=Patient(), steps=12)
    for step in sim.episode():
        if step.number == 6:
            contribution = sim.state.slots.contribution
            assert contribution[SOURCE, 0] != contribution[TARGET, 0]
            assert not same(rows_of(sim, SOURCE), rows_of(sim, TARGET))
            sim.fork(SOURCE, into=TARGET)
            observed = sim.env.observed
            assert observed is not None
            for record in (observed.attribution, observed.measured):
                assert (record[SOURCE] == record[TARGET]).all()
        if step.number > 6:
            assert step.action.op[SOURCE] == step.action.op[TARGET]
            assert step.reward[SOURCE] == step.reward[TARGET]
            assert same(rows_of(sim, SOURCE), rows_of(sim, TARGET))
        assert (sim.world.weights[:TARGET] == before[step.number][:TARGET]).all()


def test_envs_are_copied_between_their_actions_and_the_next_env_step() -> None:
    env = make().env
    env.begin_(0)
    env.observe_()
    wait = torch.zeros(3, dtype=torch.int64)
    op = torch.tensor([Op.GERMINATE, Op.WAIT, Op.WAIT])
    env.apply_action_(seed_action(op, wait, wait + 1))
    env.copy_envs_(torch.tensor([0, 1, 0]))
    view = env.observe_().view
    assert view.state.slots.live.any(1).tolist() == [True, False, True]
    assert torch.equal(view.noise[SOURCE], view.noise[TARGET])


@pytest.mark.parametrize("engine", some_of(ENGINES, "native"))
def test_a_seed_that_trains_leaves_its_host_as_that_of_the_twin_without(engine: str) -> None:
    sim = make(*f"compute.engine={engine}".split())
    sim.reset()
    sim.step(WAIT)
    _, info = sim.fork(SOURCE, into=[1, TARGET])
    assert info.restarted.tolist() == [False, True, True]
    ops = {"op": ["germinate", "wait", "wait"], "slot": "r0c0", "blueprint": "conv_light"}
    for actions in (ops, ops | {"op": ["advance", "wait", "wait"]}, WAIT):
        sim.step(actions)
    assert [seed.stage for seed in sim.seeds(SOURCE)] == ["training"]
    host = sim.world.weights["host", "params"]
    accuracy = sim.state.signals.val_accuracy
    assert torch.equal(host[SOURCE], host[TARGET])
    assert accuracy[SOURCE] == accuracy[TARGET]
    assert same(rows_of(sim, 1), rows_of(sim, TARGET))


def test_a_clone_has_the_draws_of_its_place() -> None:
    sim = make()
    sim.reset()
    sim.fork([SOURCE, SOURCE], into=[1, TARGET], same_draws=False)
    assert same(rows_of(sim, SOURCE), rows_of(sim, TARGET))
    sim.step(WAIT)
    assert not same(rows_of(sim, SOURCE), rows_of(sim, TARGET))
    sim.reset()
    fresh = make()
    fresh.reset()
    fresh.reset()
    assert same(rows_of(sim, TARGET), rows_of(fresh, TARGET))


def test_a_round_after_a_fork_is_that_without() -> None:
    sims = make(), make()
    for sim in sims:
        sim.reset()
    sims[0].fork(SOURCE, into=TARGET)
    for sim in sims:
        sim.step(WAIT)
        sim.reset()
    assert same(rows_of(sims[0], TARGET), rows_of(sims[1], TARGET))


def test_a_copy_of_a_simulator_goes_on_alone() -> None:
    sim = make()
    sim.reset()
    sim.step(GERMINATE)
    twin = sim.copy()
    before = rows_of(sim, SOURCE)
    rewards = [twin.step(WAIT)[1] for _ in range(3)]
    assert same(before, rows_of(sim, SOURCE))
    assert torch.equal(torch.stack([sim.step(WAIT)[1] for _ in range(3)]), torch.stack(rewards))
    assert same(rows_of(twin, SOURCE), rows_of(sim, SOURCE))


@pytest.mark.parametrize(
    ("name", "values"), [("task.host_lr", [0.01, 0.02, 0.03]), ("early_stop.length", [6, 7, 8])]
)
def test_settings_by_env_go_with_the_copy(name: str, values: list[float]) -> None:
    sim = make(f"{name}={values}", "task.lr_schedule=cosine")
    sim.reset()
    sim.fork(SOURCE, into=TARGET)
    assert sim.world.settings[name] == [*values[:TARGET], values[SOURCE]]
    for _ in range(3):
        sim.step(GERMINATE if sim.env.step_number == 0 else WAIT)
    assert same(rows_of(sim, SOURCE), rows_of(sim, TARGET))


def test_a_copied_host_is_exported_as_its_source() -> None:
    sim = make()
    sim.reset()
    sim.step(WAIT)
    sim.fork(SOURCE, into=TARGET)
    source, target = (sim.export(env) for env in (SOURCE, TARGET))
    assert source.spec["validation_loss"] == target.spec["validation_loss"]
    assert source.spec["test_accuracy"] == target.spec["test_accuracy"]


@pytest.mark.parametrize(
    ("envs", "into", "told"),
    [(0, 3, "env 3"), ([0, 1], [2], "2 sources and 1"), (0, [2, 2], "every env"), (0.5, 1, "0.5")],
)
def test_envs_that_do_not_pair_up_are_named(envs: object, into: object, told: str) -> None:
    sim = make()
    with pytest.raises(RuntimeError, match="call reset"):
        sim.fork(envs, into)  # type: ignore[arg-type]
    sim.reset()
    with pytest.raises((IndexError, ValueError), match=told):
        sim.fork(envs, into)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", ["data.split=true", "data.name=[synthetic,fashion32]"])
def test_envs_with_parts_of_the_data_are_refused(words: str) -> None:
    sizes = {"envs": 2} if "split" in words else {}
    sim = make(words, **sizes)
    sim.reset()
    with pytest.raises(UserError, match=re.escape(words.partition("=")[0])):
        sim.fork(0, into=1)
