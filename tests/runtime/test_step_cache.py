"""Step kernels compiled ahead of time: kept whole, taken as they were made, equal to the bit."""

import json
import math
import os
import pickle
import platform
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from copy import copy
from itertools import chain
from pathlib import Path

import pytest
import tensordict
import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.config.env import (
    REWARD_MODES,
    EarlyStopConfig,
    GatesConfig,
    LifecycleConfig,
    RewardConfig,
)
from esper_soa.config.ranges import Settings
from esper_soa.config.settings import ComputeConfig
from esper_soa.env.ahead import (
    KERNELS,
    LibraryError,
    example_inputs,
    example_values,
    given_by_env,
    leaves,
    numbers_of,
    plain_numbers,
    rebuild,
    with_numbers,
)
from esper_soa.env.step import EAGER, EnvRules
from esper_soa.runtime import compile_step, step_cache
from esper_soa.runtime.compile_step import differs
from esper_soa.runtime.step_cache import (
    LIBRARY_FILES,
    QUIET,
    REFUSAL_ENTRY,
    STEP_FOLDER,
    digests,
    find,
    only_compiler,
    remove,
    step_key,
    store,
    stored_kernels,
    unsupported,
)
from esper_soa.state import Action, Costs, same_bits
from esper_soa.system.caches import open_cache
from esper_soa.system.signals import Interrupted, signal_handlers
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop.callbacks import Callback, EnvStep, RunView
from esper_soa.training.loop.trainer import run_in_session
from esper_soa.vocabulary import HEAD_NAMES, Stage
from tests.builders import warm
from tests.builders.equal_runs import assert_equal_runs, settings
from tests.builders.program import ENVIRONMENT
from tests.builders.tiny_runs import log_of
from tests.builders.tiny_world import CPU, rules_from, tiny_rules, tiny_settings

ENVS = 3
COSTS = ("counts", "flop")  # of rewards, by hosts and seeds
SHORT = 4  # env-steps of a run that compiles nothing beside itself


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of step kernels of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return open_cache(STEP_FOLDER)


def made_files(folder: Path) -> Path:
    """A draft of files that are no libraries."""
    draft = folder / "draft"
    draft.mkdir(mode=0o700)
    for name in LIBRARY_FILES:
        (draft / name).write_text(name)
    return draft


def told(rules: EnvRules, env_steps: int = SHORT) -> str:
    """The reason of kernels that are the eager ones."""
    kernels = stored_kernels(rules, ENVS, env_steps, wait=False)
    assert kernels[:2] == EAGER[:2]
    return kernels.reason.removeprefix("not compiled: ")


def test_what_is_stored_is_found_and_what_was_changed_is_not(folder: Path) -> None:
    draft = made_files(folder)
    manifest = digests(draft)
    assert find(folder, "key") is None
    store(draft, folder, "key", manifest)
    assert find(folder, "key") == manifest
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder / "key").iterdir()}
    assert modes == {0o600}
    assert not draft.exists()
    for name in LIBRARY_FILES:
        content = (folder / "key" / name).read_bytes()
        (folder / "key" / name).write_bytes(content + b"x")
        assert find(folder, "key") is None
        (folder / "key" / name).write_bytes(content)
    (folder / "key").chmod(0o777)
    assert find(folder, "key") is None


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_whatever_is_in_the_place_of_a_key_makes_room(folder: Path, kind: str) -> None:
    place = folder / "key"
    if kind == "file":
        place.write_text("")
    elif kind == "link":
        place.symlink_to(folder / "elsewhere")
    else:
        (place / "inner").mkdir(parents=True)
    assert find(folder, "key") is None
    draft = made_files(folder)
    store(draft, folder, "key", digests(draft))
    assert find(folder, "key") is not None


def test_a_refusal_is_kept_and_said(folder: Path) -> None:
    rules = tiny_rules(2, 6)
    draft = folder / "draft"
    draft.mkdir(mode=0o700)
    store(draft, folder, step_key(rules), {REFUSAL_ENTRY: "it rounds"})
    assert told(rules) == "it rounds"
    manifest = folder / step_key(rules) / "sha256.json"
    os.utime(manifest, (0, time.time() - 25 * 3600))
    assert told(rules).startswith("the cache lacks them")  # so it is tried again


def test_the_key_follows_the_structure_of_what_kernels_read() -> None:
    rules = tiny_rules(2, 6)
    others = [
        tiny_rules(3, 6),
        tiny_rules(2, 6, RewardConfig(mode="escrow")),
        tiny_rules(2, 6, RewardConfig(disable_pbrs=True)),
        tiny_rules(2, 6, RewardConfig(mode="basic")),
        tiny_rules(2, 6, RewardConfig(mode="basic", drip_fraction=0.5)),
        rules._replace(lifecycle=LifecycleConfig(auto_forward_g1=True)),
        rules._replace(gates=GatesConfig(permissive=False)),
        rules._replace(early_stop=EarlyStopConfig(rollbacks=1)),
        rules._replace(blueprints=F.pad(rules.blueprints, (0, 1))),
        rules._replace(observed=("reward.rent_weight",)),
        rules_from(tiny_settings(4, 2, 6, RewardConfig(mode="[shaped,escrow]")), CPU),
        rules_from(tiny_settings(4, 2, 6, RewardConfig(mode="[escrow,shaped]")), CPU),
    ]
    assert step_key(tiny_rules(2, 6)) == step_key(rules)
    assert len({step_key(one) for one in (rules, *others)}) == 1 + len(others)


def with_other_numbers(part: Settings) -> Settings:
    """The settings with another value of every number."""
    changed = copy(part)
    numbers = {name: one + 1 for name, one in vars(part).items() if type(one) in (int, float)}
    vars(changed).update(numbers)
    return changed


def test_runs_that_differ_in_numbers_share_their_kernels_which_heed_those_they_are_given() -> None:
    """All numbers, of networks and early ends too: given as tensors they do what they do as such,
    to the bit.
    """
    cfg = RewardConfig(mode="escrow", drip_fraction=0.0)
    rules = tiny_rules(2, 6, cfg)._replace(early_stop=EarlyStopConfig(patience=3))
    reward = rules.reward
    config = with_other_numbers(reward.config)
    vars(config).update(loss=with_other_numbers(cfg.loss), drip_fraction=0.0)
    costs = {name: Costs(*(part + 1 for part in getattr(reward, name))) for name in COSTS}
    parts = ("gates", "lifecycle", "signals", "governor", "early_stop")
    other = rules._replace(
        **{name: with_other_numbers(getattr(rules, name)) for name in parts},
        reward=reward._replace(config=config, **costs).lasting(9),
        blueprints=~rules.blueprints,
        max_seeds=1,
    )
    assert step_key(other) == step_key(rules)
    assert {*chain(*plain_numbers(other))} == {*chain(*plain_numbers(rules))}
    for one in map(given_by_env, (rules, other)):
        plain = with_numbers(one, numbers_of(one))
        for kernel, inputs in zip(KERNELS.values(), example_inputs(one, ENVS), strict=True):
            assert same_bits(leaves(kernel(one, *inputs)), leaves(kernel(plain, *inputs)))


def test_the_key_follows_sources_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tiny_rules(2, 6)
    keys = {step_key(rules)}
    copy = tmp_path / "esper_soa"
    shutil.copytree(Path(step_cache.__file__).parents[1], copy)
    monkeypatch.setattr(step_cache, "__file__", str(copy / "runtime" / "step_cache.py"))
    assert {step_key(rules)} == keys
    names = ("env/governor.py", "env/ahead.py", "runtime/compile_step.py", "vocabulary.py")
    for name in (*names, "state.py", "config/env.py"):
        with (copy / name).open("a") as source:
            source.write("\n")
        keys.add(step_key(rules))
    for package in (torch, tensordict):
        monkeypatch.setattr(package, "__version__", "2.99")
        keys.add(step_key(rules))
    here = step_cache.this_processor()
    kinds = here._replace(kind="another"), here._replace(kind="")
    for other in (here._replace(machine="another"), *kinds):
        monkeypatch.setattr(step_cache, "this_processor", lambda other=other: other)
        keys.add(step_key(rules))
    monkeypatch.setattr(platform, "processor", lambda: "of no known kind")
    keys.add(step_key(rules))
    assert len(keys) == 13


PLAIN = dict(KERNELS)


class StandIn:
    """A library that computes what the eager kernel does, `error` added to its first number."""

    error = 0.0
    rules = tiny_rules(2, 6)

    places: list[Path] = []  # where archives were unpacked

    def __init__(self, path: str) -> None:
        self.loader = self
        self.places.append(Path(os.environ["TMPDIR"]))
        (self.places[-1] / "unpacked").touch()
        self.name = Path(path).stem
        if not Path(path).exists():
            raise RuntimeError(f"{path} does not exist")

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """The results as a library gives them."""
        like = example_inputs(self.rules, ENVS)[[*KERNELS].index(self.name)]
        inputs = rebuild(like, iter(tensors))
        results = leaves(PLAIN[self.name](self.rules, *inputs))
        number = next(i for i, one in enumerate(results) if one.is_floating_point())
        return [one + self.error if i == number else one for i, one in enumerate(results)]


def test_libraries_are_taken_only_where_they_equal_the_eager_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor, "aoti_load_package", StandIn)
    draft = made_files(folder)
    key = step_key(StandIn.rules)
    store(draft, folder, key, digests(draft))
    os.utime(folder / key / step_cache.MANIFEST_FILE, (0, 0))
    temporary = os.environ.get("TMPDIR")
    kernels = stored_kernels(StandIn.rules, ENVS, SHORT, wait=False)
    assert os.environ.get("TMPDIR") == temporary
    assert StandIn.places
    assert not any(place.exists() for place in StandIn.places)
    assert kernels.reason == f"compiled ahead of time, equal to the bit: {folder / key}"
    assert (folder / key / step_cache.MANIFEST_FILE).stat().st_mtime > 0  # it was used
    inputs, _ = example_inputs(StandIn.rules, ENVS + 1)
    refusal = "^inputs of other dtypes or shapes than the kernels were loaded for$"
    state, measured, values = inputs
    narrow = measured[:ENVS].replace(val_loss=measured.val_loss[:ENVS].float())
    for given in (inputs, (state[:ENVS], narrow, values)):
        with pytest.raises(LibraryError, match=refusal):
            kernels.record_and_observe(StandIn.rules, *given)
    monkeypatch.setattr(StandIn, "error", 1e-15)
    wrong = f"the libraries of {folder / key} do not compute what they should"
    assert told(StandIn.rules) == wrong


class Beside(Callback):
    """Compiles the kernels of a run during the second env-step of its first round."""

    live = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_run_start(self, run: RunView) -> None:
        """The library of the run."""
        StandIn.rules = run.world.rules

    def on_env_step(self, run: RunView, env_step: EnvStep) -> None:
        """The cache is filled."""
        if (env_step.round, env_step.step) == (1, 2):
            draft = made_files(self.folder)
            store(draft, self.folder, step_key(run.world.rules), digests(draft))


def test_a_run_takes_kernels_that_are_compiled_beside_it_before_its_next_env_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor, "aoti_load_package", StandIn)
    monkeypatch.setattr(StandIn, "rules", StandIn.rules)
    paths = [tmp_path / mode for mode in ("off", "auto")]
    for path in paths:
        path.mkdir()
        compute = ComputeConfig(threads=1, workers=1, engine="torch", compile=path.name)
        with session(RunFolder(path)) as opened:
            run_in_session(opened, settings(compute=compute), None, callbacks=[Beside(folder)])
        remove(folder / step_key(StandIn.rules))
    first, *_, last = [line for line in log_of(paths[1]) if "kernels of the env state" in line]
    assert "not compiled: the cache lacks them" in first
    assert last.endswith(", from env-step 3 of round 1 on")
    assert json.loads((paths[1] / "versions.json").read_text())["state"] in last
    assert_equal_runs(*paths)


class Witness(StandIn):
    """A library whose first calls are right."""

    calls: list[tuple] = []  # what the kernels were given
    right = math.inf  # number of calls

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """The results."""
        like = example_inputs(self.rules, ENVS)[[*KERNELS].index(self.name)]
        self.calls.append(rebuild(like, iter(tensors)))
        self.error = float(len(self.calls) > self.right)
        return super().run(tensors)


def test_libraries_are_compared_over_an_episode_of_random_play(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor, "aoti_load_package", Witness)
    draft = made_files(folder)
    assert differs(Witness.rules, draft, 40) == ""
    recorded, applied = Witness.calls[::2], Witness.calls[1::2]
    assert len(recorded) == len(applied) == 6  # one of each kernel in every env-step
    stages = {int(stage) for state, *_ in recorded for stage in state.slots.stage.unique()}
    assert stages >= {Stage.EMPTY, Stage.GERMINATED, Stage.TRAINING}
    lost = [(measured, state.guard.panic) for state, measured, _ in recorded]
    assert sum(int(panic.sum()) for _, panic in lost) > 0
    assert all(measured.train_loss[panic].isnan().all() for measured, panic in lost)
    chosen = torch.stack([action.op for _, _, action, _ in applied])
    assert len(chosen.unique()) > 3
    assert not torch.equal(chosen[0], chosen[1])
    for right, name, step in ((4, "record_and_observe", 2), (5, "apply_action", 2)):
        Witness.calls.clear()
        monkeypatch.setattr(Witness, "right", right)
        told = f"{name} compiled rounds otherwise here (env-step {step} of 7 envs)"
        assert differs(Witness.rules, draft, 7) == told


def compile_nothing(name: str, rules: EnvRules, draft: Path) -> None:
    """Leaves no library."""


def fail(name: str, rules: EnvRules, draft: Path) -> None:
    """As inductor fails."""
    raise RuntimeError("no such\noperation")


def die(name: str, rules: EnvRules, draft: Path) -> None:
    """As a compiler for which memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("failure", ["differs", "inductor", "killed"])
def test_what_cannot_be_proved_is_refused_and_the_cache_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    compile_kernel = {"differs": compile_nothing, "inductor": fail, "killed": die}[failure]
    monkeypatch.setattr(compile_step, "compile_kernel", compile_kernel)
    monkeypatch.setattr(compile_step, "differs", lambda rules, draft, envs: f"{envs} differ")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # put back behind the test
    rules = tiny_rules(2, 6)
    compile_step.fill(folder, step_key(rules), rules)
    words = {
        "differs": "1 differ",
        "inductor": "inductor failed: no such operation",
        "killed": "inductor failed: A process in the process pool was terminated abruptly",
    }
    assert told(rules).startswith(words[failure])
    assert [path.name for path in folder.iterdir()] == [step_key(rules)]


def test_runs_say_why_nothing_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tiny_rules(2, 6)
    short = "the cache lacks them, and runs below 64 env-steps compile nothing"
    assert told(rules) == short
    with only_compiler(folder, step_key(rules)) as alone:
        assert alone
        assert told(rules, 64).endswith("once another process has compiled them")
    with only_compiler(folder, QUIET):
        assert told(rules, 64).endswith("another process wants none compiled")
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert told(rules, 64) == (
        "no C++ compiler: /nonexistent/c++ is not there (install g++, or set CXX)"
    )
    assert not [*folder.glob("[!l]*")]


def test_what_is_not_supported_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported(tiny_rules(2, 6)) == ""
    assert told(tiny_rules(5, 6)) == "not for more than 4 slots"
    own = tiny_rules(2, 6, RewardConfig(mode="parts_of_users:parts"))
    assert told(own) == "not with the reward parts of your own"
    rules = tiny_rules(2, 6)
    assert unsupported(rules._replace(blueprints=rules.blueprints.to("meta"))) == "not for meta"


def test_tensors_lie_by_the_order_of_fields_whatever_order_a_record_was_made_in() -> None:
    (state, _, _), (_, _, action, _) = example_inputs(tiny_rules(2, 6), ENVS)
    numbers = {name: torch.full((ENVS,), place) for place, name in enumerate(HEAD_NAMES)}
    backwards = Action.from_dict(dict(reversed(numbers.items())), batch_size=[ENVS])
    places = [int(leaf[0]) for leaf in leaves(backwards)]
    assert places == [HEAD_NAMES.index(name) for name in Action.__annotations__]
    assert same_bits(leaves(rebuild(action, iter(leaves(backwards)))), leaves(backwards))
    priced = tiny_rules(2, 6)._replace(kernel_settings=("reward.rent_weight", "reward.max_rent"))
    assert [one.tolist() for one in example_values(priced, 2)] == [[1.0, 0.5], [2.0, 1.0]]
    fewer = rebuild(state, iter(leaves(state[1:])))
    assert (fewer.batch_size, fewer.slots.batch_size) == ((ENVS - 1,), (ENVS - 1, 2))


COMPILING = """
import subprocess
import torch._inductor as inductor
from esper_soa.env.ahead import KERNELS
from esper_soa.runtime import compile_step
compiler = ["sh", "-c", "echo compiling; sleep 99"]
inductor.aoti_compile_and_package = lambda *_, **__: subprocess.Popen(compiler).wait()
KERNELS["record_and_observe"] = lambda rules, state, *_: 1 - state.slots.alpha
del KERNELS["apply_action"]
compile_step.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_compilation_that_is_interrupted_ends_without_a_traceback_and_leaves_nothing(
    folder: Path, number: int
) -> None:
    rules = tiny_rules(2, 6)._replace(engine=None)  # type: ignore[arg-type]
    program = [sys.executable, "-c", COMPILING, str(folder), "key", "19"]
    (folder.parent / "rules").write_bytes(pickle.dumps(rules))
    with (folder.parent / "rules").open("rb") as given:
        streams = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = warm.Popen(program, start_new_session=True, env=ENVIRONMENT, **streams)
    assert process.stdout is not None
    assert process.stdout.readline() == b"compiling\n"
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    weight = Path(f"/proc/{process.pid}/autogroup")  # of the session, where there is such a thing
    assert not weight.exists() or weight.read_text().endswith("nice 19\n")
    os.kill(process.pid, number)
    assert process.communicate(timeout=60) == (b"", b"")  # what it has started has ended too
    assert process.returncode == 128 + number
    assert {path.name for path in folder.iterdir()} == {"lock", "lockkey"}


def test_a_run_that_is_interrupted_while_it_waits_ends_the_compiler(folder: Path) -> None:
    def stop(number: int) -> None:
        raise Interrupted(number)

    place = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = place.read_text()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with signal_handlers(stop, (signal.SIGTERM,)), pytest.raises(Interrupted):
        stored_kernels(tiny_rules(2, 6), ENVS, SHORT, wait=True)
    assert place.read_text() == before
    assert [*folder.glob("[!l]*")] == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # inductor takes about a minute of one core
@pytest.mark.parametrize(
    "reward",
    [
        *(RewardConfig(mode=mode) for mode in REWARD_MODES),
        RewardConfig(mode="[shaped,escrow]"),  # of all modes inductor takes minutes
    ],
    ids=[*REWARD_MODES, "split"],
)
def test_compiled_kernels_equal_the_eager_ones_to_the_bit(
    folder: Path, reward: RewardConfig
) -> None:
    """Whatever N, number of threads and inputs; a second start finds them."""
    envs = len(REWARD_MODES) + 1
    rules = rules_from(tiny_settings(envs, 3, 40, reward), CPU)
    rules = rules._replace(early_stop=EarlyStopConfig(rollbacks=2))
    kernels = stored_kernels(rules, envs, 1, wait=True)
    assert kernels.reason.startswith("compiled ahead of time, equal to the bit: ")
    assert stored_kernels(rules, envs, 1, wait=False).reason == kernels.reason
    assert json.loads((folder / step_key(rules) / "sha256.json").read_text()).keys() == {
        *LIBRARY_FILES
    }
    with torch.no_grad():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for number in (2, envs, 129):
                assert differs(given_by_env(rules), folder / step_key(rules), number) == ""
    (state, measured, values), _ = example_inputs(given_by_env(rules), envs)
    with pytest.raises(LibraryError, match="other dtypes or shapes"):
        kernels.record_and_observe(rules, state, measured[1:], values)
