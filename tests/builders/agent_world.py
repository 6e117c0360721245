"""Small policies, random legal play and toy worlds for the tests of the learning agent."""

import re
from pathlib import Path

import torch
from torch import Tensor

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Memory, restart
from esper_soa.agent.rollout import Rollout, Row, new_rollout, write_
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.nets import SlotSpec, TaskConfig, host_slots
from esper_soa.env.observation import NUM_ENV_FEATURES, NUM_SLOT_FEATURES
from esper_soa.state import Decision, Masks, Observation
from esper_soa.system.streams import POLICY_SAMPLE, stream_keys, uniform
from esper_soa.vocabulary import HEAD_NAMES, HEADS, Op, head_sizes

CPU = torch.device("cpu")


def some_slots(num_slots: int) -> tuple[SlotSpec, ...]:
    """The first slots of a host that has ten."""
    return host_slots(TaskConfig(num_blocks=5, num_pools=5))[:num_slots]


def width_of(num_slots: int) -> int:
    """Number of features that are observed of an env with so many slots."""
    return NUM_ENV_FEATURES + num_slots * NUM_SLOT_FEATURES


def small_policy(num_slots: int, seed: int = 0, layers: int = 1, **ppo: object) -> RecurrentPolicy:
    network = NetworkConfig(hidden=32, features=32, layers=layers, slot_features=16)
    return RecurrentPolicy(
        PolicyConfig(network=network, ppo=PPOConfig(**ppo)), some_slots(num_slots), seed
    )


def learner_of(seed: int = 0, **ppo: object) -> Learner:
    """Of a policy for two slots."""
    return Learner(small_policy(2), PPOConfig(**ppo), total_updates=100, seed=seed)


def masks_of_ops(op: Tensor, num_slots: int) -> Masks:
    """Everything is legal but the ops outside op bool [N, 6]; the slot of a legal op is free."""
    lead = op.shape[:1]
    full = {
        name: torch.ones(*lead, size, dtype=torch.bool)
        for name, size in zip(HEAD_NAMES, head_sizes(num_slots), strict=True)
    }
    by_op = op.unsqueeze(-1).expand(*op.shape, num_slots).clone()
    return Masks(**(full | {"op": op, "slot_by_op": by_op}), batch_size=lead)


def random_masks(num_envs: int, num_slots: int, generator: torch.Generator) -> Masks:
    """Random legal ops, always with WAIT, and random slots for them, at least one each."""
    op = torch.rand(num_envs, 6, generator=generator) < 0.5
    op[:, 0] = True
    masks = masks_of_ops(op, num_slots)
    by_op = torch.rand(num_envs, 6, num_slots, generator=generator) < 0.5
    by_op[..., -1] = True
    return masks.replace(slot_by_op=by_op & op.unsqueeze(-1))


def noise_of_heads(*lead: int, generator: torch.Generator) -> Tensor:
    """Numbers in [0, 1) [..., heads], drawn of eight heads: further ones move none of them."""
    drawn = torch.rand(*lead, 8, generator=generator)
    return torch.cat([drawn, torch.full((*lead, len(HEADS) - 8), 0.5)], dim=-1)


def first_decision(
    policy: RecurrentPolicy,
    features: Tensor,
    blueprints: Tensor | None = None,
    noise: Tensor | None = None,
    masks: Masks | None = None,
) -> tuple[Decision, Memory]:
    """Of N envs with features [N, F]; blueprint 0 everywhere, noise 0, all legal, if not given."""
    num_envs = len(features)
    num_slots = len(policy.places)
    if blueprints is None:
        blueprints = torch.zeros(num_envs, num_slots, dtype=torch.int64)
    if noise is None:
        noise = torch.zeros(num_envs, len(HEADS))
    if masks is None:
        masks = masks_of_ops(torch.ones(num_envs, 6, dtype=torch.bool), num_slots)
    observation = Observation(features, blueprints, batch_size=[num_envs])
    return policy.decide_with_probabilities(observation, masks, noise, policy.start(num_envs, CPU))[
        :2
    ]


def row_of(observation: Observation, masks: Masks, decision: Decision, **told: Tensor) -> Row:
    """An env-step that counts, ends and earns nothing, but for what is `told`."""
    no = torch.zeros_like(decision.action.op, dtype=torch.bool)
    unmeasured = torch.zeros_like(observation.blueprints, dtype=torch.bool)
    rest = {
        "reward": no.float(),
        "terminal": no,
        "truncated": no,
        "reset": no,
        "contribution": unmeasured.float(),
        "contribution_measured": unmeasured,
    }
    return Row(
        features=observation.features,
        blueprints=observation.blueprints,
        masks=masks,
        action=decision.action,
        effective_op=decision.action.op,
        log_probs=decision.log_probs,
        value=decision.value,
        valid=~no,
        batch_size=no.shape,
        **(rest | told),
    )


def random_rollout(
    policy: RecurrentPolicy, num_steps: int, num_envs: int, seed: int, restarts: float = 0.2
) -> Rollout:
    """Play on random observations and masks; envs restart at random, probability `restarts`."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = len(policy.places)
    num_features = width_of(num_slots)
    rollout = new_rollout(num_steps, num_envs, num_slots, num_features, CPU)
    fresh = memory = policy.start(num_envs, CPU)
    for t in range(num_steps):
        reset = (torch.rand(num_envs, generator=generator) < restarts) | (t == 0)
        features = torch.randn(num_envs, num_features, generator=generator)
        blueprints = torch.randint(-1, 13, (num_envs, num_slots), generator=generator)
        masks = random_masks(num_envs, num_slots, generator)
        noise = noise_of_heads(num_envs, generator=generator)
        memory = restart(memory, fresh, reset)
        observation = Observation(features, blueprints, batch_size=[num_envs])
        with torch.no_grad():
            decision, memory, _ = policy.decide_with_probabilities(
                observation, masks, noise, memory
            )
        row = row_of(
            observation,
            masks,
            decision,
            reward=torch.randn(num_envs, generator=generator),
            truncated=torch.full((num_envs,), t == num_steps - 1),
            reset=reset,
            contribution=torch.randn(num_envs, num_slots, generator=generator),
            contribution_measured=blueprints >= 0,
        )
        write_(rollout, t, row)
    return Rollout(rollout.rows, torch.randn(num_envs, generator=generator))


PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
UPDATE = PAGE.read_text(encoding="utf-8").split("### update")[1].split("\n## ")[0]
# names of the diagnostics of an update, and those of rounds of imitation alone
LISTED = set(re.findall(r"^\| `(\S+)`", UPDATE, re.MULTILINE))
IMITATION = {"cross_entropy", "agreement", "agreement/<head>"}


def kind(name: str) -> str:
    """A diagnostic's name in the list: behind a slash is a head, a part, an op or the like."""
    families = {one.split("/")[0]: one for one in LISTED if "/" in one}
    return families[name.split("/")[0]] if "/" in name else name


def play_recall(num_updates: int) -> list[float]:
    """Mean reward per env of every round: a cue is shown at the first of four env-steps and asked
    for at the last, where ADVANCE answers 1 and WAIT 0; chance earns 0.5.
    """
    num_envs = 64
    num_steps = 4
    no_floor = dict.fromkeys(HEAD_NAMES, 0.0)
    ppo = {"lr": 3e-3, "entropy_coef": 0.01, "target_kl": 0.1}
    ppo |= {"probability_floor": no_floor, "entropy_floor_penalty": no_floor}
    policy = small_policy(1, **ppo)
    learner = Learner(policy, PPOConfig(**ppo), num_updates, seed=0)
    op = torch.zeros(num_envs, 6, dtype=torch.bool)
    op[:, [Op.WAIT, Op.ADVANCE]] = True
    masks = masks_of_ops(op, 1)
    envs = torch.arange(num_envs)
    no = torch.zeros(num_envs, dtype=torch.bool)
    blueprints = torch.full((num_envs, 1), -1)
    history = []
    for update in range(num_updates):
        rollout = new_rollout(num_steps, num_envs, 1, width_of(1), CPU)
        keys = stream_keys(0, POLICY_SAMPLE, (update,), envs)
        cue = (uniform(keys, torch.full_like(envs, 1000)) < 0.5).long()
        memory = policy.start(num_envs, CPU)
        for t in range(num_steps):
            noise = uniform(keys.unsqueeze(-1), torch.arange(len(HEADS)) + len(HEADS) * t)
            features = torch.zeros(num_envs, width_of(1))
            if t == 0:
                features[:, :3] = torch.stack([2.0 * cue - 1, no + 1.0, no + 1.0], dim=1)
            observation = Observation(features, blueprints, batch_size=[num_envs])
            with torch.no_grad():
                decision, memory, _ = policy.decide_with_probabilities(
                    observation, masks, noise, memory
                )
            last = t == num_steps - 1
            row = row_of(observation, masks, decision, terminal=no | last, reset=no | (t == 0))
            right = decision.action.op == torch.where(cue == 1, Op.ADVANCE, Op.WAIT)
            reward = right.float() * last
            write_(rollout, t, row.replace(reward=learner.scale_rewards_(reward, ~no)))
        learner.update(rollout)
        history.append(reward.mean().item())
    return history
