"""Where the policies are that `policy.init` names: those that ship, those of runs, and files.

A policy ships as two files of esper_soa/policies: NAME.policy and its card, NAME.md. No torch.
"""

from pathlib import Path

from esper_soa.errors import UserError, one_line
from esper_soa.ops.rundir import find_checkpoint
from esper_soa.paths import user_path

POLICIES = Path(__file__).resolve().parents[1] / "policies"
SUFFIX = ".policy"


def shipped() -> list[str]:
    """Names of the policies that ship, in order."""
    return sorted(path.stem for path in POLICIES.glob(f"*{SUFFIX}"))


def find_policy(init: str) -> Path:
    """The file of the policy `init`: one that ships, a run folder (its newest checkpoint), a file.

    A name goes before a folder of that name. Raises UserError, which lists the names, for none.
    """
    names = shipped()
    if init in names:
        return POLICIES / f"{init}{SUFFIX}"
    if not user_path("policy.init", init).exists():
        raise UserError(
            f"policy.init={one_line(init)}: there is no such policy, run folder or checkpoint. "
            f"Policies that ship: {', '.join(names) or 'none yet'}"
        )
    return find_checkpoint(init, "policy.init")
