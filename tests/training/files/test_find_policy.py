"""Policies travel with the package: what a wheel holds, and a copy that finds them by name."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import torch

from esper_soa.training.files.checkpoint import save_checkpoint
from esper_soa.training.files.find_policy import POLICY_FOLDER, packaged_policies

ROOT = Path(__file__).resolve().parents[3]
LOOK = """
from importlib.resources import files
import esper_soa
from esper_soa.training.files.find_policy import find_policy, packaged_policies
print(esper_soa.__file__, packaged_policies(), find_policy("sprout"))
print(files("esper_soa").joinpath("agent", "policies", "sprout.policy").is_file())
"""


def test_an_installed_copy_finds_the_policies_that_lie_in_it(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(
        ROOT / "esper_soa", site / "esper_soa", ignore=shutil.ignore_patterns("__pycache__")
    )
    there = site / "esper_soa" / "agent" / "policies" / "sprout.policy"
    save_checkpoint(there, {"weights": torch.zeros(2)})
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    names = sorted([*packaged_policies(), "sprout"])
    assert done.stdout == f"{site}/esper_soa/__init__.py {names} {there}\nTrue\n"


def test_a_wheel_takes_in_every_file_of_the_package_and_policies_are_not_left_out() -> None:
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    assert target["packages"] == ["esper_soa", "hydra_plugins"]
    assert set(target) == {"packages", "force-include", "hooks"}, "nothing is excluded"
    assert POLICY_FOLDER == ROOT / "esper_soa" / "agent" / "policies"
    for name in (
        ("sprout.policy", "sprout.md") if (ROOT / ".git").exists() else ()
    ):  # what git ignores is left out
        ignored = subprocess.run(
            ["git", "check-ignore", "-q", f"esper_soa/agent/policies/{name}"], cwd=ROOT
        )
        assert ignored.returncode == 1, name
