"""Studies at budgets and with values that are tuned: lengths, choices, what is played again."""

import io
import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest
from rich.console import Console

from esper_soa.config.compose import compose_settings
from esper_soa.lab.compare.command import compare, main, study_of
from esper_soa.lab.compare.lengths import LENGTHS_FILE, corrected, host_flop, length_at
from esper_soa.lab.compare.study import FIGURES, GIGA, Runs, Study, table_runs
from esper_soa.system.errors import UserError
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.start.runs import RecordedRun

TINY = ["+experiment=smoke", "rounds=1", "envs=2", "train_samples=16", "val_samples=16"]
TINY += ["batch_size=8", "task.seed_lr=${task.host_lr}"]
STEP_FLOP = host_flop(compose_settings("smoke", TINY[1:]))
BUDGET = f"gflop={20 * STEP_FLOP / GIGA:.9g}"
GROWN = "policy=schedule policy.schedule.germinate=[10%] policy.schedule.blueprint=conv_light"
QUIET = Console(width=200, file=io.StringIO())
GROUPS = ("host=policy=wait", f"grown={GROWN}", "final=final_of=grown")


def study(folder: Path, *given: str) -> Study:
    return study_of([*TINY, f"out={folder}", *given])


def play(folder: Path, *given: str) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    assert compare(study(folder, *given), console) == []
    return console.export_text()


class Played(NamedTuple):
    folder: Path
    told: str
    record: dict


ASKED = (*GROUPS, BUDGET, "tune=task.host_lr=[0.001,0.05]", "random_seeds=[5,9]", "tune_seeds=1")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A study whose grown hosts are believed to be twice as expensive as they are at first."""
    folder = tmp_path_factory.mktemp("study")
    (folder / LENGTHS_FILE).write_text(json.dumps({f"grown {BUDGET[6:]} tuning": 5}))
    told = play(folder, *ASKED)
    return Played(folder, told, json.loads((folder / "compare.json").read_text()))


def test_all_sides_are_at_the_budget(played: Played) -> None:
    (budget,) = played.record["budgets"]
    assert list(budget["groups"]) == ["host", "grown", "final"]
    for name, beside in (("host", 20 * STEP_FLOP), ("grown", 20 * STEP_FLOP), ("final", None)):
        numbers = budget["groups"][name]
        wanted = beside or fmean(budget["groups"]["grown"]["train_flop"])
        flop = fmean(numbers["train_flop"])
        assert abs(flop - wanted) <= max(0.01 * wanted, flop / fmean(numbers["env_steps"])), name
    assert budget["groups"]["host"]["env_steps"] == [20, 20]
    lengths = json.loads((played.folder / LENGTHS_FILE).read_text())
    assert lengths[f"grown {BUDGET[6:]} tuning"] == 5
    assert 5 < budget["groups"]["grown"]["env_steps"][0] < 20
    assert budget["random_seeds"] == [5, 9]


def test_the_best_by_validation_is_chosen_and_a_grid_goes_on_beyond_its_ends(
    played: Played,
) -> None:
    tuning = played.record["budgets"][0]["tuning"]
    assert tuning["random_seeds"] == [1_000_000]
    assert tuning["gflop"] > 0
    seen: dict[tuple[str, float], float] = {}
    for path in sorted((played.folder / "tuning").rglob("summary.json")):
        summary = json.loads(path.read_text())
        alone = [{"settings": {"task.host_lr": RecordedRun(path.parent).settings.task.host_lr}}]
        for part in summary["configurations"] or [alone[0] | summary]:
            rate = part["settings"]["task.host_lr"]
            assert part["settings"].get("task.seed_lr", rate) == rate
            if "host" in path.parts:
                seen["host", rate] = part["grown"]["validation_accuracy"]
            else:
                seen["grown", rate] = part["grown"]["validation_accuracy"]
                seen["final", rate] = part["controls"][0]["validation_accuracy"]
    for name, choice in tuning["groups"].items():
        rows = choice["tried"]
        tried = {row["values"]["task.host_lr"]: row["validation_accuracy"] for row in rows}
        assert tried == {rate: accuracy for (side, rate), accuracy in seen.items() if side == name}
        rate = choice["values"]["task.host_lr"]
        assert tried[rate] == max(tried.values())
        assert len(tried) > 2, "each of two values is at an end"
        at_end = rate in (min(tried), max(tried))
        assert at_end == bool(choice["edges"])
        assert len(tried) >= 5 or not at_end
        assert f"chosen for {name}: task.host_lr={rate:.12g}" in played.told


@pytest.mark.slow
def test_values_of_texts_are_chosen_by_the_validation_loss(tmp_path: Path) -> None:
    small = "task=text_small data=text task.transformer.context=8 task.transformer.width=8"
    asked = [*TINY, *small.split(), "steps=2", "policy=wait", f"out={tmp_path}", "tune_seeds=1"]
    rates = "tune=task.host_lr=[0.01,0.0001]"
    assert not compare(
        study_of([*asked, rates, "a=", "b=gates.min_blending_steps=7", "random_seeds=1"]), QUIET
    )
    told = json.loads((tmp_path / "compare.json").read_text())["budgets"][0]
    choice = told["tuning"]["groups"]["a"]
    losses = {row["values"]["task.host_lr"]: row["validation_loss"] for row in choice["tried"]}
    assert losses[0.01] < losses[0.0001]
    assert losses[choice["values"]["task.host_lr"]] == min(losses.values())
    (loss,) = told["groups"]["a"]["validation_loss"]
    assert 0 < loss < losses[0.0001]


def without_times(record: dict) -> dict:
    text = json.dumps(record, sort_keys=True)
    kept = json.loads(text)
    for budget in kept["budgets"]:
        del budget["tuning"]["seconds"]
        for numbers in budget["groups"].values():
            del numbers["eps"]
    return kept


@pytest.mark.slow
def test_a_study_that_was_cut_off_ends_as_one_that_was_not(played: Played, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(played.folder, folder)
    (folder / "compare.json").unlink()
    for path in [*folder.rglob("random_seed_9"), *(folder / "tuning" / "host").rglob("random_*")]:
        shutil.rmtree(path)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    assert len(kept) > 3
    for path in kept:  # of a version that lacks a setting, which has its default
        config = path.with_name("config.yaml")
        config.write_text(config.read_text().replace("restarts: 0\n", ""))
    play(folder, *ASKED)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    record = json.loads((folder / "compare.json").read_text())
    assert without_times(record) == without_times(played.record)


@pytest.mark.slow
def test_a_probe_tells_the_length_of_hosts_that_grow(tmp_path: Path) -> None:
    told = play(tmp_path, *GROUPS[:2], BUDGET, "random_seeds=[5,6]")
    assert told.count("grown/") == 2, "none is played again"
    flop = json.loads((tmp_path / "compare.json").read_text())["budgets"][0]["groups"]["grown"]
    assert sum(flop["train_flop"]) / 2 == pytest.approx(20 * STEP_FLOP, rel=0.1)


def test_a_length_is_corrected_where_its_cost_misses_the_budget() -> None:
    assert length_at(2.0, 0.3 * GIGA) == 7
    assert length_at(0.1, GIGA) == 1
    assert corrected(100.0, {1000: 100.9 * GIGA}, 1000) == 1000
    assert corrected(100.0, {1000: 102.0 * GIGA}, 1000) == 980
    assert corrected(100.0, {10: 110.0 * GIGA}, 10) == 10, "an env-step costs 11"
    assert corrected(100.0, {10: 112.0 * GIGA}, 10) == 9
    assert corrected(100.0, {10: float("nan")}, 10) == 10
    steep = {20: 900.0 * GIGA, 2: 10.0 * GIGA}
    assert corrected(100.0, steep, 20) == 11, "2 was too short"
    assert corrected(100.0, steep, 2) == 11, "20 is too long"


def test_numbers_are_of_the_hosts_with_the_values_of_the_side(tmp_path: Path) -> None:
    asked = study(tmp_path, *GROUPS)
    rates = [0.01, 0.5, 0.01, 0.5]
    settings = {"task.host_lr": rates, "task.seed_lr": rates}

    def score(start: int) -> dict:
        rows = {
            key: [start + place + 100 * host for host in range(4)]
            for place, key in enumerate(FIGURES.values())
        }
        rows["test_losses"][3] = None
        return {"episodes": [rows | {"settings": settings}]}

    controls = [{"name": "wait"} | score(7), {"name": "static_final"} | score(5000)]
    summary = {"grown": score(1000), "controls": controls, "speed": {"eps": 6}}
    values = tuple((("task.host_lr", rate),) for rate in rates[:2])
    runs = Runs(asked, "grown", "grown", values=values)
    runs.folder(5).mkdir(parents=True)
    (runs.folder(5) / "summary.json").write_text(json.dumps(summary))
    for part, side, row, mean, loss in (
        (runs, "grown", values[1], 1200, 1102),  # hosts 1 and 3, whose loss is not known
        (runs, "final", values[0], 5100, 5102),
        (runs._replace(values=values[:1]), "final", values[0], 5150, 5102),
    ):
        (found,) = part.figures(5, side, row).values()
        means = [mean + place for place in range(len(FIGURES))]
        means[2] = loss
        assert [*found.values()] == [*means, 6]
    assert runs.samples(5, "grown", values[1]) == {"grown": None}, "there is no file of answers"
    right = np.array([[[0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 1, 0]]])
    np.savez(RunFolder(runs.folder(5)).answers, grown=right, static_final=1 - right, targets=1)
    for part, side, row, mean in (
        (runs, "grown", values[1], [0, 50, 50]),
        (runs, "final", values[0], [50, 0, 0]),
        (runs._replace(values=values[:1]), "final", values[0], [75, 25, 25]),
    ):
        (samples,) = part.samples(5, side, row).values()
        assert samples is not None
        assert samples.tolist() == mean


def test_the_folder_of_a_run_has_its_length_and_values_in_its_name(tmp_path: Path) -> None:
    asked = study(tmp_path, *GROUPS, BUDGET)
    values = ((("task.host_lr", 0.02), ("data.name", "my:data")), (("task.host_lr", 0.04),))
    runs = table_runs(asked, "grown", 600.0, steps=237, values=values)
    assert runs.folder(5) == tmp_path / "grown/600gflop_237steps_0.02_my-data_0.04/random_seed_5"
    given = runs._replace(values=values[1:]).overrides(5)
    assert {"steps=237", "task.host_lr=0.04", "control=[static_final]"} < {*given}
    assert "envs=2" not in given[-8:]
    listed = runs._replace(values=(values[1], values[1])).overrides(5)
    assert {"task.host_lr=[0.04,0.04]", "envs=4"} < {*listed}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["seeds=10"], r"^seeds=10: random seeds are random_seeds= now\. Give random_seeds=10$"),
        (["gflop=0"], "^gflop=0: must be a number above 0, or a list"),
        (["gflop=[1,1]"], "^gflop="),
        (["gflop=1e-9"], "^gflop=1e-09: must be at least .*, an env-step of host"),
        ([BUDGET, "steps=5"], r"^setting=steps=5: must be left to gflop="),
        (["control=wait"], r"^setting=control=wait: must be left to final_of="),
        (["last=final_of=host"], "^host=wait: must be a policy that grows"),
        (["last=final_of=none"], "^last=final_of=none: must be final_of= alone, with a group"),
        (["last=final_of=final"], "^last=final_of=final: must be"),
        (["last=final_of=grown rounds=1"], "^last=final_of=grown rounds=1: must be"),
        (["tune=rounds=[1,2]"], "^tune="),
        (
            ["tune=task.host_lr=[0.1,0.2]", "tune_seeds=[7]", "random_seeds=[7,8]"],
            "^tune_seeds=.*: must be random seeds that random_seeds= does not have",
        ),
        ([BUDGET, "b=task.host_lr=[0.1,0.2]"], "^b=task.host_lr=.*: must be of one task, without"),
        ([BUDGET, "b=policy.schedule.germinate=[0.5]"], "^overrides: "),
        (["random_seeds=[3000000000]"], "^random_seeds=.*: must be"),
    ],
)
def test_mistakes_are_told_before_any_run(tmp_path: Path, given: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        study(tmp_path, *GROUPS, *given)


def test_folders_of_earlier_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "host" / "seed_5").mkdir(parents=True)
    with pytest.raises(UserError, match=r"Rename folders such as .*/host/seed_5 to random_seed_5"):
        study(tmp_path, *GROUPS)


@pytest.mark.slow
def test_a_plan_tells_runs_and_cost_and_plays_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*TINY, f"out={tmp_path / 'study'}", *ASKED, "--plan"])
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"tuning/host/{BUDGET[6:]}gflop 1 20 4" in "\n".join(told)
    assert told[-1].startswith("6 runs, ")
    assert told[-1].endswith("by a probe of every group; grids that are widened come on top")
    assert not (tmp_path / "study").exists()
