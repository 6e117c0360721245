"""The harness does what it declares on both sides, keeps results, refuses the impossible."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
from hydra import compose, initialize_config_dir

from benchmarks import machine, sections
from benchmarks.baseline_text import Gate, Host, make_seed
from benchmarks.eps import benchmark, paired, percentiles, settings_from
from benchmarks.eps_config import EpsConfig, second_start
from benchmarks.loops import Crops, PlainLoop, ready_images
from benchmarks.records import keep, kept, place
from benchmarks.sides import EngineSide, planted
from benchmarks.timing import COLUMNS, BenchmarkError, Timing, in_columns, in_turns
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.hydra_versions import INITIALIZE
from esper_soa.config.nets import TaskConfig, TransformerConfig
from esper_soa.config.settings import ComputeConfig
from esper_soa.nets.model.blueprints import (
    GATE,
    SEQUENCE_BLUEPRINTS,
    gate_table,
    seed_forward,
    seed_table,
)
from esper_soa.nets.model.host import evaluate_forward, fold_batch_norm
from esper_soa.nets.seeds.seeds import SeedFiller
from esper_soa.system.errors import SettingError
from esper_soa.vocabulary import Blend, Op, Stage
from tests.benchmarks.here import stay_here

ROOT = Path(__file__).resolve().parents[2]
WORKS = sorted(path.stem for path in (ROOT / "benchmarks/conf/work").glob("*.yaml"))


def tiny(**changed: object) -> EpsConfig:
    """Two envs, two batches of four, one thread."""
    settings: dict = {"envs": 2, "batch_size": 4, "train_samples": 8, "val_samples": 8, "live": 1}
    settings |= {"num_slots": 2, "steps": 6, "timed_steps": 1, "repeats": 2, "limits": False}
    settings["policy"] = PolicyConfig(
        network=NetworkConfig(hidden=8, features=8), ppo=PPOConfig(target_kl=0, epochs=2)
    )
    cfg = EpsConfig(**settings | changed)
    cfg.compute.threads = 1
    cfg.compute.compile = "off"  # what takes a minute
    return cfg


@pytest.fixture(scope="module")
def record() -> Iterator[dict]:
    with pytest.MonkeyPatch.context() as patch:
        stay_here(patch)
        yield json.loads(json.dumps(benchmark(tiny())))


def test_both_sides_did_the_declared_images(record: dict) -> None:
    # T=8 for each of 2 envs; V=8 under 2 rows.
    point = record["points"][0]
    assert (point["work"]["train_images"], point["work"]["val_images"]) == (16, 32)
    for side in point["sides"].values():
        assert (side["train_images"], side["val_images"], side["rows"]) == (16, 32, 2)


def test_the_record_says_what_the_figures_depend_on(record: dict) -> None:
    assert {"commit", "machine", "settings", "limits", "busy", "time"} <= set(record)
    assert (record["machine"]["torch"], record["recompiled"]) == (torch.__version__, 0)
    engine, loop = (record["points"][0]["sides"][name] for name in ("engine", "baseline"))
    for side in (engine, loop):
        assert {"threads", "dtype", "peak_mib", "syncs", "graphs", "build_seconds"} <= set(side)
    assert list(engine["columns"]) == list(COLUMNS)
    assert list(loop["columns"]) == list(COLUMNS[:3]), "the plain loop has no update"
    ratios = record["points"][0]["ratios"]["baseline"]["all"]
    assert {"median", "lower", "upper", "low", "high"} == set(ratios)
    assert {"processes", "pinned", "tried_ms"} <= set(loop)


def test_an_env_step_of_the_engine_waits_a_few_times_and_the_loop_once(record: dict) -> None:
    engine, loop = (record["points"][0]["sides"][name]["syncs"] for name in ("engine", "baseline"))
    assert 0 < engine <= 3
    assert loop == 1


def test_people_and_the_readme_get_their_tables(record: dict) -> None:
    work = "| custom: N=2 B=4 T=8 V=8 K=2, seeds 1 conv_light |"
    sides = [line.split(" | ")[1] for line in sections.sides([record])[2:4]]
    assert sides == ["engine", "baseline"]
    head, _, row, *_ = sections.opponents([record])
    assert head.startswith("| work | engine, EPS")
    assert row.startswith(work)
    assert " | 1 threads | " in row


def test_results_are_appended(tmp_path: Path, record: dict) -> None:
    for _ in range(2):
        path = keep(record, str(tmp_path / "deep"), "mine")
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["custom"] * 2
    assert kept(tmp_path / "deep") == {"mine": [record, record]}


def test_every_env_step_has_its_time(record: dict) -> None:
    point = record["points"][0]
    found = point["sides"]["engine"]["env_step_ms"]
    assert 0 < found["median"] <= found["p95"]
    assert found["number"] == 2  # timings of one env-step; the first, which is not kept, apart
    assert "env_step_ms" not in point["sides"]["baseline"]
    assert sections.p95_cell(point["sides"]["engine"]) == f"{found['p95']:.0f}"
    assert percentiles([0.001 * number for number in range(101)]) == pytest.approx(
        {"median": 50, "p95": 95, "number": 101}
    )


def test_speeds_are_of_works_with_a_loop_beside_them_and_of_those_that_grow(record: dict) -> None:
    (point,) = record["points"]
    alone = point | {"sides": {"engine": point["sides"]["engine"]}, "ratios": {}}
    grown = alone | {"work": point["work"] | {"policy": "grower"}}
    _, _, first, second, *rest = sections.speed(
        [record | {"points": [one]} for one in (point, alone, grown)]
    )
    assert first.startswith("| custom | 2 | 4 | 8 | 8 | 2 | 1 conv_light | ")
    assert second.startswith("| custom | 2 | 4 | 8 | 8 | varies | by `grower` | ")
    assert [line for line in rest if line] == [f"Measured: {place(record)}."]
    assert second.endswith(" |  |  |")
    later = record | {"name": "later", "commit": "0" * 40}
    told = [line for line in sections.speed([record, later, record]) if line.startswith("Measured")]
    first, second = place(record), place(later)
    assert told == [f"Measured: custom: {first}.", f"Measured: later: {second}."]


def test_seeds_may_grow_by_the_policy() -> None:
    engine = EngineSide(tiny(live=0, grow=True, sides=["engine"], update=False, steps=30))
    engine.warm_up()
    with pytest.raises(BenchmarkError, match="no seed grows"):
        engine.check()
    for _ in range(20):
        engine.one_step()
    engine.check()
    state = engine.episode.env.state
    assert state.totals.germinated.sum() > 0
    with pytest.raises(SettingError, match="grow=True: must be with sides"):
        tiny(live=1, grow=True, sides=["engine"])


def test_a_driver_is_told_where_there_is_one(tmp_path: Path) -> None:
    told = tmp_path / "version"
    assert machine.driver_version(told) is None
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC 12.2")
    assert machine.driver_version(told) == "570.86.15"
    assert machine.package_version("no such package") is None
    version = machine.package_version("torch")
    assert version is not None
    assert torch.__version__.startswith(version)  # builds for CUDA add theirs


@pytest.mark.slow
def test_a_varied_setting_makes_points_that_are_compared_with_the_first() -> None:
    cfg = tiny(vary="envs", values=[1, 3], sides=["engine"], update=False)
    record = benchmark(cfg)
    points = record["points"]
    assert [(point["work"]["N"], point["value"]) for point in points] == [(1, 1), (3, 3)]
    assert "over_first" not in points[0]
    over = points[1]["over_first"]["engine"]
    step, env_step = (over[kind]["all"]["median"] for kind in ("step", "env_step"))
    assert step == pytest.approx(3 * env_step)
    first, second = sections.within([record])[2:4]
    assert first.startswith("| custom: N=1 B=4 T=8 V=8 K=2, seeds 1 conv_light |")
    assert " | first |  |" in first
    assert second.startswith("| custom: N=3 B=4 T=8 V=8 K=2, seeds 1 conv_light |")


# --- the work


def test_seeds_stay_where_they_were_put() -> None:
    cfg = tiny(live=2, update=False)
    engine = EngineSide(cfg)
    loop = PlainLoop(cfg, range(cfg.envs))
    engine.warm_up()
    engine.run()
    played = loop.play(2)
    assert engine.episode.env.state.slots.stage.eq(Stage.BLENDING).all()
    machines = [one for env, _ in loop.envs for one in env.machines]
    assert {one.seed.stage for one in machines} == {Stage.BLENDING}
    assert engine.val_images() == played.done.val == 2 * 8 * 4


def test_a_seed_that_is_lost_is_an_error() -> None:
    engine = EngineSide(tiny(update=False))
    engine.warm_up()
    engine.episode.env.state = planted(engine.episode.env.state, tiny(live=2))
    with pytest.raises(BenchmarkError, match="4 seeds are live"):
        engine.check()


def test_the_policy_decides_but_nothing_is_done() -> None:
    engine = EngineSide(tiny(live=0))
    engine.warm_up()
    rollout = engine.episode.rollout
    assert rollout is not None
    assert rollout.rows.action.op[: engine.step].eq(Op.WAIT).all()
    assert rollout.rows.log_probs[: engine.step].ne(0).any(), "no policy has decided"


def test_both_sides_are_given_the_same_images_and_crops_are_windows_of_them() -> None:
    cfg = tiny()
    engine = EngineSide(cfg)
    train, _, val = ready_images(cfg, torch.device("cpu"))
    (images, labels), *_ = engine.world.validation.batches(torch.tensor([0]), 8)
    pairs = sorted(zip(*val, strict=True), key=lambda pair: int(pair[1]))
    for mine, (image, label) in zip(labels.flatten().argsort(), pairs, strict=True):
        assert labels[mine] == label
        torch.testing.assert_close(images[mine], image)
    loop = PlainLoop(cfg, range(1))
    rows = torch.arange(4)
    assert isinstance(loop.source, Crops)
    crops, _ = loop.source.cut(rows, torch.Generator().manual_seed(1))
    assert crops.is_contiguous(memory_format=torch.channels_last)
    black = train.amin(dim=(0, 2, 3)).view(1, -1, 1, 1)
    padded = torch.nn.functional.pad(train[:4] - black, (4,) * 4) + black
    for crop, image in zip(crops, padded, strict=True):
        windows = [way.unfold(1, 32, 1).unfold(2, 32, 1) for way in (image, image.flip(2))]
        windows = torch.stack(windows).permute(0, 2, 3, 1, 4, 5)  # [2, 9, 9, C, 32, 32]
        assert (windows == crop).flatten(3).all(3).any()


# --- text


def text_work(**changed: object) -> EpsConfig:
    sizes = TransformerConfig(width=8, layers=2, heads=2, context=6, segments=2)
    names = [one.name for one in SEQUENCE_BLUEPRINTS[1:]]
    task = TaskConfig(
        host="transformer", num_classes=256, blueprints=names, optimizer="adamw", transformer=sizes
    )
    return tiny(task=task, blueprint="mlp_small", **changed)


def test_on_text_both_sides_do_the_declared_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_here(monkeypatch)
    point = benchmark(text_work())["points"][0]
    for side in point["sides"].values():
        assert (side["train_images"], side["val_images"], side["rows"]) == (96, 192, 2)
    with pytest.raises(SettingError, match="without bare where hosts read text"):
        text_work(sides=["bare"], live=0)


def test_the_loop_on_text_has_the_networks_of_the_engine() -> None:
    cfg = text_work()
    side = EngineSide(cfg)
    side.begin()
    shape = side.world.rules.nets.shape
    row = side.world.weights["host", "params"][:1]
    loop = PlainLoop(cfg, range(1))
    ((tokens, following), *_) = loop.source.validation(4)
    assert torch.equal(tokens.flatten()[1:6], following[:5])
    host = Host(cfg.task)
    host.load_flat(row[0])
    folded = fold_batch_norm(shape, shape.parameters.unpack(row), [])
    expected = evaluate_forward(shape, folded, tokens, SeedFiller([], 1))[:, 0].flatten(0, 1)
    torch.testing.assert_close(host(tokens, {}).detach(), expected)
    x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
    for blueprint in shape.blueprints[1:]:
        table = seed_table(blueprint, 8)
        seed = make_seed(blueprint.code, 8, Blend.ADD)
        assert seed.num_parameters() == table.total
        numbers = torch.randn(1, table.total, generator=torch.Generator().manual_seed(2))
        seed.load_flat(numbers[0])
        found = seed(x.transpose(1, 2)).detach().transpose(1, 2)
        torch.testing.assert_close(found, seed_forward(blueprint, table.unpack(numbers), x))
    gate = Gate(8)
    numbers = torch.randn(1, gate_table(8).total, generator=torch.Generator().manual_seed(3))
    gate.load_flat(numbers[0])
    amplitudes = GATE.forward(gate_table(8).unpack(numbers), x).squeeze(-1)
    torch.testing.assert_close(gate(x.transpose(1, 2)).detach()[:, 0], amplitudes)


# --- turns and ratios


class Tick:
    """A contestant whose timings are written down beforehand."""

    def __init__(self, seconds: list[float], envs: int = 1) -> None:
        self.cfg = tiny(envs=envs)
        self.timings = [Timing(dict.fromkeys(COLUMNS[:3], one / 3), {}) for one in seconds]


def test_what_no_phase_has_counted_belongs_to_the_last_column() -> None:
    phases = {"training": 1.0, "data": 2.0, "validation": 4.0, "reset": 8.0, "files": 16.0}
    work = {"training": 3.0, "validation": 4.0}
    last = "policy and state machine"
    assert in_columns(phases, 40.0) == work | {last: 24.0 + 9.0}
    assert in_columns(phases, 30.0) == work | {last: 24.0}, "clocks differ a little"
    found = in_columns(phases, 40.0, COLUMNS)
    assert found == work | {last: 24.0, "update": 9.0}


def test_turns_alternate() -> None:
    assert list(in_turns(["a", "b"], 3)) == ["a", "b", "b", "a", "a", "b"]


def test_ratios_are_of_the_same_turn() -> None:
    # Turns 3/1, 4/2, 10/5: ratios 3, 2, 2, not the ratio of the medians, 4/2.
    top = Tick([3.0, 4.0, 10.0], envs=4)
    bottom = Tick([1.0, 2.0, 5.0], envs=2)
    found = paired(bottom, top)  # type: ignore[arg-type]
    spread = {"median": 2, "lower": 2, "upper": 2.5, "low": 2, "high": 3}
    assert found["all"] == pytest.approx(spread)
    assert paired(bottom, top, per_env=True)["all"]["median"] == pytest.approx(1)  # type: ignore[arg-type]


# --- settings


@pytest.mark.parametrize("work", WORKS)
def test_every_named_work_is_a_legal_one(work: str) -> None:
    with initialize_config_dir(str(ROOT / "benchmarks/conf"), **INITIALIZE):
        cfg = settings_from(compose("eps", [f"+work={work}"]))
    assert cfg.name == work
    assert cfg.points()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sides": ["enigne"]}, "sides=enigne: must be one of engine, baseline, bare"),
        ({"sides": ["engine", "bare"]}, "must be without bare where live is above 0"),
        ({"live": 3}, "live=3: must be at most 2"),
        ({"live": -1}, "live=-1: must be at least 0"),
        ({"train_samples": 9}, "train_samples=9: must be a multiple of batch_size=4"),
        ({"repeats": 1}, "repeats=1: must be at least 2"),
        ({"timed_steps": 6}, "timed_steps=6: must be at most 5"),
        ({"vary": "envy", "values": [1]}, "vary=envy: must be one of envs, batch_size"),
        ({"vary": "envs"}, "values="),
        ({"vary": "live", "values": [3]}, "live=3"),
        ({"num_slots": 9}, "num_slots=9: must be at most 6"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(changed: dict, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        tiny(**changed)
    assert message in str(caught.value)


@pytest.mark.slow
def test_the_command_ends_with_one_json_line(tmp_path: Path) -> None:
    sizes = "envs=1 batch_size=2 train_samples=2 val_samples=2 num_slots=1 repeats=2 steps=3"
    overrides = f"{sizes} timed_steps=1 update=false limits=false compute.compile=off"
    overrides = [*overrides.split(), f"results={tmp_path}"]
    asked = [sys.executable, "-m", "benchmarks.eps", *overrides]
    done = warm.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "custom.jsonl").read_text()) == last


@pytest.mark.parametrize(
    ("setting", "device", "taken"),
    [("auto", "cpu", "on"), ("off", "cpu", "off"), ("auto", "cuda", "auto")],
)
def test_the_engine_is_timed_as_at_the_second_start_of_a_run(
    setting: str, device: str, taken: str
) -> None:
    assert second_start(ComputeConfig(compile=setting), device).compile == taken


def test_peak_memory_is_what_was_added_at_most() -> None:
    cpu = torch.device("cpu")
    before = machine.forget_peak(cpu)
    big = torch.ones(2**24)  # 64 MiB
    del big
    assert 60 < (machine.peak(cpu) - before) / machine.MIB < 200
    machine.forget_peak(cpu)
    assert (machine.peak(cpu) - before) / machine.MIB < 60
