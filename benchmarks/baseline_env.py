"""One env as most people would write it: an ordinary network, its optimisers, and a state machine
per slot.

The oracle that the stacked engine is tested against, and the opponent in benchmarks; it shares no
kernel with it. Weights come from outside through `load_flat`, data as tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import baseline_modules, baseline_text
from benchmarks.baseline_attribution import (
    AttributionReading,
    ValidationReading,
    attribute,
    code_of,
    subset_codes,
)
from benchmarks.baseline_lifecycle import SlotMachine, TotalsRecord
from benchmarks.baseline_modules import FlatModule, Graft
from benchmarks.baseline_passes import (
    GradientNorms,
    TrainPass,
    TrainReading,
    ValidationPass,
    read_together,
    record_gradients,
    tensor_norms,
)
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.nets import SEQUENCES, TaskConfig, sort_slots
from esper_soa.vocabulary import (
    ALPHA_TARGETS,
    CURVE_CHOICES,
    CURVE_STEEPNESS,
    SPEED_STEPS,
    STYLE_BLEND,
    TEMPO_STEPS,
    AlphaMode,
    Blueprint,
    Op,
    Stage,
)

# Images [B, 3, 32, 32] and labels [B], or tokens [B, T] and the next ones [B*T].
Batches = Sequence[tuple[Tensor, Tensor]]

Module = TypeVar("Module", bound=nn.Module)

MEASURED_STAGES = (Stage.TRAINING, Stage.BLENDING)
PRUNABLE_STAGES = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)


class ScalarAction(NamedTuple):
    """One factored action, field by field as in state.Action."""

    slot: int = 0
    blueprint: int = Blueprint.NOOP
    style: int = 2
    tempo: int = 1
    alpha_target: int = 2
    alpha_speed: int = 0
    alpha_curve: int = 0
    op: int = Op.WAIT


class ScalarOutcome(NamedTuple):
    """What became of an action, field by field as in state.ActionOutcome."""

    effective_op: int
    success: bool
    germinated: bool
    fossilized: bool


@dataclass
class Plant:
    """The networks in one slot; the gate stands by for the blend GATE and trains with its seed."""

    seed: FlatModule
    gate: FlatModule
    # None = the next training pass makes one, with fresh momentum.
    optimiser: torch.optim.Optimizer | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the seed, then of the gate."""
        return [*self.seed.parameters(), *self.gate.parameters()]


class BaselineEnv:
    """One host, its slots and its optimisers."""

    def __init__(
        self,
        task: TaskConfig,
        slot_names: list[str],
        lifecycle: LifecycleConfig,
        gates: GatesConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        precision: torch.dtype = torch.float32,
    ) -> None:
        """`slot_names` in any order; activations of `precision` (autocast), weights of `dtype`."""
        self.task = task
        self.lifecycle = lifecycle
        self.ablate_fossils = False  # rewards with drip need fossils among the ablated seeds
        self.accumulate = 1  # batches whose mean gradient makes an optimiser step
        self.dtype = dtype
        self.device = torch.device(device)
        self.precision = precision
        self.specs = sort_slots(task, slot_names)
        self.totals = TotalsRecord()
        self.machines = [SlotMachine(lifecycle, gates, self.totals) for _ in self.specs]
        self.plants: dict[int, Plant] = {}  # networks of the live seeds, by slot number
        topology = self.specs[0].topology
        self.modules = baseline_text if topology == SEQUENCES else baseline_modules
        self.detached = set(lifecycle.detached_in(topology))
        self.accuracy = 0.0  # of the last record, percent
        self.host = self._place(self.modules.Host(task))
        parameters = list(self.host.parameters())
        self.optimiser = self._optimiser(
            parameters, task.number("host_lr"), task.number("weight_decay")
        )

    def step(self, train: Batches, validation: Batches, action: ScalarAction) -> ScalarOutcome:
        """One env-step in the reference's order: train, evaluate, record, act, tick."""
        trained = self.train(train)
        evaluated = self.evaluate(validation)
        self.record(trained, evaluated)
        outcome = self.apply(action)
        self.tick()
        return outcome

    def train(self, batches: Batches) -> TrainReading:
        """Forward, backward, clipping over `batches`, with an SGD step for every `accumulate`."""
        done = self.training_pass(batches)
        return done.read(read_together([done])[0])

    def training_pass(self, batches: Batches) -> TrainPass:
        """`train`, its results left on the device."""
        self.host.train()
        grafts = {
            self.specs[slot].name: self._graft(slot, self.machines[slot].seed.alpha)
            for slot in self._running()
        }
        optimisers = self._optimisers()
        loss_sum = torch.zeros((), dtype=self.dtype, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        last = len(batches) // self.accumulate - 1  # optimiser step
        measured = last // self.task.gradient_stride * self.task.gradient_stride
        norms: dict[int, GradientNorms] = {}
        for index, (images, labels) in enumerate(batches):
            step, part = divmod(index, self.accumulate)
            for optimiser in optimisers if part == 0 else []:
                optimiser.zero_grad(set_to_none=True)
            with self._autocast():
                logits = self.host(images, grafts)
                loss = F.cross_entropy(logits, labels)
            (loss if self.accumulate == 1 else loss / self.accumulate).backward()
            if part == self.accumulate - 1:
                if step == measured:
                    norms = self._gradient_norms()
                self._clip_gradients()
                for optimiser in optimisers:
                    optimiser.step()
            loss_sum += loss.detach()
            correct += (logits.detach().argmax(-1) == labels).sum()
        sums = torch.stack((loss_sum.double(), correct.double()))
        return TrainPass(sums, len(batches), sum(len(labels) for _, labels in batches), norms)

    def evaluate(self, batches: Batches, codes: Sequence[int] | None = None) -> ValidationReading:
        """Accuracy under every subset in `codes` (default: all needed), a full pass each."""
        done = self.validation_pass(batches, codes)
        return done.read(read_together([done])[0])

    @torch.inference_mode()
    def validation_pass(
        self, batches: Batches, codes: Sequence[int] | None = None
    ) -> ValidationPass:
        """`evaluate`, its results left on the device."""
        self.host.eval()
        codes = self._default_codes() if codes is None else codes
        loss_sum = torch.zeros((), dtype=self.dtype, device=self.device)
        correct = torch.zeros(len(codes), dtype=torch.int64, device=self.device)
        for row, code in enumerate(codes):
            alphas = self._alphas(code)
            grafts = {
                self.specs[slot].name: self._graft(slot, alphas[slot])
                for slot in alphas
                if alphas[slot] > 0
            }
            for images, labels in batches:
                with self._autocast():
                    logits = self.host(images, grafts)
                    loss = F.cross_entropy(logits, labels) if row == 0 else 0
                correct[row] += (logits.argmax(-1) == labels).sum()
                loss_sum += loss
        return self._validation_pass(batches, codes, loss_sum, correct)

    @torch.inference_mode()
    def fused_validation_pass(
        self, batches: Batches, codes: Sequence[int] | None = None
    ) -> ValidationPass:
        """`validation_pass` in one pass per batch, images repeated for every subset."""
        self.host.eval()
        codes = self._default_codes() if codes is None else codes
        rows = [self._alphas(code) for code in codes]
        slots = list(rows[0])
        alphas = torch.tensor(
            [[row[slot] for row in rows] for slot in slots], dtype=self.dtype
        ).view(len(slots), len(rows))
        alphas = (alphas.pin_memory() if self.device.type == "cuda" else alphas).to(
            self.device, non_blocking=True
        )
        loss_sum = torch.zeros((), dtype=self.dtype, device=self.device)
        correct = torch.zeros(len(codes), dtype=torch.int64, device=self.device)
        for images, labels in batches:
            size = len(images)
            per_image = (
                alphas[:, :, None]
                .expand(-1, -1, size)
                .reshape(len(slots), len(rows) * size, *(1,) * self.modules.FEATURE_DIMS)
            )
            grafts = {
                self.specs[slot].name: self._graft(slot, per_image[at])
                for at, slot in enumerate(slots)
            }
            with self._autocast():
                logits = self.host(repeated(images, len(codes)), grafts)
                logits = logits.view(len(codes), len(labels), -1)
                loss_sum += F.cross_entropy(logits[0], labels)
            correct += (logits.argmax(-1) == labels).sum(1)
        return self._validation_pass(batches, codes, loss_sum, correct)

    def record(self, trained: TrainReading, evaluated: ValidationReading) -> AttributionReading:
        """Write the measurements of this env-step into the slots."""
        found = attribute(evaluated)
        self.accuracy = evaluated.accuracy[code_of(evaluated.ablated)]
        for slot, machine in enumerate(self.machines):
            if not machine.live:
                continue
            if slot in evaluated.ablated:
                machine.record_contribution(found.contribution[slot])
            machine.seed.interaction_sum = found.interaction_sum.get(slot, 0.0)
            machine.record_accuracy(self.accuracy)
            if slot in trained.gradients:
                record_gradients(machine, trained.gradients[slot])
        return found

    def apply(self, action: ScalarAction) -> ScalarOutcome:
        """Carry out one action; one not applicable, or whose gate fails, changes nothing."""
        machine = self.machines[action.slot]
        valid = is_valid(machine, action.op, self.lifecycle)
        done = valid and self._carry_out(machine, action)
        for each in self.machines:
            each.age_memories()
        self._remove_dead()
        return ScalarOutcome(
            effective_op=action.op if valid else Op.WAIT,
            success=done,
            germinated=done and action.op == Op.GERMINATE,
            fossilized=done and action.op == Op.FOSSILIZE,
        )

    def tick(self) -> None:
        """The mechanical end of the env-step: ramps, automatic advances, cooldowns."""
        for machine in self.machines:
            machine.tick()
        self._remove_dead()

    def _carry_out(self, machine: SlotMachine, action: ScalarAction) -> bool:
        target = ALPHA_TARGETS[action.alpha_target]
        steps = SPEED_STEPS[action.alpha_speed]
        curve = CURVE_CHOICES[action.alpha_curve]
        steepness = CURVE_STEEPNESS[action.alpha_curve]
        blend = STYLE_BLEND[action.style]
        if action.op == Op.GERMINATE:
            channels = self.specs[action.slot].channels
            seed = self.modules.make_seed(action.blueprint, channels, blend)
            gate = self.modules.Gate(channels)
            self.plants[action.slot] = Plant(self._place(seed), self._place(gate))
            return machine.germinate(
                action.blueprint, action.style, TEMPO_STEPS[action.tempo], target, self.accuracy
            )
        if action.op == Op.ADVANCE:
            return machine.advance()
        if action.op == Op.FOSSILIZE:
            done = machine.fossilize()
            if done:
                self.plants[action.slot].optimiser = None
            return done
        if action.op == Op.PRUNE:
            return machine.schedule_prune(steps, curve, steepness)
        if action.op == Op.SET_ALPHA_TARGET:
            return machine.set_alpha_target(target, steps, curve, steepness, blend)
        return True

    def _remove_dead(self) -> None:
        """Drop networks, and with them momentum, of slots without a live seed."""
        self.plants = {
            slot: plant for slot, plant in self.plants.items() if self.machines[slot].live
        }

    def _place(self, module: Module) -> Module:
        module.to(self.device, self.dtype)
        return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _running(self) -> list[int]:
        return [slot for slot, machine in enumerate(self.machines) if machine.running]

    def _graft(self, slot: int, alpha: float | Tensor) -> Graft:
        plant = self.plants[slot]
        seed = self.machines[slot].seed
        training = seed.stage == Stage.TRAINING
        detached = seed.stage in self.detached
        return Graft(plant.seed, plant.gate, seed.blend, alpha, training, detached)

    def _optimiser(
        self, parameters: list[nn.Parameter], rate: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        """Fused: one kernel launch per step on CUDA, a third of the plain form's time on a CPU."""
        if self.task.optimizer == "adamw":
            betas = self.task.number("momentum"), 0.999
            return torch.optim.AdamW(parameters, rate, betas, weight_decay=weight_decay, fused=True)
        found = torch.optim.SGD(
            parameters, rate, self.task.number("momentum"), weight_decay=weight_decay, fused=True
        )
        for (
            parameter
        ) in parameters:  # gate networks get their first gradient later than their seeds, perhaps
            found.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return found

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        """The host's and one per running seed; frozen weights get no gradients, so they stay."""
        found = [self.optimiser]
        for slot in self._running():
            plant = self.plants[slot]
            for parameter in plant.parameters():
                parameter.requires_grad_(not self.machines[slot].frozen)
            if plant.optimiser is None:
                plant.optimiser = self._optimiser(
                    plant.parameters(), self.task.number("seed_lr"), 0.0
                )
            found.append(plant.optimiser)
        return found

    def _clip_gradients(self) -> None:
        """Limit the norm of the host's gradient, and of every seed's (with its gate) separately."""
        if self.task.number("max_grad_norm") > 0:
            nn.utils.clip_grad_norm_(self.host.parameters(), self.task.number("max_grad_norm"))
            for slot in self._running():
                nn.utils.clip_grad_norm_(
                    self.plants[slot].parameters(), self.task.number("max_grad_norm")
                )

    def _gradient_norms(self) -> dict[int, GradientNorms]:
        """Gradients before clipping, of TRAINING and BLENDING seeds whose weights may change."""
        wanted = [
            slot for slot in self._running() if self.machines[slot].seed.stage in MEASURED_STAGES
        ]
        wanted = [slot for slot in wanted if not self.machines[slot].frozen]
        if not wanted:
            return {}
        host, host_count = tensor_norms(list(self.host.parameters()))
        host_norm = torch.linalg.vector_norm(host).view(1)
        found = {}
        for slot in wanted:
            tensors, count = tensor_norms(self.plants[slot].parameters())
            found[slot] = GradientNorms(host_norm, host_count, tensors, count)
        return found

    def _ablated(self) -> tuple[int, ...]:
        fossils_too = self.ablate_fossils
        return tuple(
            slot
            for slot, machine in enumerate(self.machines)
            if machine.visible and (fossils_too or machine.seed.stage != Stage.FOSSILIZED)
        )

    def _fossils(self) -> tuple[int, ...]:
        return tuple(
            slot for slot in self._ablated() if self.machines[slot].seed.stage == Stage.FOSSILIZED
        )

    def _default_codes(self) -> list[int]:
        return subset_codes(self._ablated(), self._fossils())

    def _alphas(self, code: int) -> dict[int, float]:
        """Alpha of every visible seed in subset `code`, by slot number."""
        off = code_of(self._ablated()) - code
        visible = [slot for slot, machine in enumerate(self.machines) if machine.visible]
        return {
            slot: 0.0 if off >> slot & 1 else self.machines[slot].seed.alpha for slot in visible
        }

    def _validation_pass(
        self, batches: Batches, codes: Sequence[int], loss_sum: Tensor, correct: Tensor
    ) -> ValidationPass:
        num_images = sum(len(labels) for _, labels in batches)
        sums = torch.cat((loss_sum.double().view(1), correct.double()))
        return ValidationPass(
            sums, codes, len(batches), num_images, self._ablated(), self._fossils()
        )

    def _autocast(self) -> torch.autocast:
        short = self.precision == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=short)


def repeated(images: Tensor, times: int) -> Tensor:
    """`images` [n, ...] one set after the other [times n, ...], images in channels_last."""
    if images.ndim == 2:
        return images.repeat(times, 1)
    return images.permute(0, 2, 3, 1).repeat(times, 1, 1, 1).permute(0, 3, 1, 2)


def is_valid(machine: SlotMachine, op: int, lifecycle: LifecycleConfig) -> bool:
    """The op is applicable in its slot; gates are not asked."""
    stage = machine.seed.stage
    held = machine.ramp.mode == AlphaMode.HOLD
    if op == Op.GERMINATE:
        return stage == Stage.EMPTY
    if op == Op.ADVANCE:
        return stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING)
    if op == Op.FOSSILIZE:
        return stage == Stage.HOLDING
    if op == Op.PRUNE:
        old_enough = machine.seed.seed_age >= lifecycle.number("min_prune_age")
        return stage in PRUNABLE_STAGES and held and old_enough
    if op == Op.SET_ALPHA_TARGET:
        return stage in (Stage.BLENDING, Stage.HOLDING) and held
    return True
