"""How a run is laid out and watched changes no bit of it: workers, telemetry, and
whether step kernels come from the cache.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from esper_soa.agent import pieces, products
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.settings import ComputeConfig, TelemetryConfig, TrainConfig
from esper_soa.runtime import device
from esper_soa.system.threads import run_pieces
from tests.builders.equal_runs import content, same, settings
from tests.builders.tiny_runs import fresh

ROUNDS = 2


def laid_out(level: str, **compute: object) -> TrainConfig:
    """A run of four envs whose policy is wide enough for pieces."""
    network = NetworkConfig(hidden=256, features=256)
    return settings(
        envs=4,
        rounds=ROUNDS,
        telemetry=TelemetryConfig(progress="off", level=level),
        policy=PolicyConfig(network=network, ppo=PPOConfig(epochs=2)),
        compute=ComputeConfig(engine="torch", env_chunk=2, **compute),  # type: ignore[arg-type]
    )


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on one worker, eager, that nobody watches."""
    monkeypatch.setattr(device, "usable_cores", lambda: 2)
    monkeypatch.setattr(pieces, "MIN_CUT_WORK", 500_000)
    monkeypatch.setattr(products, "LARGE_WORK", 500_000)
    fresh(laid_out("off", workers=1, compile="off"), tmp_path / "plain")
    return tmp_path / "plain"


def test_workers_and_telemetry_change_no_bit(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set[tuple[int, int]]()

    def note(todo: list, workers: int) -> list:
        taken.add((len(todo), workers))
        return run_pieces(todo, workers)

    monkeypatch.setattr(pieces, "run_pieces", note)
    other = plain.with_name("other")
    fresh(laid_out("full", workers=0, compile="off"), other)
    assert taken == {(2, 2)}
    same(content(plain, ROUNDS), content(other, ROUNDS))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # inductor takes about a minute of one core
def test_a_cold_and_a_warm_cache_of_step_kernels_change_no_bit(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(plain.parent))
    cold, filled, warm = (plain.with_name(name) for name in ("cold", "filled", "warm"))
    watched = laid_out("full", workers=2)
    fresh(watched, cold)
    fresh(replace(watched, compute=replace(watched.compute, compile="on")), filled)
    fresh(watched, warm)
    told = [(path / "log.txt").read_text() for path in (cold, filled, warm)]
    assert ["compiled ahead of time" in text for text in told] == [False, True, True]
    for path in (cold, filled, warm):
        same(content(plain, ROUNDS), content(path, ROUNDS))
