"""The plan of a run: what its probe measures and what is made of it. Whether plans come true:
test_plan_holds.py.
"""

import io
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
from rich.console import Console

from esper_soa.config.agent import PolicyConfig
from esper_soa.config.env import EarlyStopConfig
from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import (
    MAX_ENVS,
    TelemetryConfig,
    TrainConfig,
    WorldConfig,
    settings_from_yaml,
    settings_yaml,
)
from esper_soa.env.step import StepData
from esper_soa.lab.plan import probe
from esper_soa.lab.plan.plan import (
    GIB,
    MIB,
    Disk,
    Plan,
    disk_of,
    make_plan,
    plan_table,
    show_plan,
    show_plan_json,
    slowest_rank,
    total_text,
    verdict,
)
from esper_soa.lab.plan.probe import (
    ENV_MARGIN,
    FEW_SAMPLES,
    ProbeProfile,
    few_samples,
    round_of,
    settings_in,
)
from esper_soa.lab.plan.probe_result import SETTINGS, ProbeResult
from esper_soa.nets.data.images import ValidationImages
from esper_soa.nets.needs import at_once
from esper_soa.nets.setup import lay_out
from esper_soa.runtime.memory import needs
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.loop.build import build_world, make_setup
from esper_soa.training.loop.collect import EpisodeRunner, Round
from esper_soa.training.loop.players import build_player
from tests.builders.tiny_world import quiet_progress, tiny_settings

T = TypeVar("T")
CPU = torch.device("cpu")
# program, host, device, free; seconds of build, episode, bare episode, update, files, report
COST = (400 * MIB, 500 * MIB, 0, GIB, 1.0, 8.0, 4.0, 2.0, 0.5, 3.0)
TOOK = ProbeResult(*COST, measured_steps=5, per_env=2.0 * MIB, least=7 * MIB, device_name="cpu")
DISK = Disk(whole=507, per_round=10, free=10**9)


def plan_of(took: ProbeResult = TOOK, disk: Disk = DISK, **changed: object) -> Plan:
    cfg = replace(TrainConfig(envs=4, rounds=20, steps=5), **changed)
    return Plan(cfg, took, disk)


def test_what_is_left_is_shared_by_more_envs() -> None:
    assert plan_of().run_memory == 100 * MIB
    assert plan_of().most_envs == 4 + (1024 - 100) // 2
    assert plan_of(TOOK._replace(free=96 * MIB)).most_envs == 2
    assert plan_of(TOOK._replace(free=-1)).most_envs == 0
    assert plan_of(TOOK._replace(free=2**60)).most_envs == MAX_ENVS
    on_gpu = plan_of(TOOK._replace(device=200 * MIB))
    assert (on_gpu.run_memory, on_gpu.most_envs) == (200 * MIB, 4 + (1024 - 200) // 2)


def test_several_tasks_are_in_memory_together_and_take_turns() -> None:
    # 100 MiB and 1 + 20 * 10.5 + 4 + 3 s each
    both = [plan_of(), plan_of(TOOK._replace(free=200 * MIB), Disk(3 * MIB, 10, 10**9))]
    told = "all tasks: memory 200 MiB, time 7m16s, disk 3.0 MiB; "
    assert total_text(both) == told + "fits"
    tight = [*both, plan_of(TOOK._replace(host=401 * MIB))]
    assert total_text(tight).endswith("; does not fit: lower envs of a task")
    unknown = [plan_of(TOOK._replace(free=-1))] * 2
    assert total_text(unknown).endswith("fits")


def test_pace_and_duration_follow_from_a_round() -> None:
    plan = plan_of(control="wait", control_rounds=3)
    assert plan.eps == pytest.approx(4 * 5 / 10.0)
    assert plan.seconds == pytest.approx(1.0 + 20 * 10.5 + 3 * 4.0 + 3.0)
    assert plan_of(control="none").seconds == pytest.approx(1.0 + 20 * 10.5 + 3.0)
    assert plan_of(control="heuristic").seconds == pytest.approx(1.0 + 20 * 10.5 + 8.0 + 3.0)
    same = plan_of(control="heuristic", policy=PolicyConfig(name="heuristic"))
    assert same.seconds == pytest.approx(1.0 + 20 * 10.5 + 3.0), "which its last rounds are anyway"
    short = plan_of(control="wait", control_rounds=3, rounds=2)
    assert short.seconds == pytest.approx(1.0 + 2 * 10.5 + 2 * 4.0 + 3.0)


def test_ranks_have_a_share_each_and_wait_for_the_slowest() -> None:
    plan = plan_of(envs=7, ranks=2)
    assert plan.most_envs == 2 * (4 + (1024 - 100) // 2)
    assert plan_of(TOOK._replace(free=98 * MIB), envs=7, ranks=2).most_envs == 2 * 3
    assert plan.eps == pytest.approx(7 * 5 / 10.0)
    wanted = TOOK._replace(update_seconds=2.5, free=GIB // 2, measured_steps=4)
    quick = wanted._replace(host=490 * MIB, episode_seconds=7.0)
    assert slowest_rank([quick]) == quick
    assert slowest_rank([TOOK, quick]) == wanted._replace(free=GIB // 4), "which both share"
    assert slowest_rank([quick, TOOK]) == slowest_rank([TOOK, quick])
    first, other = (one._replace(device_name=f"cuda:{n}") for n, one in enumerate((quick, TOOK)))
    assert slowest_rank([first, other]) == wanted._replace(device_name="cuda:0"), "one GPU each"


def test_the_disk_of_a_round_is_a_share_of_what_two_have_left(tmp_path: Path) -> None:
    left = {"metrics.jsonl": 60, "telemetry/steps": 40, "networks/a.pt": 20, "config.yaml": 9}
    left |= {"checkpoint_000001.pt": 300, "checkpoint_000002.pt": 300}
    for name, size in left.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    cfg = replace(plan_of().cfg, checkpoint_keep=3, run_dir=str(tmp_path / "to" / "be"))
    for changed, per_round, kept in (
        ({"checkpoint_every": 5}, 50, 3),
        ({"checkpoint_every": 0}, 50, 1),
        ({"checkpoint_every": 8, "checkpoint_keep": 9}, 50, 3),
        ({"rounds": 1}, 100, 1),
    ):
        asked = replace(cfg, **changed)
        found = disk_of(tmp_path, asked)
        assert found[:2] == (asked.rounds * per_round + kept * 310 + 9, per_round)
        shared = disk_of(tmp_path, replace(asked, ranks=2))
        assert shared[:2] == (2 * (found.whole - 9) + 9, 2 * per_round)


def test_what_does_not_fit_says_what_to_lower() -> None:
    assert verdict(plan_of()) == "fits"
    told = (
        "does not fit: memory: lower envs to 2, or batch_size, steps, train_samples, the width of "
        "the hosts (task.base_channels or task.transformer.width), policy.network.hidden or "
        "compute.env_chunk"
    )
    assert verdict(plan_of(TOOK._replace(free=96 * MIB))) == told
    assert verdict(plan_of(disk=DISK._replace(free=507))) == "fits"
    tight = DISK._replace(free=506)
    disk = "disk: lower telemetry.level or checkpoint_keep, or give another run_dir"
    assert verdict(plan_of(disk=tight)) == f"does not fit: {disk}"
    assert verdict(plan_of(TOOK._replace(free=96 * MIB), tight)) == f"{told}; {disk}"
    assert "memory: lower batch_size" in verdict(plan_of(TOOK._replace(free=MIB)))


def test_a_plan_of_episodes_that_may_end_early_is_of_those_that_do_not(tmp_path: Path) -> None:
    """The probe trains hosts so little that all would end at once; all else stays."""
    early = EarlyStopConfig(patience=1, min_delta=100.0, min_steps=2)
    telling = TelemetryConfig(progress="live", console="envs")
    asked = replace(
        replace(few_images(6), early_stop=early, telemetry=telling, track=["wandb"]),
        **{"profile": "phases", "resume": "auto", "run_dir": "there"},
    )
    (tmp_path / "settings.yaml").write_text(settings_yaml(asked), encoding="utf-8")
    probed_cfg = settings_in(tmp_path / "settings.yaml")
    assert probed_cfg == replace(
        replace(asked, telemetry=TelemetryConfig(progress="off"), track=[], profile="off"),
        **{"resume": "", "run_dir": "", "early_stop": replace(early, min_steps=6)},
    )
    ends = {}
    for name, cfg in (("asked", asked), ("run_probe", probed_cfg)):
        world = build_world(cfg, CPU)
        pace = ProbeProfile(0.0, 6, CPU, partial(few_samples, world))
        number = Round(0, quiet_progress(), "", pace)
        episode = EpisodeRunner(world, build_player(cfg.policy, world), number)
        while not episode.env.over:
            episode.step_()
        ends[name] = episode.env.state.signals.step.tolist()
    assert ends == {"asked": [2, 2], "run_probe": [6, 6]}


def test_the_record_of_a_plan_has_every_number_in_its_place() -> None:
    memory = {"run": 100 * MIB, "program": 400 * MIB, "process": 500 * MIB, "device": 0}
    memory |= {"per_env": 2.0 * MIB, "free": GIB, "least": 7 * MIB}
    wanted = {
        "name": plan_of().cfg.name,
        "device": "cpu",
        **{"envs": 4, "rounds": 20, "steps": 5, "ranks": 1},
        "memory": memory,
        **{"most_envs": 466, "fits": True, "eps": 2.0},
        "seconds": 1.0 + 20 * 10.5 + 3.0,
        **{"env_steps": 400, "measured_env_steps": 20},
        "disk": {"run": 507, "per_round": 10, "free": 10**9},
    }
    assert plan_of(control="none").record() == wanted
    unknown = plan_of(TOOK._replace(free=-1, device=200 * MIB), control="none")
    found = unknown.record()
    memory |= {"run": 200 * MIB, "device": 200 * MIB, "free": None}
    assert found == wanted | {"memory": memory, "most_envs": None}
    assert not plan_of(TOOK._replace(free=96 * MIB)).fits


def shown(show: Callable[[T, Console], None], what: T) -> list[str]:
    """The lines that are shown, one blank between words."""
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as found:
        show(what, console)
    return [" ".join(line.split()) for line in found.get().splitlines() if line.strip()]


def rows_of(plan: Plan) -> list[str]:
    return shown(lambda plan, console: console.print(plan_table(plan)), plan)


def test_the_table_of_a_plan_has_every_number_in_its_place() -> None:
    disk = Disk(whole=3 * MIB, per_round=MIB // 4, free=5 * GIB)
    name = plan_of().cfg.name
    first = rows_of(plan_of(TOOK._replace(files_seconds=55.0), disk, control="none"))
    assert first == [
        f"{name}: rounds=20 steps=5 envs=4 on cpu",
        "memory 100 MiB and 400 MiB for the program; 1.0 GiB free",
        "memory per env 2.00 MiB for every further env",
        "largest envs 466 other settings as they are",
        "env-steps/s 2.0 5 of 5 env-steps measured",
        "a round 1m05s 2.0 s of it the policy update",
        "the run 21m44s with control and report",
        "disk 3.0 MiB 0.25 MiB per round; 5.0 GiB free",
    ]
    full = rows_of(plan_of(TOOK._replace(free=0)))
    assert full[3] == "largest envs 0 other settings as they are"
    columns = [(one.justify, one.style) for one in plan_table(plan_of()).columns]
    assert columns == [("left", ""), ("right", ""), ("left", "dim")]
    gpu = TOOK._replace(device=200 * MIB, device_name="cuda:0", free=-1)
    told = rows_of(plan_of(gpu, envs=7, ranks=2, early_stop=EarlyStopConfig(patience=3)))
    assert told[0] == f"{name}: rounds=20 steps=5 envs=7 on cuda"
    assert told[1] == "memory 200 MiB of each of 2 ranks on cuda:0; unknown"
    assert told[3] == "largest envs unknown other settings as they are"
    assert told[6].endswith("with control and report, at most (early_stop)")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What processes of probes are asked; each leaves two rounds and answers with TOOK."""
    found: list[tuple] = []

    def run(words: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        *program, place, rank, ranks = words
        cfg = settings_from_yaml(Path(place, SETTINGS).read_text(encoding="utf-8"))
        found.append((rank, ranks, program, given, cfg, place))
        Path(place, rank).mkdir()
        for name in ("metrics.jsonl", "episodes.jsonl"):
            Path(place, rank, name).write_bytes(b"x" * MIB)
        return subprocess.CompletedProcess(words, 0, f"?\n{json.dumps(TOOK._asdict())}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    free = {tmp_path: 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    return found


@pytest.mark.usefixtures("asked")
def test_the_plan_of_every_task_is_shown_and_what_they_come_to() -> None:
    tasks = {name: TaskConfig(name=name) for name in ("first", "second")}
    worlds = {name: WorldConfig(envs=3, task=task) for name, task in tasks.items()}
    cfg = replace(plan_of().cfg, worlds=worlds)
    plans = {name: make_plan(one) for name, one in cfg.by_task.items()}
    each = [[f"task {name}", *rows_of(plan), "fits"] for name, plan in plans.items()]
    assert shown(show_plan, cfg) == [*sum(each, []), total_text([*plans.values()])]
    records = [json.loads(line) for line in shown(show_plan_json, cfg)]
    assert records == [plan.record() for plan in plans.values()]


def same_work(data: StepData) -> StepData:
    return data


def few_images(steps: int) -> TrainConfig:
    """Two tiny hosts."""
    data = DataConfig(name="synthetic", synthetic_train=16, synthetic_test=64)
    return replace(tiny_settings(2, 1, steps), train_samples=8, val_samples=64, data=data)


def paced(
    seconds: float, steps: int, short: float, rise: float = 0.0
) -> tuple[ProbeProfile, list[int]]:
    """Play all env-steps: 2 s each in full, and a `rise` with every one, the first of all ten times
    that, and `short` otherwise. Gives those played in full.
    """
    world = build_world(few_images(40), CPU)
    now = [0.0]
    cut = partial(few_samples, world)
    pace = ProbeProfile(seconds, steps, CPU, cut, lambda: now[0])
    played = []
    now[0] += 3.0
    pace.on_phase_end("reset")
    for step in range(steps):
        given = world.work(step)
        work = pace.watch(given)
        assert isinstance(work.validation, ValidationImages)
        full = work is given
        played += [step] * full
        images = work.num_batches, len(work.validation.order)
        assert images == ((4, 64) if full else (1, FEW_SAMPLES))
        now[0] += (2.0 + rise * step) * (1 if step else 10) if full else short
        pace.on_phase_end("training")
        pace.env_step()
    return pace, played


def test_an_episode_that_fits_is_played_in_full_and_the_first_env_step_warms_up() -> None:
    pace, _ = paced(1000.0, 8, 0.5)
    assert len(pace.full_times) == 8
    assert sum(pace.paces) == pytest.approx(8 * 2.0)
    assert pace.beside == pytest.approx(3.0)
    pace.clock = iter((100.0, 102.0, 107.0, 108.0)).__next__
    for phase in ("telemetry", "files", "update", "files"):
        pace.on_phase_end(phase)
    assert (pace.files_seconds, pace.update_seconds) == (3.0, 5.0)
    beside = pace.beside
    pace.report("a later round")
    pace.clock = iter((110.0, 120.0)).__next__
    for phase in ("update", "training"):
        pace.on_phase_end(phase)
    assert (pace.beside, pace.update_seconds) == (beside, 5.0)


def test_env_steps_that_take_longer_one_by_one_are_told_from_those_around_them() -> None:
    pace, played = paced(30.0, 40, 0.125, rise=0.1)
    assert len(played) <= 9
    assert pace.paces == pytest.approx([2.1, *(2.0 + 0.1 * step for step in range(1, 40))])
    assert ProbeProfile(0.0, 4, CPU, same_work).paces == []


class KeptProfile(ProbeProfile):
    """Remembers the newest."""

    newest: ProbeProfile

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        KeptProfile.newest = self


def test_a_probe_plays_two_rounds_and_tells_what_they_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = replace(few_images(3), rounds=5, report=False)
    monkeypatch.setattr(probe, "ProbeProfile", KeptProfile)
    begun = time.perf_counter()
    took = round_of(cfg, RunFolder(tmp_path / "probe"), 100.0, 1)
    elapsed = time.perf_counter() - begun
    pace = KeptProfile.newest
    parts = (took.build_seconds, took.update_seconds, took.report_seconds, pace.files_seconds)
    assert min(parts) > 0
    assert sum([*parts, *pace.full_times, pace.beside]) < elapsed
    beside = max(0.0, pace.beside)
    assert took.files_seconds == pytest.approx(pace.files_seconds / 2), "of a round"
    assert took.update_seconds == pace.update_seconds, "of the first"
    assert took.episode_seconds == pytest.approx(sum(pace.paces) + beside)
    assert took.bare_seconds == pytest.approx(3 * min(pace.paces) + beside)
    assert took.measured_steps == 3
    assert (took.program, took.device) == (1, 0)
    assert took.host > 1 < took.free
    assert 0 < took.bare_seconds <= took.episode_seconds
    setup = make_setup(cfg, CPU, loaded=True)
    least, more = (at_once(needs(lay_out(setup, envs), cfg.policy)) for envs in (2, 16))
    assert (took.least, took.per_env) == (least, ENV_MARGIN * (more - least) / 14)
    found = disk_of(tmp_path / "probe", cfg)
    assert 5 * found.per_round < found.whole < found.free
    assert len((tmp_path / "probe" / "metrics.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(probe, "STATUS", tmp_path / "elsewhere")  # where Linux is not
    assert probe._memory("VmHWM") == pytest.approx(took.host, rel=0.2)
