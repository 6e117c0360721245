"""Whether parts of users' own are what a run takes them for: every finding in words, in one error.

For users' tests and notebooks: `esper_soa.check_blueprint("my_parts.seeds:twin")`, or the function
or class itself. What a run looks at while it is built (nets/model/user_parts.py,
env/user_reward.py, agent/user_agents.py) is looked at here too, and more than that: what begins or
comes out not finite, what envs share, what depends on chance, and where gradients go.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.agent.protocol import Agent, Memory
from esper_soa.agent.user_agents import Surroundings, decision_faults, made_agent, memory_faults
from esper_soa.config import registry
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.errors import UserError, one_line
from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE, DataConfig, TaskConfig, host_slots
from esper_soa.config.registry import AGENT, BLUEPRINT, HOST, REWARD, Part, collect_faults
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.env import Env
from esper_soa.env.legal import illegal_choices
from esper_soa.env.reward_records import RewardInputs
from esper_soa.env.step import Observed
from esper_soa.env.user_reward import reward_findings, sample_inputs
from esper_soa.nets.data import streams
from esper_soa.nets.forward import seed_forward
from esper_soa.nets.model import host as hosts
from esper_soa.nets.model import user_parts as own_parts
from esper_soa.nets.model.blueprints import Architecture, initial_seeds, seed_table
from esper_soa.nets.model.layers import PLAIN
from esper_soa.nets.seeds.seeds import TrainingSeeds
from esper_soa.state import Decision, View
from esper_soa.training.build import build_world
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
    with _looking(BLUEPRINT, part) as (name, made, found):
        blueprint = own_parts.architecture_of(made, name, NUM_BLUEPRINTS)
        for width in channels:
            found += own_parts.blueprint_findings(blueprint, width, size) or [
                f"with {width} channels {one}"
                for one in _network_findings(_seeds(blueprint, width, size))
            ]


def check_host(part: Part | str, classes: int = 10) -> None:
    """Raise ConformanceError, with all findings, unless `part` is a host of that many classes.

    part: what @esper_soa.host marks, or `module:name`.
    """
    with _looking(HOST, part) as (name, made, found):
        host = own_parts.host_of(made, name, classes)
        shape = partial(hosts.host_shape, TaskConfig(num_classes=classes), (), host=host)
        found += own_parts.host_findings(host) or _network_findings(_hosts(shape()))


def check_reward(part: Part | str, num_slots: int = 3, max_steps: int = 20) -> None:
    """Raise ConformanceError, with all findings, unless `part` is a reward, on made-up inputs of
    hosts with such slots.

    part: what @esper_soa.reward marks, or `module:name`. max_steps: env-steps of an episode.
    """
    with _looking(REWARD, part) as (_, made, found):
        sizes = NETS + 2, num_slots, max_steps, CPU
        samples = [sample_inputs(*sizes, seed) for seed in range(SAMPLES)]
        found += reward_findings(made, samples[0].clone()) or [
            *_value_findings(made, samples),
            *_kernel_findings(made, samples[0]),
        ]


def check_agent(part: Part | str, num_slots: int = 2, envs: int = 4, steps: int = 16) -> None:
    """Raise ConformanceError, with all findings, unless `part` gives an agent; it plays an episode
    of small real hosts.

    part: what @esper_soa.agent marks, or `module:name`.
    """
    with _looking(AGENT, part) as (_, made, found):
        if registry.num_required(made) > 1:
            raise ValueError("it wants more arguments than the Surroundings")
        world = build_world(_small_run(num_slots, envs, steps), CPU)
        surroundings = Surroundings(world.rules.nets.shape.slots, BLUEPRINT_NAMES, steps, 0)
        with collect_faults(found):
            found += _play_findings(made_agent(made, surroundings), Env(world))


@contextmanager
def _looking(kind: str, part: Part | str) -> Iterator[tuple[str, Part, list[str]]]:
    """Name of a part, the part, a list for findings, which are raised at the end, all at once."""
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


# --- blueprints and hosts


class Networks(NamedTuple):
    """How networks of several envs at once are tried, seeds and hosts alike."""

    size: tuple[int, ...]  # of inputs, [B, H, W, n*C]
    start: Callable[[], tuple[Tensor, Tensor]]  # fresh rows of parameters and of buffers [n, ...]
    outputs: Callable[[Tensor, Tensor, Tensor], Tensor]  # [B, n, ...] of rows, buffers, inputs
    # A number [n] per network to differentiate, and buffers behind the pass.
    train: Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]

    def inputs(self, seed: int) -> Tensor:
        """[B, n*C, H, W] of numbers in [-1, 1)."""
        keys = streams.stream_keys(seed, streams.SEED_INIT, (1,), torch.tensor(0))
        numbers = streams.uniform(keys, torch.arange(math.prod(self.size)))
        return (2 * numbers - 1).view(self.size).permute(0, 3, 1, 2)


def _seeds(blueprint: Architecture, channels: int, size: int) -> Networks:
    """Seeds in slots of these channels, height and width."""
    keys = streams.stream_keys(0, streams.SEED_INIT, (0,), torch.arange(NETS))
    blends = torch.zeros(NETS, dtype=torch.bool)
    table = seed_table(blueprint, channels)

    def start() -> tuple[Tensor, Tensor]:
        rows = initial_seeds(blueprint, channels, keys, blends, torch.float32)
        return rows, torch.zeros(NETS, 0)

    def outputs(rows: Tensor, kept: Tensor, x: Tensor) -> Tensor:
        return seed_forward(PLAIN, blueprint, table.unpack(rows), x).unflatten(1, (NETS, channels))

    def train(rows: Tensor, kept: Tensor) -> tuple[Tensor, list[Tensor]]:
        target = nets.inputs(3).unflatten(1, (NETS, channels))
        return (outputs(rows, kept, nets.inputs(1)) * target).sum((0, 2, 3, 4)), []

    nets = Networks((IMAGES, size, size, NETS * channels), start, outputs, train)
    return nets


def _hosts(shape: hosts.HostShape) -> Networks:
    """Hosts without seeds."""
    keys = streams.stream_keys(0, streams.HOST_INIT, (0,), torch.arange(NETS))
    labels = torch.arange(IMAGES)[:, None].expand(-1, NETS) % shape.num_classes
    filler = TrainingSeeds([], NETS)

    def outputs(rows: Tensor, kept: Tensor, x: Tensor) -> Tensor:
        parameters = shape.parameters.unpack(rows)
        folded = hosts.fold_batch_norm(shape, parameters, shape.statistics.unpack(kept))
        return hosts.evaluate_forward(PLAIN, shape, folded, x, filler)

    def train(rows: Tensor, kept: Tensor) -> tuple[Tensor, list[Tensor]]:
        statistics = [one.flatten().clone() for one in shape.statistics.unpack(kept)]
        parameters = shape.parameters.unpack(rows)
        batch = nets.inputs(1), labels
        return hosts.train_loss(PLAIN, shape, parameters, statistics, batch, filler)[0], statistics

    start = partial(hosts.initial_hosts, shape, keys, torch.float32)
    size = (IMAGES, IMAGE_SIZE, IMAGE_SIZE, NETS * IMAGE_CHANNELS)
    nets = Networks(size, start, outputs, train)
    return nets


def _network_findings(nets: Networks) -> list[str]:
    """What networks of several envs at once do that they must not."""
    rows, kept = nets.start()
    found = []
    if not all(map(torch.equal, nets.start(), (rows, kept))):
        found.append(
            "its initial values differ though the env is the same: it has other draws than torch's"
        )
    if not (rows.isfinite().all() and kept.isfinite().all()):
        return [*found, "its initial values are not finite"]
    with collect_faults(found, own_parts.TOGETHER):
        with torch.no_grad():
            found += _pass_findings(nets, rows, kept)
        found += _gradient_findings(nets, rows, kept)
    return found


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
        found.append(
            "the gradient of all of its parameters is 0 as it begins: it could never learn"
        )
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
    names = [*RewardInputs.__annotations__]
    for inputs, others in zip(samples, [*samples[1:], samples[0]], strict=True):
        given = inputs.clone()
        paid = _paid(part, given)
        changed = [one for one in names if not torch.equal(given.get(one), inputs.get(one))]
        found += [f"it changes its input {name} in place" for name in changed]
        for env in (~paid.isfinite()).nonzero().flatten().tolist()[:1]:
            place = "at" if inputs.step[env] == inputs.max_steps[env] else "before"
            found.append(
                f"it pays {float(paid[env])}, not a finite number, {place} the last env-step"
            )
        rows = {one: torch.cat([inputs.get(one)[:1], others.get(one)[1:]]) for one in names}
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
    """Whether the device can do without the host, and compiled kernels without a break."""
    found = list[str]()
    what = "it reads numbers on the host, or makes tensors elsewhere than its inputs are:"
    with collect_faults(found, what):
        _paid(part, inputs.to("meta"))
    with collect_faults(found, "it cannot be compiled as one graph:"):
        torch.compile(part, backend="eager", fullgraph=True)(inputs.clone())
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
    observed: Observed | None = env.reset()
    found = memory_faults(memory, num_envs, CPU)
    while observed is not None and not found:
        view = observed.view
        first = agent.act(view.clone(), _copied(memory))
        found = _step_findings(first, view) or _conduct_findings(agent, view, memory, first)
        found = [f"at env-step {int(view.state.signals.step[0])}: {fault}" for fault in found]
        if not found:
            memory = first[1]
            _, observed = env.step(first[0].action)
    return found


def _step_findings(first: tuple[Decision, Memory], view: View) -> list[str]:
    """What is wrong with a decision and the memory behind it as they are."""
    decision, memory = first
    found = decision_faults(decision, view) + memory_faults(memory, view.shape[0], CPU)
    return found or illegal_choices(decision.action, view.masks) + [
        f"its {name} is not finite"
        for name in ("log_probs", "value")
        if not getattr(decision, name).isfinite().all()
    ]


def _conduct_findings(
    agent: Agent, view: View, memory: Memory, first: tuple[Decision, Memory]
) -> list[str]:
    """Chance, state outside of its memory, changes of what is given, envs that know one another."""
    given = view.clone()
    kept = _copied(memory)
    again = agent.act(given, kept)
    turned = torch.tensor([0, *range(2, view.shape[0]), 1][: view.shape[0]])
    others, alone = (
        agent.act(view[envs].clone(), tuple(part[envs].clone() for part in memory))
        for envs in (turned, torch.tensor([0]))
    )
    wrong = {
        "for the same view and memory it decides something else the second time: it keeps state "
        "elsewhere than in its memory, or draws other numbers than view.noise": not _same(
            again, first
        ),
        "it changes the view in place": not (given == view).all(),
        "it changes its memory in place": not all(map(torch.equal, kept, memory)),
        "what it decides for env 0 depends on other envs": not _same(others, first, 0),
        "what it decides for env 0 depends on the number of envs": not _same(alone, first, 0),
    }
    return [words for words, is_so in wrong.items() if is_so]


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
