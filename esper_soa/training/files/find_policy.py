"""Finds the file of a policy by its name: those that ship, run folders, files. Needs no torch."""

from pathlib import Path

from esper_soa.config.paths import user_path
from esper_soa.system.errors import UserError, one_line
from esper_soa.training.files.run_folder import find_checkpoint

POLICY_FOLDER = Path(__file__).resolve().parents[2] / "agent" / "policies"  # policies that ship
POLICY_SUFFIX = ".policy"  # beside each lies its card, NAME.md


def packaged_policies() -> list[str]:
    """Names of the policies that ship, in order."""
    return sorted(path.stem for path in POLICY_FOLDER.glob(f"*{POLICY_SUFFIX}"))


def find_policy(init: str) -> Path:
    """The file of the policy `init`: one that ships, else a run folder (its newest checkpoint) or a
    file. Raises UserError, which lists the names, for none.
    """
    names = packaged_policies()
    if init in names:
        return POLICY_FOLDER / f"{init}{POLICY_SUFFIX}"
    if not user_path("policy.init", init).exists():
        problem = "there is no such policy, run folder or checkpoint"
        shipped = f"Policies that ship: {', '.join(names) or 'none yet'}"
        raise UserError(f"policy.init={one_line(init)}: {problem}. {shipped}")
    return find_checkpoint(init, "policy.init")
