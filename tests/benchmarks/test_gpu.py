"""The one-command GPU script: refused without a GPU, rehearsed on a CPU, and its table."""

import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks import gpu
from benchmarks.gpu import (
    RUNGS,
    TASKS,
    Place,
    compute_of,
    environment,
    ladder,
    main,
    rung,
    syncs,
    visits,
)
from benchmarks.machine import sources_digest
from benchmarks.sync_guard import HostSyncError
from esper_soa.config.settings import ComputeConfig
from esper_soa.nets import passes
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.seeds.pools import ActiveSeeds, claim_

TINY = Place(torch.device("cpu"), True)
REHEARSAL = ["--device", "cpu", "--tiny"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--device", "cpu"]) == 2
    assert "--tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rehearsal_runs_its_tasks_apart_and_keeps_a_record_of_each(tmp_path: Path) -> None:
    only = [*REHEARSAL, "--only", "parity:graphs"]
    assert main([*only, "--results", str(tmp_path)]) == 0
    (record,) = map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert record["task"] == "parity:graphs"
    assert record["found"]["distance"] < record["found"]["tolerance"]
    assert main([*only, "--seconds", "1.2", "--results", ""]) == 1


def test_a_call_goes_on_where_the_one_before_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    names = [name for visit in visits() for name in visit]

    def task(name: str, place: Place, seconds: float) -> dict:
        cut_off = name == names[2] and name not in done
        done.append(name)
        return {"ok": False, "cut_off": True} if cut_off else {"ok": True}

    monkeypatch.setattr(gpu, "in_process", task)
    monkeypatch.setattr(
        gpu, "origin", lambda *_: {"commit": "unknown", "machine": {"device": "cpu"}}
    )
    first, later = tmp_path / "first", tmp_path / "later"
    given = [*REHEARSAL, "--results", str(first)]
    assert main(given) == gpu.MORE
    assert "tasks are left: give the command again" in capsys.readouterr().err
    assert main(given) == 0
    assert done == [*names[:3], *names[2:]]
    assert main(given) == 0
    elsewhere = [*REHEARSAL, "--results", str(later), "--resume", str(first)]
    assert main([*elsewhere, "--visit", "1"]) == 0
    assert len(done) == len(names) + 1
    monkeypatch.setattr("benchmarks.machine.sources_digest", lambda: "others")
    main(given)
    assert len(done) > len(names) + 1


def test_a_visit_does_a_part_of_all_and_none_is_done_twice() -> None:
    names = [name for visit in visits() for name in visit]
    assert len(names) == len(set(names))
    assert len(visits()) == 4
    assert {"sanitize:memcheck", "sanitize:racecheck"} <= set(visits()[0])
    envs = [name.split(":")[2] for name in visits()[1]]
    assert envs == ["16", "64", "512"]


def test_what_was_measured_is_known_by_its_sources_without_git(tmp_path: Path) -> None:
    for folder in ("esper_soa", "benchmarks", "configs"):
        (tmp_path / folder).mkdir()
    code = tmp_path / "esper_soa" / "code.py"
    found = []
    for text in ("a = 1", "a = 2", "a = 1"):
        code.write_text(text)
        found.append(sources_digest(tmp_path))
    assert found[0] == found[2] != found[1]
    code.rename(code.with_name("other.py"))
    assert sources_digest(tmp_path) != found[0]


def test_what_is_compiled_goes_where_the_results_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", "/somewhere")
    assert environment()["TRITON_CACHE_DIR"] == "/somewhere/triton"
    monkeypatch.delenv("OUT")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert "TRITON_CACHE_DIR" not in environment()


def test_the_true_default_is_the_first_rung() -> None:
    assert compute_of(RUNGS[0], TINY) == ComputeConfig()
    names = [name for visit in visits() for name in visit]
    assert {name.split(":")[0] for name in names} == set(TASKS) - {"few"}


@pytest.mark.slow
def test_the_guarded_env_step_and_a_rung_can_be_rehearsed() -> None:
    assert syncs(TINY, "graphs") == {"ok": True, "births": 1, "steady": 1, "allowed": 1}
    found = rung(TINY, "graphs", "64", "32")
    assert found["K"] == 8
    assert sum(one["ms"] for one in found["kernels"]) > 0
    assert found["images_per_second"] == pytest.approx(found["eps"] * (4 + 8 * 4))


def test_a_wait_at_the_birth_of_seeds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim_and_wait_(
        weights: TensorDict, shape: HostShape, active_seeds: ActiveSeeds, keys: Tensor
    ) -> None:
        if active_seeds.newborn.any():
            keys[0].item()
        claim_(weights, shape, active_seeds, keys)

    monkeypatch.setattr(passes, "claim_", claim_and_wait_)
    with pytest.raises(HostSyncError, match="claim_and_wait_"):
        syncs(TINY, "graphs")


def test_the_ladder_compares_with_the_plain_loop_and_the_row_above() -> None:
    records = {
        "baseline:8:32": {"eps": 10.0, "images_per_second": 1000.0},
        "rung:eager:64:32": {"eps": 20.0, "images_per_second": 2000.0},
        "rung:graphs:64:32": {"eps": 50.0, "images_per_second": 5000.0},
        "rung:triton:64:32": {"error": "no triton"},
    }
    rows = {row[0]: row[1:] for row in ladder(records, 32)}
    assert rows["eager"] == ("20.0", "2,000", "2.00", "2.00")
    assert rows["graphs"] == ("50.0", "5,000", "5.00", "2.50")
    assert rows["triton"][0] == "no triton"
    assert rows["compiled"][0] == "left out"
