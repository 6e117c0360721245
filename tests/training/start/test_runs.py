"""The package from Python: a run in one call, what comes out, and a caller's process left alone."""

import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from rich.console import Console

import esper_soa
from esper_soa.config.compose import compose_settings
from esper_soa.env.env import Env
from esper_soa.grown.module_files import digest
from esper_soa.lab.telemetry.schema import TABLES
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.setup import choose_env_chunk
from esper_soa.runtime.device import layout_in_words
from esper_soa.state import Action
from esper_soa.system.errors import UserError
from esper_soa.training.files.checkpoint import load_checkpoint
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.results.progress import Progress
from esper_soa.training.start.runs import TABLES as NAMES
from esper_soa.vocabulary import HEAD_NAMES
from tests.builders.tiny_runs import log_of

CPU = torch.device("cpu")
# The policy learns fast, so that another one would play otherwise.
TINY = shlex.split(
    "device=cpu policy.ppo.lr=0.05 policy.ppo.target_kl=0 rounds=3 steps=8 envs=3 train_samples=16 "
    "val_samples=8 data.synthetic_train=32 data.synthetic_test=16 compute.threads=1 "
    "compute.workers=1 compute.engine=torch telemetry.progress=off control=none "
    "checkpoint_every=1 checkpoint_keep=9 lifecycle=auto_forward gates.min_gradient_health=0 "
    "gates.min_blending_steps=1 policy.network.hidden=16 policy.network.features=16"
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> esper_soa.RecordedRun:
    return esper_soa.train("smoke", [*TINY, f"run_dir={tmp_path_factory.mktemp('run') / 'run'}"])


def test_a_run_in_one_call_and_its_best_host(done: esper_soa.RecordedRun, tmp_path: Path) -> None:
    assert done.path.name == "run"
    assert done.summary["rounds"] == 3
    assert [line["round"] for line in done.metrics()] == [1, 2, 3]
    net = done.export()
    best = max(line["accuracy"] for line in done.episodes())
    assert (net.spec["validation_accuracy"], net.spec["chosen_by"]) == (best, "validation_accuracy")
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    esper_soa.save(net, tmp_path / "host.safetensors")
    again = esper_soa.load(tmp_path / "host.safetensors")
    assert digest(again.state_dict()) == digest(net.state_dict())
    assert again.spec == net.spec
    assert done.evaluate(again).accuracy == net.spec["test_accuracy"]
    last = [line["accuracy"] for line in done.episodes() if line["round"] == 3]
    assert [done.export(env).spec["validation_accuracy"] for env in range(3)] == last
    asked = ["+experiment=smoke", *TINY, f"run_dir={done.path}"]
    assert (done.path / "overrides.txt").read_text().splitlines() == asked
    assert done.tasks == {"cifar_impaired": done}


def test_the_log_tells_data_hosts_policy_and_what_computes_them(
    done: esper_soa.RecordedRun,
) -> None:
    told = log_of(done.path)
    host = host_shape(done.settings.task, ()).parameters.total
    chunk = choose_env_chunk(0, 3, 8, CPU)  # by the cores of this machine
    assert told.pop() == f"INFO files    {done.path}"
    assert all(line.startswith("DEBUG ") for line in told[10:])  # of the table
    versions = json.loads((done.path / "versions.json").read_text())
    assert told.pop(8) == f"DEBUG state    kernels of the env state: {versions['state']}"
    assert {"data", "kernels", "graphs"} < versions.keys()
    assert told.pop(3).startswith("INFO memory   at least ")
    assert told[:8] == [
        "INFO data     synthetic images, asked for by data.name: 32 training, 16 validation and 16 "
        "test images.",
        f"INFO hosts    3 x cifar_impaired, {host} parameters, slots r0c0, r0c1, r0c2; 3 rounds of "
        "8 env-steps",
        f"INFO policy   ppo, reward shaped, on {done.summary['device']}",
        "DEBUG work     T=16 training and V=8 validation images of every host per env-step, in "
        "batches of 16",
        f"DEBUG compute  {layout_in_words(CPU, 1, chunk)}",
        "DEBUG numbers  hosts compute in float32: fastest on cpu for networks of few channels",
        "DEBUG kernels  plain torch (compute.engine=torch)",
        "DEBUG graphs   no CUDA graphs (compute.cuda_graphs=auto on cpu)",
    ]


def test_a_run_is_opened_by_its_folder(
    done: esper_soa.RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(done.path.parent)
    monkeypatch.setenv("HOME", str(done.path.parent))
    assert esper_soa.open_run("~/run").path == done.path
    opened = esper_soa.open_run("run")
    assert opened.path == done.path
    assert opened.summary == done.summary
    assert opened.export(2).spec["env"] == 2


def test_a_host_is_evaluated_to_the_digit_of_its_run(done: esper_soa.RecordedRun) -> None:
    (written,) = done.folder.network_files("best")[-1:]
    for net in (done.export(), done.export(1), esper_soa.load(written)):
        found = done.evaluate(net.train(), "validation")
        assert net.training
        assert found.accuracy == net.spec["validation_accuracy"]
        assert found.loss == pytest.approx(net.spec["validation_loss"], abs=1e-5)
        images, labels = done.images("test")
        right = int((net.eval()(images).argmax(1) == labels).sum())
        assert done.evaluate(net).accuracy == net.spec["test_accuracy"] == 100.0 * right / 16
        assert (net.spec["test_images"], net.spec["validation_images"]) == (16, 8)
    images, labels = done.images()
    assert (images.shape, labels.shape) == ((8, 3, 32, 32), (8,))
    assert [len(done.samples(split)[1]) for split in ("train", "test")] == [32, 16]
    assert done.samples("test")[0].min() >= 0
    assert done.samples("test")[0].max() <= 1
    with pytest.raises(UserError, match=r"^split=val: must be train or validation or test\.$"):
        done.samples("val")


def test_hosts_with_validation_images_of_their_own_are_evaluated_on_those(tmp_path: Path) -> None:
    own = ["rounds=1", "data.split=true", "batch_size=4", "policy=random", f"run_dir={tmp_path}/r"]
    own += ["policy.ppo.minibatches=4"]
    run = esper_soa.train("smoke", [*TINY, *own], verbose=0)
    assert "WARNING" not in run.folder.log.read_text()
    for env in range(3):
        net = run.export(env)
        found = run.evaluate(net, "validation").accuracy
        assert found == net.spec["validation_accuracy"]
    every = torch.cat([run.images(env=env)[1] for env in range(3)])
    assert sorted(every.tolist()) == sorted(run.images("test")[1].tolist())  # of the same classes


def test_the_tables_of_a_run_are_arrow(done: esper_soa.RecordedRun) -> None:
    steps = done.table("steps")
    assert steps["round"].to_pylist() == [number for number in (1, 2, 3) for _ in range(24)]
    assert steps["step"].to_pylist() == [step for step in range(1, 9) for _ in range(3)] * 3
    ends = [row["accuracy"] for row in steps.to_pylist() if row["step"] == 8]
    assert ends == [line["accuracy"] for line in done.episodes()]
    assert done.table("slots")["slot"].to_pylist()[:3] == ["r0c0", "r0c1", "r0c2"]
    assert {*done.table("events").column_names} == {*TABLES["events"].names}
    assert {*NAMES} == {*TABLES}
    with pytest.raises(UserError, match="there is no table subsets: .*telemetry.level=full"):
        done.table("subsets")
    with pytest.raises(UserError, match="there is no table effects: .*with effects.ops"):
        done.table("effects")
    with pytest.raises(UserError, match="there is no table control_steps: .* of a control"):
        done.control_steps()
    with pytest.raises(UserError, match="^table=step: must be one of steps, slots, events"):
        done.table("step")


@pytest.mark.parametrize("name", ["steps", "slots", "events"])
def test_tables_are_data_frames_where_there_is_pandas(
    done: esper_soa.RecordedRun, name: str
) -> None:
    read = getattr(done, name)
    if find_spec("pandas") is None:
        with pytest.raises(
            UserError, match=rf"^{name}: needs pandas\. Install esper-soa\[pandas\]"
        ):
            read()
        return
    assert read().equals(done.table(name).to_pandas())


def test_a_network_is_exported_by_the_ending_of_its_file_or_by_its_format(
    done: esper_soa.RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = done.export(1)
    path = esper_soa.export(net, tmp_path / "new" / "folders" / "host.safetensors")
    assert path == tmp_path / "new" / "folders" / "host.safetensors"
    assert digest(esper_soa.load(path).state_dict()) == digest(net.state_dict())
    monkeypatch.chdir(tmp_path)
    assert esper_soa.export(net, "code", to="out") == Path("out", "host_1.py")
    told = "a file ending in .safetensors, .pt2, .onnx, .py, or a format: safetensors, pt2, onnx, "
    with pytest.raises(UserError, match=f"^target=host.h5: must be {told}code.$"):
        esper_soa.export(net, "host.h5")
    told = r"^a Linear is no grown network, as run\.export\(\) returns them$"
    with pytest.raises(UserError, match=told):
        esper_soa.export(torch.nn.Linear(1, 1), "host.pt2")


def test_what_is_not_there_is_said(done: esper_soa.RecordedRun, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^/.*: is not the folder of a run: there is no config\.yaml in it$"
    ):
        esper_soa.open_run(tmp_path)
    (tmp_path / "config.yaml").write_text("name: [x\nb: }\n")
    with pytest.raises(UserError, match="config.yaml: must be settings of a run"):
        _ = esper_soa.open_run(tmp_path).settings
    (tmp_path / "config.yaml").write_text("name: x\n")
    begun = esper_soa.open_run(tmp_path)
    assert repr(begun) == f"RecordedRun('{tmp_path}')"
    assert begun.metrics() == begun.episodes() == []
    last = done.folder.network_files("hosts")[-1]
    for ask, told in (
        (
            lambda: begun.summary,
            (r"^/.*: there is no summary\.json: the run has not come to its end$"),
        ),
        (begun.export, "^env=best: /.* holds no such network; it is written once a round is done$"),
        (
            lambda: begun.export(0),
            (
                "^env=0: /.* holds no such network; it is written with every checkpoint and at "
                "the end of the last round$"
            ),
        ),
        (
            begun.policy,
            (
                r"^policy=/.*: there is no checkpoint in this folder\. Give a checkpoint or a "
                r"run folder$"
            ),
        ),
        (
            lambda: done.export("worst"),
            (r"^env=worst: must be best, or the number of a host of the last round\.$"),
        ),
        (lambda: done.export(3), "env=3: must be 0 to 2"),
        (
            lambda: done.policy("none.pt"),
            (r"^policy=/.*/run/none\.pt: there is no such file or folder$"),
        ),
        (lambda: done.policy(3), "^which=3: must be a path"),
        (lambda: done.export(1.0), "^env=1.0: must be the number of a host"),
        (lambda: done.samples(env="0"), "^env=0: must be a whole number"),
        (lambda: done.evaluate(None), "^net=None: must be a module"),
        (lambda: esper_soa.load(last, "0"), "^env=0: must be the number of a host"),
        (lambda: esper_soa.export(done.export(), 3), "^target=3: must be a path"),
        (lambda: esper_soa.export(done.export(), "code", to=3), "^to=3: must be a path"),
        (lambda: esper_soa.train("smoke", TINY, callbacks=[print]), "^callbacks="),
        (lambda: esper_soa.train("nowhere"), "nowhere"),
        (lambda: esper_soa.train("smoke", ["env=4"]), "env"),
        (lambda: esper_soa.train("smoke", ["envs=0"]), r"^envs=0: must be in \[1, 1048576\]\.$"),
        (
            lambda: esper_soa.train("smoke", [f"run_dir={done.path}"]),
            "^run_dir=/.*/run: .*resume=auto",
        ),
    ):
        with pytest.raises(UserError, match=told):
            ask()


@pytest.mark.parametrize(
    "override",
    [
        "slots=[r9c9]",
        "data.root=nowhere.npz",
        "task.host=nowhere:Host",
        "reward.mode=nowhere:reward",
        "policy.name=nowhere:Agent",
        "compute.threads=1024",
    ],
)
def test_a_refusal_leaves_no_folder(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=override.partition("=")[0]):
        esper_soa.train("smoke", [*TINY, override], verbose=0)
    assert not [*tmp_path.glob("runs/smoke/*")]


def test_what_is_another_thing_than_a_run_left_is_said(
    done: esper_soa.RecordedRun, tmp_path: Path
) -> None:
    changed = esper_soa.RecordedRun(tmp_path)
    shutil.copy(done.path / "config.yaml", tmp_path)
    (tmp_path / "versions.json").write_text('{"data": {"identity": "of other images"}}')
    (tmp_path / "networks").mkdir()
    shutil.copy(done.folder.network_files("hosts")[-1], tmp_path / "networks")
    assert changed.export(0).spec["test_accuracy"] is None
    policy = tmp_path / "networks" / "best_000001.safetensors"
    esper_soa.save(done.policy(), policy)
    for ask, told in (
        (
            changed.samples,
            f"{tmp_path}: its images are not there any more: synthetic images, asked for by "
            "data.name: 32 training, 16 validation and 16 test images.",
        ),
        (
            changed.steps,
            f"{tmp_path}: there is no table steps: it is written with "
            "telemetry.level=events, once a round is done",
        ),
        (changed.export, f"{policy}: holds no network"),
    ):
        with pytest.raises(UserError) as caught:
            ask()
        assert str(caught.value) == told


@pytest.mark.parametrize(
    ("name", "content", "ask"),
    [
        ("summary.json", b"[1]", "summary"),
        ("metrics.jsonl", b'{"round": 1}\n3\n', "metrics"),
        ("episodes.jsonl", b"\xff\n", "episodes"),
        ("config.yaml", b"\xff", "settings"),
        ("versions.json", b'{"data": 3}', "samples"),
        ("networks/best_000009.safetensors", b"", "export"),
    ],
)
def test_a_changed_file_of_a_run_is_refused_by_its_name(
    done: esper_soa.RecordedRun, tmp_path: Path, name: str, content: bytes, ask: str
) -> None:
    changed = esper_soa.RecordedRun(shutil.copytree(done.path, tmp_path / "run"))
    (changed.path / name).parent.mkdir(parents=True, exist_ok=True)
    (changed.path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{changed.path}/{name.partition('/')[0]}.*$"):
        getattr(changed, ask)()


# --- the policy


@pytest.mark.parametrize("way", ["agent", "inside"])
def test_the_policy_plays_the_next_round_exactly_as_the_run_did(
    done: esper_soa.RecordedRun, tmp_path: Path, way: str
) -> None:
    esper_soa.save(done.policy("checkpoint_000002.pt"), tmp_path / "policy.safetensors")
    module = esper_soa.load(tmp_path / "policy.safetensors")
    assert isinstance(module, esper_soa.Controller)
    assert module.spec["rounds"] == 2
    saved: dict = dict(load_checkpoint(done.path / "checkpoint_000002.pt", torch.device("cpu")))
    assert digest(module.policy.state_dict()) == digest(saved["learner"]["policy"])
    world = build_world(compose_settings("smoke", TINY), torch.device("cpu"))
    if way == "agent":
        progress = Progress(24, Console(file=io.StringIO()), "off")
        result, _ = play_round(world, Player(module, None), Round(2, progress))
        accuracies = result.accuracies
        rewards = result.rewards
    else:
        env = Env(world)
        seen = env.reset(2)
        while seen is not None:
            view = seen.view
            masks = {name: view.masks.get(name) for name in view.masks.keys()}  # noqa: SIM118 - of a record
            chosen = module(
                view.observation.features,
                view.observation.blueprints,
                masks,
                view.noise,
                seen.restarted,
            )
            action = Action.from_dict({name: chosen[name] for name in HEAD_NAMES}, batch_size=[3])
            _, seen = env.step(action)
        accuracies = env.state.signals.val_accuracy.tolist()
        rewards = env.state.totals.reward.tolist()
    told = [line for line in done.episodes() if line["round"] == 3]
    assert accuracies == [line["accuracy"] for line in told]
    assert rewards == [line["reward"] for line in told]
    assert any(line["seeds"]["germinated"] for line in told)


# --- a caller's process


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody's own configuration, and a resolver of the name of one of Hydra's."""
    (tmp_path / "theirs.yaml").write_text("size: 3\nname: ${now:x}\n")
    before = dict(BaseContainer._resolvers)
    yield tmp_path
    BaseContainer._resolvers = before


def state_of_hydra() -> list[dict]:
    store = ConfigStore.instance()
    parts = (Singleton._instances, store.repo, vars(store), BaseContainer._resolvers)
    return [dict(part) for part in parts]


def test_a_callers_own_hydra_and_threads_are_left_as_they_were(others: Path) -> None:
    store = ConfigStore.instance()
    store.store(name="train_schema", node={"mine": 1})
    torch.set_num_threads(2)
    drawn = torch.get_rng_state()
    with initialize_config_dir(str(others), version_base="1.3"):
        OmegaConf.register_new_resolver("now", lambda pattern: "theirs", replace=True)
        hydra = GlobalHydra.instance().hydra
        before = state_of_hydra()
        run = esper_soa.train(
            "smoke", [*TINY, "rounds=1", "policy=random", f"run_dir={others / 'run'}"]
        )
        after = state_of_hydra()
        for mine, its in zip(before, after, strict=True):
            assert {name: its[name] for name in mine} == mine
        assert HydraConfig in before[0] or HydraConfig not in after[0]
        assert GlobalHydra.instance().hydra is hydra
        composed = compose("theirs", ["size=4"])
        assert (composed.size, composed.name) == (4, "theirs")
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), drawn)
    assert run.summary["rounds"] == 1
    with pytest.raises(UserError, match=r"^policy=random: must be one that learns, as ppo does\.$"):
        run.policy()
    store.repo.pop("train_schema.yaml")


def test_type_checkers_read_the_public_names_that_there_are() -> None:
    source = Path(esper_soa.__file__).read_text()
    imports = re.findall(r"^ *from esper_soa\.(\S+) import (\w+) as", source, re.MULTILINE)
    assert {name: module for module, name in imports} == esper_soa.HOMES
