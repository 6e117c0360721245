"""A job in a process of its own: how it ends is noted, signals reach it, and it ends with whoever
waits for it. What is played here are functions of Python.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from program import wait_until

from esper_soa.config.paths import config_dir
from esper_soa.config.settings import register_schema
from esper_soa.lab.sweep.jobs import KILLED, STOPPED, JobRecord, read_records, save_record, watch
from esper_soa.runtime.signals import Interrupted

LONG = 20  # seconds of a job that must not come to its end


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobRecord:
    """A job that has begun here, of a sweep in `tmp_path`."""
    register_schema()
    context = {"job.num": 0, "runtime.output_dir": tmp_path, "runtime.cwd": tmp_path}
    context |= {"sweep.dir": tmp_path}
    with hydra.initialize_config_dir(config_dir(), version_base="1.3"):
        composed = hydra.compose("train", return_hydra_config=True)
    OmegaConf.set_readonly(composed.hydra, False)
    for key, value in context.items():
        OmegaConf.update(composed.hydra, key, value if key == "job.num" else str(value))
    monkeypatch.setattr(HydraConfig.instance(), "cfg", composed)
    begun = JobRecord(0, [], str(tmp_path))
    save_record(tmp_path, begun)
    return begun


def test_a_job_that_is_killed_is_noted_as_such(job: JobRecord, tmp_path: Path) -> None:
    assert watch(signal.raise_signal, signal.SIGKILL, tmp_path, job) is None
    assert read_records(tmp_path)[0].status == KILLED
    assert read_records(tmp_path)[0].message == "its process was ended by SIGKILL"


def test_a_signal_reaches_the_job_and_ends_the_sweep(job: JobRecord, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        wait_until(lambda: signal.getsignal(signal.SIGTERM) is not before)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=stop, daemon=True).start()
    with pytest.raises(Interrupted):
        watch(time.sleep, LONG, tmp_path, job)
    assert "SIGTERM" in read_records(tmp_path)[0].message


def test_a_job_ends_where_nobody_waits_for_it_any_more(job: JobRecord, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "esper_soa.lab.sweep.jobs"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        context = OmegaConf.to_container(HydraConfig.get(), resolve=False)
        started = tmp_path / "started"
        waits = ["sh", "-c", f"touch {started}; exec sleep {LONG}"]
        process.stdin.write(pickle.dumps((subprocess.call, waits, context)))
        process.stdin.flush()
        wait_until(started.exists)
        process.stdin.close()
    assert read_records(tmp_path)[0].status == STOPPED
