"""When the state machine is compiled, and where that is kept."""

import os
from pathlib import Path

import pytest
import torch

from esper_soa.runtime import compilation
from esper_soa.runtime.compilation import choose_compilation, keep_compiled

CPU = torch.device("cpu")
HOUR = (64, 150 * 2_000)


def break_even(envs: int) -> int:
    """Env-steps from which on `auto` compiles, by the constants of the module."""
    saved = compilation.CALL_SECONDS + compilation.ENV_SECONDS * envs
    return round(compilation.MIN_SAVING * compilation.COMPILE_SECONDS / saved)


@pytest.mark.parametrize(
    ("setting", "device", "length", "wanted"),
    [
        ("auto", "cpu", (8, 75), False),  # cifar_3seed
        ("auto", "cpu", (32, 8 * 75), False),  # imitate
        ("auto", "cpu", (128, 200 * 150), True),  # the full budget of cifar_3seed
        ("auto", "cpu", (1, break_even(1) - 1), False),
        ("auto", "cpu", (1, break_even(1) + 1), True),
        # many envs make an env-step dearer
        ("auto", "cpu", (10_000, break_even(1) // 2), True),
        ("auto", "cuda", HOUR, False),  # never measured
        ("off", "cpu", HOUR, False),
        ("on", "cpu", (1, 1), True),
        ("on", "cuda", (1, 1), True),
    ],
)
def test_auto_compiles_long_runs_on_a_cpu_and_the_others_force(
    setting: str, device: str, length: tuple[int, int], wanted: bool
) -> None:
    assert choose_compilation(setting, torch.device(device), *length)[0] is wanted


def test_the_choice_says_why() -> None:
    weighed = "compiling takes about 70 s and saves less than 1 s in 75 env-steps of 8 envs"
    assert choose_compilation("auto", CPU, 8, 75) == (False, f"not compiled: {weighed}")
    saves = compilation.CALL_SECONDS + compilation.ENV_SECONDS * 64
    weighed = f"compiling takes about 70 s and saves about {saves * 300_000:.0f} s in 300000"
    told = f"compiled: {weighed} env-steps of 64 envs"
    assert choose_compilation("auto", CPU, *HOUR) == (True, told)
    never = "not compiled: what compiling saves on cuda was never measured"
    assert choose_compilation("auto", torch.device("cuda"), *HOUR) == (False, never)
    for setting, told in (("off", "not compiled"), ("on", "compiled")):
        found = choose_compilation(setting, CPU, *HOUR)
        assert found == (setting == "on", f"{told} (compute.compile={setting})")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compilation.INDUCTOR_FOLDER, raising=False)
    return tmp_path / "esper_soa"


def test_a_folder_that_others_can_write_in_is_not_taken(cache: Path) -> None:
    keep_compiled()
    del os.environ[compilation.INDUCTOR_FOLDER]
    (cache / "inductor").chmod(0o777)
    told = f"kept for now, others can write in the cache folder {cache}/inductor"
    assert keep_compiled().startswith(told)
    assert compilation.INDUCTOR_FOLDER not in os.environ
