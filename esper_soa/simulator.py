"""The simulator as a library: N hosts that train and grow, stepped by a caller or by a policy.

    sim = esper_soa.make("cifar_3seed", envs=16, policy="heuristic")
    for step in sim.episode():
        print(step.number, step.accuracy.mean(), step.reward.mean())

    observation, info = sim.reset()
    action = {"op": "germinate", "slot": "r0c0", "blueprint": "conv_light"}
    observation, reward, terminated, truncated, info = sim.step(action)
    net = sim.export(3)    # host 3 as a plain module

Everything random follows from the seed, the round, the env and the env-step: round i of a simulator
is round i of a training run with the same settings, to the bit. Several simulators live in one
process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from operator import index
from os import PathLike, fspath
from typing import TYPE_CHECKING, NamedTuple, Protocol, SupportsIndex

import numpy as np
import torch
from hydra.core.override_parser.types import Quote, QuotedString
from torch import Tensor

from esper_soa.agent.protocol import Agent, Memory, restart
from esper_soa.agent.scripted import as_decision
from esper_soa.agent.user_agents import CheckedAgent
from esper_soa.config.agent import SCRATCH
from esper_soa.config.compose import compose_settings, override_list
from esper_soa.config.registry import is_reference
from esper_soa.config.settings import POLICIES, TrainConfig, settings_yaml
from esper_soa.env import actions
from esper_soa.env.env import Env
from esper_soa.env.legal import illegal_choices, obey
from esper_soa.env.step import EnvView, StepResult
from esper_soa.env.topology import HostStates, host_states
from esper_soa.nets.data.batches import BatchSource
from esper_soa.nets.data.datasets import ImageSet
from esper_soa.nets.data.image_set import source_of
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.runtime.device import resolve_device, threads
from esper_soa.runtime.memory import memory_errors
from esper_soa.state import Action, Decision, EnvState, Masks, Observation, View
from esper_soa.system.errors import SettingError, UserError, check, check_choice, whole_number
from esper_soa.system.torch_state import package_state
from esper_soa.training.loop.build import build_world, rule_player
from esper_soa.vocabulary import STAGE_NAMES, Stage

if TYPE_CHECKING:
    from esper_soa.nets.model.modules import GrownNetwork

# Modules that few need, of learned policies, exported hosts and files, are imported on demand.
PLAYERS = "esper_soa.training.loop.players"
USER_IMAGES = "esper_soa.nets.data.user_images"
NETWORKS = "esper_soa.grown.networks"
HOST_PARTS = "esper_soa.grown.build"
EPISODE_FILES = "esper_soa.training.loop.episode_files"
Value = str | int | float | bool
MAX_STREAM_SEED = 2**63 - 1  # of `reset`
ILLEGAL_MODES = ("raise", "wait")  # consequences of an illegal action


class EpisodeRecord(Protocol):
    """Writes an episode to a run folder, as episode_files.py does."""

    add: Callable[[EnvView, Decision, StepResult], None]
    finish: Callable[[EnvState], None]
    close: Callable[[], None]


class Info(NamedTuple):
    """Facts of a step of N envs beside observation and reward."""

    masks: Masks  # the choices that are legal now
    accuracy: Tensor  # float64 [N], validation accuracy at the newest measurement, percent
    illegal: Tensor  # bool [N]: the last action was illegal, and the env waited (illegal="wait")
    # Bool [N]: rolled back at the last env-step, so that a trajectory begins here.
    restarted: Tensor
    round: int  # from 0
    env_step: int  # of the decision that is due, from 0; as many as the episode has once it is over


class Step(NamedTuple):
    """One env-step of N envs in an episode of the policy."""

    number: int  # from 0
    observation: Observation
    masks: Masks
    action: Action
    reward: Tensor  # float64 [N]
    accuracy: Tensor  # float64 [N], percent, on which the action was decided
    terminated: Tensor  # bool [N]: rolled back, the trajectory ends here
    # The episode ends here, for all; of an env that has ended before, state.ending.over says so.
    truncated: bool
    state: EnvState  # after the action


class Seed(NamedTuple):
    """One live seed of an env; stage and blueprint are names."""

    slot: str
    stage: str
    blueprint: str
    alpha: float  # how much of it the host uses, 0 to 1
    age: int  # env-steps
    # Percent points of accuracy that its host would lose; None before it was measured.
    contribution: float | None


class Simulator:
    """N envs with their weights, data and policy; see `make`."""

    @package_state()
    def __init__(
        self,
        settings: TrainConfig,
        agent: Agent | None = None,
        images: ImageSet | None = None,
        illegal: str = "raise",
    ) -> None:
        """agent: the policy of `episode`; None: that of the settings. images: instead of theirs.

        illegal: "raise" or "wait"; see `make`. Raises UserError for what does not fit together.
        """
        allowed = " or ".join(ILLEGAL_MODES)
        check(illegal in ILLEGAL_MODES, "illegal", illegal, allowed=allowed)
        if settings.worlds:
            remedy = "Make a simulator of each."
            raise SettingError("tasks", settings.tasks, "a single task here", remedy=remedy)
        self.settings = settings
        self.strict = illegal == "raise"
        self.device = resolve_device(settings.device)
        self._images: BatchSource | None = None if images is None else images.to(self.device)
        self._build(settings.seed)
        self._next_round = 0
        name = settings.policy.name
        if agent is not None:
            self.agent: Agent = CheckedAgent("policy", agent, names=self.words)
        elif name != "ppo":
            self.agent = rule_player(name, "policy.name", settings.policy, setup=self.world.setup)
        else:
            with threads(self.world.setup.compute.threads):
                self.agent = import_module(PLAYERS).build_player(settings.policy, self.world).agent

    def __repr__(self) -> str:
        setup = self.world.setup
        hosts = f"{self.num_envs} x {setup.task.host_name}, slots {', '.join(self.slots)}"
        at = f"round {self.world.round}, env-step {self.env.step_number} of {setup.steps}"
        return f"<Simulator: {hosts}, seed {self.world.seed}, on {self.device}; {at}>"

    def _build(self, seed: int) -> None:
        with memory_errors(UserError):
            self.world = build_world(self.settings, self.device, seed, data=self._images)
        self._images = self.world.data
        self.env = Env(self.world)
        legal = self.world.rules.blueprints
        self.joint = actions.JointActions(len(self.slots), legal)
        blueprints = names_by_code(self.world.setup.shape.blueprints)
        self.words = {"slot": self.slots, "blueprint": blueprints}  # by number, for messages
        # that actions may use, by head
        self.names = actions.choice_names(self.slots, blueprints, legal)
        self._observed: EnvView | None = None  # what the next action answers; None: reset is due
        self._files: EpisodeRecord | None = None  # of the episode, where it is recorded
        self._run_dir: str | None = None  # asked for of the next episode
        self._hosts: HostStates | None = None  # the hosts as they were last measured
        self._memory: Memory = ()  # of the policy that plays an episode

    @property
    def num_envs(self) -> int:
        """N."""
        return self.env.num_envs

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the S slots, in the order of actions and observations."""
        return tuple(spec.name for spec in self.world.setup.shape.slots)

    @property
    def state(self) -> EnvState:
        """The EnvState of the N envs: that which the next action answers, or of the end."""
        return self.env.state if self._observed is None else self._observed.view.state

    @package_state()
    def reset(self, seed: int | None = None) -> tuple[Observation, Info]:
        """Begin the next round with fresh hosts, and play it up to its first decision.

        seed: begin again at round 0 with the streams of this seed; None: the next round.
        """
        if seed is not None:
            self._build(whole_number("seed", seed, 0, high=MAX_STREAM_SEED))
            self._next_round = 0
        self._observed = self._hosts = None
        if self._files is not None:  # of an episode that is left
            self._files.close()
            self._files = None
        if self._run_dir is not None:
            self._files = import_module(EPISODE_FILES).EpisodeFiles(
                settings_yaml(self.settings), self.world, self.agent, run_dir=self._run_dir
            )
            self._run_dir = None
        with threads(self.world.setup.compute.threads):
            observed = self.env.reset(self._next_round)
        self._observed = observed
        before = observed.view.state
        self._hosts = host_states(before, before)
        self._next_round += 1
        return observed.view.observation, self._info(observed.view, observed.restarted)

    @package_state()
    def step(self, action: actions.ActionLike) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Carry out an action [N] and play on to the next decision.

        action: choices by head, each a name, a number or a sequence of N of them, as in
        {"op": ["germinate", "wait"], "slot": "r0c0", "blueprint": "conv_light"}; or an Action, rows
        int [N, 8] of heads, or numbers int [N] of joint actions.

        Returns the observation, the reward float64 [N], terminated bool [N] (the env was rolled
        back: its trajectory ends, and it goes on from its snapshot), truncated bool [N] (the
        episode is over: for all, and `reset` comes next; with `early_stop` for this env, which
        waits unpaid until it is for all) and Info.

        Raises ValueError for names and numbers that are no choices, and for an illegal action,
        before anything is played (with illegal="wait" the env waits instead, and Info.illegal says
        so); RuntimeError before `reset`.
        """
        observed = self._due()
        choices = actions.read_action(action, self.num_envs, self.joint, names=self.names)
        masks = observed.view.masks
        faults = illegal_choices(choices, masks, self.words) if self.strict else []
        if faults:
            raise ValueError(faults[0])
        legal_choices, is_legal = obey(choices, masks)
        result, after = self._play(observed, as_decision(legal_choices))
        panic = observed.view.state.guard.panic
        view = self.env.current_view() if after is None else after.view
        info = self._info(view, panic)._replace(illegal=~is_legal)
        return view.observation, result.terms.total, panic, self.env.truncated, info

    def episode(self) -> Iterator[Step]:
        """Play the next round with the policy, env-step by env-step."""
        self.reset()
        agent = self.agent
        with package_state():
            fresh = self._memory = agent.start(self.num_envs, self.device)
        while (observed := self._observed) is not None:
            number = self.env.step_number
            with package_state(), threads(self.world.setup.compute.threads):
                memory = restart(self._memory, fresh, observed.restarted)
                decision, self._memory = agent.act(observed.view, memory)
                result, after = self._play(observed, decision)
            before = observed.view
            yield Step(
                number=number,
                observation=before.observation,
                masks=before.masks,
                action=decision.action,
                reward=result.terms.total,
                accuracy=before.state.signals.val_accuracy,
                terminated=before.state.guard.panic,
                truncated=after is None,
                state=result.state,
            )

    @package_state()
    def fork(
        self, envs: int | Sequence[int], into: int | Sequence[int], same_draws: bool = True
    ) -> tuple[Observation, Info]:
        """Make the envs `into` copies of `envs` as they stand: hosts, seeds, state, memory of the
        policy.

        envs: numbers of the sources, one for each of `into` or one for all. same_draws: a copy has
        the data order and the draws of its source until the next `reset`: with the same actions
        both stay equal to the bit. False: it has those of its place.

        Returns what the next actions answer; `Info.restarted` says which envs are copies. Raises
        IndexError for a number that is no env, ValueError for numbers that do not pair up,
        RuntimeError where no decision is due, SettingError where envs have parts of the data only.
        """
        self._due()
        targets = [self._check_env(env) for env in np.atleast_1d(into).tolist()]
        sources = [self._check_env(env) for env in np.atleast_1d(envs).tolist()]
        sources *= len(targets) if len(sources) == 1 else 1
        if len(sources) != len(targets) or len({*targets}) < len(targets):
            pairs = f"{len(sources)} sources and {len(targets)} targets"
            raise ValueError(f"envs and into: {pairs}; every env of `into` needs one source")
        rows = torch.arange(self.num_envs)
        rows[targets] = torch.tensor(sources)
        is_copy = torch.zeros(self.num_envs, dtype=torch.bool)
        is_copy[targets] = True
        source = rows.to(self.device)
        self.env.copy_envs_(source, same_draws)
        self._observed = self.env.observed
        if self._hosts is not None:
            self._hosts = HostStates._make(part[source] for part in self._hosts)
        self._memory = tuple(part[source] for part in self._memory)
        view = self._due().view
        return view.observation, self._info(view, is_copy.to(self.device))

    @package_state()
    def copy(self) -> "Simulator":
        """Another simulator that stands where this one does, on the same device and data.

        Nothing that is done to either shows in the other; with the same actions both give the same
        numbers, to the bit.
        """
        twin = copy(self)
        twin.env = self.env.copy()
        twin.world = twin.env.world
        twin._observed = None if self._observed is None else twin.env.observed
        twin._files = None  # a record is of this one alone
        return twin

    @package_state()
    def export(self, env: int) -> "GrownNetwork":
        """A host as last measured, in eval mode: images [B, 3, 32, 32] in [0, 1] to logits.

        Its `spec` has its accuracy on all test images, measured here.
        Raises IndexError for a number that is no env, RuntimeError before `reset`.
        """
        number_of_env = self._check_env(env)
        if self._hosts is None:
            problem = "nothing has been measured since the last reset"
            raise RuntimeError(f"{problem}: call reset, or play an episode")
        number = self.world.round + 1
        networks = import_module(NETWORKS)
        (host,) = networks.export_hosts(self.world, self._hosts, number, [number_of_env])
        network: GrownNetwork = host.network()
        networks.add_test_accuracy(network, self.world.data)
        return network

    def _due(self) -> EnvView:
        """The observation that the next actions answer."""
        if self._observed is None:
            raise RuntimeError("the episode is over, was interrupted or has not begun: call reset")
        return self._observed

    def _check_env(self, env: int) -> int:
        if not isinstance(env, SupportsIndex) or not 0 <= index(env) < self.num_envs:
            raise IndexError(f"env {env}: there are {self.num_envs}, from 0")
        return index(env)

    def _play(self, observed: EnvView, decision: Decision) -> tuple[StepResult, EnvView | None]:
        """Carry out what answers `observed`, and the next env-step; interrupted, a reset is due."""
        self._observed = self._hosts = None
        with threads(self.world.setup.compute.threads):
            result, after = self.env.step(decision.action)
        if self._files is not None:
            self._files.add(observed, decision, result)
            if after is None:
                self._files.finish(result.state)
                self._files = None
        self._observed = after
        before = (after or observed).view.state
        self._hosts = host_states(before, before if after is not None else result.state)
        return result, after

    @package_state()
    def weights(self, env: int) -> dict[str, Tensor]:
        """The parameters of a host and its live seeds by the names of `export(env)`, as in
        weights(0)["block2.conv.weight"]: views of the memory that is trained, to read and to write.

        What is written acts from the next training pass on. It voids what was measured before: the
        accuracies and contributions of `state`, the reward of the next action, the accuracy in the
        spec of `export`; and round i is no longer that of a training run. Momenta stay, a rollback
        brings back the weights of its snapshot, and the next `reset` those of fresh hosts. Seeds
        come and go, so ask anew after each step; a newborn is there from the env-step after its
        germination on. IndexError for no env's number.
        """
        number = self._check_env(env)
        slots = self.state.slots[number]
        there = (slots.live & ~slots.newborn).tolist()
        parts = import_module(HOST_PARTS)
        contents = parts.SlotContents(
            [Stage.HOLDING if seed else Stage.EMPTY for seed in there],
            slots.blueprint.tolist(),
            slots.blend.tolist(),
            slots.alpha.tolist(),
        )
        inputs = source_of(self.world.data, number).input_spec()
        shape = self.world.setup.shape
        views: dict[str, Tensor] = parts.live_parameters(
            shape, self.world.weights, number, slot_contents=contents, inputs=inputs
        )
        return views

    @package_state()
    def samples(self, split: str = "validation", env: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a part of an env's data, as `RecordedRun.samples` has them."""
        check_choice("split", split, ("train", "validation", "test"))
        number = self._check_env(env)
        data = self.world.data
        if split == "validation":
            order = self.world.validation_order.expand(self.num_envs, -1)[number]
            inputs, labels = data.samples(split, order[order >= 0])
        else:
            data = source_of(data, number)
            labels = data.train_labels if split == "train" else data.test_labels
            inputs, labels = data.samples(split, torch.arange(len(labels)))
        return inputs.cpu(), labels.cpu()

    def images(self, split: str = "validation", env: int = 0) -> tuple[Tensor, Tensor]:
        """The `samples` of hosts of images."""
        return self.samples(split, env)

    def record(self, run_dir: str | PathLike[str] = "") -> None:
        """Write the next episode, by `episode` or by `reset` and `step`, as a run of one round into
        a folder: `open_run`, `esper-report` and `esper-query` read it once the episode is over.

        run_dir: the folder; "" = runs/<name>/<time>. `reset` raises UserError where it holds the
        results of a run. Each env-step then waits for the device.
        """
        self._run_dir = fspath(run_dir)

    @package_state()
    def seeds(self, env: int) -> list[Seed]:
        """The live seeds of an env, in the order of slots; IndexError for no env's number."""
        slots = self.state.slots[self._check_env(env)]
        names = names_by_code(self.world.setup.shape.blueprints)
        return [
            Seed(
                slot=name,
                stage=STAGE_NAMES[int(slot.stage)],
                blueprint=names[int(slot.blueprint)],
                alpha=float(slot.alpha),
                age=int(slot.seed_age),
                contribution=float(slot.contribution) if slot.contribution_known else None,
            )
            for name, slot in zip(self.slots, slots.unbind(0), strict=True)
            if slot.live
        ]

    def _info(self, view: View, restarted: Tensor) -> Info:
        legal = torch.zeros_like(restarted)
        accuracy = view.state.signals.val_accuracy
        return Info(
            view.masks,
            accuracy,
            legal,
            restarted=restarted,
            round=self.world.round,
            env_step=self.env.step_number,
        )


@package_state()
def make(
    experiment: str = "",
    *,
    policy: str | PathLike[str] | Agent | None = None,
    data: ImageSet | str | PathLike[str] | None = None,
    illegal: str = "raise",
    overrides: str | Sequence[str] = (),
    **settings: Value,
) -> Simulator:
    """A simulator with settings of `python -m esper_soa.train +experiment=<name> <overrides>`.

    policy: the player of `episode`: wait, random, schedule, heuristic, a policy that ships
    (grower), a run folder or file with a learned policy, `module:name` of a user's, or an Agent;
    None takes the experiment's. An Agent's illegal action is a UserError.
    data: images, or the path of their .npz or folder, instead of those that data.name asks for;
    task.num_classes follows them unless it is overridden.
    illegal: the consequence of an illegal action of `step`: "raise", ValueError; "wait", the env
    waits, and Info.illegal says so.
    overrides: in Hydra's words, such as "task=cifar_impaired" or "reward.mode=net".
    settings: of the top level, by name: envs=16, seed=3, device="cpu", slots="[r0c0,r0c1]".

    Raises UserError for settings that the command line would refuse.
    """
    image_set = (
        import_module(USER_IMAGES).images(data) if isinstance(data, str | PathLike) else data
    )
    if image_set is not None and not isinstance(image_set, ImageSet):
        allowed = "an ImageSet or the path of an .npz file"
        raise SettingError("data", type(image_set).__name__, allowed)
    if isinstance(policy, PathLike):
        policy = fspath(policy)
    plays = isinstance(policy, str) or policy is None or hasattr(policy, "act")
    check(plays, "policy", policy, allowed="a name, a path, or an Agent with `start` and `act`")
    data_overrides = [] if image_set is None else ["data.name=given"]
    if image_set is not None and image_set.num_classes is not None:
        data_overrides.append(f"task.num_classes={image_set.num_classes}")
        channels, size, _ = image_set.spec.shape
        data_overrides += [f"data.size={size}", f"data.channels={channels}"]
    composed = play_settings(experiment, [*data_overrides, *override_list(overrides)], settings)
    if isinstance(policy, str):
        composed = with_policy(composed, policy)
    agent = None if isinstance(policy, str) else policy
    return Simulator(composed, agent, image_set, illegal=illegal)


def play_settings(
    experiment: str, overrides: Sequence[str], settings: Mapping[str, Value]
) -> TrainConfig:
    """Checked settings for play without learning; see `make`."""
    items = [f"{name}={_quoted(name, value)}" for name, value in settings.items()]
    return compose_settings(experiment, [*overrides, *items])


def _quoted(name: str, value: object) -> str:
    """The value as Hydra reads it; a text with the signs of its grammar is taken as that."""
    if isinstance(value, np.ndarray | np.generic | Tensor):
        value = value.tolist()
    if isinstance(value, PathLike):
        value = fspath(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(_quoted(name, item) for item in value)}]"
    allowed = "a number, a text, True, False or a list of them"
    check(isinstance(value, str | int | float), name, value, allowed=allowed)
    if not isinstance(value, str) or value[:1] in ("[", "{"):
        return str(value)
    return QuotedString(value, Quote.single).with_quotes()


def with_policy(settings: TrainConfig, policy: str) -> TrainConfig:
    """`settings` with the policy called `policy`, as `make` takes its name."""
    if policy in POLICIES or is_reference(policy):
        return replace(settings, policy=replace(settings.policy, name=policy, init=SCRATCH))
    return replace(settings, policy=replace(settings.policy, name="ppo", init=policy))
