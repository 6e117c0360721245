"""Shares of phases and traces: what a phase counts, that watching changes nothing, what is told."""

import io
import json
import logging
import re
import shlex
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper_soa.agent.scripted import WaitPolicy
from esper_soa.config.compose import compose_settings
from esper_soa.env.env import NO_OBSERVER, Observer
from esper_soa.env.step import StepData
from esper_soa.training.files.run_folder import open_run_folder
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round
from esper_soa.training.results.profile import PhaseProfile, TraceProfile, make_profile
from esper_soa.training.results.progress import LOGGER, Progress
from tests.builders.tiny_runs import run
from tests.builders.tiny_world import CPU, tiny_world

TINY = shlex.split(
    "rounds=2 steps=4 telemetry.progress=off batch_size=2 train_samples=4 val_samples=4 "
    "data.synthetic_train=8 data.synthetic_test=4"
)


class HandClock:
    """A clock that is set by hand."""

    time = 0.0

    def __call__(self) -> float:
        return self.time


def by_hand() -> tuple[PhaseProfile, HandClock]:
    clock = HandClock()
    return PhaseProfile(CPU, clock), clock


def test_a_lap_takes_what_passed_since_the_lap_before() -> None:
    profile, clock = by_hand()
    for phase, moment in (("training", 3.0), ("state", 4.0), ("training", 6.0)):
        clock.time = moment
        profile.on_phase_end(phase)
    assert profile.take() == {"training": 5.0, "state": 1.0}
    clock.time = 7.0
    profile.on_phase_end("policy")
    assert profile.take() == {"policy": 1.0}, "counting did not begin anew"


def played(profile: Observer, steps: int = 3) -> EpisodeRunner:
    world = tiny_world(2, 1, 4)
    quiet = Progress(8, Console(file=io.StringIO()), "off")
    episode = EpisodeRunner(world, Player(WaitPolicy(), None), Round(0, quiet, profile=profile))
    for _ in range(steps):
        episode.step_()
    return episode


def test_watching_changes_no_result() -> None:
    one = played(NO_OBSERVER).env.state
    other = played(PhaseProfile(CPU)).env.state
    assert torch.equal(one.signals.val_loss, other.signals.val_loss)
    assert torch.equal(one.signals.train_loss, other.signals.train_loss)


def test_the_phases_of_an_episode_make_up_its_time() -> None:
    profile = PhaseProfile(CPU)
    begun = time.perf_counter()
    played(profile)
    passed = time.perf_counter() - begun
    found = profile.take()
    assert set(found) == {"reset", "data", "state", "training", "validation", "policy", "telemetry"}
    assert all(seconds > 0 for seconds in found.values())
    assert sum(found.values()) <= passed


class PhaseList(Observer):
    """The phases in order."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def on_phase_end(self, phase: str) -> None:
        self.phases.append(phase)

    def watch(self, data: StepData) -> StepData:
        self.phases.append("watched")
        return data

    def env_step(self) -> None:
        self.phases.append("an env-step")


def test_every_env_step_has_its_phases_in_order() -> None:
    listed = PhaseList()
    played(listed, steps=4).finish()
    measured = ["data", "state", "training", "validation", "state", "telemetry", "policy"]
    env_step = ["watched", *measured, "state", "policy", "telemetry", "an env-step"]
    assert listed.phases == ["reset", "reset", *4 * env_step, "policy", "telemetry"]


@pytest.fixture
def told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the package's logger says."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, LOGGER.name)
    return caplog


def test_a_trace_holds_the_env_steps_after_warm_up(tmp_path: Path) -> None:
    profile = make_profile("torch", CPU, tmp_path)
    assert isinstance(profile, TraceProfile)
    for _ in range(8):
        worker = threading.Thread(target=torch.ones(3).mul, args=[2])
        worker.start()
        worker.join()
        torch.ones(3).add(1)
        profile.env_step()
    profile.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [
        event["name"] for event in events if re.match(r"ProfilerStep#\d+$", event.get("name", ""))
    ]
    assert sorted(set(steps)) == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    shapes = {
        event.get("name"): event["args"].get("Input Dims") for event in events if "args" in event
    }
    assert (shapes["aten::add"][0], shapes["aten::mul"][0]) == ([3], [3])


def run_with(profile: str, folder: Path) -> str:
    """The log of a run of two rounds of four env-steps."""
    settings = compose_settings("smoke", [*TINY, f"profile={profile}"])
    run(settings, open_run_folder(str(folder), settings.name))
    return (folder / "log.txt").read_text()


def test_a_run_leaves_its_trace_in_its_folder(tmp_path: Path) -> None:
    log = run_with("torch", tmp_path / "run")
    assert (tmp_path / "run" / "trace.json").stat().st_size > 0
    assert f"trace of 3 env-steps: {tmp_path / 'run' / 'trace.json'}" in log
