"""The cores whose time a process has: control groups as Linux shows them in files."""

import os
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401, is there

from esper_soa.system import cores
from esper_soa.system.cores import core_limit, core_numbers, usable_cores


@pytest.mark.parametrize(
    ("membership", "limits", "cores"),
    [
        ("0::/\n", {".": "200000 100000"}, 2),  # in a container of its own
        ("0::/a/b\n", {"a": "400000 100000", "a/b": "max 100000"}, 4),
        ("0::/a/b\n", {"a": "400000 100000", "a/b": "150000 100000"}, 2),
        ("0::/a\n", {"a": "5000 100000"}, 1),
        ("4:cpu:/a\n0::/\n", {"a": "200000 100000"}, sys.maxsize),
        ("0::/a\n", {"a": "much"}, sys.maxsize),
        ("", {}, sys.maxsize),
    ],
)
def test_the_smallest_limit_of_a_group_and_those_above_counts(
    tmp_path: Path, membership: str, limits: dict[str, str], cores: int
) -> None:
    for group, text in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(f"{text}\n")
    own = tmp_path / "own"
    own.write_text(membership)
    assert core_limit(tmp_path, own) == cores
    assert usable_cores() >= 1


def test_threads_sleep_unless_torch_is_there_or_it_is_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(cores.WAIT_POLICY, raising=False)
    cores.let_threads_sleep()
    assert cores.WAIT_POLICY not in os.environ, "torch is there"
    monkeypatch.delitem(sys.modules, "torch")
    for set_before, after in (("active", "active"), ("", "passive")):
        monkeypatch.setenv(cores.WAIT_POLICY, set_before)
        if not set_before:
            monkeypatch.delenv(cores.WAIT_POLICY)
        cores.let_threads_sleep()
        assert os.environ[cores.WAIT_POLICY] == after


def test_ranks_share_out_the_time_of_their_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_CGROUP", tmp_path / "own")
    for ranks, share in (("1", 2), ("2", 1), ("3", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert usable_cores() == min(share, len(core_numbers()))
