"""What decides is tried as CUDA graphs before a run: what agrees is replayed, all else is dropped
and says why.
"""

import gc
import io
import json
import math
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import pytest
import torch
from nets.stand_in import EMPTY, stand_in
from rich.console import Console
from tiny_world import CPU, tiny_settings
from torch import Tensor

from benchmarks.sync_guard import SyncGuard
from esper_soa.agent.config import NetworkConfig, PPOConfig
from esper_soa.agent.policy import CapturedPolicy
from esper_soa.build import build_player, build_rules, build_world, replaying
from esper_soa.config import TrainConfig
from esper_soa.env.step import EAGER, Observed, Rules, StepKernels, StepResult, apply_action
from esper_soa.errors import fault_in_words
from esper_soa.nets.graphs import (
    GRADIENTS,
    PARTS,
    POLICY,
    STATE,
    CapturedCall,
    Replay,
    StepCache,
    _Kept,
)
from esper_soa.nets.trial import PASSES
from esper_soa.nets.verdicts import keep_verdict
from esper_soa.ops import replay
from esper_soa.ops.collect import Player, Round, play_round
from esper_soa.ops.progress import Progress
from esper_soa.ops.replay import (
    TOLERANCE,
    TriedPart,
    distance,
    tried_parts,
    try_replay,
    verdict_key,
    weighed_replay,
)
from esper_soa.ops.rundir import RunFolder
from esper_soa.ops.session import session
from esper_soa.running import Run
from esper_soa.state import Action
from esper_soa.trainer import run

STEPS = 5
GPU = torch.device("cuda", 1)
Apply = Callable[[Rules, Observed, Action], StepResult]


def settings(envs: int = 4, slots: int = 3, steps: int = STEPS) -> TrainConfig:
    cfg = tiny_settings(envs, slots, steps)
    cfg.compute.engine = "torch"
    cfg.policy.network = NetworkConfig(hidden=32, features=16)
    cfg.policy.ppo = PPOConfig(
        epochs=3, minibatches=2, entropy_anneal_rounds=4, entropy_coef_end=0.01
    )
    return cfg


def static() -> StepCache[CapturedCall]:
    return StepCache(capture=False)


def tried(
    cfg: TrainConfig,
    apply: Apply = apply_action,
    make: Callable[[], StepCache[CapturedCall]] = static,
) -> dict[str, TriedPart]:
    """What becomes of all parts; apply: of the state machine."""
    kernels = StepKernels(EAGER.record_and_observe, apply)
    found = try_replay(cfg, build_rules(cfg, CPU), kernels, PARTS, make)
    assert [one.name for one in found] == list(PARTS)
    return {one.name: one for one in found}


# --- what agrees


class Refusing(StepCache[CapturedCall]):
    """Keeps steps and refuses what a capture would: that the host waits for the device."""

    made: list["Refusing"] = []

    def __init__(self) -> None:
        super().__init__(capture=False)
        self.made.append(self)

    def _advance_(self, kept: _Kept[CapturedCall], variant: int) -> None:
        with SyncGuard():
            super()._advance_(kept, variant)


@pytest.mark.parametrize(("slots", "steps"), [(3, 8), (6, 2)])
def test_every_call_of_a_run_agrees_to_the_bit_with_itself_on_static_buffers(
    slots: int, steps: int
) -> None:
    cfg = settings(4, slots, steps)
    cfg.telemetry.level = "full"
    cfg.policy.imitation.rounds = 1
    Refusing.made.clear()
    found = tried(cfg, make=Refusing)
    for one in found.values():
        assert (one.dropped, one.apart, one.memory) == ("", 0.0, 0)
        assert 0 < one.seconds < 60 > one.as_written > 0
        assert one.words().startswith(f"{one.name}: ")
    names = [{key[0] for key in steps._kept} for steps in Refusing.made]  # type: ignore[index]
    assert [len(one) for one in names] == [3, 2, 2]
    assert names[1:] == [{"act", "act openly"}, {("update", 0), ("imitate", 0)}]
    for steps_of_a_part in Refusing.made:
        assert all(kept.runs[0] >= PASSES for kept in steps_of_a_part._kept.values())


def test_a_part_that_nobody_calls_is_not_believed() -> None:
    cfg = settings()
    cfg.policy.name = "random"
    found = try_replay(cfg, build_rules(cfg, CPU), EAGER, [STATE], static)
    assert [(one.name, one.dropped) for one in found] == [(STATE, "")]
    idle = replay.ComparedSteps(static(), [], CPU).verdict("idle")
    assert idle.dropped == "nothing of it was tried"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_part_is_replayed_on_a_gpu() -> None:
    cfg = settings()
    device = torch.device("cuda")
    cfg.telemetry.level = "full"
    cfg.policy.imitation.rounds = 1
    found = try_replay(
        cfg, build_rules(cfg, device), EAGER, PARTS, lambda: StepCache(capture=True, device=device)
    )
    assert [one.dropped for one in found] == [""] * len(PARTS)


# --- what is dropped


def reading(rules: Rules, observed: Observed, action: Action) -> StepResult:
    """Waits for the device, as no capture allows."""
    assert int(action.op.max()) >= 0
    return apply_action(rules, observed, action)


class Counting:
    """Pays more with every call: what a graph would do again is not what the call would do."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rules: Rules, observed: Observed, action: Action) -> StepResult:
        self.calls += 1
        result = apply_action(rules, observed, action)
        return result._replace(terms=result.terms.replace(total=result.terms.total + self.calls))


def failing(rules: Rules, observed: Observed, action: Action) -> StepResult:
    raise ZeroDivisionError("no such thing")


def others_agree(found: dict[str, TriedPart], but: str) -> bool:
    return all(not one.dropped and one.apart == 0 for name, one in found.items() if name != but)


def test_a_step_that_raises_where_it_is_kept_is_dropped_alone() -> None:
    found = tried(settings(), reading, Refusing)
    assert "it fails with" in found[STATE].dropped
    assert found[STATE].words().startswith("state machine: left out, as it fails with ")
    assert math.isnan(found[STATE].seconds)
    assert others_agree(found, STATE)


def test_a_step_that_disagrees_is_dropped_alone() -> None:
    found = tried(settings(), Counting())
    assert found[STATE].dropped.startswith("its results are ")
    assert found[STATE].dropped.endswith(f" from those as written, and {TOLERANCE:.0e} is rounding")
    assert others_agree(found, STATE)


def test_a_graph_that_records_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = stand_in(monkeypatch, EMPTY)
    found = tried(settings(), make=lambda: StepCache(capture=True, device=GPU))
    for one in found.values():
        assert one.dropped == "it fails with EmptyGraphError: a graph captured on cuda:1 is empty"
    assert happened.count("begin in pool") == len(PARTS)  # nobody tries again


def test_what_failed_within_a_capture_is_told_with_the_end_of_the_capture_that_fails_then() -> None:
    first = ZeroDivisionError("no such\nthing")
    last = RuntimeError("capture ended")
    assert fault_in_words(last) == "it fails with RuntimeError: capture ended"
    last.__context__ = first
    told = "it fails with RuntimeError: capture ended, after ZeroDivisionError: no such\\nthing"
    assert fault_in_words(last) == told


def test_a_replay_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = stand_in(monkeypatch)
    found = tried(settings(), make=lambda: StepCache(capture=True, device=GPU))
    for one in found.values():
        assert one.dropped.startswith("its results are "), one
    assert happened.count("replay") > len(PARTS)


def test_a_trial_that_fails_itself_leaves_all_out() -> None:
    for one in tried(settings(), failing).values():
        assert one.dropped == "the trial fails: it fails with ZeroDivisionError: no such thing"


def test_settings_that_a_trial_cannot_be_made_with_leave_all_out_too() -> None:
    for one in tried(settings(envs=1)).values():
        assert one.dropped.startswith(
            "the trial fails: it fails with SettingError: policy.ppo.minibatches=2: must be"
        )


def test_in_place_changes_are_compared_too() -> None:
    weights = torch.ones(3)

    class Lost(StepCache[CapturedCall]):
        def run_(self, key: Hashable, fresh: CapturedCall, variants: Sequence[int]) -> CapturedCall:
            done = super().run_(key, fresh, variants)
            weights.zero_()
            return done

    def grown(by: Tensor) -> Tensor:
        return weights.add_(by).sum()

    steps = replay.ComparedSteps(Lost(capture=False), [weights], CPU)
    steps.run_(
        "grow", CapturedCall(grown, [torch.ones(3)], torch.utils._pytree.tree_flatten((0,))[1]), [0]
    )
    assert steps.dropped
    assert weights.tolist() == [2.0] * 3


def test_distances_are_relative_and_infinite_where_nothing_is_rounded() -> None:
    one = torch.tensor([3.0, 4.0])
    nan = torch.tensor([math.nan, 1.0])
    assert distance([one + torch.tensor([0.0, 5e-3])], [one]) == pytest.approx(1e-3, rel=1e-4)
    assert distance([nan, torch.tensor([True])], [nan.clone(), torch.tensor([True])]) == 0
    assert distance([torch.tensor([math.inf])], [torch.tensor([math.inf])]) == 0
    assert distance([torch.tensor([1e-7])], [torch.tensor([0.0])]) == pytest.approx(1e-5, rel=1e-3)
    for found, wanted in (
        ([1, 2], [1, 3]),
        ([True], [False]),
        ([math.nan], [1.0]),
        ([1.0], [math.nan]),
    ):
        assert distance([torch.tensor(found)], [torch.tensor(wanted)]) == math.inf


# --- what a run notices of it


def numbers_of(trials: bool) -> dict[str, Tensor]:
    """Everything that two rounds of a run leave, with or without trials before, within and between
    them.
    """
    cfg = settings()
    found = {}

    def attempt(rules: Rules, kernels: StepKernels) -> None:
        if trials:
            assert not any(one.dropped for one in try_replay(cfg, rules, kernels, PARTS, static))

    torch.manual_seed(7)
    attempt(build_rules(cfg, CPU), EAGER)
    world = build_world(cfg, CPU)
    attempt(world.rules, world.kernels)
    player = build_player(cfg, world)
    assert player.learner is not None
    for number in range(2):
        quiet = Progress(4 * STEPS, Console(file=io.StringIO()), "off")
        result, rollout = play_round(
            world, Player(player.agent, player.learner), Round(number, quiet)
        )
        attempt(world.rules, world.kernels)
        assert rollout is not None
        report = player.learner.update(rollout) | {
            name: value for name, value in result.record.items() if isinstance(value, float)
        }
        found |= {
            f"{number}/{name}": torch.tensor(value).nan_to_num() for name, value in report.items()
        }
    found |= {name: value.clone() for name, value in world.weights.flatten_keys(".").items()}
    found |= player.learner.policy.state_dict() | player.learner.adam._asdict()
    return found | {"torch's own": torch.get_rng_state(), "next": torch.rand(3)}


def test_a_run_is_the_same_to_the_bit_with_a_trial_as_without() -> None:
    wanted = numbers_of(False)
    found = numbers_of(True)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_trial_leaves_no_tensor_behind() -> None:
    cfg = settings()
    rules = build_rules(cfg, CPU)

    def alive() -> int:
        try_replay(cfg, rules, EAGER, PARTS, static)
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    alive()  # what is made once and kept
    gc.disable()  # nobody else cleans up
    try:
        assert alive() == alive()
    finally:
        gc.enable()


def test_every_part_takes_a_line_of_the_log_and_what_is_left_out_a_warning(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    found = Replay((STATE,), "replayed as CUDA graphs: state machine", ("a", "b"), ("c",))
    with session(folder) as within:
        job = Run(settings(), within)
        job.world.kernels = job.world.kernels._replace(replay=found)
        job.announce()
    lines = [
        line for line in (tmp_path / "log.txt").read_text().splitlines() if "graphs   " in line
    ]
    told = [line.split(" ", 2)[2] for line in lines]
    assert told == [
        f"INFO graphs   {found.reason}",
        "WARNING graphs   c",
        "INFO graphs   a",
        "INFO graphs   b",
    ]


@pytest.mark.parametrize("part", PARTS)
def test_a_run_keeps_the_steps_of_what_is_replayed_and_no_others(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    cfg = settings()
    world = build_world(cfg, CPU)
    world.kernels = replaying(world.kernels, Replay((part,)), CPU)
    player = build_player(cfg, world)
    assert player.learner is not None
    kept = {STATE: world.kernels.steps, GRADIENTS: player.learner.steps}
    if isinstance(player.agent, CapturedPolicy):
        kept[POLICY] = player.agent.steps
        assert player.agent.policy is player.learner.policy
    assert [name for name, steps in kept.items() if steps is not None and steps.capture] == [part]


def test_what_a_run_on_a_cpu_replays_stands_with_its_versions(tmp_path: Path) -> None:
    cfg = settings(2)
    cfg.control = "none"
    cfg.report = False
    assert cfg.compute.cuda_graphs == "auto"
    run(cfg, RunFolder(tmp_path))
    words = "nothing is replayed (compute.cuda_graphs=auto on cpu)"
    written = json.loads((tmp_path / "versions.json").read_text())["graphs"]
    assert written == {"replayed": "", "reason": words, "tried": ""}


# --- verdicts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "esper_soa" / "engines"


@pytest.mark.usefixtures("cache")
def test_where_nothing_can_be_captured_a_run_goes_on_without_and_says_so_once() -> None:
    cfg = settings()
    found = weighed_replay(cfg, build_rules(cfg, CPU), EAGER)
    assert (found.parts, found.tried) == ((), ())
    assert found.reason == "replayed as CUDA graphs: nothing (tried now)"
    assert [
        one.partition(": left out, as the trial fails: it fails with ")[0] for one in found.dropped
    ] == list(PARTS)
    again = weighed_replay(cfg, build_rules(cfg, CPU), EAGER)
    assert again.reason.endswith("(found at an earlier run)")
    assert again.dropped == found.dropped


@pytest.mark.usefixtures("cache")
def test_what_agreed_at_an_earlier_run_is_replayed_and_only_that() -> None:
    cfg = settings()
    keep_verdict(
        verdict_key(cfg, CPU, 1),
        [
            TriedPart(STATE, "", 0.0, 1e-3, 40e-3, 5),
            TriedPart(POLICY, "it fails"),
            TriedPart(GRADIENTS, "", 0.0, 2e-3, 9e-3),
        ],
    )
    found = weighed_replay(cfg, build_rules(cfg, CPU), EAGER)
    assert found.parts == (STATE, GRADIENTS)
    assert found.tried[0] == "state machine: 1.00 ms replayed, 40.00 ms as written"
    assert found.dropped == ("policy: left out, as it fails",)
    assert found.facts() == {
        "replayed": "state machine, gradient steps",
        "reason": "replayed as CUDA graphs: state machine, gradient steps (found at an earlier run)",  # noqa: E501
        "tried": "; ".join(found.dropped + found.tried),
    }
    assert found.steps(POLICY, CPU) is None
    assert not found.insists


def test_a_verdict_holds_for_what_it_was_found_for() -> None:
    cfgs = [settings() for _ in range(9)]
    cfgs[1].envs, cfgs[2].steps, cfgs[3].slots = 9, 9, cfgs[3].slots[:2]
    cfgs[4].policy.network.hidden = 64
    cfgs[5].compute.compile = "on"
    cfgs[6].telemetry.level = "full"
    cfgs[7].governor.enabled, cfgs[8].attribution.pairs = False, not cfgs[8].attribution.pairs
    keys = [verdict_key(cfg, CPU, 1) for cfg in cfgs]
    keys += [verdict_key(cfgs[0], CPU, 2), verdict_key(cfgs[0], torch.device("meta"), 1)]
    assert len(set(keys)) == len(keys)
    other = settings()
    other.seed = 7
    other.name = "another"
    other.rounds = 99
    assert verdict_key(other, CPU, 1) == keys[0]


def test_what_a_run_does_not_have_or_cannot_repeat_is_not_tried() -> None:
    cfg = settings()
    shared = {one.name: one.dropped for one in tried_parts(cfg, build_rules(cfg, CPU), EAGER, 2)}
    assert shared[GRADIENTS] == "ranks take them together"
    cfg.policy.name = "wait"
    assert [one.name for one in tried_parts(cfg, build_rules(cfg, CPU), EAGER, 1)] == [STATE]
