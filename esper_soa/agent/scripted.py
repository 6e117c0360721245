"""Decision makers that follow rules, not learning: random, wait, a fixed schedule, a heuristic.

Every choice obeys the masks. Users' agents use `seed_action`, `as_decision`, `env.legal.obey`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.agent.protocol import Agent, Memory, restart
from esper_soa.config.agent import HeuristicConfig, PolicyConfig, ScheduleConfig
from esper_soa.config.nets import blueprint_names
from esper_soa.env.legal import first_choice, head_masks, obey
from esper_soa.env.lifecycle import ALPHA_TOLERANCE
from esper_soa.env.masks import ADVANCES, stage_allows
from esper_soa.state import Action, Decision, EnvState, View, chosen
from esper_soa.system.errors import check, check_choice
from esper_soa.system.transfers import upload
from esper_soa.vocabulary import HEAD_NAMES, HEADS, AlphaMode, Op, Stage

MIN_PENALTY = 0.1  # a blueprint's penalty that decays below this is dropped
# A seed that contributes more while its host gained less is pruned instead of fossilized.
RANSOM_CONTRIBUTION = 0.1  # percent points
RANSOM_IMPROVEMENT = 0.0  # percent points
NEVER = -100  # env-step of the last prune before there was one


def scripted_policy(cfg: PolicyConfig, blueprints: Sequence[str]) -> Agent:
    """The scripted policy that `policy.name` asks for; `blueprints` are those of the task."""
    policies: dict[str, Callable[[], Agent]] = {
        "random": RandomPolicy,
        "wait": WaitPolicy,
        "schedule": partial(SchedulePolicy, cfg.schedule, blueprints),
        "heuristic": partial(HeuristicPolicy, cfg.heuristic, blueprints),
    }
    allowed = "random, wait, schedule or heuristic"
    check(
        cfg.name in policies,
        "policy.name",
        cfg.name,
        allowed=allowed,
        remedy="It is not a scripted policy.",
    )
    return policies[cfg.name]()


def uniform_choice(mask: Tensor, noise: Tensor) -> Tensor:
    """Index int64 [...] drawn uniformly from True of mask [..., C] by `noise` [...] in [0, 1)."""
    num_legal = mask.sum(-1)
    rank = (noise * num_legal).to(torch.int64).clamp(max=num_legal - 1)
    return (mask.cumsum(-1) <= rank.unsqueeze(-1)).sum(-1)


class _Memoryless:
    """An agent without memory."""

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """Empty."""
        return ()


class RandomPolicy(_Memoryless):
    """Uniform over the legal ops, then over the legal choices of every head that the op needs."""

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """One legal action per env, a function of view.noise."""
        noise = dict(zip(HEAD_NAMES, view.noise.unbind(-1), strict=True))
        op = uniform_choice(view.masks.op, noise["op"])
        offered = head_masks(view.masks, op)
        heads = {name: uniform_choice(offered[name], noise[name]) for name in HEAD_NAMES}
        return as_decision(Action.from_dict(heads | {"op": op}, batch_size=op.shape)), memory


class WaitPolicy(_Memoryless):
    """Never acts: the host trains alone."""

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """WAIT for every env."""
        op = torch.zeros_like(view.state.signals.step)
        return as_decision(seed_action(op, op, op)), memory


def first_due(view: View, due: Tensor, blueprints: Tensor, **choices: int) -> Action:
    """The op of the first slot in which one is due and legal; WAIT where there is none.

    due, blueprints: int64 [N, S], op (WAIT for none) and blueprint of each slot. choices: of other
    heads, the same for all envs.
    """
    legal = view.masks.slot_by_op.gather(1, due.unsqueeze(1)).squeeze(1)
    slot = first_choice((due != Op.WAIT) & legal).unsqueeze(1)
    op, blueprint = (table.gather(1, slot).squeeze(1) for table in (due, blueprints))
    heads = {name: torch.full_like(op, choice) for name, choice in choices.items()}
    return obey(seed_action(op, slot.squeeze(1), blueprint).replace(**heads), view.masks)[0]


class SchedulePolicy(_Memoryless):
    """The same lifecycle in every env, at declared env-steps, or as soon after as it is legal."""

    def __init__(self, cfg: ScheduleConfig, blueprints: Sequence[str]) -> None:
        check_choice("policy.schedule.blueprint", cfg.blueprint, tuple(blueprints))
        self.cfg = cfg
        self.code = blueprint_names(blueprints).index(cfg.blueprint)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """The due op of the first slot that may act; WAIT if there is none."""
        slots = view.state.slots
        due = self.due_ops(view.state.signals.step, slots.stage, slots.seed_age)
        fixed = {name: getattr(self.cfg, name) for name in ("style", "tempo", "alpha_target")}
        return as_decision(first_due(view, due, torch.full_like(due, self.code), **fixed)), memory

    def due_ops(self, step: Tensor, stage: Tensor, age: Tensor) -> Tensor:
        """Op due in every slot [N, S] at env-step `step` [N], by stage and age of its seed."""
        cfg = self.cfg
        starts = _constants(tuple(cfg.germination_steps(stage.shape[-1])), step.device)
        starts_now = (stage == Stage.EMPTY) & (step.unsqueeze(-1) >= starts)
        due = torch.where(starts_now, Op.GERMINATE, Op.WAIT)
        for (stage_before, _), offset in zip(ADVANCES, cfg.advance, strict=False):
            due = torch.where((stage == stage_before) & (age >= offset), Op.ADVANCE, due)
        return torch.where((stage == Stage.HOLDING) & (age >= cfg.fossilize), Op.FOSSILIZE, due)


class HeuristicMemory(NamedTuple):
    """Memory of the heuristic for N envs."""

    rotation: Tensor  # int64 [N], candidates of the blueprint rotation tried so far
    penalties: Tensor  # float64 [N, P], by blueprint
    last_prune: Tensor  # int64 [N], env-step
    last_decay: Tensor  # int64 [N], env-step


class HeuristicConstants(NamedTuple):
    """Constants of the heuristic, those of esper-lite; also tensors [N]."""

    embargo_steps: float | Tensor = 5  # env-steps after a prune without a germination
    prune_penalty: float | Tensor = 2.0  # added to that of a blueprint whose seed is pruned
    penalty_decay: float | Tensor = 0.5  # factor per env-step
    penalty_threshold: float | Tensor = 3.0  # from which a blueprint is passed over


CONSTANTS = HeuristicConstants()


class HeuristicChoice(NamedTuple):
    """The heuristic's choice, int64 [N]."""

    op: Tensor
    slot: Tensor  # of the seed that decides; 0 without one
    blueprint: Tensor  # to germinate, or of the seed that decides


class HeuristicPolicy:
    """Hand-written rules: germinate on a plateau, advance, prune failures, fossilize gains."""

    def __init__(self, cfg: HeuristicConfig, blueprints: Sequence[str]) -> None:
        fits = set(cfg.blueprint_rotation) <= set(blueprints)
        cfg.require(fits, "blueprint_rotation", f"a list of some of {', '.join(blueprints)}")
        self.cfg = cfg
        self.names = blueprint_names(blueprints)

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """The initial HeuristicMemory."""
        zeros = torch.zeros(num_envs, dtype=torch.int64, device=device)
        penalties = torch.zeros(num_envs, len(self.names), dtype=torch.float64, device=device)
        return HeuristicMemory(zeros, penalties, zeros + NEVER, last_decay=zeros)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """The wanted action; where it is masked, WAIT, and the memory is only decayed."""
        state = view.state
        decayed = decay_penalties(HeuristicMemory(*memory), state.signals.step)
        wish, after = heuristic_choice(state, decayed, self.cfg, names=self.names)
        slot = torch.where(wish.op == Op.GERMINATE, first_choice(state.slots.empty), wish.slot)
        action, legal = obey(seed_action(wish.op, slot, wish.blueprint), view.masks)
        return as_decision(action), HeuristicMemory(*restart(decayed, after, legal))


def decay_penalties(
    memory: HeuristicMemory, step: Tensor, constants: HeuristicConstants = CONSTANTS
) -> HeuristicMemory:
    """Penalties decayed once per env-step; small ones are dropped."""
    decayed = memory.penalties * _column(constants.penalty_decay)
    decayed = torch.where(decayed < MIN_PENALTY, 0.0, decayed)
    due = step > memory.last_decay
    penalties = torch.where(due.unsqueeze(-1), decayed, memory.penalties)
    last = torch.where(due, step, memory.last_decay)
    return memory._replace(penalties=penalties, last_decay=last)


def heuristic_choice(
    state: EnvState,
    memory: HeuristicMemory,
    cfg: HeuristicConfig,
    names: Sequence[str],
    constants: HeuristicConstants = CONSTANTS,
) -> tuple[HeuristicChoice, HeuristicMemory]:
    """The heuristic's choice without masks, and its memory after that choice (as the reference).

    The first managed seed in slot order decides; only without one is germination considered.
    Thresholds of `cfg` may also be tensors [N]; names: what it calls the blueprints, by code.
    """
    undecided = stage_allows(Op.PRUNE, state.slots.stage)  # seeds that still need decisions
    managing = undecided.any(-1)
    slot = first_choice(undecided)
    signals = state.signals
    # stable, on a plateau, late enough, long enough after a prune, with a free slot
    due = signals.step - memory.last_prune >= constants.embargo_steps
    due = due & signals.stabilized & (signals.step >= cfg.min_steps_before_germinate)
    due = due & state.slots.empty.any(-1) & (signals.plateau >= cfg.plateau_steps_to_germinate)
    germinating = ~managing & due
    next_blueprint, rotation = _next_blueprint(memory, cfg, names, constants=constants)
    op = torch.where(germinating, Op.GERMINATE, Op.WAIT)
    op = torch.where(managing, _managing_op(state, slot, cfg), op)
    blueprint = torch.where(germinating, next_blueprint, chosen(state.slots.blueprint, slot))
    pruning = op == Op.PRUNE
    codes = torch.arange(memory.penalties.shape[1], device=op.device)
    charged = pruning.unsqueeze(-1) & (codes == blueprint.unsqueeze(-1))
    penalties = memory.penalties + _column(constants.prune_penalty)
    memory = memory._replace(
        rotation=torch.where(germinating, rotation, memory.rotation),
        penalties=torch.where(charged, penalties, memory.penalties),
        last_prune=torch.where(pruning, state.signals.step, memory.last_prune),
    )
    return HeuristicChoice(op, slot, blueprint), memory


def _managing_op(state: EnvState, slot: Tensor, cfg: HeuristicConfig) -> Tensor:
    """Op int64 [N] for the managed seed in `slot` [N]."""
    stage = chosen(state.slots.stage, slot)
    target = chosen(state.ramp.target, slot)
    contribution = chosen(state.slots.contribution, slot)
    failing = chosen(state.slots.stage_age, slot) >= cfg.prune_after_steps_without_improvement
    failing &= chosen(state.slots.improvement, slot) < -cfg.prune_if_accuracy_drops_by
    blended = (
        (target >= 1.0 - ALPHA_TOLERANCE)
        & (chosen(state.ramp.mode, slot) == AlphaMode.HOLD)
        & ((chosen(state.slots.alpha, slot) - target).abs() <= ALPHA_TOLERANCE)
    )
    ransomware = contribution > RANSOM_CONTRIBUTION
    ransomware &= chosen(state.slots.total_improvement, slot) < RANSOM_IMPROVEMENT
    keepable = (contribution > cfg.min_improvement_to_fossilize) & ~ransomware
    decision = torch.where(keepable, Op.FOSSILIZE, Op.PRUNE)
    op = torch.where(failing, Op.PRUNE, Op.ADVANCE)
    op = torch.where((stage == Stage.BLENDING) & ~failing & ~blended, Op.WAIT, op)
    op = torch.where(stage == Stage.GERMINATED, Op.ADVANCE, op)
    known = chosen(state.slots.contribution_known, slot)
    return torch.where(stage == Stage.HOLDING, torch.where(known, decision, Op.WAIT), op)


def _next_blueprint(
    memory: HeuristicMemory,
    cfg: HeuristicConfig,
    names: Sequence[str],
    constants: HeuristicConstants,
) -> tuple[Tensor, Tensor]:
    """Blueprint int64 [N] to germinate next, and the rotation count int64 [N] once it is taken.

    The next candidate of the rotation with a penalty below the threshold; where all are above it,
    the rotation goes over the candidates ordered by penalty, then name.
    """
    device = memory.rotation.device
    size = len(cfg.blueprint_rotation)
    codes = _constants(tuple(map(names.index, cfg.blueprint_rotation)), device)
    turn = (memory.rotation.unsqueeze(-1) + torch.arange(size, device=device)) % size
    candidates = codes[turn]
    acceptable = memory.penalties.gather(1, candidates) < _column(constants.penalty_threshold)
    first = first_choice(acceptable)
    by_name = _constants(tuple(map(names.index, sorted(cfg.blueprint_rotation))), device)
    order = memory.penalties[:, by_name].argsort(dim=1, stable=True)
    least_bad = by_name[chosen(order, memory.rotation % size)]
    some = acceptable.any(-1)
    blueprint = torch.where(some, chosen(candidates, first), least_bad)
    return blueprint, memory.rotation + torch.where(some, first + 1, 1)


def seed_action(op: Tensor, slot: Tensor, blueprint: Tensor) -> Action:
    """`op` on `slot` [N], `blueprint` for GERMINATE, the placeholder choice in every other head."""
    placeholders = {head.name: torch.full_like(op, head.placeholder) for head in HEADS}
    choices = {"op": op, "slot": slot, "blueprint": blueprint}
    return Action.from_dict(placeholders | choices, batch_size=op.shape)


def as_decision(action: Action) -> Decision:
    """`action` as a Decision, with zeros for what only a learner needs."""
    zeros = torch.zeros_like(action.op, dtype=torch.float32)
    log_probs = zeros.new_zeros(*zeros.shape, len(HEAD_NAMES))
    return Decision(action=action, log_probs=log_probs, value=zeros, batch_size=zeros.shape)


@lru_cache(maxsize=64)
def _constants(values: tuple[int, ...], device: torch.device) -> Tensor:
    """`values` as int64 on the device, where they stay."""
    return upload([np.array(values)], device)[0]


def _column(setting: Tensor | float) -> Tensor | float:
    """A setting that broadcasts over [N, C]: tensors [N] become [N, 1]."""
    return setting.unsqueeze(-1) if isinstance(setting, Tensor) else setting
