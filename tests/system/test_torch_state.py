"""Programs that have changed the state of torch or numpy: the same numbers, and their state as it
was.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import esper_soa
from esper_soa.system.torch_state import package_state
from tests.builders.lanes import some_of

SETTINGS = {"device": "cpu", "envs": 2, "steps": 4, "train_samples": 16}
RUN = ["device=cpu", "rounds=1", "steps=2", "envs=2", "train_samples=16", "report=false"]
# Public functions in which nothing is computed, and those that agents call while they are called.
WITHOUT_STATE = {
    *("blueprint", "dataset", "host", "layer", "reward", "compose_settings", "experiments"),
    *("as_decision", "seed_action", "obey", "open_run"),
}


@contextmanager
def switched(switch: Callable[[object], None], value: object, before: object) -> Iterator[None]:
    switch(value)
    yield
    switch(before)


def dtype(kind: torch.dtype) -> AbstractContextManager[None]:
    return switched(torch.set_default_dtype, kind, torch.float32)


STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float16": lambda: dtype(torch.float16),
    "float64": lambda: dtype(torch.float64),
    "meta": lambda: switched(torch.set_default_device, "meta", None),
    "meta for a while": lambda: torch.device("meta"),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "no denormals": lambda: switched(torch.set_flush_denormal, True, False),
    "errors of numpy": lambda: np.errstate(all="raise"),
}


def caller() -> tuple[object, ...]:
    """All that a caller may have set."""
    made = torch.empty(0)
    return (
        *(made.dtype, made.device, made.is_inference(), torch.is_grad_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled(), str(np.geterr())),
        sys.float_info.min / 4 == 0,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_num_threads(),
        hash(torch.get_rng_state().numpy().tobytes()),
    )


def played(path: Path) -> list[object]:
    """Numbers of a simulator, of its host in a file, and of checks; the caller's state between."""
    before = caller()
    sim = esper_soa.make("smoke", policy="heuristic", **SETTINGS)
    numbers: list[object] = []
    for step in sim.episode():
        assert caller() == before
        numbers += [step.reward.tolist(), step.accuracy.tolist()]
    sim.reset()
    _, reward, *_ = sim.step({"op": "germinate", "slot": "r0c0", "blueprint": "conv_light"})
    inputs, _ = sim.world.data.samples("test", torch.arange(2, device="cpu"))
    numbers += [inputs[0, 0].tolist()]
    esper_soa.save(sim.export(0), path)
    net = esper_soa.load(path)
    esper_soa.check_blueprint("tests.builders.users.parts_of_users:twice")
    assert caller() == before
    return [*numbers, reward.tolist(), sim.seeds(0), net.spec["test_accuracy"]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], bytes]:
    """The numbers where nothing is set, and the file."""
    path = tmp_path_factory.mktemp("plain") / "net.safetensors"
    return played(path), path.read_bytes()


@pytest.mark.parametrize("name", some_of(STATES, "float16", "no gradients", "inference"))
def test_a_caller_gets_the_same_numbers_whatever_is_set_and_has_it_afterwards(
    name: str, plain: tuple[list[object], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "net.safetensors"
    with STATES[name]():
        numbers = played(path)
    assert (numbers, path.read_bytes()) == plain


def trained(path: Path) -> list[object]:
    run = esper_soa.train("smoke", [*RUN, f"run_dir={path}"], verbose=0)
    net = run.export(0)
    lines = [{**line, "seconds": 0} for line in run.episodes()]
    learned = [values.tolist() for values in run.policy().state_dict().values()]
    return [lines, run.evaluate(net), learned]


def test_a_run_is_the_same_where_everything_is_set(tmp_path: Path) -> None:
    expected = trained(tmp_path / "plain")
    with ExitStack() as stack:
        for name, state in STATES.items():
            if name != "float64":
                stack.enter_context(state())
        before = caller()
        assert trained(tmp_path / "set") == expected
        assert caller() == before


def test_threads_and_errors_leave_the_state_of_the_process_as_it_was() -> None:
    """Two threads meet in the package's state; what is imported there may change it."""
    inside = threading.Barrier(2, timeout=60)
    kinds = list[torch.dtype]()

    def use() -> None:
        with package_state():
            inside.wait()
            torch.set_default_dtype(torch.float16)
            inside.wait()
        inside.wait()

    with dtype(torch.float64):
        thread = threading.Thread(target=use)
        thread.start()
        with suppress(ZeroDivisionError), package_state():
            inside.wait()
            inside.wait()
            inside.wait()  # the other is out
            kinds.append(torch.get_default_dtype())
            torch.set_grad_enabled(False)
            raise ZeroDivisionError
        thread.join()
        kinds.append(torch.get_default_dtype())
    assert kinds == [torch.float32, torch.float64]
    assert torch.is_grad_enabled()


def test_every_public_function_computes_in_the_state_of_the_package() -> None:
    parts = {name: getattr(esper_soa, name) for name in esper_soa.HOMES}
    functions = {name: part for name, part in parts.items() if inspect.isfunction(part)}
    for owner, methods in {
        "Simulator": ("__init__", "reset", "step", "export", "seeds"),
        "RecordedRun": ("samples", "evaluate", "export", "policy"),
    }.items():
        functions |= {f"{owner}.{name}": getattr(parts[owner], name) for name in methods}
    without = {name for name, part in functions.items() if not hasattr(part, "__wrapped__")}
    assert without == WITHOUT_STATE
