"""Setup, rules, worlds and scripted players from checked settings."""

from dataclasses import replace

import torch

from esper_soa.agent.protocol import Agent
from esper_soa.agent.scripted import scripted_policy
from esper_soa.agent.user_agents import AgentContext, user_agent
from esper_soa.config.agent import PolicyConfig
from esper_soa.config.env import EPISODE_LENGTH, REWARD_MODE, RewardConfig
from esper_soa.config.nets import SubsetRows, blueprint_names
from esper_soa.config.registry import is_reference, name_in
from esper_soa.config.settings import TrainConfig
from esper_soa.env.ahead import given_by_env
from esper_soa.env.attribution import prefix_codes, shapley_orders
from esper_soa.env.observation import NUM_ENV_FEATURES, NUM_SLOT_FEATURES
from esper_soa.env.reward_records import RewardSettings
from esper_soa.env.step import EAGER, EnvRules, StepKernels, compiled
from esper_soa.env.user_reward import user_reward
from esper_soa.env.world import World
from esper_soa.nets.choose import choose_engine
from esper_soa.nets.data import datasets
from esper_soa.nets.data.batches import BatchSource, SampleCount
from esper_soa.nets.model.blueprints import blueprint_codes, num_codes
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.user_parts import task_shape
from esper_soa.nets.seeds.pools import parameter_table
from esper_soa.nets.setup import Setup, lay_out
from esper_soa.runtime.compilation import STATE, choose_compilation, choose_replay, keep_compiled
from esper_soa.runtime.device import keep_freed_memory, take_device, threads
from esper_soa.runtime.memory import check_room, room_for_engine
from esper_soa.runtime.ranks import SINGLE_PROCESS, Ranks
from esper_soa.runtime.step_cache import stored_kernels, unsupported
from esper_soa.system.json_lines import Json


def make_setup(
    cfg: TrainConfig, device: torch.device, ranks: Ranks = SINGLE_PROCESS, loaded: bool = False
) -> Setup:
    """The setup of this rank on `device`; SettingError where the settings ask for what cannot run.

    loaded: whether the samples are in memory already. Only here are cfg.task, cfg.slots, cfg.data
    and cfg.compute read.
    """
    spec = datasets.sample_spec(cfg.data)
    task = datasets.with_classes(cfg.task, cfg.data)
    shape = task_shape(task, cfg.slots, cfg.data.image_shape)
    orders = shapley_orders(cfg.attribution, len(shape.slots), cfg.seed)
    codes = () if orders is None else prefix_codes(orders).flatten().tolist()
    setup = Setup(
        shape,
        task,
        cfg.lifecycle.detached_in(shape.slots[0].topology),
        env_chunk=1,  # this and the rest of the layout by `lay_out`
        eval_batch=1,
        device=device,
        processes=ranks.beside,
        compute=cfg.compute,
        batch_size=cfg.batch_size,
        train_samples=cfg.train_samples,
        val_samples=cfg.val_samples,
        steps=cfg.steps,
        seed=cfg.seed,
        accumulate=cfg.accumulate,
        rows=SubsetRows(cfg.attribution.pairs, tuple(dict.fromkeys(codes))),
        spec=spec,
        data=cfg.data,
        effects=cfg.effects,
        env_features=NUM_ENV_FEATURES + len(cfg.policy.observe),
        slot_features=NUM_SLOT_FEATURES,
        unread=SampleCount(0, 0) if loaded else datasets.count_samples(cfg.data),
    )
    return lay_out(setup, len(ranks.share(cfg.envs)))


def build_rules(cfg: TrainConfig, setup: Setup) -> EnvRules:
    """All that stays the same during a run, the engine of its networks included.

    Raises SettingError where the settings ask for what cannot run.
    """
    device = setup.device
    allowed = torch.zeros(num_codes(setup.shape.blueprints), dtype=torch.bool)
    allowed[list(blueprint_codes(list(setup.task.blueprints)))] = True
    orders = shapley_orders(cfg.attribution, len(setup.shape.slots), setup.seed)
    length = [EPISODE_LENGTH] * (cfg.early_stop.length != 0)
    groups = cfg.reward, cfg.gates, cfg.lifecycle
    read = *(name for group in groups for name in group.differing), *length, *cfg.policy.observe
    return EnvRules(
        setup=setup,
        engine=choose_engine(setup, datasets.synthetic, room_for_engine(setup, cfg.policy)),
        lifecycle=cfg.lifecycle,
        gates=cfg.gates,
        signals=cfg.signals,
        governor=cfg.governor,
        reward=reward_settings(cfg.reward, setup),
        blueprints=allowed.to(device),
        max_seeds=cfg.max_seeds,
        shapley_orders=None if orders is None else orders.to(device),
        early_stop=cfg.early_stop,
        differing=cfg.differing,
        observed=tuple(cfg.policy.observe),
        kernel_settings=tuple(dict.fromkeys(read)),
    )


def reward_settings(reward: RewardConfig, setup: Setup) -> RewardSettings:
    """Settings of the rewards of all envs; raises SettingError for a user's reward that is none."""
    counts = parameter_table(setup.shape, setup.device)
    flop = training_flop(setup.shape, setup.device)
    num_slots = len(setup.shape.slots)

    def settings_of(mode: str) -> RewardSettings:
        part = user_reward(mode, num_slots, setup.steps, device=setup.device)
        config = replace(reward, mode=mode)
        return RewardSettings(config, counts, flop, max_steps=setup.steps, user_reward=part)

    by_mode = tuple(map(settings_of, reward.modes))
    if REWARD_MODE not in reward.differing:
        return by_mode[0]
    return RewardSettings(reward, counts, flop, max_steps=setup.steps, by_mode=by_mode)


def rule_player(name: str, setting: str, policy: PolicyConfig, setup: Setup) -> Agent:
    """The scripted policy or user's own agent `name`, of `setting`; SettingError where none."""
    if not is_reference(name):
        return scripted_policy(replace(policy, name=name), setup.task.blueprints)
    names = tuple(map(name_in, blueprint_names(setup.task.blueprints)))
    context = AgentContext(setup.shape.slots, names, setup.steps, seed=setup.seed)
    return user_agent(name, setting, context)


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
    setup = make_setup(cfg, device, ranks, loaded=data is not None)
    return _world_of(cfg, setup, seed, data=data, ranks=ranks)


def _world_of(
    cfg: TrainConfig,
    setup: Setup,
    seed: int | None = None,
    data: BatchSource | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> World:
    with threads(setup.compute.threads):
        check_room(setup, cfg.policy)
        take_device(setup.device)
        keep_freed_memory(setup.device)
        rules = build_rules(cfg, setup)
        data = (
            datasets.load_samples(setup.data, setup.device)
            if data is None
            else data.to(setup.device)
        )
        own_reward = any(map(is_reference, cfg.reward.modes))
        graphs = setup.compute.cuda_graphs
        replay = choose_replay(graphs, setup.device, own_reward, num_ranks=ranks.count)
        if setup.compute.compile != "off" and not unsupported(rules):
            rules = given_by_env(rules)
        kernels = build_kernels(rules, cfg.rounds * cfg.steps, num_envs=cfg.envs)
        kernels = kernels._replace(replay=replay, steps=replay.steps(STATE, setup.device))
        seed = setup.seed if seed is None else seed
        return World(rules, data, seed, kernels=kernels, reduction=ranks)


def world_facts(world: World) -> dict[str, Json]:
    """Facts for versions.json: data, kernels, and which decisions are replayed."""
    return {
        "data": world.data.facts(),
        "kernels": world.rules.engine.chosen.facts(),
        "state": world.kernels.reason,
        "graphs": world.kernels.replay.facts(),
    }


def build_worlds(cfg: TrainConfig, setup: Setup, ranks: Ranks) -> World:
    """`build_world` on every rank: the first chooses the engine and compiles for the others."""
    world = _world_of(cfg, setup, ranks=ranks) if ranks.first else None
    engine = ranks.from_first(lambda: world.rules.engine.chosen.name if world is not None else "")
    same = setup._replace(compute=replace(setup.compute, engine=engine))
    return world or _world_of(cfg, same, ranks=ranks)


def build_kernels(rules: EnvRules, env_steps: int, num_envs: int) -> StepKernels:
    """The kernels of the state machine as the settings ask for them; on a CPU those that were
    compiled ahead of time, which change no number. num_envs: N of the run.
    """
    setup = rules.setup
    setting = setup.compute.compile
    if setting != "off" and not unsupported(rules):
        stored = stored_kernels(rules, setup.num_envs, env_steps, wait=setting == "on")
        if setting == "auto" or stored.record_and_observe is not EAGER.record_and_observe:
            return stored
    wanted, reason = choose_compilation(setting, setup.device, num_envs, env_steps=env_steps)
    if not wanted:
        return EAGER._replace(reason=reason)
    reason = f"{reason}; {keep_compiled()}"
    # jobs of a sweep share a process: what one compiled is nothing to the next
    torch.compiler.reset()
    return compiled()._replace(reason=reason)
