"""Parts that a user might write, good and faulty, as a module for settings: parts_of_users:NAME."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import esper_soa
from esper_soa.agent.protocol import Memory
from esper_soa.agent.scripted import as_decision, seed_action, uniform_choice
from esper_soa.agent.user_agents import AgentContext
from esper_soa.config.nets import VECTORS
from esper_soa.env.legal import obey
from esper_soa.env.reward_records import RewardInputs
from esper_soa.nets.model.blueprints import Architecture
from esper_soa.nets.model.parts import NARROW, Conv, Part, SoftNorm
from esper_soa.nets.model.sequence_parts import Dense
from esper_soa.nets.model.user_module import UserModule
from esper_soa.state import Action, Decision, View
from esper_soa.vocabulary import Op


@esper_soa.blueprint("twice")
def twice() -> tuple[Part, ...]:
    return Conv(kernel=1), Conv(kernel=1)


@esper_soa.blueprint("instead")
def instead() -> Architecture:
    return Architecture(0, "", (Conv(kernel=1), SoftNorm()), residual=False)


@esper_soa.blueprint("flat")
def flat() -> Architecture:
    """Of vectors, which no slot of a convolutional host has."""
    module = UserModule(lambda channels: nn.Linear(channels, channels), VECTORS)
    return Architecture(0, "", (module,), residual=False)


@esper_soa.blueprint("grouped")
class Grouped(nn.Module):
    """With a norm of groups, as convolutional seeds have it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.mix(self.norm(x)))


@esper_soa.blueprint("linear", topology="vectors")
def linear(channels: int) -> nn.Module:
    return nn.Linear(channels, channels)


@esper_soa.blueprint("perceptron")
def perceptron(channels: int) -> nn.Module:
    """No convolution: the mean of an image moves all its pixels; writes to what it is given."""

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(channels, 2 * channels)
            self.outer = nn.Linear(2 * channels, channels)

        def forward(self, x: Tensor) -> Tensor:
            moved = self.outer(torch.tanh(self.inner(x.mean((2, 3)))))
            return x.mul_(1.5).add_(moved[..., None, None])

    return Perceptron()


@esper_soa.blueprint("particular")
def particular(channels: int) -> nn.Module:
    """For the slots of a host with 2 base channels alone."""
    if channels not in (2, 4):
        raise ValueError(f"{channels} channels are not mine")
    return nn.Conv2d(channels, channels, 1)


# --- the faulty


def of_parts(name: str, *parts: Part) -> Callable[[], tuple[Part, ...]]:
    """A blueprint `name` of these parts."""

    @esper_soa.blueprint(name)
    def make() -> tuple[Part, ...]:
        return parts

    return make


one_of_two = of_parts("same", Conv())
other_of_two = of_parts("same", Conv())
taken = of_parts("norm", Conv())
narrower = also_narrower = of_parts("narrower", Conv(NARROW))
dense = of_parts("dense", Dense())


def unmarked() -> tuple[Part, ...]:
    return (Conv(),)


class Pointwise(nn.Conv2d):
    def __init__(self, channels: int, bias: bool = True) -> None:
        super().__init__(channels, channels, 1, bias=bias)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    """A blueprint `name`: a pointwise convolution whose output is changed."""

    @esper_soa.blueprint(name)
    class Changed(Pointwise):
        def forward(self, x: Tensor) -> Tensor:
            return change(super().forward(x))

    return Changed


half = changed("half", lambda out: out.bfloat16())
undefined = changed("undefined", lambda out: torch.log(out - 100))
deaf = changed("deaf", lambda out: out.detach())
silent = changed("silent", lambda out: 0 * out)

word = esper_soa.blueprint("word")(lambda: "conv_light")
bare = esper_soa.blueprint("bare")(lambda: Pointwise(8))
greedy = esper_soa.blueprint("greedy")(lambda channels, more: nn.Conv2d(channels, more, 1))
keyword = esper_soa.blueprint("keyword")(lambda *, channels: Pointwise(channels))
failing = esper_soa.blueprint("failing")(
    lambda channels: nn.Conv2d(channels, 1, 1, groups=channels + 1)
)
shrinking = esper_soa.blueprint("shrinking")(lambda channels: nn.Conv2d(channels, channels, 3))
empty = esper_soa.blueprint("empty")(lambda channels: nn.Identity())
frozen = esper_soa.blueprint("frozen")(
    lambda channels: Pointwise(channels, bias=False).requires_grad_(False)
)
dropping = esper_soa.blueprint("dropping")(
    lambda channels: nn.Sequential(Pointwise(channels), nn.Dropout(0.5))
)
# running statistics, which all networks would share; a norm over the batch without them
counting = esper_soa.blueprint("counting")(lambda channels: nn.BatchNorm2d(channels))
crowd = esper_soa.blueprint("crowd")(
    lambda channels: nn.BatchNorm2d(channels, track_running_stats=False)
)


@esper_soa.blueprint("counter")
class Counter(Pointwise):
    """Is another function with every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(x)


@esper_soa.blueprint("chance")
class Chance(Pointwise):
    """Begins with numbers that no generator of torch gives."""

    drawn = 0

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        Chance.drawn += 1
        nn.init.constant_(self.weight, float(Chance.drawn))


@esper_soa.blueprint("infinite")
class Infinite(Pointwise):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        nn.init.constant_(self.weight, float("inf"))


@esper_soa.blueprint("undrawn")
class Undrawn(Pointwise):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        nn.init.constant_(self.weight, float("nan"))


@esper_soa.blueprint("random_wide")
class RandomWide(nn.Module):
    """Draws random numbers, and gives a channel too many."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels + 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.conv(x), training=True)


@esper_soa.blueprint("threefold")
class Threefold(RandomWide):
    """Keeps buffers too."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@esper_soa.blueprint("leaking")
class Leaking(Pointwise):
    """Gives what a convolution gives, and hands gradients to the networks of other envs."""

    def forward(self, x: Tensor) -> Tensor:
        batched = torch._C._functorch.is_batchedtensor(self.weight)
        every = torch._C._functorch.get_unwrapped(self.weight) if batched else self.weight
        return super().forward(x) + (every.sum() - every.sum().detach())


@esper_soa.blueprint("hoarding")
class Hoarding(Pointwise):
    """Keeps a tensor that is no parameter."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = torch.ones(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


# --- rewards


@esper_soa.reward("gain")
def gain(inputs: RewardInputs) -> Tensor:
    """The change of accuracy, and the final accuracy."""
    return inputs.accuracy_delta + torch.where(
        inputs.step == inputs.max_steps, inputs.val_accuracy, 0.0
    )


@esper_soa.reward("parts")
def parts(inputs: RewardInputs) -> dict[str, Tensor]:
    return {"own": inputs.accuracy_delta.float(), "occupancy_rent": -inputs.num_active.double()}


@esper_soa.reward("branching")
def branching(inputs: RewardInputs) -> Tensor:
    return inputs.val_accuracy if inputs.step.max() > 3 else inputs.val_loss


# of hosts with two slots or more
second = esper_soa.reward("second")(lambda inputs: inputs.contribution[:, 1])
of_a_taken_name = esper_soa.reward("pbrs_bonus")(lambda inputs: inputs.accuracy_delta)
per_slot = esper_soa.reward("per_slot")(lambda inputs: inputs.contribution)
total = esper_soa.reward("total")(lambda inputs: inputs.accuracy_delta.sum())
count = esper_soa.reward("count")(lambda inputs: inputs.num_fossilized)
scalar = esper_soa.reward("scalar")(lambda inputs: 1.0)
spread = esper_soa.reward("spread")(
    lambda inputs: {"own": inputs.contribution, "drip": inputs.contribution, "clawback": 1.0}
)
strange = esper_soa.reward("strange")(lambda inputs: dict.fromkeys(("bonus", "drip", "tip")))
twofold = esper_soa.reward("twofold")(lambda inputs, weight: weight * inputs.accuracy_delta)
misspelt = esper_soa.reward("misspelt")(lambda inputs: inputs.acuracy)
careless = esper_soa.reward("careless")(lambda inputs: inputs.val_accuracy.sub_(50))
lost = esper_soa.reward("lost")(
    lambda inputs: torch.where(inputs.step == 2, torch.nan, inputs.accuracy_delta)
)
ranked = esper_soa.reward("ranked")(lambda inputs: inputs.val_accuracy - inputs.val_accuracy.mean())
divided = esper_soa.reward("divided")(
    lambda inputs: (inputs.max_steps - inputs.step) / (inputs.max_steps - inputs.step)
)
random = esper_soa.reward("random")(
    lambda inputs: inputs.val_accuracy + torch.rand_like(inputs.val_accuracy)
)
graph = esper_soa.reward("graph")(
    lambda inputs: inputs.val_accuracy * torch.ones(1, requires_grad=True)
)


# --- agents


@esper_soa.agent("eager")
class Eager:
    """Does the last op that is legal, on its first slot, and remembers how often it has acted."""

    def start(self, num_envs: int, device: torch.device) -> Memory:
        return (torch.zeros(num_envs, dtype=torch.int64, device=device),)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        return as_decision(self.action(view, memory[0])), (memory[0] + 1,)

    def action(self, view: View, count: Tensor) -> Action:
        op = view.masks.op.shape[1] - 1 - view.masks.op.flip(1).long().argmax(1)
        slot = view.masks.slot_by_op[torch.arange(op.shape[0]), op].long().argmax(1)
        return obey(seed_action(op, slot, view.masks.blueprint.long().argmax(1)), view.masks)[0]


def acting(name: str, action: Callable[[View, Tensor], Action]) -> type[Eager]:
    """An agent `name` that acts so; given a view, and how often it has acted."""

    @esper_soa.agent(name)
    class Acting(Eager):
        def action(self, view: View, count: Tensor) -> Action:
            return action(view, count)

    return Acting


def dice(view: View, count: Tensor) -> Action:
    """Drawn by itself."""
    op = uniform_choice(view.masks.op, torch.rand(count.shape))
    legal = obey(seed_action(op, 0 * count, 0 * count + 1), view.masks)[0]
    return legal.replace(tempo=torch.randint(0, 3, op.shape))


def follow(view: View, count: Tensor) -> Action:
    """Every env acts only where the last one may."""
    own = Eager().action(view, count)
    return own.replace(op=torch.where(view.state.signals.val_accuracy[-1] > 12, own.op, Op.WAIT))


# germinates what no host here has; does what no op is
Lawless = acting("lawless", lambda _, count: seed_action(0 * count + 1, 0 * count, 0 * count + 9))
beyond = acting("beyond", lambda _, count: seed_action(0 * count + 6, 0 * count, 0 * count))
Climbing = acting("climbing", lambda _, count: seed_action(6 + count, 0 * count, 0 * count))
dicing = acting("dicing", dice)
following = acting("following", follow)


@esper_soa.agent("writing")
class Writing(Eager):
    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        decision, _ = super().act(view, memory)
        memory[0].add_(1)
        view.observation.features.zero_()
        return decision, memory


@esper_soa.agent("short")
class Short(Eager):
    def start(self, num_envs: int, device: torch.device) -> Memory:
        return (torch.zeros((), dtype=torch.int64, device=device),)


@esper_soa.agent("forgetting")
class Forgetting(Eager):
    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        decision, (count,) = super().act(view, memory)
        return decision, (count[:1],)


@esper_soa.agent("listing")
class Listing(Eager):
    def start(self, num_envs: int, device: torch.device) -> Memory:
        return [torch.zeros(num_envs, dtype=torch.int64)]  # type: ignore[return-value]


@esper_soa.agent("loose")
class Loose(Eager):
    """A decision of a wrong type and with a gradient."""

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        decision, after = super().act(view, memory)
        value = decision.value.double() * torch.ones(1, requires_grad=True).double()
        return decision.replace(value=value), after


@esper_soa.agent("bare")
class BareAction(Eager):
    """An action where a decision is asked for."""

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        return self.action(view, memory[0]), memory  # type: ignore[return-value]


@esper_soa.agent("mute")
class Mute:
    def start(self, num_envs: int, device: torch.device) -> Memory:
        return ()


@esper_soa.agent("telling")
def telling(given: AgentContext) -> Mute:
    slots = [slot.name for slot in given.slots]
    raise ValueError(slots, given.blueprints[:2], given.steps, given.seed)


@esper_soa.agent("placed")
class Placed(Eager):
    def __init__(self, given: AgentContext) -> None:
        self.slots = given.slots


@esper_soa.agent("demanding")
class Demanding(Eager):
    def __init__(self, surroundings: AgentContext, more: int) -> None:
        pass


@esper_soa.agent("stumbling")
class Stumbling(Eager):
    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        raise KeyError("memory")


@esper_soa.agent("hopeless")
class Hopeless(Eager):
    """Illegal at every env-step, drawn by torch, and not finite, all at once; then it stumbles."""

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        if int(view.state.signals.step[0]) == 3:
            raise KeyError("step")
        decision, after = super().act(view, memory)
        action = decision.action.replace(op=torch.full_like(decision.action.op, 9))
        value = torch.rand(()) + torch.full_like(decision.value, torch.inf)
        drawn = torch.randint(0, 2**31, memory[0].shape)
        return decision.replace(action=action, value=value), (drawn,)


@esper_soa.blueprint("mess")
class Mess(Pointwise):
    """Keeps a tensor that is no parameter, and its output is not finite."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = torch.ones(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(super().forward(x) - 100) * self.scale


@esper_soa.agent("fateful")
class Fateful(Eager):
    """In the second episode of the second rank, unless that was started again, ends itself, or has
    the process that started it save a checkpoint in a folder, freezes, and has it stop, as FATE
    says.
    """

    def __init__(self) -> None:
        self.episodes = 0

    def start(self, num_envs: int, device: torch.device) -> Memory:
        self.episodes += 1
        fate = os.environ.get("FATE", "") if self.episodes == 2 else ""
        if fate and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
            if fate == "end":
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(os.getppid(), signal.SIGUSR2)
            waited = (time.sleep(0.01) for _ in range(6000))
            while not list(Path(fate).glob("checkpoint_*.pt")):
                next(waited)
            Path(fate, "frozen").touch()
            subprocess.Popen(["sh", "-c", f"sleep 1; kill {os.getppid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().start(num_envs, device)
