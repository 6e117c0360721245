"""Run folders of strangers, with links at every name that the package opens, reads, writes or
deletes: what they lead to is neither changed nor shown, and the link is refused by its name.
"""

import io
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import EvaluateConfig, settings_from_yaml, settings_yaml
from esper_soa.grown.formats import export
from esper_soa.grown.module_files import save
from esper_soa.lab.compare.command import compare, study_of
from esper_soa.lab.query.database import VIEWS, open_database
from esper_soa.lab.report import live, write
from esper_soa.lab.run_folders import find_run_folders
from esper_soa.lab.sweep.records import JobRecord, Status, read_records, save_record
from esper_soa.lab.sweep.summary import end_sweep
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.system.errors import UserError
from esper_soa.training.files.checkpoint import load_checkpoint, save_checkpoint
from esper_soa.training.files.run_folder import LIBRARY_NAMES, LINKING_NAMES, RunFolder
from esper_soa.training.start.export import settings_of, write_network
from esper_soa.training.start.runs import open_run
from tests.builders.program import TINY
from tests.builders.report_runs import PROGRAM, make_run
from tests.builders.tiny_runs import evaluate, fresh, resumed, settings
from tests.lab.sweep.test_summary import hydra_of

SECRET = "what lies outside"  # noqa: S105
MARKED = ("config.yaml", "overrides.txt", "summary.json", "versions.json", "metrics.jsonl")
SHORT = settings(rounds=2, telemetry=replace(settings().telemetry, level="full"))
QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every file that there may be, some of them empty."""
    path = tmp_path_factory.mktemp("played") / "run"
    fresh(SHORT, path)
    (path / "config.yaml").write_text(settings_yaml(SHORT))
    for known in {*vars(RunFolder(path)).values(), *(path / name for name in LIBRARY_NAMES)}:
        if not known.exists():
            known.touch() if "." in known.name[1:] else known.mkdir()
    return path


@pytest.fixture
def outside(played: Path, tmp_path: Path) -> Path:
    """A copy of the run that says SECRET wherever a report would tell it."""
    copy = shutil.copytree(played, tmp_path / "outside")
    for name in MARKED:
        text = (copy / name).read_text().replace('"verdict": null', f'"verdict": "{SECRET}"')
        (copy / name).write_text(text.replace("tiny", SECRET) or SECRET)
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    paths = folder.rglob("*")
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


def report(run: Path) -> str:
    with suppress(SystemExit):
        write.main([str(run)])
    return (run / "report.html").read_text() if (run / "report.html").is_file() else ""


def watch(run: Path) -> str:
    with live.Server([str(run)], PROGRAM, 0) as server:
        return server.answer_to("/")[2] + server.answer_to("/news")[2]


def query(run: Path) -> list[list[tuple]]:
    database = open_database([run])
    return [database.sql(f"select * from {name}").fetchall() for name in VIEWS]


def judge(run: Path) -> object:
    cfg = EvaluateConfig(checkpoint=str(run), policies=["ppo"], episodes=1, progress="off")
    (run.parent / "judged").mkdir()
    return evaluate(cfg, RunFolder((run.parent / "judged").resolve()))


COMMANDS = {
    "resume": lambda run: resumed(replace(SHORT, rounds=3), run).name,
    "report": report,
    "watch": watch,
    "query": query,
    "export": lambda run: write_network(str(run), settings_of([f"to={run.parent}"])),
    "evaluate": judge,
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_links_of_a_run_folder_are_not_followed(
    played: Path,
    outside: Path,
    tmp_path: Path,
    command: str,
    part: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    names = [str(path.relative_to(played)) for path in sorted(played.rglob("*"))]
    assert len(names) > 40
    best = str(RunFolder(played).network_files("best")[-1].relative_to(played))
    before = contents(outside)
    for name in (
        names if part == "all" else ["overrides.txt", "checkpoint_000002.pt", best, *names[::16]]
    ):
        run = shutil.copytree(played, tmp_path / "stranger" / "run")
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
        (run / name).symlink_to(outside / name)
        refused = told = ""
        try:
            told = str(COMMANDS[command](run))
        except UserError as error:
            refused = str(error)
        needed = {"resume": name, "export": name if name in (best, "networks") else ""}
        assert needed.get(command, "") in refused, name
        if name.startswith("checkpoint"):
            with pytest.raises(UserError, match=name):
                resumed(SHORT, run, name)
        assert SECRET not in "".join([told, refused, *capfd.readouterr()]), name
        assert contents(outside) == before, name
        shutil.rmtree(tmp_path / "stranger")


def test_guessed_names_of_drafts_and_files_of_other_programs_stay_as_they_are(
    played: Path, outside: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(played, tmp_path / "run")
    before = contents(outside)
    for name in ("report.html", *MARKED):
        (run / f"{name}.{os.getpid()}.tmp").symlink_to(outside / name)
    (run / "networks" / "notes.txt.7.tmp").write_text("of another program")
    there = set(run.rglob("*.tmp"))
    COMMANDS["resume"](run)
    report(run)
    assert there == set(run.rglob("*.tmp"))
    assert contents(outside) == before


def test_a_folder_that_is_reached_by_links_is_as_any_other(played: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    shutil.copytree(played, disk / "run")
    link = tmp_path / "link"
    link.symlink_to(disk)
    for command in COMMANDS.values():
        command(link / "run")
    (link / "kept.safetensors").symlink_to(disk / "net.safetensors")
    net = open_run(link / "run").export()
    save(net, link / "kept.safetensors")
    export(net, "code", to=link)
    made = {"net.safetensors", f"host_{net.spec['env']}.py"}
    assert made <= {path.name for path in disk.iterdir()}


def test_sweeps_and_studies_reach_no_other_folder(
    outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(outside)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for number, folder in enumerate((str(outside), str(sweep / "link"), f"{sweep}/../outside")):
        save_record(sweep, JobRecord(number, ["a=1"], folder, Status.DONE, 50.0))
    (sweep / "link").symlink_to(outside)
    (sweep / "sweep.json").symlink_to(outside / "summary.json")
    end_sweep(hydra_of(sweep, sweeper="other"), QUIET)
    (sweep / ".jobs").rename(tmp_path / "jobs")
    (sweep / ".jobs").symlink_to(tmp_path / "jobs")
    for touch in (read_records, lambda path: save_record(path, JobRecord(9, [], ""))):
        with pytest.raises(UserError, match=r"\.jobs: a link"):
            touch(sweep)
    study = study_of(["a=", "b=", "random_seeds=1", f"out={tmp_path}/study", *TINY])
    (study.out / "a").mkdir(parents=True)
    (study.out / "a" / f"random_seed_{study.random_seeds[0]}").symlink_to(outside)
    (study.out / "b").symlink_to(outside)
    assert len(compare(study, QUIET)) == 2
    assert contents(outside) == before


def test_loops_of_links_end_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path / "name" / "run")
    (tmp_path / "name" / "config.yaml").write_text("worlds:\n  a:\n    envs: 1\n")
    (tmp_path / "name" / "loop").symlink_to(tmp_path)
    assert [*find_run_folders([tmp_path])] == ["run"]
    assert f"{tmp_path}/name/loop: a link" in caplog.text


def test_names_in_files_obey_the_rules_of_those_that_are_typed(
    played: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(played, tmp_path / "run")
    path = RunFolder(run).checkpoint(2)
    content = load_checkpoint(path, torch.device("cpu"))
    world = {name: content["settings"][name] for name in ("task", "data", "slots", "envs")}
    for name in ("../../x", "/x", "other"):
        content["settings"] |= {"tasks": [name, "tiny"], "worlds": {name: world, "tiny": world}}
        save_checkpoint(path, content)
        with pytest.raises(UserError, match="worlds"):
            judge(run)
        shutil.rmtree(tmp_path / "judged")
    net = open_run(played).export()
    for env in ("../../x", -1, None, 1.5):
        net.spec["env"] = env
        with pytest.raises(UserError, match="env"):
            export(net, "safetensors", to=tmp_path / "to" / "deep")
    assert {entry.name for entry in tmp_path.iterdir()} == {"run"}


def test_settings_of_a_stranger_look_nothing_up(
    played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", SECRET)
    mine = compose_settings(overrides=["data.root=${oc.env:MINE}"])
    assert settings_from_yaml(settings_yaml(mine)).data.root == SECRET
    run = shutil.copytree(played, tmp_path / "run")
    text = (run / "config.yaml").read_text().replace("name: tiny", "name: ${oc.env:MINE}")
    (run / "config.yaml").write_text(text)
    path = RunFolder(run).checkpoint(2)
    content = load_checkpoint(path, torch.device("cpu"))
    content["settings"] |= {"run_dir": "${oc.env:MINE}"}
    save_checkpoint(path, content)
    for read in (lambda: open_run(run).settings, open_run(run).policy, lambda: judge(run)):
        with pytest.raises(UserError, match=r"\$\{oc\.env:MINE\}") as error:
            read()
        assert SECRET not in str(error.value)
    assert SECRET not in report(run)


def test_links_that_libraries_make_stay_in_their_folders(played: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(played, tmp_path / "run"))
    for name in LINKING_NAMES:
        (run.path / name / "run-1").mkdir(parents=True)
        (run.path / name / "latest-run").symlink_to("run-1")
        (run.path / name / "run-1" / "debug.log").symlink_to(played / "log.txt")  # of an ended run
        run.check_plain()
        (run.path / name / "settings").symlink_to(played / "config.yaml")
        with pytest.raises(UserError, match=f"{name}/settings: a link"):
            run.check_plain()
        (run.path / name / "settings").unlink()


def test_a_network_that_does_not_take_the_samples_is_refused_in_a_line(played: Path) -> None:
    spec = open_run(played).export().spec
    net = GrownNetwork(spec | {"input": spec["input"] | {"mean": [0.5, 0.5]}})
    with pytest.raises(UserError, match=r"^net: must be a network that takes the samples"):
        open_run(played).evaluate(net)


def test_a_data_set_of_a_strangers_settings_is_not_imported(
    played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(played, tmp_path / "run")
    text = (run / "config.yaml").read_text().replace("name: synthetic", "name: strange:images")
    (run / "config.yaml").write_text(text)
    (tmp_path / "strange.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    COMMANDS["export"](run)
    assert "strange" not in sys.modules
