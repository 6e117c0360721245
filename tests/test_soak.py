"""Memory over many rounds: what the soak finds wrong, and nothing with a real run."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.soak import EVENTS, Reading, complaints, settings, soak

BUSY = dict.fromkeys(EVENTS, 1)
IDLE = dict.fromkeys(EVENTS, 0)


def test_only_what_grows_after_the_second_round_is_a_complaint() -> None:
    flat = [
        Reading(1.0, 90.0, False, BUSY),
        Reading(2.0, 100.0, False, BUSY),
        Reading(2.0, 107.0, False, BUSY),
    ]
    assert complaints(flat, tolerance=8.0) == []
    (told,) = complaints(flat, tolerance=6.0)
    assert told == "the process grew by 7.00 MiB after round 2, more than 6.0 MiB"
    (told,) = complaints([*flat, flat[-1]._replace(tensors=2.5)], 8.0)
    assert told == "tensors grew by 0.500000 MiB after round 2"


def test_weights_that_move_and_rounds_in_which_nothing_happens_are_complaints() -> None:
    rounds = [Reading(1.0, 1.0, number == 1, IDLE if number > 1 else BUSY) for number in range(3)]
    told = complaints(rounds, 8.0)
    assert told[0] == "weights moved: something was allocated anew"
    assert told[1:] == [f"nothing {name} after round 2" for name in EVENTS]


def test_a_kept_tensor_shows_to_the_byte() -> None:
    cfg = settings(2, 6)
    cpu = torch.device("cpu")
    (before,) = soak(cfg, 1, cpu)
    kept = torch.zeros(2**18)  # float32: one MiB
    (after,) = soak(cfg, 1, cpu)
    assert kept.sum() == 0
    assert after.tensors - before.tensors == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_twenty_rounds_with_germinations_prunes_and_rollbacks_leave_memory_flat() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--device", "cpu", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["wrong"] == []
