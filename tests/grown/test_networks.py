"""The networks of a run: the best host so far and the last round's, as they were measured."""

import shutil
from pathlib import Path

import pytest
import torch

from esper_soa.config.env import GatesConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env.topology import HostStates, host_states
from esper_soa.grown.module_files import load
from esper_soa.runtime.ranks import SINGLE_PROCESS
from esper_soa.state import STATE_FLOAT
from esper_soa.system.versions import package_versions
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import Session
from esper_soa.training.loop import task as task_run
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.task_files import TaskFiles
from esper_soa.vocabulary import Stage
from tests.builders import tiny_runs
from tests.builders.grown_hosts import score
from tests.builders.tiny_runs import records, run
from tests.builders.tiny_world import CPU, play_state, tiny_rules

ROUNDS = 4


def settings(player: str = "random", **changed: object) -> TrainConfig:
    """Three hosts in which seeds grow at random."""
    given: dict = {
        "envs": 3,
        "rounds": ROUNDS,
        "steps": 8,
        "val_samples": 16,
        "slots": ["r0c0", "r1c0"],
        "gates": GatesConfig(min_gradient_health=0.0, min_blending_steps=1),
    }
    return tiny_runs.settings(player, **given | changed)


def fresh(cfg: TrainConfig, path: Path) -> RunFolder:
    tiny_runs.fresh(cfg, path)
    return RunFolder(path)


def resumed(cfg: TrainConfig, path: Path, checkpoint: str = "") -> RunFolder:
    tiny_runs.resumed(cfg, path, checkpoint)
    return RunFolder(path)


def episodes(folder: RunFolder) -> list[dict]:
    return records(folder.episodes)


def kept(folder: RunFolder) -> dict[str, bytes]:
    """The newest file of each kind."""
    newest = [folder.network_files(kind)[-1] for kind in ("best", "hosts")]
    return {path.name: path.read_bytes() for path in newest}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return fresh(settings(), tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def folder(undisturbed: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the undisturbed run."""
    return RunFolder(shutil.copytree(undisturbed.path, tmp_path / "run"))


def test_the_hosts_of_the_last_round_have_the_accuracy_that_the_run_tells(
    undisturbed: RunFolder,
) -> None:
    (path,) = undisturbed.network_files("hosts")[-1:]
    assert path.name == "hosts_000004.safetensors"
    world = build_world(settings(), CPU)
    told = [line for line in episodes(undisturbed) if line["round"] == ROUNDS]
    chosen = world.validation.order
    images = world.data.val_images[chosen].permute(0, 3, 1, 2).float() / 255
    seeds = 0
    for env, line in enumerate(told):
        net = load(path, env)
        accuracy, loss = score(net, images, world.data.val_labels[chosen])
        facts = {
            "task": settings().task.host_name,
            **{"round": ROUNDS, "seed": 42, "env": env, "chosen_by": None},
            "data": {
                "name": world.data.name,
                "source": world.data.source,
                "identity": world.data.identity,
            },
            **{"validation_images": 16, "test_images": len(world.data.test_labels)},
            **{"precision": "float32", "version": package_versions()["esper-soa"]},
            "test_accuracy": None,
        }
        assert {name: net.spec[name] for name in facts} == facts
        assert accuracy == net.spec["validation_accuracy"] == line["accuracy"]
        assert loss == pytest.approx(net.spec["validation_loss"], abs=1e-5)
        seeds += len(net.spec["seeds"])
    assert seeds > 0


def test_a_run_without_a_checkpoint_begins_afresh_and_its_networks_too(
    undisturbed: RunFolder, folder: RunFolder
) -> None:
    for path in folder.checkpoints():
        path.unlink()
    for kind in ("best", "hosts"):
        (folder.networks / f"{kind}_000099.safetensors").write_bytes(b"of a run that is forgotten")
    run(settings(resume="auto"), folder)
    assert kept(folder) == kept(undisturbed)
    assert "the best host so far is not there" not in folder.log.read_text()


def files_of(folder: RunFolder) -> TaskFiles:
    """What writes the networks of a run there."""
    return TaskFiles(settings(), Session(folder, 0), build_world(settings(), CPU), SINGLE_PROCESS)


def test_a_run_whose_networks_are_gone_goes_on_and_says_so(folder: RunFolder) -> None:
    shutil.rmtree(folder.networks)
    resumed(settings(rounds=ROUNDS + 1), folder.path)
    assert load(folder.network_files("best")[-1]).spec["round"] == ROUNDS + 1
    told = "the best host so far is not there: that of the rounds to come will be the best\n"
    assert f"WARNING networks {told}" in folder.log.read_text()


def test_they_are_there_before_the_control_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_control(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(task_run, "play_control", no_control)
    with pytest.raises(KeyboardInterrupt):
        fresh(settings(rounds=1, control="wait", checkpoint_every=0), tmp_path)
    folder = RunFolder(tmp_path)
    assert [path.name for path in sorted(folder.networks.iterdir())] == [
        "best_000001.safetensors",
        "hosts_000001.safetensors",
    ]
    assert load(folder.network_files("hosts")[0], 2).spec["env"] == 2


# --- which host is the best


def hosts_of(world_slots: int, accuracy: list[float], stages: list[int]) -> HostStates:
    """Hosts with a seed of conv_heavy in one slot, in these stages, and these accuracies."""
    stage = torch.tensor(stages)[:, None].expand(-1, world_slots)
    scores = torch.tensor(accuracy, dtype=STATE_FLOAT)
    none = torch.ones_like(stage)
    return HostStates(stage, 7 * none, none, none.to(STATE_FLOAT), scores, scores / 100)


NAN = float("nan")
FOSSIL = Stage.FOSSILIZED
EMPTY = Stage.EMPTY


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        ([([50.0, 60.0, 55.0], [EMPTY] * 3)], (1, 1)),
        # fewest parameters, then the lower env; the earlier round
        ([([50.0] * 3, [FOSSIL, EMPTY, EMPTY])], (1, 1)),
        ([([50.0] * 3, [EMPTY] * 3), ([50.0] * 3, [EMPTY] * 3)], (1, 0)),
        ([([50.0, 1.0, 1.0], [FOSSIL] * 3), ([1.0, 1.0, 50.0], [EMPTY] * 3)], (2, 2)),  # smaller
        ([([50.0, 1.0, 1.0], [EMPTY] * 3), ([1.0, 50.0, 1.0], [FOSSIL] * 3)], (1, 0)),
        ([([NAN, 1.0, NAN], [EMPTY] * 3), ([NAN] * 3, [EMPTY] * 3)], (1, 1)),
        ([([NAN] * 3, [EMPTY] * 3)], None),
    ],
)
def test_the_best_host_has_the_highest_accuracy_then_the_fewest_parameters(
    tmp_path: Path, rounds: list[tuple[list[float], list[int]]], best: tuple[int, int] | None
) -> None:
    found = files_of(RunFolder(tmp_path))
    for number, (accuracy, stages) in enumerate(rounds, 1):
        found.save_best(hosts_of(2, accuracy, stages), number)
    assert (found.best and (found.best["round"], found.best["env"])) == best
    files = RunFolder(tmp_path).network_files("best")
    assert [load(path).spec for path in files[-1:]] == ([] if best is None else [found.best])


def test_a_host_that_was_rolled_back_stands_as_that_left_it_without_an_accuracy() -> None:
    seen = 0
    for played in play_state(tiny_rules(3, 20), 64, 5):
        before = played.view.state
        after = played.result.state
        stood = host_states(before, after)
        panic = before.guard.panic
        assert torch.equal(stood.accuracy.isnan(), panic)
        assert torch.equal(stood.stage[panic], after.slots.stage[panic])
        assert torch.equal(stood.stage[~panic], before.slots.stage[~panic])
        assert torch.equal(stood.accuracy[~panic], before.signals.val_accuracy[~panic])
        felt = (stood.stage[panic] == Stage.BLENDING) | (stood.stage[panic] == Stage.HOLDING)
        assert not felt.any()
        seen += int(panic.sum())
    assert seen > 0


def test_a_loss_that_is_not_finite_is_not_known(tmp_path: Path) -> None:
    files = files_of(RunFolder(tmp_path))
    hosts = hosts_of(2, [50.0] * 3, [EMPTY] * 3)
    files.save_best(hosts._replace(loss=torch.full_like(hosts.loss, torch.inf)), 1)
    assert load(RunFolder(tmp_path).network_files("best")[0]).spec["validation_loss"] is None
