"""Without their libraries the adapters say what to install."""

import importlib
import sys

import pytest

import esper_soa.adapters


@pytest.mark.parametrize(
    ("adapter", "library"),
    [("gymnasium", "gymnasium"), ("sb3", "stable_baselines3"), ("torchrl", "torchrl")],
)
def test_a_missing_library_is_told_with_the_extra_to_install(
    adapter: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = [name for name in sys.modules if name.startswith(f"{library}.")]
    for name in (library, f"{library}.data", f"{library}.common.vec_env", *hidden):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"esper_soa.adapters.{adapter}", raising=False)
    monkeypatch.delattr(esper_soa.adapters, adapter, raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"esper_soa.adapters.{adapter}")
    name = library.replace("_", "-")
    told = f"esper_soa.adapters.{adapter} needs {name}: pip install 'esper-soa[envs]'"
    assert str(caught.value) == told
