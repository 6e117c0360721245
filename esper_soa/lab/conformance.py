"""Checks users' own parts: one error lists all faults of a part.

For users' tests and notebooks: `esper_soa.check_blueprint("my_parts.seeds:twin")`, or the function
or class itself. Checks all that a run checks while it is built (nets/model/user_parts.py,
env/user_reward.py, agent/user_agents.py), and more: initial values and outputs that are not finite,
what envs share, what depends on chance, and where gradients go. A fault hides no other, unless the
other cannot be measured.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor

from esper_soa.agent.protocol import Agent
from esper_soa.agent.user_agents import (
    AgentContext,
    conduct_findings,
    copied,
    decision_faults,
    make_agent,
    memory_faults,
)
from esper_soa.config import registry
from esper_soa.config.env import REWARD_MODE, GatesConfig, LifecycleConfig
from esper_soa.config.nets import IMAGES, TOPOLOGIES, DataConfig, TaskConfig, host_slots
from esper_soa.config.registry import AGENT, BLUEPRINT, HOST, REWARD, Part, collect_faults
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.env import Env
from esper_soa.env.legal import illegal_choices, obey
from esper_soa.env.reward_records import RewardInputs
from esper_soa.env.step import EnvView
from esper_soa.env.user_reward import changed_inputs, reward_findings, sample_inputs
from esper_soa.env.world import World
from esper_soa.lab.conformance_networks import host_networks, seed_networks, training_findings
from esper_soa.nets.choose import NATIVE, engine_of
from esper_soa.nets.model import user_parts
from esper_soa.nets.model.host import HostChain, host_shape
from esper_soa.nets.model.user_segment import UserHost
from esper_soa.state import Decision, View
from esper_soa.system.errors import UserError, one_line
from esper_soa.system.torch_state import package_state
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import BLUEPRINT_NAMES, NUM_BLUEPRINTS

CPU = torch.device("cpu")
REWARD_SIZES = (5, 3, 20)  # envs, slots and env-steps of an episode, of the inputs of a reward
REWARD_SAMPLES = 20  # sets of inputs that a reward is tried on
NUM_TRIED = 5  # envs, and sets of inputs, where a run begins
MOST_SIDE = 8  # pixels or positions of features there


class ConformanceError(UserError):
    """A user's own part that a run cannot use; `findings` lists its faults."""

    def __init__(self, kind: str, name: str, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        super().__init__(kind, name, self.findings)  # `args`, which a pickle is made of

    def __str__(self) -> str:
        kind, name, findings = self.args
        count = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
        lines = "".join(f"\n  - {finding}" for finding in findings)
        return f"{kind} {name}: {count}{lines}"


@package_state()
def check_blueprint(part: Part | str, channels: Sequence[int] = (4, 24), size: int = 8) -> str:
    """The engine that computes it on a CPU. Raises ConformanceError, with all findings, unless
    `part` is a blueprint.

    part: what @esper_soa.blueprint marks, or `module:name`. channels: of the slots to try it in,
    which have `size` x `size` pixels, or `size` positions where it takes sequences.
    """
    engine = NATIVE
    with _checking(BLUEPRINT, part) as (name, made, found):
        blueprint = user_parts.architecture_of(made, name, NUM_BLUEPRINTS)
        axes = TOPOLOGIES.index(blueprint.topology or IMAGES)
        for width in channels:
            shape = (width, *[size] * axes)
            faults = user_parts.blueprint_findings(blueprint, shape)
            trained = training_findings(partial(seed_networks, blueprint, shape), faults)
            found += [*faults, *(f"with {width} channels {finding}" for finding in trained)]
            if engine == NATIVE and not found:
                engine = engine_of(blueprint, shape)
    return engine


@package_state()
def check_host(part: Part | str, classes: int = 10) -> str:
    """The engine that computes it on a CPU. Raises ConformanceError, with all findings, unless
    `part` is a host of that many classes.

    part: what @esper_soa.host marks, or `module:name`. Only the shapes
    of a Host with segments of its own are looked at.
    """
    engine = NATIVE
    with _checking(HOST, part) as (name, made, found):
        host = user_parts.host_of(made, name, classes)
        faults = user_parts.host_findings(host, classes)
        found += faults
        if isinstance(host, HostChain | UserHost):
            found += training_findings(partial(host_networks, host, classes), faults)
        if not found:
            engine = engine_of(host_shape(TaskConfig(num_classes=classes), (), host=host))
    return engine


@package_state()
def check_reward(part: Part | str) -> None:
    """Raise ConformanceError, with all findings, unless `part` is a reward, on made-up inputs.

    part: what @esper_soa.reward marks, or `module:name`.
    """
    with _checking(REWARD, part) as (_, made, found):
        samples = [sample_inputs(*REWARD_SIZES, CPU, seed) for seed in range(REWARD_SAMPLES)]
        found += reward_findings(made, samples[0].clone())
        faults = " ".join(found)
        measurable = registry.RAISES not in faults and "not a tensor" not in faults
        if registry.num_required(made) == 1 and measurable:
            if _paid(made, samples[0].clone()).shape == samples[0].op.shape:
                found += _value_findings(made, samples)
            found += _kernel_findings(made, samples[0])


@package_state()
def check_agent(part: Part | str, steps: int = 16) -> None:
    """Raise ConformanceError, with all findings, unless `part` gives an agent; it plays an episode
    of small real hosts.

    part: what @esper_soa.agent marks, or `module:name`.
    """
    with _checking(AGENT, part) as (_, made, found):
        if registry.num_required(made) > 1:
            raise ValueError("it wants more arguments than the AgentContext")
        world = build_world(_small_run(steps), CPU)
        surroundings = AgentContext(world.setup.shape.slots, BLUEPRINT_NAMES, steps, seed=0)
        with collect_faults(found):
            found.extend(_play_findings(make_agent(made, surroundings), Env(world)))


def findings_of_a_run(world: World, modes: Sequence[str]) -> list[str]:
    """Faults of the users' host, blueprints and rewards of a run that it does not refuse while it
    is built. Agents are watched as they play, and kernels compiled, by the run itself.
    """
    shape = world.setup.shape
    networks = {}
    for part in (part for part in shape.blueprints if part.code >= NUM_BLUEPRINTS):
        for channels, *axes in {spec.shape for spec in shape.slots if part.fits(spec)}:
            small = channels, *(min(side, MOST_SIDE) for side in axes)
            networks[f"{part.name} in {[*small]}"] = partial(seed_networks, part, small)
    host = user_parts.task_host(world.setup.task, shape.input_shape)
    if isinstance(host, HostChain | UserHost):
        networks[world.setup.task.host] = partial(host_networks, host, shape.num_classes)
    found = list[str]()
    with torch.random.fork_rng(devices=[]):
        for label, make in networks.items():
            found += [f"{label}: {finding}" for finding in training_findings(make, ())]
        for mode in filter(registry.is_reference, modes):
            reward = registry.find(REWARD, mode, REWARD_MODE)
            steps = world.rules.max_steps
            draw = partial(sample_inputs, NUM_TRIED, len(shape.slots), steps, world.device)
            samples = [draw(seed) for seed in range(NUM_TRIED)]
            with collect_faults(found, f"{mode}: {registry.RAISES}"):
                found += [f"{mode}: {finding}" for finding in _value_findings(reward, samples)]
    return found


@contextmanager
def _checking(kind: str, part: Part | str) -> Iterator[tuple[str, Part, list[str]]]:
    """Name of a part, the part, and a list for findings, which raise one error at the end."""
    made = registry.find(kind, part, f"check_{kind}") if isinstance(part, str) else part
    marked = registry.marked_name(kind, made)
    found = [] if marked else [f'nothing marks it: @esper_soa.{kind}("name") belongs above it']
    name = marked or one_line(made)
    try:
        yield name, made, found
    except registry.RAISED as error:
        found.append(one_line(error))
    if found:
        raise ConformanceError(kind, name, list(dict.fromkeys(found)))


# --- rewards


def _paid(part: Part, inputs: RewardInputs) -> Tensor:
    """The reward [N]; terms are summed up."""
    given = part(inputs)
    terms = list(given.values()) if isinstance(given, Mapping) else [given]
    return torch.stack(cast(list[Tensor], terms)).sum(0)


def _value_findings(part: Part, samples: Sequence[RewardInputs]) -> list[str]:
    """Faults of the numbers paid for finite inputs such as a run can give."""
    found = []
    names = [*RewardInputs.__annotations__]
    for inputs, others in zip(samples, [*samples[1:], samples[0]], strict=True):
        given = inputs.clone()
        paid = _paid(part, given)
        found += changed_inputs(given, inputs)
        for env in (~paid.isfinite()).nonzero().flatten().tolist()[:1]:
            place = "at" if inputs.step[env] == inputs.max_steps[env] else "before"
            found.append(
                f"it pays {float(paid[env])}, not a finite number, {place} the last env-step"
            )
        rows = {name: torch.cat([inputs.get(name)[:1], others.get(name)[1:]]) for name in names}
        mixed = RewardInputs.from_dict(rows, batch_size=inputs.batch_size)
        again = (
            "for the same inputs it pays something else the second time: it keeps state or draws"
        )
        for what, less, envs in (
            (again, inputs, len(paid)),
            ("what env 0 is paid depends on other envs", mixed, 1),
            ("what env 0 is paid depends on the number of envs", inputs[:1], 1),
        ):
            other = _paid(part, less.clone())[:envs]
            if not torch.equal(other.nan_to_num(), paid[:envs].nan_to_num()):
                found.append(what)
    return list(dict.fromkeys(found))


def _kernel_findings(part: Part, inputs: RewardInputs) -> list[str]:
    """Faults that make a device wait for the host, or break compiled kernels."""
    found = list[str]()
    what = "it reads numbers on the host, or makes tensors elsewhere than its inputs are:"
    with collect_faults(found, what):
        _paid(part, inputs.to("meta"))
    with collect_faults(found, "it cannot be compiled as one graph:"):
        torch.compile(part, backend="eager", fullgraph=True)(inputs.clone())
    return found


# --- agents


def _small_run(steps: int) -> TrainConfig:
    """Hosts of some hundred weights, whose seeds mature in a few env-steps."""
    task = TaskConfig(name="small", base_channels=2, num_blocks=5, kernel_size=1, num_pools=5)
    return TrainConfig(
        envs=4,
        steps=steps,
        rounds=1,
        batch_size=2,
        train_samples=2,
        val_samples=4,
        task=task,
        slots=[spec.name for spec in host_slots(task)[:2]],
        data=DataConfig(name="synthetic", synthetic_train=16, synthetic_test=8),
        gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.0),
        lifecycle=LifecycleConfig(embargo_steps=2, min_prune_age=1),
        compute=ComputeConfig(workers=1, engine="torch"),
    )


def _play_findings(agent: Agent, env: Env) -> Iterator[str]:
    """Faults of an episode, each at the env-step that first shows it. The episode goes on with WAIT
    for illegal actions, and ends early at what is no action or no memory.
    """
    num_envs = env.num_envs
    memory = agent.start(num_envs, CPU)
    observed: EnvView | None = env.reset()
    known = set[str]()
    fatal = memory_faults(memory, num_envs, CPU)
    yield from fatal
    while observed is not None and not fatal:
        view = observed.view
        first = agent.act(view.clone(), copied(memory))
        faults = decision_faults(first[0], view)
        fatal = [fault for fault in faults if fault.startswith(("its decision", "its action"))]
        fatal += memory_faults(first[1], num_envs, CPU)
        faults = [fault for fault in faults if fault not in fatal] + fatal
        if not fatal:
            faults += _step_findings(first[0], view)
            faults += conduct_findings(agent, view, memory, first=first)
        new = {_kind(fault): fault for fault in reversed(faults) if _kind(fault) not in known}
        known |= new.keys()
        step = int(view.state.signals.step[0])
        yield from (f"at env-step {step}: {fault}" for fault in reversed(new.values()))
        if not fatal:
            memory = first[1]
            _, observed = env.step(obey(first[0].action, view.masks)[0])


def _kind(fault: str) -> str:
    """Faults of one kind: of illegal choices, those of one head."""
    illegal = re.match(r"env \d+: (\w+) .* is not legal", fault)
    return f"{illegal[1]} is not legal" if illegal else fault


def _step_findings(decision: Decision, view: View) -> list[str]:
    return illegal_choices(decision.action, view.masks, {"blueprint": BLUEPRINT_NAMES}) + [
        f"its {name} is not finite"
        for name in ("log_probs", "value")
        if not torch.as_tensor(getattr(decision, name)).isfinite().all()
    ]
