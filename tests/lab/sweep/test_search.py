"""The search: its words for a space, a planted optimum found, trials pruned, and resuming."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf, open_dict

from esper_soa.config.settings import TrainConfig
from esper_soa.lab.sweep import jobs
from esper_soa.lab.sweep.records import JobRecord, Status, save_record
from esper_soa.system.errors import PrunedError, UserError
from hydra_plugins.esper_soa_sweeps.search import OptunaSweeper
from tests.builders.program import ENVIRONMENT
from tests.builders.sweeping import LONG, finished_sweep, killed_in_the_middle, started_sweep

optuna = pytest.importorskip("optuna")
search = pytest.importorskip("esper_soa.lab.sweep.search")
pruner = pytest.importorskip("esper_soa.lab.sweep.pruner")

PROGRAM = Path(__file__).parents[2] / "builders" / "planted.py"
PLANTED = [
    "hydra/sweeper=optuna_search",
    "policy.ppo.lr=tag(log,interval(1e-6,1))",
    "reward=shaped,escrow,basic",
]


REFUSED = {
    "": "already holds a search. Choose another folder, or go on with resume=auto",
    "resume=auto rounds=7": "holds a search of something else",
    "resume=auto hydra.sweeper.pruner=mean": "=mean: must be one of median, halving, none",
    "resume=auto hydra.sweeper.n_trials=0": "=0: must be a whole number of at least 1",
}


def planted(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), "-m", *PLANTED, "run_dir=found", *overrides],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=250,
    )


def trials(folder: Path) -> list:
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    )
    return optuna.load_study(study_name="search", storage=storage).trials


def test_a_search_is_over_trainings(tmp_path: Path) -> None:
    hydra = {"sweeper": {}, "sweep": {"dir": str(tmp_path)}}
    told = "^hydra/sweeper=optuna_search: searches over trainings. Use it with esper-train$"
    with pytest.raises(UserError, match=told):
        search.search(OmegaConf.create({"hydra": hydra}), [], lambda *_: [])


def test_overrides_become_the_space_that_they_name() -> None:
    space = search.space_of(
        [
            "policy.ppo.lr=tag(log,interval(1e-5,1e-2))",
            "policy.ppo.gamma=interval(0.9,1)",
            "envs=int(interval(1,8))",
            "steps=range(10,31,10)",
            "reward=shaped,escrow",
            "slots=[r0c0],[r0c0,r0c1]",
            "rounds=5",
            "run_dir=a",
            "resume=auto",
            "hydra.job.name=x",
            "name='a b'",
            "policy.ppo.epochs=range(4,0,-2)",
            "policy.ppo.minibatches=range(1,2)",
            "policy.ppo.value_coef=range(0.25,0.5,0.125)",
            "policy.ppo.gae_lambda=interval(0,0.5)",
        ]
    )
    kinds = optuna.distributions
    assert space.searched == {
        "policy.ppo.lr": kinds.FloatDistribution(1e-5, 1e-2, log=True),
        "policy.ppo.gamma": kinds.FloatDistribution(0.9, 1),
        "envs": kinds.IntDistribution(1, 8),
        "steps": kinds.IntDistribution(10, 30, step=10),
        "reward": kinds.CategoricalDistribution(["shaped", "escrow"]),
        "slots": kinds.CategoricalDistribution(["[r0c0]", "[r0c0,r0c1]"]),
        "policy.ppo.epochs": kinds.CategoricalDistribution(["4", "2"]),
        "policy.ppo.minibatches": kinds.CategoricalDistribution(["1"]),
        "policy.ppo.value_coef": kinds.CategoricalDistribution(["0.25", "0.375"]),
        "policy.ppo.gae_lambda": kinds.FloatDistribution(0, 0.5),
    }
    assert space.record()["fixed"] == ["name='a b'", "rounds=5"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["rounds=5"],
            (
                r"^hydra/sweeper=optuna_search: there is no setting to search for\. Give one "
                r"or more, such as policy\.ppo\.lr=tag\(log,interval\(1e-5,1e-2\)\), "
                r"task\.base_channels=range\(4,17,4\) or reward=shaped,escrow$"
            ),
        ),
        (["envs=int(tag(log,interval(0,8)))"], "is no interval to search .`low >= 1` must hold"),
    ],
)
def test_what_cannot_be_searched_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        search.space_of(overrides)


SWEEPER = {
    "sampler": "random",
    "pruner": "median",
    "seed": 0,
    "n_trials": 4,
    "n_jobs": 2,
    "startup_trials": 1,
    "warmup_rounds": 1,
    "params": {},
}


def test_the_study_chooses_and_prunes_as_it_is_asked_to(tmp_path: Path) -> None:
    def made(**changed: object) -> "optuna.Study":
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        return search.load_study(OmegaConf.create(SWEEPER | changed), folder)

    optuna.logging.set_verbosity(optuna.logging.INFO)
    first = made(sampler="tpe", startup_trials=3, warmup_rounds=2)
    assert optuna.logging.get_verbosity() == optuna.logging.WARNING
    assert isinstance(first.sampler, optuna.samplers.TPESampler)
    assert (first.sampler._n_startup_trials, first.sampler._constant_liar) == (3, True)
    assert made(sampler="tpe", n_jobs=1).sampler._constant_liar is False
    assert isinstance(made().sampler, optuna.samplers.RandomSampler)
    assert isinstance(first.pruner, optuna.pruners.MedianPruner)
    assert (first.pruner._n_startup_trials, first.pruner._n_warmup_steps) == (3, 2)
    for rounds, least in ((0, 1), (1, 1), (4, 4)):
        halving = made(pruner="halving", warmup_rounds=rounds).pruner
        assert isinstance(halving, optuna.pruners.SuccessiveHalvingPruner)
        assert halving._min_resource == least
    assert isinstance(made(pruner="none").pruner, optuna.pruners.NopPruner)
    assert first.direction == optuna.study.StudyDirection.MAXIMIZE


@pytest.mark.parametrize(
    ("name", "least"),
    [
        *(("n_trials", 1), ("n_jobs", 1), ("startup_trials", 1)),
        *(("warmup_rounds", 0), ("seed", 0)),
    ],
)
def test_numbers_of_a_search_have_a_least(tmp_path: Path, name: str, least: int) -> None:
    space = search.space_of(["envs=1,2"])
    for value in (least - 1, 1.5):
        told = rf"^hydra\.sweeper\.{name}={value}: must be a whole number of at least {least}\.$"
        with pytest.raises(UserError, match=told):
            search.open_study(OmegaConf.create(SWEEPER | {name: value}), tmp_path, space, False)
    search.open_study(OmegaConf.create(SWEEPER | {name: least}), tmp_path, space, False)


@pytest.mark.timeout(60)
def test_a_lock_that_leads_nowhere_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "study.log.lock").symlink_to("nowhere")
    search.open_study(OmegaConf.create(SWEEPER), tmp_path, search.space_of(["envs=1,2"]), False)
    (tmp_path / "study.log").write_text("x\n")
    with pytest.raises(UserError, match=rf"^{tmp_path}/study\.log: must be a study"):
        search.load_study(OmegaConf.create(SWEEPER), tmp_path)


@pytest.mark.filterwarnings("error:The reported value:UserWarning")
def test_a_trial_is_given_up_below_the_median_and_only_behind_the_rounds_that_all_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = search.load_study(OmegaConf.create(SWEEPER), tmp_path)
    for _ in range(3):
        study.ask({})
    run = SimpleNamespace(cfg=SimpleNamespace(rounds=3))

    def played(trial: int, accuracies: list[float], first: int = 1) -> None:
        job = SimpleNamespace(num=trial)
        hydra = SimpleNamespace(
            sweeper=OmegaConf.create(SWEEPER), sweep=SimpleNamespace(dir=tmp_path), job=job
        )
        watch = pruner.Pruner(hydra)
        for number, accuracy in enumerate(accuracies, first):
            watch.on_round_end(run, {"round": number, "accuracy": {"mean": accuracy}})

    played(0, [10.0, 20.0])
    played(0, [99.0, 30.0], first=2)  # what was told before the run was cut off stands
    study.tell(0, 30.0)
    with pytest.raises(PrunedError, match=r"^pruned after 2 rounds at 6\.00 % accuracy$"):
        played(1, [5.0, 6.0])
    study.tell(1, state=optuna.trial.TrialState.PRUNED)
    played(2, [10.5, 20.5, 20.6])  # the last round ends the run anyway
    target = {"_target_": "hydra_plugins.esper_soa_sweeps.search.OptunaSweeper"}
    hydra = {"sweeper": SWEEPER | target, "sweep": {"dir": str(tmp_path)}, "job": {"num": 1}}
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": hydra}))
    for ranks, tasks, pruners in ((1, ["a"], 1), (2, [], 0), (1, ["a", "b"], 0)):
        found = jobs.pruner(OmegaConf.create({"ranks": ranks, "tasks": tasks}))
        assert [type(one) for one in found] == [pruner.Pruner] * pruners
    told = [trial.intermediate_values for trial in trials(tmp_path)]
    assert told == [{0: 10.0, 1: 20.0, 2: 30.0}, {0: 5.0, 1: 6.0}, {0: 10.5, 1: 20.5, 2: 20.6}]


def test_the_best_of_a_search_is_that_of_the_highest_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials 1 and 3 do not come to their end, and 4 leaves no record: a second call plays them."""
    config = OmegaConf.structured(TrainConfig())
    params = {"rounds": 7, "name": "found"}
    sweeper = SWEEPER | {"n_trials": 5, "params": params}
    with open_dict(config):
        config.hydra = {"sweeper": sweeper, "sweep": {"dir": str(tmp_path)}}
    worth = {2: 55.0}
    asked = []

    class Launcher:
        def launch(self, overrides: list[list[str]], initial_job_idx: int) -> None:
            asked.append((initial_job_idx, len(overrides)))
            for number, own in enumerate(overrides, initial_job_idx):
                gamma = trials(tmp_path)[number].params["policy.ppo.gamma"]
                assert own == ["rounds=3", "name=found", f"policy.ppo.gamma={gamma}"]
                status = Status.DONE if number in worth else Status.PRUNED
                status = Status.FAILED if worth == {2: 55.0} and number in (1, 3) else status
                record = JobRecord(number, own, "", status, worth.get(number, 99.0))
                if worth != {2: 55.0} or number < 4:
                    save_record(tmp_path, record)

    arguments = ["policy.ppo.gamma=interval(0.9,1)", "rounds=3"]
    assert search.search(config, arguments, Launcher()) == 55.0
    assert asked == [(0, 2), (2, 2), (4, 1)]
    assert OmegaConf.load(tmp_path / "multirun.yaml") == config
    with pytest.raises(UserError, match="already holds a search"):
        search.search(config, arguments, Launcher())
    worth |= {1: 70.0, 4: 60.0}
    capsys.readouterr()
    config.resume = "auto"
    setup = {"hydra_context": "context", "task_function": "task", "config": config}
    plugins = SimpleNamespace(instantiate_launcher=lambda **given: (given == setup) and Launcher())
    monkeypatch.setattr(Plugins, "instance", lambda: plugins)
    sweeper_of_hydra = OptunaSweeper(**sweeper)
    sweeper_of_hydra.setup(**setup)
    assert sweeper_of_hydra.sweep(arguments) == 70.0
    assert asked[3:] == [(1, 1), (3, 2)]
    best = trials(tmp_path)[1].params["policy.ppo.gamma"]
    told = f"5 trials, best is job 1: 70.00 % validation accuracy with policy.ppo.gamma={best}"
    assert capsys.readouterr().out == f"search   {told}\n"
    hopeless = tmp_path / "hopeless"
    hopeless.mkdir()
    config.hydra = {"sweeper": sweeper | {"n_trials": 1}, "sweep": {"dir": str(hopeless)}}
    assert search.search(config, arguments, SimpleNamespace(launch=lambda *_, **__: [])) is None


def test_a_search_goes_on_as_itself_alone(tmp_path: Path) -> None:
    settings = OmegaConf.create(SWEEPER)
    space = search.space_of(["policy.ppo.gamma=interval(0.9,1)", "rounds=3"])
    search.open_study(settings, tmp_path, space, False)
    same = search.space_of(["rounds=3", "hydra.job.name=x", "policy.ppo.gamma=interval(0.9,1)"])
    search.open_study(settings, tmp_path, same, True)
    told = "already holds a search. Choose another folder, or go on with resume=auto"
    with pytest.raises(UserError, match=f"^run_dir={tmp_path}: {told}$"):
        search.open_study(settings, tmp_path, space, False)
    for changed, told in (
        ({"sampler": "best"}, "sampler=best: must be one of tpe, random"),
        ({"pruner": "mean"}, "pruner=mean: must be one of median, halving, none"),
    ):
        other = OmegaConf.create(SWEEPER | changed)
        with pytest.raises(UserError, match=rf"^hydra\.sweeper\.{told}\.$"):
            search.open_study(other, tmp_path, space, True)
    for low, rounds in ((0.8, 3), (0.9, 4)):
        changed = search.space_of([f"policy.ppo.gamma=interval({low},1)", f"rounds={rounds}"])
        with pytest.raises(UserError) as caught:
            search.open_study(settings, tmp_path, changed, True)
        before, after = (
            f"{{'searched': {{'policy.ppo.gamma': 'FloatDistribution(high=1.0, log=False, low={low}"
            f", step=None)'}}, 'fixed': ['rounds={rounds}']}}"
            for low, rounds in ((0.9, 3), (low, rounds))
        )
        told = f"holds a search of something else: {before}, and not {after}"
        assert str(caught.value) == f"run_dir={tmp_path}: {told}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_planted_optimum_is_found_hopeless_trials_are_pruned_and_a_second_call_goes_on(
    tmp_path: Path,
) -> None:
    done = planted(tmp_path, "hydra.sweeper.n_trials=40")
    assert done.returncode == 0, done.stderr
    found = trials(tmp_path / "found")
    assert [trial.number for trial in found] == list(range(40))
    best = max((trial for trial in found if trial.values), key=lambda trial: trial.value)
    assert best.params["reward"] == "escrow"
    assert abs(math.log10(best.params["policy.ppo.lr"]) + 3) < 0.3
    assert f"best is job {best.number}: {best.value:.2f} % validation accuracy" in done.stdout
    pruned = [trial for trial in found if trial.state == optuna.trial.TrialState.PRUNED]
    ended = [trial for trial in found if trial.state == optuna.trial.TrialState.COMPLETE]
    assert len(pruned) + len(ended) == 40
    assert 5 <= len(pruned) < 40
    # After a round, as warmup_rounds says, and below the median of those before it after as many
    # rounds.
    for trial in pruned:
        step, value = max(trial.intermediate_values.items())
        assert 1 <= step < 3
        assert value < best.intermediate_values[step]
    more = planted(tmp_path, "hydra.sweeper.n_trials=42", "resume=auto")
    assert more.returncode == 0
    more_found = trials(tmp_path / "found")
    assert len(more_found) == 42
    assert [one.params for one in more_found[:40]] == [one.params for one in found]
    for overrides, told in REFUSED.items():
        refused = planted(tmp_path, *overrides.split())
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
        assert told in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_over_runs_prunes_them_and_goes_on_with_the_trial_that_was_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    asked = [
        "+sweep=[optuna,joblib]",
        *LONG,
        "policy.ppo.lr=tag(log,interval(1e-5,1e-2))",
        "hydra.sweeper.n_trials=6",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.startup_trials=1",
    ]
    process = started_sweep(*asked, folder=tmp_path)
    killed_in_the_middle(tmp_path / "sweep" / "1", process, signal.SIGKILL)
    assert process.wait(300) == 1
    first = {trial.number: trial for trial in trials(tmp_path / "sweep")}
    assert first[1].state == optuna.trial.TrialState.RUNNING
    assert first[0].state == optuna.trial.TrialState.COMPLETE
    done = finished_sweep(*asked, "resume=auto", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = trials(tmp_path / "sweep")
    assert len(ended) == 6
    assert ended[1].params == first[1].params
    for trial, job in zip(
        ended, json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"], strict=True
    ):
        rounds = [
            json.loads(line)
            for line in (tmp_path / "sweep" / str(trial.number) / "metrics.jsonl").open()
        ]
        told = [line["accuracy"]["mean"] for line in rounds]
        assert list(trial.intermediate_values.values()) == told
        assert list(trial.intermediate_values) == list(range(len(told)))
        if trial.state == optuna.trial.TrialState.PRUNED:
            assert job["status"] == "pruned"
            assert job["accuracy"] == told[-1]
            assert len(told) < 24
            assert list((tmp_path / "sweep" / str(trial.number)).glob("checkpoint_*.pt"))
        else:
            assert (job["status"], job["accuracy"], len(told)) == ("done", trial.value, 24)
    assert trials(tmp_path / "sweep")[0].value == first[0].value
