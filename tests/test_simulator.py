"""The simulator as a library: a run's rounds to the bit, whoever steps it; clear words."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import esper_soa
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.protocol import Memory
from esper_soa.agent.scripted import RandomPolicy, WaitPolicy
from esper_soa.config.settings import TrainConfig
from esper_soa.env.actions import read_action
from esper_soa.simulator import Seed, Simulator, Step
from esper_soa.state import Decision, View
from esper_soa.system.errors import UserError
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.players import build_player
from esper_soa.vocabulary import BLUEPRINT_NAMES, HEAD_NAMES, HEADS, OP_NAMES, Op
from tests.builders.lanes import some_of
from tests.builders.tiny_world import CPU, quiet_progress, tiny_settings

ENVS = 3
STEPS = 6
TINY = (
    "device=cpu",
    "task=cifar_minimal",
    "slots=[r0c0,r0c1]",
    "data.name=synthetic",
    "gates.min_blending_steps=1",
)
Pair = tuple[Simulator, Simulator]
SIZES = {"envs": ENVS, "steps": STEPS, "batch_size": 4, "train_samples": 8, "val_samples": 20}


def settings() -> TrainConfig:
    return tiny_settings(ENVS, 2, STEPS)


def make(**more: object) -> Simulator:
    return esper_soa.make("smoke", **(SIZES | {"policy": "random", "overrides": TINY} | more))


def make_main(policy: str, steps: int) -> Simulator:
    sizes = SIZES | {"device": "cpu", "steps": steps}
    return esper_soa.make("cifar_3seed", policy=policy, **sizes)


def rewards(steps: list[Step]) -> torch.Tensor:
    return torch.stack([step.reward for step in steps])


@pytest.mark.parametrize("policy", some_of(["random", "grower"], "grower"))
def test_a_round_is_that_of_a_training_run_to_the_bit(policy: str) -> None:
    sim = make_main(policy, steps=4)
    world = build_world(sim.settings, CPU)
    player = Player(build_player(sim.settings.policy, world).agent, None)
    for number in range(2):
        result, _ = play_round(world, player, Round(number, quiet_progress()))
        steps = list(sim.episode())
        assert (sim.world.weights == world.weights).all()
        assert rewards(steps).sum(0).tolist() == pytest.approx(result.rewards, abs=1e-12)
        assert sim.state.signals.val_accuracy.tolist() == result.accuracies
        assert [step.truncated for step in steps] == [False, False, False, True]


def test_stepping_with_the_actions_of_an_episode_is_that_episode() -> None:
    played = Simulator(settings(), RandomPolicy())
    stepped = Simulator(settings())
    observation, info = stepped.reset()
    assert not info.illegal.any()
    assert not info.restarted.any()
    for step in played.episode():
        assert torch.equal(observation.features, step.observation.features)
        assert torch.equal(info.accuracy, step.accuracy)
        assert (info.masks == step.masks).all()
        assert info.env_step == step.number
        observation, reward, terminated, truncated, info = stepped.step(step.action)
        assert torch.equal(reward, step.reward)
        assert torch.equal(terminated, step.terminated)
        assert not terminated.any()
        assert truncated.tolist() == [step.truncated] * ENVS
        assert not info.illegal.any()
    assert info.env_step == STEPS
    last = stepped.env.current_view()  # behind the last action
    assert torch.equal(observation.features, last.observation.features)
    assert not torch.equal(observation.features, step.observation.features)
    assert (info.masks == last.masks).all()
    assert (stepped.state == played.state).all()
    assert (step.state == played.state).all()
    assert played.state.totals.germinated.sum() > 0
    with pytest.raises(
        RuntimeError, match="^the episode is over, was interrupted or has not begun: call reset$"
    ):
        stepped.step({"op": Op.WAIT})


def test_reset_goes_on_to_the_next_round_and_a_seed_begins_again() -> None:
    sim = Simulator(settings())
    images = sim.world.data.train_images
    first, second = (sim.reset()[0].features for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(sim.reset(seed=settings().seed)[0].features, first)
    assert torch.equal(sim.reset()[0].features, second)
    assert not torch.equal(sim.reset(seed=5)[0].features, first)
    assert sim.reset()[1].round == 1
    assert sim.world.data.train_images is images  # not read again
    with pytest.raises(ValueError, match="op fossilize is not legal"):
        sim.step({"op": Op.FOSSILIZE})


def test_simulators_live_side_by_side_and_leave_torch_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = list(Simulator(settings(), RandomPolicy()).episode())
        pair = Simulator(settings(), RandomPolicy()).episode(), make().episode()
        mixed = [one for one, _ in zip(*pair, strict=True)]
        assert torch.equal(rewards(mixed), rewards(alone))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_actions_come_as_records_names_rows_or_numbers() -> None:
    germinate = {"op": Op.GERMINATE, "slot": 1, "blueprint": [3, 1, 3]}
    named = {"op": "germinate", "slot": "r0c1", "blueprint": ["norm", "conv_light", "norm"]}
    plain = {head.name: head.placeholder for head in HEADS} | {"slot": 1, "op": Op.GERMINATE}
    rows = np.array([[*(plain | {"blueprint": code}).values()] for code in (3, 1, 3)])
    sim = make()
    numbers = [sim.joint.rows.tolist().index(row) for row in rows.tolist()]
    found = []
    for given in (germinate, named, rows, torch.from_numpy(rows), numbers):
        sim.reset(seed=0)
        found.append((sim.step(given)[1], sim.state))
        names = [seed.blueprint for env in range(ENVS) for seed in sim.seeds(env)]
        assert names == ["norm", "conv_light", "norm"]
    for reward, state in found:
        assert torch.equal(reward, found[0][0])
        assert (state == found[0][1]).all()
    seed = sim.seeds(1)[0]
    told = (seed.slot, seed.stage, seed.alpha, seed.contribution)
    assert told == ("r0c1", "germinated", 0.0, None)
    for env in (-1, 3):
        with pytest.raises(IndexError, match=f"^env {env}: there are 3, from 0$"):
            sim.seeds(env)


def test_every_choice_of_every_head_has_a_name(both: Pair) -> None:
    named = {"slot": "r0c1", "blueprint": "norm", "style": "gated_gate", "tempo": "slow"}
    named |= {"alpha_target": "half", "alpha_speed": "medium", "alpha_curve": "cosine"}
    found = read_action(named | {"op": "prune"}, ENVS, both[0].joint, both[0].names)
    wanted = dict(zip([*named, "op"], (1, 3, 3, 2, 0, 2, 1, 3), strict=True))
    assert {name: found.get(name).tolist() for name in wanted} == {
        name: [choice] * ENVS for name, choice in wanted.items()
    }
    sizes = {name: len(names) for name, names in both[0].names.items()}
    counted = dict(zip([*named, "op"], (2, 7, 4, 3, 3, 4, 5, 6), strict=True))
    assert sizes.keys() == {*HEAD_NAMES}
    assert sizes | counted == sizes


CNN = ", ".join(BLUEPRINT_NAMES[1:8])
ILLEGAL = [
    ({"op": Op.GERMINATE, "blueprint": 9}, f"blueprint lora_large for op germinate: {CNN}"),
    ({"op": Op.GERMINATE}, f"op germinate without a blueprint: {CNN}"),
    ({"op": Op.GERMINATE, "blueprint": -1}, f"blueprint -1 for op germinate: {CNN}"),
    ({"op": Op.GERMINATE, "blueprint": 3, "slot": 2}, "slot 2 for op germinate: r0c0, r0c1"),
    (
        {"op": Op.GERMINATE, "blueprint": 3, "tempo": 100},
        "tempo 100 for op germinate: fast, standard, slow",
    ),
    # the first head's
    (
        {"op": Op.GERMINATE, "blueprint": 3, "slot": 2, "tempo": 100},
        "slot 2 for op germinate: r0c0, r0c1",
    ),
    ({"op": Op.FOSSILIZE}, "op fossilize: wait, germinate"),
    ({"op": 6}, "op 6: wait, germinate"),
    ({"op": -1}, "op -1: wait, germinate"),
]


@pytest.fixture(scope="module")
def both() -> Pair:
    """One that waits instead of an illegal action, and one that raises, as is the default."""
    return make(illegal="wait"), make()


@pytest.mark.parametrize(("action", "words"), ILLEGAL)
def test_what_is_not_legal_becomes_wait_or_raises(
    action: dict[str, int], words: str, both: Pair
) -> None:
    # the second env's alone; the others wait
    mixed = {head: [0, choice, 0] for head, choice in action.items()}
    waiting, raising = both
    waiting.reset()
    raising.reset()
    info = waiting.step(mixed)[4]
    assert info.illegal.tolist() == [False, True, False]
    assert not waiting.state.slots.live.any()
    choice, legal = words.split(": ")
    told = f"^env 1: {choice} is not legal; legal are {legal}$"
    with pytest.raises(ValueError, match=told):
        raising.step(mixed)
    raising.step({"op": Op.WAIT})  # nothing had been played


def test_choices_that_the_op_does_not_read_do_not_matter(both: Pair) -> None:
    for sim in both:
        sim.reset(seed=0)
    plain, odd = both
    heads = dict.fromkeys(HEAD_NAMES, 77)
    assert torch.equal(plain.step({"op": Op.WAIT})[1], odd.step(heads | {"op": Op.WAIT})[1])
    assert (plain.state == odd.state).all()


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"opp": 1, "a": 2}, f"action heads are {', '.join(HEAD_NAMES)}, not a, opp"),
        ({"op": 1.0}, "op must be integers, not torch.float32"),
        ({"op": None}, "op must be integers, not None"),
        ("germinate", "actions must be integers, not 'germinate'"),
        ({"op": [True, False, True]}, "op must be integers, not torch.bool"),
        ({"op": [1j, 0, 0]}, "op must be integers, not torch.complex64"),
        ({"op": [0, 1]}, "the op head takes {each}, not torch.Size([2])"),
        ({"op": ("wait", "wait")}, "the op head takes {each}, not torch.Size([2])"),
        ({"op": torch.zeros(0).long()}, "the op head takes {each}, not torch.Size([0])"),
        ({"slot": [[0], [1], [0]]}, "the slot head takes {each}, not torch.Size([3, 1])"),
        ({"op": "germinat"}, f"op='germinat': must be one of {', '.join(OP_NAMES)}"),
        ({"slot": ["r0c1", "r9c9", 0]}, "slot='r9c9': must be one of r0c0, r0c1"),
        (
            {"blueprint": np.array(["lora", "norm", "norm"])},
            "blueprint='lora': must be one of conv_light, attention, norm, depthwise, bottleneck, "
            "conv_small, conv_heavy",
        ),
        ({"tempo": "quick"}, "tempo='quick': must be one of fast, standard, slow"),
        ([0, 1], "actions are numbers [3] of joint actions or choices [3, 8], not [2]"),
        ([0, 1, 1029], "joint actions are 0 to 1028, not [0, 1, 1029]"),
        ([0, 1, -1], "joint actions are 0 to 1028, not [0, 1, -1]"),
    ],
)
def test_what_is_no_action_is_refused(action: object, words: str, both: Pair) -> None:
    both[0].reset()
    told = words.format(each="a number or one for each of 3 envs")
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        both[0].step(action)


def test_a_host_that_breaks_down_ends_its_trajectory_and_goes_on() -> None:
    sim = make()
    sim.reset()
    sim.world.weights["host", "params"][1] = torch.nan
    ends = []
    for _ in range(STEPS):
        _, reward, terminated, truncated, info = sim.step({"op": Op.WAIT})
        assert reward.isfinite().all()
        ends.append((terminated.tolist(), info.restarted.tolist()))
    assert ends[1] == ([False, True, False], [False, True, False])
    assert [terminated for terminated, _ in ends].count([False] * 3) == STEPS - 1
    assert truncated.all()
    assert sim.world.weights["host", "params"].isfinite().all()


class Counting:
    """Waits, and counts its decisions for every env since it was last told to begin anew."""

    def __init__(self) -> None:
        self.wait = WaitPolicy()
        self.counts = list[list[int]]()
        self.threads = list[int]()

    def start(self, num_envs: int, device: torch.device) -> Memory:
        return (torch.zeros(num_envs, dtype=torch.int64, device=device),)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        self.counts.append(memory[0].tolist())
        self.threads.append(torch.get_num_threads())
        return self.wait.act(view, ())[0], (memory[0] + 1,)


def test_an_agent_begins_anew_with_a_host_that_was_rolled_back() -> None:
    agent = Counting()
    sim = Simulator(settings(), agent)
    for step in sim.episode():
        if step.number == 1:
            sim.world.weights["host", "params"][1] = torch.nan
    counts = torch.tensor(agent.counts)
    assert counts[:, 0].tolist() == counts[:, 2].tolist() == list(range(STEPS))
    # broken down while the third is played, seen by the fourth
    assert counts[:, 1].tolist() == [0, 1, 2, 3, 0, 1]


def test_a_host_that_is_rolled_back_at_the_end_stands_without_what_it_has_lost() -> None:
    sim = make(steps=10, overrides=(*TINY, "gates=permissive"))
    _, info = sim.reset()
    for number in range(10):
        germinates = number == 0
        advances = bool(info.masks.op[1, Op.ADVANCE])
        if number == 8:
            sim.world.weights["host", "params"][1] = torch.nan
        op = Op.GERMINATE if germinates else Op.ADVANCE if advances else Op.WAIT
        _, _, terminated, truncated, info = sim.step({"op": [0, op, 0], "blueprint": 3})
        if number == 8:
            assert [seed["stage"] for seed in sim.export(1).spec["seeds"]] == ["holding"]
        if number == 7:
            sim.state.slots.contribution[1, 0] += 2.5
            assert sim.seeds(1) == [Seed("r0c0", "blending", "norm", 1.0, 8, 2.5)]
    assert terminated.tolist() == info.restarted.tolist() == [False, True, False]
    assert truncated.all()
    spec = sim.export(1).spec
    assert spec["seeds"] == []
    assert spec["validation_accuracy"] is spec["validation_loss"] is None


def test_a_policy_by_name_is_that_and_nothing_that_the_experiment_starts_from() -> None:
    fresh, shipped = (make_main(policy, steps=2).agent for policy in ("ppo", "grower"))
    assert isinstance(fresh, RecurrentPolicy)
    assert isinstance(shipped, RecurrentPolicy)
    assert not torch.equal(fresh.embedding.weight, shipped.embedding.weight)


def test_a_step_that_was_interrupted_leaves_a_reset_due(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = make()
    for number, name in enumerate(("step", "reset")):
        sim.reset()
        with monkeypatch.context() as broken:
            broken.setattr(sim.env, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                sim.step({"op": Op.WAIT}) if name == "step" else sim.reset()
        with pytest.raises(
            RuntimeError,
            match="^the episode is over, was interrupted or has not begun: call reset$",
        ):
            sim.step({"op": Op.WAIT})
        told = "nothing has been measured since the last reset: call reset, or play an episode"
        with pytest.raises(RuntimeError, match=told):
            sim.export(0)
        assert sim.world.round == number
    assert sim.reset()[1].round == 2


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_settings_are_checked_as_on_the_command_line() -> None:
    with pytest.raises(
        esper_soa.UserError, match=r"^env: there is no such setting\. Did you mean envs\?$"
    ):
        esper_soa.make("smoke", env=3)
    with pytest.raises(esper_soa.UserError, match=r"^illegal=skip: must be raise or wait\.$"):
        make(illegal="skip")
    told = (
        r"^policy\.init=nobody: there is no such policy, run folder or checkpoint\. Policies that "
        r"ship: gardener, grower$"
    )
    with pytest.raises(esper_soa.UserError, match=told):
        make(policy="nobody")
    assert make(slots="[r0c1]", run_dir="a, b=c").settings.run_dir == "a, b=c"
    floors = make(**{"policy.ppo.entropy_floor": "{op: 0.4}"}).settings.policy.ppo.entropy_floor
    assert floors["op"] == 0.4


def test_the_package_offers_its_names_and_imports_torch_only_when_asked() -> None:
    code = "import sys, esper_soa; assert 'torch' not in sys.modules; assert dir(esper_soa)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(getattr(esper_soa, name) for name in esper_soa.__all__)
    with pytest.raises(AttributeError, match="^module 'esper_soa' has no attribute 'mak'$"):
        esper_soa.mak  # noqa: B018
    assert esper_soa.__version__ == metadata.version("esper-soa")


def test_a_host_comes_out_with_the_accuracy_that_was_measured() -> None:
    sim = make(steps=9)
    with pytest.raises(
        RuntimeError,
        match="^nothing has been measured since the last reset: call reset, or play an episode$",
    ):
        sim.export(0)
    steps = list(sim.episode())
    data = sim.world.data
    order = sim.world.validation.order
    for env in range(ENVS):
        net = sim.export(env)
        images = data.val_images[order].permute(0, 3, 1, 2) / 255
        correct = (net(images).argmax(1) == data.val_labels[order]).double().mean() * 100
        assert float(correct) == pytest.approx(float(steps[-1].accuracy[env]), abs=1e-9)
        assert net.spec["validation_accuracy"] == float(steps[-1].accuracy[env])
        assert net.spec["round"] == 1
    with pytest.raises(IndexError, match="^env 3: there are 3, from 0$"):
        sim.export(ENVS)
    info = sim.reset()[1]
    assert (sim.export(0).spec["round"], sim.export(0).spec["validation_accuracy"]) == (
        2,
        float(info.accuracy[0]),
    )


def test_the_policy_of_a_run_plays_as_a_module_and_from_its_folder_alike(tmp_path: Path) -> None:
    sizes = [f"{name}={value}" for name, value in SIZES.items()]
    run = esper_soa.train(
        "smoke",
        [*TINY, *sizes, "policy=ppo", "control=none", "rounds=1", f"run_dir={tmp_path}/run"],
    )
    played = [
        list(make(policy=policy).episode()) for policy in (run.policy(), str(run.path), "wait")
    ]
    assert torch.equal(rewards(played[0]), rewards(played[1]))
    ops = [torch.stack([step.action.op for step in steps]) for steps in played]
    assert torch.equal(ops[0], ops[1])
    assert not torch.equal(ops[0], ops[2])


def test_a_value_of_another_type_is_the_value_that_was_meant() -> None:
    meant = {"overrides": ["steps=4"], "envs": 2, "slots": "[r0c0]", "seed": 7, "policy": "random"}
    given = {"overrides": "steps=4", "envs": np.int64(2), "slots": ("r0c0",)}
    given |= {"seed": np.uint32(7), "policy": Path("random")}
    array = given | {"slots": np.array(["r0c0"], dtype=object)}
    wanted, *taken = (
        esper_soa.make("smoke", device="cpu", **values) for values in (meant, given, array)
    )
    assert [sim.settings == wanted.settings for sim in taken] == [True, True]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *[("overrides", None), ("overrides", [3]), ("policy", 3), ("data", np.zeros(3))],
        *[("envs", None), ("envs", 2.5), ("seed", -1), ("seed", "x"), ("experiment", None)],
    ],
)
def test_a_value_that_means_nothing_is_named_in_one_line(name: str, given: object) -> None:
    values = {"experiment": "smoke", "device": "cpu", "policy": "random", name: given}
    with pytest.raises(UserError, match=name) as error:
        esper_soa.make(**values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [5.0, "5", -1, 2**63, [5, 6]])
def test_a_seed_is_a_whole_number_of_whatever_kind(seed: object, both: Pair) -> None:
    sim, _ = both
    observation, info = sim.reset(np.int64(5))
    assert torch.equal(observation.features, sim.reset(5)[0].features)
    assert torch.equal(sim.state.signals.val_accuracy, info.accuracy), "what was observed"
    with pytest.raises(UserError, match="seed="):
        sim.reset(seed)


@pytest.mark.parametrize("engine", ["torch", "auto"])
def test_weights_are_read_and_written_where_they_are_trained(engine: str) -> None:
    sims = [make(overrides=(*TINY, f"compute.engine={engine}")) for _ in range(2)]
    action = {"op": "germinate", "slot": "r0c0", "blueprint": "conv_light"}
    for sim in sims:
        sim.reset()
        assert not [name for name in sim.weights(1) if name.startswith("r0c0")], "no seed yet"
        sim.step(action)
    plain, written = sims
    views = written.weights(1)
    assert any(name.startswith("r0c0.seed.") for name in views), "also one that only trains"
    exported = written.export(1).state_dict()
    assert {*dict(written.export(1).named_parameters())} <= {*views}
    for name in {*views} & {*exported}:
        assert torch.equal(views[name], exported[name]), name
    assert all(torch.equal(view, plain.weights(1)[name]) for name, view in views.items())
    name = "block1.conv.weight"
    views[name].zero_()
    assert not written.export(1).state_dict()[name].any()
    losses = []
    for sim in sims:
        sim.step({"op": "wait"})
        losses.append(sim.state.signals.train_loss.tolist())
    assert [one == other for one, other in zip(*losses, strict=True)] == [True, False, True]
    with pytest.raises(IndexError, match="^env 3: there are 3, from 0$"):
        written.weights(3)


def test_a_seed_of_the_last_action_has_no_weights_yet() -> None:
    sim = make()
    sim.reset()
    for _ in range(STEPS - 1):
        sim.step({"op": "wait"})
    sim.step({"op": "germinate", "slot": "r0c0", "blueprint": "conv_light"})
    assert [seed.slot for seed in sim.seeds(1)] == ["r0c0"]
    assert not [name for name in sim.weights(1) if name.startswith("r0c0")]


def test_a_simulator_tells_what_it_is_and_shows_its_images() -> None:
    sim = make()
    sim.reset()
    shown = (
        f"<Simulator: {ENVS} x cifar_minimal, slots r0c0, r0c1, seed {sim.settings.seed}, on cpu"
    )
    assert repr(sim) == f"{shown}; round 0, env-step 0 of {STEPS}>"
    sim.step({"op": "wait"})
    assert repr(sim).endswith(f"env-step 1 of {STEPS}>")
    images, labels = sim.images("train")
    assert len(images) == len(labels) == len(sim.world.data.train_labels)
    assert (images.shape[1:], images.min() >= 0, images.max() <= 1) == ((3, 32, 32), True, True)
    assert len(sim.images()[1]) == SIZES["val_samples"]
    with pytest.raises(UserError, match="^split=val: must be one of train, validation, test"):
        sim.images("val")
