"""A run of a domain that the package does not know (toy_domain.py) is a run like any other."""

import signal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toy_domain import CLASSES, LENGTH, TEST, TRAIN, WIDTH, WORDS, Embed, Sentences, Tagger, targets

import esper_soa
from esper_soa.agent.scripted import WaitPolicy
from esper_soa.agent.slots import place_table
from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env.topology import Topology
from esper_soa.env.world import World
from esper_soa.grown.build import SlotContents, grown_hosts
from esper_soa.lab.query import command as query
from esper_soa.lab.report import write
from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.nets.choose import choose_engine
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.data.orders import validation_order
from esper_soa.nets.model.blueprints import BLUEPRINTS, parameter_counts
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.seeds.pools import row_layout
from esper_soa.state import EnvState
from esper_soa.system import streams
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world, make_setup
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round
from esper_soa.vocabulary import NUM_BLUEPRINTS, Blend
from tests.builders.equal_runs import assert_equal_runs
from tests.builders.tiny_runs import signal_at
from tests.builders.tiny_world import CPU, quiet_progress

TOY = [
    "device=cpu",
    "task.host=toy_domain:tagging",
    "task.blueprints=[toy_domain:perceptron,toy_domain:shift]",
    f"task.num_classes={CLASSES}",
    "task.host_lr=0.1",
    "task.seed_lr=0.1",
    "data.name=toy_domain:sentences",
    "slots=[r0c0,r0c2]",
    "envs=4",
    "steps=12",
    "batch_size=8",
    "train_samples=64",
    "val_samples=32",
    "compute.threads=1",
    "compute.workers=1",
    "telemetry.progress=off",
]


# Seeds of one kind that are germinated, blended and fossilized within an episode.
SCHEDULE = [
    "policy=schedule",
    "policy.schedule.blueprint=toy_domain:shift",
    "policy.schedule.germinate=[1,2]",
    "policy.schedule.advance=[1,2,4]",
    "policy.schedule.fossilize=7",
    "policy.schedule.tempo=0",
    "gates.min_gradient_health=0",
    "gates.min_blending_steps=1",
    "task.host_lr=0.01",
]


LEARNING = ["policy=ppo", "rounds=2", "steps=4", "checkpoint_every=1", "control=none"]
LEARNING.append("report=false")


def trained(path: Path, *changes: str) -> esper_soa.RecordedRun:
    """A run of the toy domain."""
    return esper_soa.train("smoke", [*TOY, *changes, f"run_dir={path}"], verbose=0)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> esper_soa.RecordedRun:
    path = tmp_path_factory.mktemp("toy") / "run"
    return trained(path, *SCHEDULE, "telemetry.level=full")


def test_a_run_trains_hosts_and_grows_them(
    grown: esper_soa.RecordedRun,
) -> None:
    assert "4 x tagging of your own" in (grown.path / "log.txt").read_text()
    assert "validation sentences of every host" in (grown.path / "log.txt").read_text()
    assert "each on all 32 test sentences" in (grown.path / "log.txt").read_text()
    last = grown.metrics()[-1]
    assert last["seeds"]["fossilized"] == 4
    assert last["blueprints"]["shift"]["germinated"] == 8
    assert last["train_flop"] > 0
    assert last["blueprints"]["shift"]["mean_gain"] > 0
    assert last["accuracy"]["mean"] > 100 / CLASSES + 15


def test_subset_rows_are_the_accuracies_without_the_seeds_left_out(
    grown: esper_soa.RecordedRun,
) -> None:
    """Of the hosts of the last round, as plain modules of which slots are taken out."""
    names = ("step", "env", "subset", "accuracy")
    columns = read_table(grown.path, "subsets", [2])
    rows = [row for row in zip(*map(columns.get, names), strict=True) if row[0] == 12]
    assert len(rows) == 4 * 2  # one seed of each host has fossilized
    for _, env, subset, accuracy in rows:
        net = grown.export(env)
        assert "r0c0" in dict(net.named_children())
        if not subset & 2:
            net.r0c2 = nn.Identity()
        assert grown.evaluate(net, "validation").accuracy == pytest.approx(accuracy)


def test_the_best_host_is_a_plain_module_in_every_format(
    grown: esper_soa.RecordedRun, tmp_path: Path
) -> None:
    net = grown.export()
    found = grown.evaluate(net, "validation")
    assert found.accuracy == net.spec["validation_accuracy"]
    assert found.loss == pytest.approx(net.spec["validation_loss"], abs=1e-5)
    assert grown.evaluate(net).accuracy == net.spec["test_accuracy"]
    words, labels = grown.samples()
    assert (words.shape, labels.shape) == ((TEST, LENGTH), (TEST, LENGTH))
    assert net(words).shape == (TEST, LENGTH, CLASSES)
    saved = esper_soa.export(net, tmp_path / "net.safetensors")
    assert torch.equal(esper_soa.load(saved)(words), net(words))  # type: ignore[operator]
    program = torch.export.load(esper_soa.export(net, tmp_path / "net.pt2")).module()
    torch.testing.assert_close(program(words), net(words))


def test_a_run_that_is_stopped_goes_on_as_if_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    trained(whole, *LEARNING)
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGINT, report=6)  # in the second round
        with pytest.raises(KeyboardInterrupt):
            trained(stopped, *LEARNING)
    esper_soa.train(
        "smoke", [*TOY, *LEARNING, f"resume={stopped}", f"run_dir={stopped}"], verbose=0
    )
    assert_equal_runs(whole, stopped, rounds=2)


def test_report_and_queries_read_the_run(
    grown: esper_soa.RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write.main([str(grown.path), "-o", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert "shift" in page
    assert "tagging" in page
    capsys.readouterr()
    if find_spec("duckdb"):
        asked = "select distinct blueprint from seed_lifecycle where fate = 'fossilized'"
        with pytest.raises(SystemExit, match="0"):
            query.main([str(grown.path), asked, "format=csv"])
        assert capsys.readouterr().out.split() == ["blueprint", "shift"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            ["compute.engine=native"],
            "the kernels for sequences need transformer layers without dropout",
        ),
        (["compute.engine=triton"], "kernels cut crops of images, not of sentences"),
        (
            ["data.name=synthetic"],
            r"^task\.host=toy_domain:tagging: .*\[3, 32, 32\], .*\[6\]",
        ),
        (["train_samples=72"], "must be at most 64, the training sentences of sentences"),
        (
            ["task.num_classes=4"],
            r"^task\.host=toy_domain:tagging: .* 3 classes, .*=4",
        ),
        (
            ["policy=wait", "task.blueprints=[conv_light]"],
            (
                r"^task\.blueprints=conv_light: must be a list of blueprints for "
                r"sequences, which the slots have\.$"
            ),
        ),
        (
            ["data.name=toy_domain:tagging"],
            (
                r"^data\.name=toy_domain:tagging: must be a dataset that toy_domain registers "
                r'\(sentences\)\. @esper_soa\.dataset\("tagging"\) above a function or class '
                r"there registers it\.$"
            ),
        ),
        (["slots=[r0c3]"], r"^slots=r0c3: must be a slot of tagging: r0c0, r0c1, r0c2\.$"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_words_of_the_domain(
    changes: list[str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=told):
        trained(tmp_path / "run", *SCHEDULE, *changes)


def test_segments_that_do_not_fit_make_no_chain() -> None:
    segments = Embed(), Embed(), Tagger()
    host = SimpleNamespace(segments=lambda _: segments)
    with pytest.raises(
        ValueError, match=r"segment 1 of the host takes features \[6\], not \[8, 6\]"
    ):
        host_shape(TaskConfig(), (), host=host)


# --- its networks and batches

ADD, MULTIPLY, GATE = Blend.ADD, Blend.MULTIPLY, Blend.GATE
PERCEPTRON, SHIFT = NUM_BLUEPRINTS, NUM_BLUEPRINTS + 1
PLANTED = Topology(  # of four hosts, one of them without seeds
    torch.tensor([[PERCEPTRON, -1], [SHIFT, PERCEPTRON], [PERCEPTRON, SHIFT], [-1, -1]]),
    torch.tensor([[ADD, ADD], [MULTIPLY, ADD], [GATE, GATE], [ADD, ADD]]),
    torch.tensor([[1, 0], [0.5, 1], [1, 0.25], [0, 0]], dtype=torch.float64),
)


def toy_settings(*changes: str) -> TrainConfig:
    return esper_soa.compose_settings("smoke", [*TOY, *SCHEDULE, *changes])


def toy_world(*changes: str) -> World:
    return build_world(toy_settings(*changes), CPU)


def after_a_step(*changes: str) -> tuple[World, EnvState]:
    """Hosts with the planted seeds after an env-step."""
    world = toy_world(*changes)
    request = Round(0, quiet_progress(), topology=PLANTED)
    played = EpisodeRunner(world, Player(WaitPolicy(), None), request)
    played.step_()
    return world, played.env.state


def test_hosts_with_seeds_of_every_blend_are_measured_as_their_plain_modules() -> None:
    world, state = after_a_step()
    (words, labels) = Sentences(DataConfig()).samples("validation", world.validation.order)
    columns = (state.slots.stage, *PLANTED)
    residents = [SlotContents(*(part[env].tolist() for part in columns)) for env in range(4)]
    inputs = world.data.input_spec()
    hosts = grown_hosts(world.rules.setup.shape, world.weights, range(4), residents, [inputs] * 4)
    for env, host in enumerate(hosts):
        logits = host.network()(words).flatten(0, 1).double()
        loss = F.cross_entropy(logits, labels.flatten()).detach()
        assert float(state.signals.val_loss[env]) == pytest.approx(float(loss), rel=1e-5)
        right = (logits.argmax(1) == labels.flatten()).double().mean()
        assert float(state.signals.val_accuracy[env]) == pytest.approx(100 * float(right))


def test_hosts_train_as_they_do_alone() -> None:
    together, _ = after_a_step("compute.env_chunk=4")
    alone, _ = after_a_step("compute.env_chunk=1")
    assert (together.weights["host", "params"] != toy_world().weights["host", "params"]).any()
    torch.testing.assert_close(together.weights.to_dict(), alone.weights.to_dict())
    _, short = after_a_step("compute.precision=bfloat16")
    assert short.signals.val_loss.isfinite().all()


def test_costs_follow_from_segments_and_slots() -> None:
    world = toy_world()
    mixing = WIDTH * WIDTH * LENGTH
    assert world.flop.host == 6 * (2 * mixing + CLASSES * WIDTH * LENGTH)
    assert world.flop.seed[:, PERCEPTRON].tolist() == [6 * 4 * mixing] * 2
    assert world.flop.seed[:, :PERCEPTRON].sum() == 0  # which take images
    mixed = world.rules.setup.shape._replace(blueprints=BLUEPRINTS)
    assert training_flop(mixed, CPU).seed.sum() == 0
    assert not any(parameter_counts(BLUEPRINTS, mixed.slots[0]))
    perceptron = 4 * WIDTH * WIDTH + 3 * WIDTH
    assert row_layout(world.rules.setup.shape, 0).seed == perceptron
    assert place_table(world.rules.setup.shape.slots).isfinite().all()
    torch_only = make_setup(toy_settings(), torch.device("cuda"))
    assert choose_engine(torch_only, synthetic).chosen.name == "torch"


def test_an_env_step_draws_a_pass_over_the_sentences_changed_by_the_streams_of_each_env() -> None:
    world = toy_world("data.augment=true")
    world.start_round(1)
    work = world.work(0)
    keys = streams.stream_keys(world.seed, streams.AUGMENTATION, (1,), world.envs)
    drawn = []
    for index in range(work.num_batches):
        words, labels = work.training.batch(world.envs, index)
        assert (words.shape, labels.shape) == ((8, 4 * LENGTH), (8, 4, LENGTH))
        words = words.unflatten(1, (4, LENGTH))
        assert torch.equal(labels, targets(words))
        first = streams.integers(keys[:, None], 8 * index + torch.arange(8), WORDS)
        assert torch.equal(words[..., 0], first.T)
        drawn.append(words[..., 1:])
    every = world.data.samples("train", torch.arange(TRAIN))[0][:, 1:].unique(dim=0)
    for env in range(4):
        assert torch.equal(torch.cat(drawn)[:, env].unique(dim=0), every)


def test_validation_is_on_the_same_sentences_for_all_envs_or_on_a_share_for_each() -> None:
    shared = toy_world()
    (words, labels), (rest, _) = shared.validation.batches(shared.envs, 20)
    assert [tuple(one.shape) for one in (words, labels, rest)] == [(20, 6), (20, 1, 6), (12, 6)]
    order = validation_order(TEST, 32, shared.seed)
    assert torch.equal(torch.cat((words, rest)), shared.data.samples("validation", order)[0])
    (few,) = shared.validation.first(3).batches(shared.envs, 20)
    assert torch.equal(few[0], words[:3])
    split = toy_world("data.split=true")
    ((own, answers),) = split.validation.batches(split.envs, TEST)
    assert own.shape == (TEST // 4, 4 * LENGTH)
    assert (answers >= 0).all()


def test_its_parts_pass_the_checks_of_users_parts() -> None:
    esper_soa.check_blueprint("toy_domain:perceptron")
    esper_soa.check_blueprint("toy_domain:shift", channels=[WIDTH], size=LENGTH)
    esper_soa.check_host("toy_domain:tagging", classes=CLASSES)
    with pytest.raises(esper_soa.ConformanceError, match="it has 3 classes"):
        esper_soa.check_host("toy_domain:tagging")
