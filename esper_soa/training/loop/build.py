"""Rules, worlds and scripted players from checked settings."""

from copy import copy
from dataclasses import replace
from functools import partial

import torch

from esper_soa.agent.protocol import Agent
from esper_soa.agent.scripted import scripted_policy
from esper_soa.agent.user_agents import AgentContext, user_agent
from esper_soa.config.env import EPISODE_LENGTH, REWARD_MODE
from esper_soa.config.nets import SubsetRows, blueprint_names
from esper_soa.config.registry import is_reference, name_in
from esper_soa.config.settings import TrainConfig
from esper_soa.env.attribution import arrival_orders, prefix_codes
from esper_soa.env.reward_records import RewardSettings
from esper_soa.env.step import EAGER, EnvRules, StepKernels, compiled
from esper_soa.env.user_reward import user_reward
from esper_soa.env.world import World
from esper_soa.nets.choose import choose_engine
from esper_soa.nets.data.batches import BatchSource
from esper_soa.nets.data.datasets import count_samples, load_samples, sample_spec, synthetic
from esper_soa.nets.engine import NetsConfig
from esper_soa.nets.model.blueprints import blueprint_codes, num_codes
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.user_parts import task_shape, task_slots
from esper_soa.nets.seeds.pools import parameter_table
from esper_soa.nets.seeds.subsets import EXACT_SLOTS
from esper_soa.nets.trial import Trial
from esper_soa.runtime.compilation import choose_compilation, keep_compiled
from esper_soa.runtime.device import choose_layout, keep_freed_memory, sizes_of, take_device
from esper_soa.runtime.memory import NO_SAMPLES, check_room, room_for_steps
from esper_soa.runtime.ranks import SINGLE_PROCESS, Ranks
from esper_soa.runtime.replay import STATE, choose_replay
from esper_soa.runtime.step_cache import stored_kernels, unsupported
from esper_soa.system.json_lines import Json


def build_rules(cfg: TrainConfig, device: torch.device, ranks: Ranks = SINGLE_PROCESS) -> EnvRules:
    """All that stays the same during a run, on `device`, the engine of its networks included.

    cfg.envs: of this rank. Raises SettingError where the settings ask for what cannot run.
    """
    trial = trial_of(cfg, device, ranks.beside)
    nets = trial.nets
    allowed = torch.zeros(num_codes(nets.shape.blueprints), dtype=torch.bool)
    allowed[list(blueprint_codes(list(cfg.task.blueprints)))] = True
    orders, _ = shapley_orders(cfg, len(nets.shape.slots))
    length = [EPISODE_LENGTH] * (cfg.early_stop.length != 0)
    groups = cfg.reward, cfg.gates, cfg.lifecycle
    read = *(name for group in groups for name in group.differing), *length, *cfg.policy.observe
    return EnvRules(
        nets=nets,
        engine=choose_engine(cfg.compute.engine, trial),
        lifecycle=cfg.lifecycle,
        gates=cfg.gates,
        signals=cfg.signals,
        governor=cfg.governor,
        reward=reward_settings(cfg, nets.shape, device),
        blueprints=allowed.to(device),
        max_seeds=cfg.max_seeds,
        shapley_orders=None if orders is None else orders.to(device),
        early_stop=cfg.early_stop,
        differing=cfg.differing,
        observed=tuple(cfg.policy.observe),
        kernel_settings=tuple(dict.fromkeys(read)),
    )


def reward_settings(cfg: TrainConfig, shape: HostShape, device: torch.device) -> RewardSettings:
    """What rewards need to know; raises SettingError for a user's reward that is none."""
    counts = parameter_table(shape, device)
    flop = training_flop(shape, device)

    def settings_of(mode: str) -> RewardSettings:
        part = user_reward(mode, len(shape.slots), cfg.steps, device=device)
        config = replace(cfg.reward, mode=mode)
        return RewardSettings(config, counts, flop, max_steps=cfg.steps, user_reward=part)

    by_mode = tuple(map(settings_of, cfg.reward.modes))
    if REWARD_MODE not in cfg.reward.differing:
        return by_mode[0]
    return RewardSettings(cfg.reward, counts, flop, max_steps=cfg.steps, by_mode=by_mode)


def trial_of(cfg: TrainConfig, device: torch.device, processes: int = 1) -> Trial:
    """Networks and their work on `device`, which so many processes share; not of native kernels."""
    shape = task_shape(cfg.task, cfg.slots)
    nets = NetsConfig(
        shape,
        cfg.task,
        cfg.lifecycle.detached_in(shape.slots[0].topology),
        rows=SubsetRows(cfg.attribution.pairs, shapley_orders(cfg, len(shape.slots))[1]),
        accumulate=cfg.accumulate,
        **choose_layout(cfg, shape, device)._asdict(),
    )
    room = partial(room_for_steps, cfg, device, processes)
    return Trial(
        nets, device, sizes_of(cfg), spec=sample_spec(cfg.data), example=synthetic, room=room
    )


def rule_player(cfg: TrainConfig, name: str, setting: str) -> Agent:
    """The scripted policy or user's own agent `name`, of `setting`; SettingError where none."""
    if not is_reference(name):
        return scripted_policy(replace(cfg.policy, name=name), cfg.task.blueprints)
    slots = task_slots(cfg.task, cfg.slots)
    names = tuple(map(name_in, blueprint_names(cfg.task.blueprints)))
    return user_agent(name, setting, AgentContext(slots, names, cfg.steps, seed=cfg.seed))


def shapley_orders(cfg: TrainConfig, num_slots: int) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """Orders int64 [P, S] for sampled Shapley values, the same all run long, and their subsets;
    None where not asked for, and where so few slots have all subsets evaluated.
    """
    samples = cfg.attribution.shapley_samples
    if samples == 0 or num_slots <= EXACT_SLOTS:
        return None, ()
    orders = arrival_orders(num_slots, samples, cfg.seed, device=torch.device("cpu"))
    return orders, tuple(dict.fromkeys(prefix_codes(orders).flatten().tolist()))


def build_world(
    cfg: TrainConfig,
    device: torch.device,
    seed: int | None = None,
    data: BatchSource | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> World:
    """The envs of this rank, with weights and data, of cfg.seed and cfg.data where no others are
    given; raises SettingError or DataError for what does not fit together.
    """
    # not checked again: what is asked of all envs need not hold for a share of them
    part = copy(cfg)
    part.envs = len(ranks.share(cfg.envs))
    check_room(
        part,
        device,
        count_samples(cfg.data) if data is None else NO_SAMPLES,
        processes=ranks.beside,
    )
    take_device(device)
    keep_freed_memory(device)
    rules = build_rules(part, device, ranks)
    data = load_samples(cfg.data, device) if data is None else data.to(device)
    own_reward = any(map(is_reference, cfg.reward.modes))
    replay = choose_replay(cfg.compute.cuda_graphs, device, own_reward, num_ranks=ranks.count)
    kernels = build_kernels(cfg, rules, part.envs)
    kernels = kernels._replace(replay=replay, steps=replay.steps(STATE, device))
    seed = cfg.seed if seed is None else seed
    return World(
        rules, data, sizes_of(part), cfg=cfg.data, seed=seed, kernels=kernels, reduction=ranks
    )


def world_facts(world: World) -> dict[str, Json]:
    """Facts for versions.json: data, kernels, and which decisions are replayed."""
    return {
        "data": world.data.facts(),
        "kernels": world.rules.engine.chosen.facts(),
        "state": world.kernels.reason,
        "graphs": world.kernels.replay.facts(),
    }


def build_worlds(cfg: TrainConfig, device: torch.device, ranks: Ranks) -> World:
    """`build_world` on every rank: the first chooses the engine and compiles for the others."""
    world = build_world(cfg, device, ranks=ranks) if ranks.first else None
    engine = ranks.from_first(lambda: world.rules.engine.chosen.name if world is not None else "")
    strict_cfg = replace(cfg, compute=replace(cfg.compute, engine=engine))
    return world or build_world(strict_cfg, device, ranks=ranks)


def build_kernels(cfg: TrainConfig, rules: EnvRules, num_envs: int) -> StepKernels:
    """The kernels of the state machine as the settings ask for them; on a CPU those that were
    compiled ahead of time, which change no number.
    """
    setting = cfg.compute.compile
    env_steps = cfg.rounds * cfg.steps
    if setting != "off" and not unsupported(rules):
        stored = stored_kernels(rules, num_envs, env_steps, wait=setting == "on")
        if setting == "auto" or stored.record_and_observe is not EAGER.record_and_observe:
            return stored
    device = rules.blueprints.device
    wanted, reason = choose_compilation(setting, device, cfg.envs, env_steps=env_steps)
    if not wanted:
        return EAGER._replace(reason=reason)
    reason = f"{reason}; {keep_compiled()}"
    # jobs of a sweep share a process: what one compiled is nothing to the next
    torch.compiler.reset()
    return compiled()._replace(reason=reason)
