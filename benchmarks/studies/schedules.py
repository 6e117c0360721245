"""Schedules, and the teacher that knows which of them pays in which env of growth_family.

The teacher is fitted to episodes of every schedule (family.py), and is what the shipped policy
`gardener` learns to imitate (gardener.yaml).
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import esper_soa
from benchmarks.processes import ROOT
from esper_soa.agent.protocol import Memory
from esper_soa.agent.scripted import as_decision, first_due
from esper_soa.env.observation import NUM_ENV_FEATURES
from esper_soa.state import Decision, View
from esper_soa.vocabulary import BLUEPRINT_NAMES, Op, Stage, Style

PRICE = "reward.rent_weight"
# In the order of policy.observe of the experiment, behind the price.
AXES = (
    "task.host_lr",
    "task.seed_lr",
    "task.momentum",
    "task.weight_decay",
    "task.max_grad_norm",
)
DECADES = (1.2, 1.2, 1.0, 3.5, 1.5)  # that the ranges of AXES span, about
PRICE_CLASSES = 5
TEACHER_FILE = ROOT / "runs" / "family" / "teacher.pt"
LENGTHS = (0.5, 0.8, 1.2, 2.0)
NOISES = (3.0, 10.0, 30.0, 100.0)


class Schedule(NamedTuple):
    """A blueprint for each slot, and the env-step at which it germinates there; 0: never.

    Seeds fossilize as soon as they may.
    """

    blueprints: tuple[str, ...]
    germinate: tuple[int, ...]

    def __str__(self) -> str:
        """What grows, in the order of germination."""
        grows = sorted((step, slot) for slot, step in enumerate(self.germinate) if step)
        return (
            ", ".join(f"{self.blueprints[slot]} in r0c{slot} at {step}" for step, slot in grows)
            or "no growth"
        )


def _schedules() -> list[Schedule]:
    every = (
        "norm",
        "depthwise",
        "bottleneck",
        "conv_light",
        "conv_small",
        "conv_heavy",
        "attention",
    )
    one = [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 6, 1), (11, 6, 1), (1, 6, 11)]
    late = [(0, 0, 14), (0, 19, 14), (24, 19, 14)]
    mixed = [
        ("norm", "norm", "conv_light"),
        ("norm", "conv_light", "conv_light"),
        ("conv_light", "conv_light", "norm"),
        ("conv_light", "norm", "norm"),
        ("conv_light", "conv_light", "conv_heavy"),
        ("conv_heavy", "conv_light", "conv_light"),
        ("conv_light", "attention", "norm"),
        ("depthwise", "conv_light", "conv_light"),
        ("conv_small", "conv_light", "conv_heavy"),
    ]
    found = [Schedule(("norm",) * 3, (0, 0, 0))]
    found += [Schedule((name,) * 3, steps) for name in every for steps in one]
    found += [
        Schedule((name,) * 3, steps)
        for name in ("norm", "conv_light", "conv_heavy", "depthwise")
        for steps in late
    ]
    return found + [Schedule(names, (11, 6, 1)) for names in mixed]


SCHEDULES = _schedules()


class Plan:
    """An agent that follows a schedule of its own in each env, as soon as its ops are legal."""

    def __init__(self, schedules: Sequence[int]) -> None:
        """schedules: for each env, its number in SCHEDULES."""
        own = [SCHEDULES[number] for number in schedules]
        codes = [[BLUEPRINT_NAMES.index(name) for name in one.blueprints] for one in own]
        self.codes = torch.tensor(codes)
        self.germinate = torch.tensor([one.germinate for one in own])

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """Empty."""
        return ()

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """The op of the first slot in which one is due and legal, else WAIT."""
        return follow(view, self.germinate, self.codes), memory


def follow(view: View, germinate: Tensor, codes: Tensor) -> Decision:
    """What schedules do in N envs; germinate, codes: int64 [N, S]."""
    slots = view.state.slots
    step = view.state.signals.step[:, None]
    begins = (slots.stage == Stage.EMPTY) & (germinate > 0) & (step >= germinate)
    due = torch.where(begins, Op.GERMINATE, Op.WAIT)
    due = torch.where(slots.stage == Stage.HOLDING, Op.FOSSILIZE, due)
    action = first_due(view, due, codes, tempo=0, style=Style.SIGMOID_ADD)
    return as_decision(action)


class Estimate(NamedTuple):
    """What each schedule brings in an env, estimated from the training draws.

    A Gaussian process for each schedule, with one kernel: the accuracy above the mean of all
    schedules in the same env, by the env's rates, momentum, weight decay and clipping.
    """

    inputs: Tensor  # float64 [D, 5], settings of the draws as `coordinates`
    weights: Tensor  # float64 [D, P]
    means: Tensor  # float64 [P], points
    growth: Tensor  # float64 [P], parameters above those of the host, over them; a mean
    length: float  # of the kernel, in units of `coordinates`
    scores: Tensor  # float64 [D, P], accuracy minus rent of the training draws
    prices: Tensor  # float64 [D]

    def best(self, inputs: Tensor, prices: Tensor) -> Tensor:
        """int64 [N]: the schedule of the largest estimated score in each env."""
        gains = self.means + kernel(inputs, self.inputs, self.length) @ self.weights
        return (gains - prices[:, None] * self.growth.log1p()).argmax(1)

    def by_price(self, prices: Sequence[float]) -> list[int]:
        """For each price the schedule of the best mean score on training draws of about it."""
        edges = torch.quantile(self.prices, torch.linspace(0, 1, PRICE_CLASSES + 1)[1:-1].double())
        own, asked = (
            torch.bucketize(torch.as_tensor(one, dtype=torch.float64), edges)
            for one in (self.prices, prices)
        )
        best = [int(self.scores[own == one].mean(0).argmax()) for one in range(PRICE_CLASSES)]
        return [best[one] for one in asked.tolist()]

    @property
    def single(self) -> int:
        """The schedule of the best mean score."""
        return int(self.scores.mean(0).argmax())


def coordinates(logarithms: Tensor) -> Tensor:
    """Settings of envs [N, 5] from their decimal logarithms, scaled so that a range of the
    experiment is about 1.

    Momentum m counts by 1 - m, whose inverse multiplies the rate in the long run.
    """
    momentum = -(1 - 10 ** logarithms[:, 2:3]).clamp(min=1e-3).log10()
    parts = (logarithms[:, :2], momentum, logarithms[:, 3:])
    return torch.cat(parts, 1) / logarithms.new_tensor(DECADES)


def kernel(ones: Tensor, others: Tensor, length: float) -> Tensor:
    """The covariance of a process of unit variance that is smooth over a `length`."""
    return torch.exp(-torch.cdist(ones, others).square() / (2 * length**2))


def fit(seeds: Sequence[Mapping[str, Mapping]]) -> tuple[Estimate, dict[str, float]]:
    """An estimate from the units of all schedules by seed, and how well it predicts.

    Length and noise of the kernel are those that predict a draw best that is left out.
    """
    settings = {name: _column(seeds, "0", "settings", name) for name in (PRICE, *AXES)}
    inputs = coordinates(torch.stack([settings[name].log10() for name in AXES], 1))
    every = {
        name: torch.stack([_column(seeds, str(one), name) for one, _ in enumerate(SCHEDULES)], 1)
        for name in ("accuracy", "growth", "rent")
    }
    gains = every["accuracy"] - every["accuracy"].mean(1, keepdim=True)
    rest = gains - gains.mean(0)
    identity = torch.eye(len(inputs), dtype=torch.float64)
    tried = {}
    for length, noise in product(LENGTHS, NOISES):
        inverse = torch.linalg.inv(kernel(inputs, inputs, length) + noise * identity)
        weights = inverse @ rest
        # what is left of a draw that is left out (Rasmussen and Williams 2006, 5.12)
        error = (weights / inverse.diagonal()[:, None]).square().mean().sqrt()
        tried[float(error), length, noise] = weights
    error, length, noise = best = min(tried)
    estimate = Estimate(
        inputs,
        tried[best],
        gains.mean(0),
        (every["growth"] - 1).mean(0),
        length,
        every["accuracy"] - every["rent"],
        settings[PRICE],
    )
    quality = {"draws": len(inputs), "length": length, "noise": noise, "error": error}
    return estimate, quality | {"spread": float(rest.square().mean().sqrt())}


def _column(seeds: Sequence[Mapping[str, Mapping]], schedule: str, *names: str) -> Tensor:
    """Numbers float64 [D] of the units of a schedule, seed after seed."""
    own = [reduce(getitem, names, seed[schedule]) for seed in seeds]
    return torch.cat([torch.tensor(one, dtype=torch.float64) for one in own])


def settings_seen(view: View) -> tuple[Tensor, Tensor]:
    """Coordinates [N, 5] and prices [N] of envs, from what a policy observes."""
    features = view.observation.features[:, NUM_ENV_FEATURES : NUM_ENV_FEATURES + 1 + len(AXES)]
    logarithms = 6 * (features.double() - 1)
    return coordinates(logarithms[:, 1:]), 10 ** logarithms[:, 0]


class Teacher:
    """The schedule of the largest estimated score in each env, by what the policy observes."""

    def __init__(self, estimate: Estimate) -> None:
        """estimate: what each schedule brings."""
        self.estimate = estimate
        names = [BLUEPRINT_NAMES.index(name) for one in SCHEDULES for name in one.blueprints]
        self.codes = torch.tensor(names).view(len(SCHEDULES), -1)
        self.germinate = torch.tensor([one.germinate for one in SCHEDULES])

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """Empty."""
        return ()

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """The op of the schedule that the settings of the env ask for."""
        best = self.estimate.best(*settings_seen(view))
        return follow(view, self.germinate[best], self.codes[best]), memory


def read_estimate(path: Path) -> Estimate:
    """The estimate in a file."""
    return Estimate(**torch.load(path, weights_only=True))


def save_estimate(estimate: Estimate, path: Path) -> None:
    """Write what `read_estimate` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(estimate._asdict(), path)


@esper_soa.agent("teacher")
def teacher() -> Teacher:
    """The teacher of the last `python -m benchmarks.studies.family teacher`."""
    return Teacher(read_estimate(TEACHER_FILE))
