"""Policies in files of their own: how they are saved, loaded and taken over by a new learner.

A file of a policy is sealed as a checkpoint is, and holds tensors and plain values alone: the sizes
of the network, what the learner takes over, and facts. A checkpoint of a run serves as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from esper_soa.agent.policy import with_blueprints, with_heads, with_observed
from esper_soa.agent.ppo import Learner
from esper_soa.config.agent import NetworkConfig
from esper_soa.config.registry import is_reference, name_in
from esper_soa.config.settings import flat_settings
from esper_soa.system.errors import UserError, one_line
from esper_soa.system.files import LOGGER
from esper_soa.system.value_types import type_error
from esper_soa.training.files import checkpoint
from esper_soa.training.files.checkpoint import CheckpointError, mismatch
from esper_soa.training.files.find_policy import find_policy
from esper_soa.training.files.run_folder import damaged_newer
from esper_soa.training.files.saved_run import SavedRun, parse_run
from esper_soa.vocabulary import BLUEPRINT_NAMES

POLICY_FORMAT = "esper_soa policy"  # tells a policy's file from a checkpoint of a run
POLICY_VERSION = 1
# fact: names of users' blueprints, in the order of their codes; absent where there are none
USER_BLUEPRINTS = "blueprints"
# fact: names of settings of its env that the policy sees; absent where there are none
OBSERVED_SETTINGS = "observe"
# parts of a learner's state: weights with observation statistics, normalisers
LEARNER_PARTS = ("policy", "reward", "value")


@dataclass
class PolicyFacts:
    """Facts of what a policy has learned on; its maker may say more."""

    rounds: int
    tasks: list[str]
    data: list[str]
    blueprints: list[str]  # users' own, see USER_BLUEPRINTS
    observe: list[str]  # see OBSERVED_SETTINGS


@dataclass
class Pretrained:
    """A policy that somebody else has learned; its file holds format and version too."""

    init: str  # how it was asked for, no part of the file
    network: dict[str, int]  # policy.network.*
    learner: dict  # the parts LEARNER_PARTS of a learner's state
    facts: dict  # PolicyFacts and more

    def __str__(self) -> str:
        """Which policy it is and where it comes from, in one line."""
        tasks, data = (", ".join(self.facts[name]) for name in ("tasks", "data"))
        rounds = self.facts["rounds"]
        return one_line(f"{self.init}: learned for {rounds} rounds on {tasks} with {data}")


def save_policy(path: Path, saved: SavedRun, facts: Mapping[str, object]) -> None:
    """Write the policy of a run to the file `path`; `facts` go before what the run tells.

    Raises CheckpointError where the run has learned nothing, OSError where not written.
    """
    learned = _of_run(str(path), saved)
    held = {"network": learned.network, "learner": learned.learner}
    held["facts"] = learned.facts | dict(facts)
    checkpoint.save_checkpoint(path, held | {"format": POLICY_FORMAT, "version": POLICY_VERSION})


def load_policy(init: str, device: torch.device) -> Pretrained:
    """The policy that `init` names (see `find_policy`), on `device`; raises UserError for none.

    Damaged checkpoints of a run that are newer than the one taken are told in the log.
    """
    path = find_policy(init)
    for damaged in damaged_newer(path):
        LOGGER.warning("policy   %s", damaged)
    content = checkpoint.load_checkpoint(path, device)
    if content.get("format") != POLICY_FORMAT:
        return _of_run(init, parse_run(path, content))
    if content.get("version") != POLICY_VERSION:
        given = content.get("version")
        raise _refusal(init, f"its version is {given}, this program reads version {POLICY_VERSION}")
    kept = {name: part for name, part in content.items() if name not in ("format", "version")}
    parts = kept | {"init": init}
    fault = type_error(parts, Pretrained, "the policy")
    if not fault:
        facts = {USER_BLUEPRINTS: [], OBSERVED_SETTINGS: []} | cast(dict, parts["facts"])
        known = {item.name for item in fields(PolicyFacts)} & facts.keys()
        fault = type_error({name: facts[name] for name in known}, PolicyFacts, "facts")
    if fault:
        raise _refusal(init, f"its file is not what this program writes ({one_line(fault)})")
    return Pretrained(**cast(dict, parts))


def load_pretrained(
    learner: Learner,
    network: NetworkConfig,
    learned: Pretrained,
    observe: Sequence[str] = (),
    blueprints: Sequence[str] = BLUEPRINT_NAMES,
) -> None:
    """Let a new learner, whose network has the sizes `network`, begin with what was learned.

    blueprints: names by code; see with_blueprints for those that the policy does not know, and
    with_observed for the settings `observe` that it has not seen. A head that it lacks begins as
    that of a new policy. Raises UserError, which names the settings to give, where sizes differ;
    CheckpointError for another reason.
    """
    sizes = asdict(network)
    wrong = [name for name, size in sizes.items() if learned.network.get(name, size) != size]
    if wrong:
        give = " ".join(f"policy.network.{name}={learned.network[name]}" for name in wrong)
        have = " ".join(f"{name}={sizes[name]}" for name in wrong)
        problem = f"policy.init={one_line(learned.init)}: its network is of another size"
        raise UserError(f"{problem}. Give {give} (instead of {have})")
    like = {name: part for name, part in learner.state_dict().items() if name in LEARNER_PARTS}
    known = (*BLUEPRINT_NAMES, *learned.facts.get(USER_BLUEPRINTS, []))
    state = dict(learned.learner)
    weights = state.get("policy")
    if isinstance(weights, Mapping):
        completed = with_heads(weights, cast(Mapping[str, Tensor], like["policy"]))
        new_heads = sorted({name.split(".")[1] for name in completed.keys() - weights.keys()})
        if new_heads:
            LOGGER.info("start    heads it does not know begin as new: %s", ", ".join(new_heads))
        weights = with_blueprints(completed, known, blueprints)
        state["policy"] = with_observed(weights, learned.facts.get(OBSERVED_SETTINGS, []), observe)
    fault = mismatch(state, like, "learner")
    if fault:
        raise _refusal(learned.init, f"its network does not fit these hosts ({one_line(fault)})")
    learner.load_pretrained(state)
    LOGGER.debug("start    from %s", learned)
    new = ", ".join(name for name in blueprints if name not in known)
    if new:
        LOGGER.info("start    blueprints it does not know begin as the mean of the others: %s", new)


def _of_run(init: str, saved: SavedRun) -> Pretrained:
    settings = flat_settings(saved.settings)
    if saved.learner is None:
        name = settings.get("policy.name")
        raise _refusal(init, f"it is of a run with policy.name={name}, which learns nothing")
    facts: dict = {"rounds": saved.rounds_done, "tasks": list(saved.tasks)}
    facts["data"] = list(dict.fromkeys(task.data["name"] for task in saved.tasks.values()))
    listed = settings.get("task.blueprints")
    offered = map(str, listed) if isinstance(listed, list) else ()
    user_blueprints = list(map(name_in, filter(is_reference, offered)))
    facts |= {USER_BLUEPRINTS: user_blueprints} if user_blueprints else {}
    observed = settings.get("policy.observe")
    facts |= {OBSERVED_SETTINGS: observed} if observed else {}
    sizes = asdict(NetworkConfig()).items()
    network: dict = {name: settings.get(f"policy.network.{name}", size) for name, size in sizes}
    state = {name: part for name, part in saved.learner.items() if name in LEARNER_PARTS}
    return Pretrained(init, network, state, facts=facts)


def _refusal(init: str, why: str) -> CheckpointError:
    return CheckpointError(f"policy.init={one_line(init)}: {why}")
