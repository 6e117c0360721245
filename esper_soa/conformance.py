"""Whether parts of users' own are what a run takes them for: every finding in words, in one error.

For users' tests and notebooks: `esper_soa.check_blueprint("my_parts.seeds:twin")`, or the function
or class itself. What a run looks at while it is built (nets/own_parts.py,
env/own_reward.py, agent/own_agents.py) is looked at here too, and more than that: what begins or
comes out not finite, what envs share, what depends on chance, and where gradients go.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.agent.distribution import illegal_choices
from esper_soa.agent.own_agents import Surroundings, decision_faults, made_agent, memory_faults
from esper_soa.agent.protocol import Agent, Memory
from esper_soa.build import build_world
from esper_soa.config import ComputeConfig, TrainConfig
from esper_soa.env.config import GatesConfig, LifecycleConfig
from esper_soa.env.env import Env, Seen
from esper_soa.env.own_reward import reward_findings, sample_inputs
from esper_soa.env.reward_records import RewardInputs
from esper_soa.errors import UserError, one_line
from esper_soa.nets import streams
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, DataConfig, TaskConfig, host_slots
from esper_soa.nets.forward import seed_forward
from esper_soa.nets.host import (
    HostShape,
    evaluate_forward,
    fold_batch_norm,
    host_shape,
    initial_hosts,
    train_loss,
)
from esper_soa.nets.layers import PLAIN
from esper_soa.nets.model.blueprints import Architecture, initial_seeds, seed_table
from esper_soa.nets.own_parts import architecture_of, blueprint_findings, host_findings, host_of
from esper_soa.nets.seeds import TrainingSeeds
from esper_soa.registry import (
    AGENT,
    BLUEPRINT,
    HOST,
    RAISED,
    REWARD,
    Part,
    find,
    marked_name,
    num_required,
)
from esper_soa.state import Decision, View
from esper_soa.vocabulary import BLUEPRINT_NAMES, HEAD_NAMES, NUM_BLUEPRINTS

CPU = torch.device("cpu")
NETS = 3  # networks and images that a blueprint is tried on
IMAGES = 4
SAMPLES = 20  # sets of inputs that a reward is tried on
SETTLED = 1e-6  # relative difference of an image's features that rounding may make


class ConformanceError(UserError):
    """A part of a user's own that a run could not take; `findings` says why, one by one."""

    def __init__(self, kind: str, name: str, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        count = "1 finding" if len(self.findings) == 1 else f"{len(self.findings)} findings"
        lines = "".join(f"\n  - {finding}" for finding in self.findings)
        super().__init__(f"{kind} {name}: {count}{lines}")


def check_blueprint(part: Part | str, channels: Sequence[int] = (4, 24), size: int = 8) -> None:
    """Raise ConformanceError, with all findings, unless `part` is a blueprint.

    part: what @esper_soa.blueprint marks, or `module:name`. channels: of the slots to try it in,
    which have `size` x `size` pixels.
    """
    name, made, findings = _begun(BLUEPRINT, part)
    try:
        blueprint = architecture_of(made, name, NUM_BLUEPRINTS)
    except RAISED as error:
        raise ConformanceError(BLUEPRINT, name, [*findings, one_line(error)]) from error
    for width in channels:
        found = blueprint_findings(blueprint, width, size)
        if not found:
            found = _network_findings(_seeds(blueprint, width, size))
            found = [f"with {width} channels {one}" for one in found]
        findings += found
    _raise(BLUEPRINT, name, findings)


def check_host(part: Part | str, classes: int = 10) -> None:
    """Raise ConformanceError, with all findings, unless `part` is a host of that many classes.

    part: what @esper_soa.host marks, or `module:name`.
    """
    name, made, findings = _begun(HOST, part)
    try:
        host = host_of(made, name, classes)
    except RAISED as error:
        raise ConformanceError(HOST, name, [*findings, one_line(error)]) from error
    shape = partial(host_shape, TaskConfig(num_classes=classes), (), host=host)
    findings += host_findings(host) or _network_findings(_hosts(shape()))
    _raise(HOST, name, findings)


def check_reward(part: Part | str, num_slots: int = 3, max_steps: int = 20) -> None:
    """Raise ConformanceError, with all findings, unless `part` is a reward, on made-up inputs of
    hosts with such slots.

    part: what @esper_soa.reward marks, or `module:name`. max_steps: env-steps of an episode.
    """
    name, made, findings = _begun(REWARD, part)
    samples = [sample_inputs(NETS + 2, num_slots, max_steps, CPU, seed) for seed in range(SAMPLES)]
    broken = reward_findings(made, samples[0].clone())
    findings += broken or [*_value_findings(made, samples), *_kernel_findings(made, samples[0])]
    _raise(REWARD, name, findings)


def check_agent(part: Part | str, num_slots: int = 2, envs: int = 4, steps: int = 16) -> None:
    """Raise ConformanceError, with all findings, unless `part` gives an agent; it plays an episode
    of small real hosts.

    part: what @esper_soa.agent marks, or `module:name`.
    """
    name, made, findings = _begun(AGENT, part)
    if num_required(made) > 1:
        told = "it wants more arguments than the Surroundings"
        raise ConformanceError(AGENT, name, [*findings, told])
    world = build_world(_small_run(num_slots, envs, steps), CPU)
    surroundings = Surroundings(world.rules.nets.shape.slots, BLUEPRINT_NAMES, steps, 0)
    try:
        agent = made_agent(made, surroundings)
        findings += _play_findings(agent, Env(world))
    except RAISED as error:
        findings.append(f"it raises {type(error).__name__}: {one_line(error)}")
    _raise(AGENT, name, findings)


def _begun(kind: str, part: Part | str) -> tuple[str, Part, list[str]]:
    """The name of a part, the part itself, and whether a mark is lacking."""
    found = find(kind, part, f"check_{kind}") if isinstance(part, str) else part
    name = marked_name(kind, found)
    unmarked = f'nothing marks it: @esper_soa.{kind}("name") belongs above it'
    return name or one_line(found), found, [] if name else [unmarked]


def _raise(kind: str, name: str, findings: Sequence[str]) -> None:
    if findings:
        raise ConformanceError(kind, name, list(dict.fromkeys(findings)))


# --- blueprints and hosts


class Networks(NamedTuple):
    """How networks of several envs at once are tried, seeds and hosts alike."""

    start: Callable[[], tuple[Tensor, Tensor]]  # fresh rows of parameters and of buffers [n, ...]
    inputs: Callable[[int], Tensor]  # [B, n*C, H, W] by seed
    outputs: Callable[[Tensor, Tensor, Tensor], Tensor]  # [B, n, ...] of rows, buffers, inputs
    # A number [n] per network to differentiate, and buffers behind the pass.
    train: Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]


def _seeds(blueprint: Architecture, channels: int, size: int) -> Networks:
    """Seeds in slots of these channels, height and width."""
    keys = streams.stream_keys(0, streams.SEED_INIT, (0,), torch.arange(NETS))
    shape = (IMAGES, size, size, NETS * channels)
    still = torch.zeros(NETS, 0)

    def start() -> tuple[Tensor, Tensor]:
        fresh = torch.zeros(NETS, dtype=torch.bool)
        return initial_seeds(blueprint, channels, keys, fresh, torch.float32), still

    def inputs(seed: int) -> Tensor:
        return _drawn(shape, seed, 1, 2.0, 0.5)

    def outputs(rows: Tensor, kept: Tensor, x: Tensor) -> Tensor:
        out = seed_forward(PLAIN, blueprint, seed_table(blueprint, channels).unpack(rows), x)
        return out.unflatten(1, (NETS, channels))

    def train(rows: Tensor, kept: Tensor) -> tuple[Tensor, list[Tensor]]:
        target = inputs(3).unflatten(1, (NETS, channels))
        return (outputs(rows, kept, inputs(1)) * target).sum((0, 2, 3, 4)), []

    return Networks(start, inputs, outputs, train)


def _hosts(shape: HostShape) -> Networks:
    """Hosts without seeds."""
    keys = streams.stream_keys(0, streams.HOST_INIT, (0,), torch.arange(NETS))
    labels = torch.arange(IMAGES)[:, None].expand(-1, NETS) % shape.num_classes
    size = (IMAGES, IMAGE_SIZE, IMAGE_SIZE, NETS * IMAGE_CHANNELS)

    def inputs(seed: int) -> Tensor:
        return _drawn(size, seed, 2, 4.0, 2.0)

    def outputs(rows: Tensor, kept: Tensor, x: Tensor) -> Tensor:
        parameters = shape.parameters.unpack(rows)
        folded = fold_batch_norm(shape, parameters, shape.statistics.unpack(kept))
        return evaluate_forward(PLAIN, shape, folded, x, TrainingSeeds([], NETS))

    def train(rows: Tensor, kept: Tensor) -> tuple[Tensor, list[Tensor]]:
        statistics = [one.flatten().clone() for one in shape.statistics.unpack(kept)]
        parameters = shape.parameters.unpack(rows)
        batch = inputs(1), labels
        filler = TrainingSeeds([], NETS)
        return train_loss(PLAIN, shape, parameters, statistics, batch, filler)[0], statistics

    start = partial(initial_hosts, shape, keys, torch.float32)
    return Networks(start, inputs, outputs, train)


def _drawn(shape: tuple[int, ...], seed: int, purpose: int, scale: float, below: float) -> Tensor:
    """[B, C, H, W] of numbers in [-below, scale - below); shape [B, H, W, C]."""
    keys = streams.stream_keys(seed, streams.SEED_INIT, (purpose,), torch.tensor(0))
    drawn = streams.uniform(keys, torch.arange(torch.Size(shape).numel())).view(shape)
    return (scale * drawn - below).permute(0, 3, 1, 2)


def _network_findings(nets: Networks) -> list[str]:
    """What networks of several envs at once do that they must not."""
    rows, kept = nets.start()
    found = []
    if not all(map(torch.equal, nets.start(), (rows, kept))):
        told = "it has other draws than torch's"
        found.append(f"its initial values differ though the env is the same: {told}")
    if not (rows.isfinite().all() and kept.isfinite().all()):
        return [*found, "its initial values are not finite"]
    try:
        with torch.no_grad():
            found += _pass_findings(nets, rows, kept)
        return found + _gradient_findings(nets, rows, kept)
    except RAISED as error:
        fault = f"for several networks at once it raises {type(error).__name__}: {one_line(error)}"
        return [*found, fault]


def _pass_findings(nets: Networks, rows: Tensor, kept: Tensor) -> list[str]:
    """Chance, numbers that are not finite, networks or images of a batch that know one another."""
    x = nets.inputs(1)
    other = nets.inputs(2)
    channels = x.shape[1] // NETS
    out = nets.outputs(rows, kept, x)
    found = []
    if not torch.equal(out, nets.outputs(rows, kept, x)):
        found.append("a second pass gives something else: it keeps state or draws random numbers")
    if not out.isfinite().all():
        found.append("its output is not finite")
    others = torch.cat([rows[:1], 2 * rows[1:] + 0.1])
    elsewhere = torch.cat([x[:, :channels], other[:, channels:]], dim=1)
    elsewhere = elsewhere.contiguous(memory_format=torch.channels_last)
    if not torch.equal(nets.outputs(others, kept, elsewhere)[:, 0], out[:, 0]):
        found.append("the output of env 0 depends on the networks of other envs")
    images = torch.cat([x[:1], other[1:]]).contiguous(memory_format=torch.channels_last)
    alone = nets.outputs(rows, kept, images)[0]
    if (alone - out[0]).abs().max() > SETTLED * out[0].abs().max().clamp(min=1):
        found.append("the output of an image depends on the other images of its batch")
    return found


def _gradient_findings(nets: Networks, rows: Tensor, kept: Tensor) -> list[str]:
    """Where gradients and running buffers go in a training pass."""
    leaf = rows.clone().requires_grad_()
    losses, statistics = nets.train(leaf, kept)
    if not losses.requires_grad:
        return ["no gradient reaches its parameters: its output is cut off from them"]
    (gradient,) = torch.autograd.grad(losses[0], [leaf])
    found = []
    if not gradient.isfinite().all():
        found.append("the gradient of its parameters is not finite")
    if gradient[1:].any():
        found.append("a gradient reaches parameters of env 1 from the output of env 0")
    if not gradient[0].any():
        told = "it could never learn"
        found.append(f"the gradient of all of its parameters is 0 as it begins: {told}")
    if not all(one.isfinite().all() for one in statistics):
        found.append("its buffers are not finite after a training pass")
    return found


# --- rewards


def _paid(part: Part, inputs: RewardInputs) -> Tensor:
    """The reward [N]; terms are summed up."""
    given = part(inputs)
    terms = list(given.values()) if isinstance(given, Mapping) else [given]
    return torch.stack([term for term in terms if isinstance(term, Tensor)]).sum(0)


def _value_findings(part: Part, samples: Sequence[RewardInputs]) -> list[str]:
    """What the numbers say: of finite inputs such as a run can give."""
    found = []
    for inputs, others in zip(samples, [*samples[1:], samples[0]], strict=True):
        given = inputs.clone()
        paid = _paid(part, given)
        names = [*RewardInputs.__annotations__]
        changed = [one for one in names if not torch.equal(given.get(one), inputs.get(one))]
        found += [f"it changes its input {name} in place" for name in changed]
        for env in (~paid.isfinite()).nonzero().flatten().tolist()[:1]:
            place = "at" if inputs.step[env] == inputs.max_steps[env] else "before"
            told = f"{place} the last env-step"
            found.append(f"it pays {float(paid[env])}, not a finite number, {told}")
        if not torch.equal(_paid(part, inputs.clone()).nan_to_num(), paid.nan_to_num()):
            told = "it keeps state or draws"
            found.append(f"for the same inputs it pays something else the second time: {told}")
        rows = {one: torch.cat([inputs.get(one)[:1], others.get(one)[1:]]) for one in names}
        mixed = RewardInputs.from_dict(rows, batch_size=inputs.batch_size)
        for what, less in (("other envs", mixed), ("the number of envs", inputs[:1])):
            if not torch.equal(_paid(part, less.clone())[:1].nan_to_num(), paid[:1].nan_to_num()):
                found.append(f"what env 0 is paid depends on {what}")
    return list(dict.fromkeys(found))


def _kernel_findings(part: Part, inputs: RewardInputs) -> list[str]:
    """Whether the device can do without the host, and compiled kernels without a break."""
    found = []
    try:
        _paid(part, inputs.to("meta"))
    except RAISED as error:
        told = "it reads numbers on the host, or makes tensors elsewhere than its inputs are"
        found.append(f"{told}: {one_line(error)}")
    try:
        torch.compile(part, backend="eager", fullgraph=True)(inputs.clone())
    except RAISED as error:
        first = str(error).strip().splitlines()[0]
        found.append(f"it cannot be compiled as one graph: {one_line(first)}")
    return found


# --- agents


def _small_run(num_slots: int, envs: int, steps: int) -> TrainConfig:
    """Hosts of some hundred weights, whose seeds mature in a few env-steps."""
    task = TaskConfig(name="small", base_channels=2, num_blocks=5, kernel_size=1, num_pools=5)
    return TrainConfig(
        envs=envs,
        steps=steps,
        rounds=1,
        batch_size=2,
        train_samples=2,
        val_samples=4,
        task=task,
        slots=[spec.name for spec in host_slots(task)[:num_slots]],
        data=DataConfig(name="synthetic", synthetic_train=16, synthetic_test=8),
        gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.0),
        lifecycle=LifecycleConfig(embargo_steps=2, min_prune_age=1),
        compute=ComputeConfig(workers=1, engine="torch"),
    )


def _play_findings(agent: Agent, env: Env) -> list[str]:
    """What an episode shows, up to the first env-step at which something is wrong."""
    num_envs = env.num_envs
    memory = agent.start(num_envs, CPU)
    seen: Seen | None = env.reset()
    found = memory_faults(memory, num_envs, CPU)
    while seen is not None and not found:
        step = int(seen.view.state.signals.step[0])
        view = seen.view
        decision, after = agent.act(view.clone(), _copied(memory))
        found = decision_faults(decision, view) + memory_faults(after, num_envs, CPU)
        found = found or illegal_choices(decision.action, view.masks) + [
            f"its {name} is not finite"
            for name in ("log_probs", "value")
            if not getattr(decision, name).isfinite().all()
        ]
        found = found or _conduct_findings(agent, view, memory, (decision, after))
        found = [f"at env-step {step}: {fault}" for fault in found]
        if not found:
            memory = after
            (_, seen) = env.step(decision.action)
    return found


def _conduct_findings(
    agent: Agent, view: View, memory: Memory, first: tuple[Decision, Memory]
) -> list[str]:
    """Chance, state outside of its memory, changes of what is given, envs that know one another."""
    found = []
    given = view.clone()
    kept = _copied(memory)
    if not _same(agent.act(given, kept), first):
        told = "it keeps state elsewhere than in its memory, or draws other numbers than view.noise"
        again = "for the same view and memory it decides something else the second time"
        found.append(f"{again}: {told}")
    if not (given == view).all():
        found.append("it changes the view in place")
    if not all(map(torch.equal, kept, memory)):
        found.append("it changes its memory in place")
    turned = torch.tensor([0, *range(2, view.shape[0]), 1][: view.shape[0]])
    for what, envs in (("other envs", turned), ("the number of envs", torch.tensor([0]))):
        alone = agent.act(view[envs].clone(), tuple(part[envs].clone() for part in memory))
        if not _same(alone, first, env=0):
            found.append(f"what it decides for env 0 depends on {what}")
    return found


def _copied(memory: Memory) -> Memory:
    """The memory, in a tuple of the same kind."""
    copies = [part.clone() for part in memory]
    return type(memory)(*copies) if hasattr(memory, "_fields") else tuple(copies)


def _same(
    one: tuple[Decision, Memory], other: tuple[Decision, Memory], env: int | None = None
) -> bool:
    """Whether actions and memories are the same, in all envs or in one."""
    rows = slice(None) if env is None else slice(env, env + 1)
    pairs = [(one[0].action.get(name), other[0].action.get(name)) for name in HEAD_NAMES]
    pairs += list(zip(one[1], other[1], strict=True))
    return all(torch.equal(mine[rows], its[rows]) for mine, its in pairs)
