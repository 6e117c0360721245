"""Episodes of the state kernels alone, packed env-step by env-step as a run packs them."""

from typing import NamedTuple

import numpy as np
import torch

from esper_soa.config.env import GatesConfig, LifecycleConfig, RewardConfig
from esper_soa.env.legal import head_masks
from esper_soa.env.step import EnvRules
from esper_soa.lab.telemetry.pack import pack, unpack
from esper_soa.lab.telemetry.rows import Cost, Legend, RoundRecord
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.nets.model.flops import training_flop
from esper_soa.state import Decision
from esper_soa.training.loop.recorder import Facts
from esper_soa.vocabulary import HEAD_NAMES
from tests.builders.tiny_world import CPU, EnvStep, play_state, random_numbers, tiny_rules

TRAIN_SAMPLES = 2  # of tiny_settings
AUTO = dict.fromkeys(("auto_forward_g1", "auto_forward_g2", "auto_forward_g3"), True)
BY_ITSELF = LifecycleConfig(embargo_steps=2, min_prune_age=1, **AUTO)


class Recorded(NamedTuple):
    """An episode as it was played and as it was packed."""

    rules: EnvRules
    legend: Legend
    steps: list[EnvStep]
    facts: list[Facts]
    played: RoundRecord
    numbers: np.ndarray  # [T, N, C]


def made_legend(rules: EnvRules, learns: bool = True) -> Legend:
    """The legend of hosts with these rules."""
    shape = rules.setup.shape
    counts = rules.reward.counts
    flop = training_flop(rules.setup.shape, CPU)
    flops = (flop.host, flop.seed.numpy(), flop.gate.numpy())
    return Legend(
        slots=tuple(spec.name for spec in shape.slots),
        blueprints=names_by_code(shape.blueprints),
        parameters=Cost(float(counts.host), counts.seed.numpy(), counts.gate.numpy()),
        train_flop=Cost(*(TRAIN_SAMPLES * one for one in flops)),
        learns=learns,
        sampled_shapley=rules.shapley_orders is not None,
    )


def facts_of(step: EnvStep, seed: int) -> Facts:
    """An env-step as a recorder is given it, with made-up probabilities."""
    num_envs = step.action.op.shape[0]
    log_probs = -random_numbers(seed, 1, torch.empty(num_envs, len(HEAD_NAMES))).float()
    value = random_numbers(seed, 2, torch.empty(num_envs)).float()
    decision = Decision(action=step.action, log_probs=log_probs, value=value, batch_size=[num_envs])
    choices = torch.cat(list(head_masks(step.view.masks, step.action.op).values()), 1)
    likely = random_numbers(seed, 3, choices).float()
    return Facts(step.observed, decision, step.result, likely)


def record(
    seed: int,
    num_envs: int = 5,
    num_slots: int = 3,
    steps: int = 60,
    by_itself: bool = False,
    learns: bool = True,
    gates: GatesConfig | None = None,
) -> Recorded:
    """An episode of random legal play on made-up measurements, at level full."""
    rules = tiny_rules(num_slots, steps, RewardConfig(mode="shaped"))
    rules = rules._replace(gates=gates or rules.gates)
    if by_itself:
        rules = rules._replace(lifecycle=BY_ITSELF)
    played = list(play_state(rules, num_envs, seed))
    facts = [facts_of(step, seed * 1000 + index) for index, step in enumerate(played)]
    numbers = np.stack([pack(one, full=True).numpy() for one in facts])
    legend = made_legend(rules, learns)
    whole = unpack(legend, 1, np.arange(1, steps + 1), numbers)
    return Recorded(rules, legend, played, facts, whole, numbers)
