"""Live seeds among sleeping ones: the benchmark runs, hosts without slots included."""

import json

import pytest

from benchmarks import sleepers


def test_hosts_are_timed_without_slots_and_with_seeds(capsys: pytest.CaptureFixture) -> None:
    sizes = ["--envs", "2", "--batch", "2", "--train", "2", "--val", "2", "--results", ""]
    sleepers.main([*sizes, "--repeats", "2", "--device", "cpu"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["benchmark"] == "sleepers"
    assert all(row for row in record["rows"])
