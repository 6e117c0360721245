"""Tries engines on the shapes of a run: what they compute, in what time, in how much memory.

A mixture of seeds of every kind and stage is trained and validated by each; torch in float32 says
what is right, of as many envs as it has room for. Whatever an engine or its compiler raises is a
verdict on it. choose.py, which alone knows engines, gives how each of them is made.
"""

import math
import time
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.nets import TaskConfig
from esper_soa.config.ranges import env_numbers
from esper_soa.nets.data.batches import BatchSource, Draw
from esper_soa.nets.engine import Engine
from esper_soa.nets.graphs import WARM_UPS
from esper_soa.nets.model.blueprints import blueprint_codes
from esper_soa.nets.precision import add_loss_scales_, reset_loss_scales_
from esper_soa.nets.seeds import pools
from esper_soa.nets.setup import Setup
from esper_soa.state import STATE_FLOAT
from esper_soa.system import streams
from esper_soa.system.errors import UserError, error_text, one_line
from esper_soa.vocabulary import RUNNING_STAGES, Blend, Stage

# Result by result, an engine may be as far from torch in float32 as TIMES torch itself in the
# precision of the run, and ROUNDING more, which is what TensorFloat-32 does to a few steps: a wrong
# kernel is off by about 1.
ROUNDING = 1e-2
TIMES = 2.0
FLIPPED = 2.5  # validation samples whose answer may be another by rounding
BATCHES = 3  # training batches of a pass
REFERENCE_ENVS = (64, 8, 1)  # what is right is known of the first of them, of fewer if memory ends
TIMED = 2  # last passes, of which the quicker counts
PASSES = WARM_UPS + 1 + TIMED  # the one between them captures
SAMPLES = 512  # to train on
SEED = 2**31  # of the trials; no run has it


class TrialResult(NamedTuple):
    """Result of the trial of one engine."""

    name: str
    dropped: str = ""  # why a run cannot have it; "" where it can
    error: float = math.nan  # of the worst network, from torch in float32; see `distances`
    seconds: float = math.nan  # of the networks' part of an env-step of all envs
    memory: int = 0  # bytes at most, beyond the weights; 0 where the device does not say

    def words(self) -> str:
        """One clause for logs."""
        if self.dropped:
            return f"{self.name} is left out: {self.dropped}"
        return f"{self.name} takes {1e3 * self.seconds:.1f} ms per env-step"


Maker = Callable[[], Engine]
# Makes so many training and test samples of the kind that the run has, on which engines are tried.
Example = Callable[[int, int, torch.device], BatchSource]
Outcome = TypeVar("Outcome")
Results = dict[str, Tensor]
Distances = dict[str, tuple[float, float]]  # of the worst network, of all in the mean, by result


def try_engines(
    setup: Setup, example: Example, exact: Maker, reference: str, makers: Mapping[str, Maker]
) -> list[TrialResult]:
    """Results of the engines of `makers`, that named `reference` first; exact: torch in float32.
    UserError where the device is of no use any more after an engine has failed on it.
    """
    workload = Workload(setup, example)
    expected: Results | str = "there are no envs"
    for envs in REFERENCE_ENVS:
        expected = attempt(partial(workload.first(envs).results, exact, torch.float32))
        release(setup.device, reference)
        if not isinstance(expected, str):
            break
    trial_results = []
    rounding: Distances = {}
    for name in (reference, *(name for name in makers if name != reference)):
        outcome = attempt(partial(workload.compare, makers[name], expected))
        if isinstance(outcome, str):
            trial_results.append(TrialResult(name, outcome))
        elif isinstance(expected, str):
            unknown = f"torch in float32, which says what is right, does not run: {expected}"
            trial_results.append(TrialResult(name, unknown))
        else:
            errors, cost = outcome
            rounding = errors if name == reference else rounding
            worst = max(max(pair) for pair in errors.values())
            trial_results.append(TrialResult(name, disagreement(errors, rounding), worst, *cost))
        del outcome  # before its memory is given back
        release(setup.device, name)
    return trial_results


def attempt(work: Callable[[], Outcome]) -> Outcome | str:
    """The outcome of `work`, or in words its error; only what ends the program goes through."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 (compilers raise what they like)
        return error_text(error)


def disagreement(errors: Distances, rounding: Distances) -> str:
    """Name the result that differs from torch in float32 by more than rounding; "" where none does.

    rounding: how far torch itself is in the precision of the run; empty where it could not say.
    """
    for name, pair in errors.items():
        for actual, own in zip(pair, rounding.get(name, (0.0, 0.0)), strict=True):
            allowed = ROUNDING + TIMES * own
            if not math.isfinite(actual) or actual > allowed:
                far = f"{actual:.1e} from torch in float32"
                return f"its {name} is {far}, and {allowed:.1e} is rounding"
    return ""


def distances(actual: Results, expected: Results, val_samples: int) -> Distances:
    """Distances relative to the norm of a network's: of the worst network, and the mean of all that
    `expected` has, the first.

    Accuracies count as the share of samples beyond FLIPPED; other subsets are infinitely far.
    """
    errors = Distances()
    for name, right in expected.items():
        values = actual[name][: len(right)].to(right.dtype)
        if name == "subset":
            rows = torch.where((values == right).all(1), 0.0, math.inf)
        elif name == "accuracy":
            rows = ((values - right).abs().amax(1) / 100 - FLIPPED / val_samples).clamp(min=0)
        else:
            norm = right.reshape(len(right), -1).norm(dim=1)
            floor = 0.1 * norm.mean() + torch.finfo(right.dtype).tiny
            rows = (values - right).reshape(len(right), -1).norm(dim=1) / norm.clamp(min=floor)
        errors[name] = float(rows.max()), float(rows.mean())
    return errors


class Workload:
    """Networks with a mixture of seeds, and samples, on which every engine does the same work."""

    def __init__(self, setup: Setup, example: Example) -> None:
        self.setup = setup
        device = self.device = setup.device
        self.val_samples = min(setup.val_samples, setup.eval_batch)
        samples = example(SAMPLES, self.val_samples, device)
        envs = torch.arange(setup.num_envs, device=device)
        self.keys = streams.stream_keys(SEED, streams.HOST_INIT, (0,), envs=envs)
        batch_size = setup.batch_size
        places = torch.arange(BATCHES * batch_size, device=device)
        order = streams.integers(self.keys[:, None], places, SAMPLES)
        draw = Draw(order, self.keys, 0, batch_size=batch_size, augment=True)
        self.training = samples.training(draw, torch.float32)
        order = torch.arange(self.val_samples, device=device)
        self.validation = samples.validation(order, torch.float32)
        self.weights = pools.allocate(
            setup.shape,
            setup.num_envs,
            device,
            dtype=torch.float32,
            optimizer=setup.task.optimizer,
        )
        pools.initialise_hosts_(self.weights, setup.shape, self.keys)
        self.seeds = mixture(setup)
        alpha = torch.from_numpy(np.where(self.seeds.visible, 0.6, 0.0))
        self.alpha = alpha.to(device, STATE_FLOAT)

    def first(self, envs: int) -> "Workload":
        """The same of the first envs."""
        part = copy(self)
        part.weights = self.weights[:envs]
        part.alpha = self.alpha[:envs]
        part.keys = self.keys[:envs]
        first_rows = (rows if rows is None else rows[:envs] for rows in self.seeds)
        part.seeds = pools.ActiveSeeds._make(first_rows)
        return part

    def results(self, make: Maker, precision: torch.dtype) -> Results:
        """Results of a training and a validation pass, weights included."""
        return self.passes(make(), precision, BATCHES)[0]

    def compare(self, make: Maker, expected: Results | str) -> tuple[Distances, tuple[float, int]]:
        """Distances from `expected`, none where that is an error; and the cost, as of `run`."""
        results, cost = self.run(make, self.setup.precision)
        known = {} if isinstance(expected, str) else expected
        return distances(results, known, self.val_samples), cost

    def run(self, make: Maker, precision: torch.dtype) -> tuple[Results, tuple[float, int]]:
        """Results of the last training and validation pass; seconds of an env-step, and bytes."""
        setup = self.setup
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        results, train, validate = self.passes(make(), precision, BATCHES)
        _, single, _ = self.passes(make(), precision, 1)
        seconds = extrapolate(single, train, setup.train_samples // setup.batch_size)
        seconds += validate * setup.val_samples / self.val_samples
        return results, (seconds, torch.cuda.max_memory_allocated(self.device) if on_gpu else 0)

    def passes(
        self, engine: Engine, precision: torch.dtype, batches: int
    ) -> tuple[Results, float, float]:
        """Results of the last pass, seconds of the quickest in training and in validation."""
        task = alike(self.setup.task)
        setup = self.setup._replace(precision=precision, accumulate=1, task=task)
        weights = self.weights.clone()
        if precision == torch.float16:
            add_loss_scales_(weights)
        times = []
        reports: Results = {}
        for _ in range(PASSES):
            weights.update_(self.weights)
            reset_loss_scales_(weights)
            seeds = engine.claim_(setup, weights, self.seeds.resident(self.device), keys=self.keys)
            start = now(self.device)
            trained = engine.train_(setup, weights, self.alpha, seeds, self.training, batches)
            between = now(self.device)
            validated = engine.validate(setup, weights, self.alpha, seeds, self.validation)
            times.append((between - start, now(self.device) - between))
            reports = {"train loss": trained.loss, "validation loss": validated.loss}
            reports |= {"accuracy": validated.accuracy, "subset": validated.subset}
        train, validate = (min(column) for column in zip(*times[-TIMED:], strict=True))
        leaves = dict(weights.select(*self.weights.keys()).flatten_keys(".").items())
        return leaves | reports, train, validate


def alike(task: TaskConfig) -> TaskConfig:
    """The task with the first number of each setting that differs by env, for all of them."""
    task = copy(task)
    for key in (name.removeprefix(task.path) for name in task.differing):
        vars(task)[key] = env_numbers(vars(task)[key])[0]
    return task


def extrapolate(single: float, several: float, batches: int) -> float:
    """Seconds of a pass of so many batches from those of one batch and of BATCHES."""
    return single + (batches - 1) * max(0.0, several - single) / (BATCHES - 1)


def mixture(setup: Setup) -> pools.ActiveSeeds:
    """Newborn seeds of the task's blueprints in all stages, blends, directions, and empty slots."""
    draw = np.random.default_rng(SEED)
    shape = (setup.num_envs, len(setup.shape.slots))
    stage = draw.choice([*RUNNING_STAGES, Stage.EMPTY], shape)
    running = stage != Stage.EMPTY
    blueprint = draw.choice(blueprint_codes(list(setup.task.blueprints)), shape)
    visible = running & (stage != Stage.TRAINING)
    return pools.ActiveSeeds(
        running=running,
        stage=stage,
        blueprint=np.where(running, blueprint, -1),
        blend=draw.choice([Blend.ADD, Blend.MULTIPLY, Blend.GATE], shape),
        frozen=(stage == Stage.BLENDING) & (draw.random(shape) < 0.25),
        visible=visible,
        ablated=visible & (stage != Stage.FOSSILIZED),
        newborn=running,
        fresh_momentum=running,
    )


def now(device: torch.device) -> float:
    """Seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def release(device: torch.device, engine: str) -> None:
    """Free the memory of a trial; raises UserError where it has left the device unusable."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        left = f"compute.engine=auto: {engine} has left {device} unusable ({one_line(error)})"
        raise UserError(f"{left}. Give compute.engine=torch") from error
