"""The engine of a CPU: whole networks, of any width and with any seeds, by the native kernels.

nets/choose.py asks for an `obstacle` before it makes one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.data.images import crops_of
from esper_soa.nets.engines.cpu import host_program as hosts
from esper_soa.nets.engines.cpu import program, records
from esper_soa.nets.engines.cpu.operations import MODULE
from esper_soa.nets.gradients import EXPLODING_NORM, SMALLEST_NORM, VANISHING_NORM
from esper_soa.nets.model.blueprints import GATE, num_codes, seed_table
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.needs import Need, training_needs
from esper_soa.nets.passes import Gradients, Measure, Pass, Piece, PieceEngine, TrainChunk
from esper_soa.nets.seeds.pools import row_layout
from esper_soa.nets.seeds.seed_plan import THROUGH, Group, SeedPlan
from esper_soa.nets.seeds.subsets import Job
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import Rules
from esper_soa.state import STATE_FLOAT
from esper_soa.system.threads import Call
from esper_soa.vocabulary import Blend


def obstacle(shape: HostShape) -> str:
    """Why the kernels cannot take hosts and their seeds; "" where they can."""
    seeds = (
        (hosts.seed_obstacle(each, shape), each.name) for each in shape.blueprints if each.parts
    )
    words = (f"{reason} (blueprint {name})" for reason, name in seeds if reason)
    return hosts.host_obstacle(shape) or next(words, "")


@lru_cache(maxsize=64)
def _places(shape: HostShape) -> np.ndarray:
    """The kernels' kinds of seeds by the codes of their blueprints; -1 where there is none."""
    places = np.full(num_codes(shape.blueprints), -1)
    for place, blueprint in enumerate(shape.blueprints):
        if blueprint.parts and not hosts.seed_obstacle(blueprint, shape):
            places[blueprint.code] = 1 + place
    return places


def _kinds(shape: HostShape, plan: SeedPlan, running: np.ndarray) -> np.ndarray:
    kinds = np.where(running, _places(shape)[plan.blueprint], 0)
    if (kinds < 0).any():
        code = plan.blueprint[kinds < 0][0]
        raise LookupError(f"no native kernel for seeds of blueprint code {code}")
    return kinds


Seeds = dict[str, np.ndarray]  # the fields of the record that are about them, int64 [N, S]


def training_seeds(shape: HostShape, plan: SeedPlan) -> Seeds:
    """The seeds of a training pass as the kernels know them."""
    flags = (plan.blend == THROUGH) * records.THROUGH | plan.detached * records.DETACHED
    flags |= plan.frozen * records.FROZEN | plan.measured * records.MEASURED | _blends(plan)
    return {"seed_kind": _kinds(shape, plan, plan.running), "seed_flags": flags}


def validation_seeds(shape: HostShape, plan: SeedPlan) -> Seeds:
    """The seeds of a validation pass for the kernels; one that learns behind its host is none."""
    running = plan.running & (plan.blend != THROUGH)
    return {"seed_kind": _kinds(shape, plan, running), "seed_flags": _blends(plan)}


def _blends(plan: SeedPlan) -> np.ndarray:
    multiplied = plan.blend == Blend.MULTIPLY
    return multiplied * records.MULTIPLIED | (plan.blend == Blend.GATE) * records.GATED


@lru_cache(maxsize=64)
def _tables(shape: HostShape) -> dict[str, np.ndarray]:
    widths = [spec.channels for spec in shape.slots]
    columns = {
        "gate_at": [row_layout(shape, slot).seed for slot in range(len(widths))],
        "gate_hidden": [GATE.hidden.of(width) for width in widths],
        "programs": program.programs(shape.blueprints, widths),
    }
    tables = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    rows = [hosts.host_program(shape)]
    modules = np.zeros((len(widths), len(shape.blueprints)), dtype=MODULE)
    for slot, spec in enumerate(shape.slots):
        for place, blueprint in enumerate(shape.blueprints):
            if blueprint.module is not None and not hosts.seed_obstacle(blueprint, shape):
                begin = sum(map(len, rows))
                rows.append(hosts.seed_program(blueprint.module.make, spec.shape))
                numel = seed_table(blueprint, spec.channels).total
                modules[slot, place] = begin, begin + len(rows[-1]), numel
    return tables | {"program": np.concatenate(rows), "modules": modules}


def _networks(shared: Pass, seeds: Seeds) -> records.NativeNetworks:
    """Record of the networks; LookupError if the kernels do not support their memory layout."""
    shape = shared.setup.shape
    weights = shared.weights
    host = weights["host"]
    params = host["params"]
    if hosts.host_obstacle(shape) or params.dtype != torch.float32:
        raise LookupError(f"no native kernels for {params.dtype} networks of {shape.segments}")
    pools = [weights["seeds", spec.name] for spec in shape.slots]
    tables = _tables(shape)
    _, blueprints, parts, _ = tables["programs"].shape
    record = records.NativeNetworks(
        operations=len(hosts.host_program(shape)),
        longest=int((tables["modules"]["end"] - tables["modules"]["begin"]).max()),
        slots=len(pools),
        classes=shape.num_classes,
        size=shape.input_shape[1],
        colours=shape.input_shape[0],
        blueprints=blueprints,
        parts=parts,
        width=params.shape[1],
        statistics_width=host["statistics"].shape[1],
        eps=batched.NORM_EPS,
    )
    arrays: records.Held = {
        "seed_width": np.array([pool["params"].shape[1] for pool in pools], dtype=np.int64),
        "seed_params": _addresses(pools, "params", len(params)),
        "seed_momentum": _addresses(pools, "momentum", len(params)),
        "alpha": shared.alpha.to(params.dtype).contiguous(),
    }
    state = host["momentum"].shape[1]
    fields = {**tables, **seeds, **arrays, **host}
    return records.point(
        record, fields, rows=len(params), state=state, lines=len(tables["program"])
    )


def _addresses(pools: Sequence[TensorDict], name: str, rows: int) -> np.ndarray:
    """Where rows [N, W] of each pool begin, int64 [S]."""
    places = [
        records.address(name, pool[name], records.SINGLE, count=rows * pool[name].shape[1])
        for pool in pools
    ]
    return np.array(places, dtype=np.int64)


@dataclass(frozen=True)
class CpuEngine(PieceEngine):
    """For hosts without an obstacle and weights in float32, on a CPU: all of a network in a call.

    It cuts the images of its feeds as it goes, so that they never leave the caches.
    """

    def needs(self, setup: Setup) -> list[Need]:
        """Needs of networks that each worker takes in place, one after the other."""
        return training_needs(setup, in_place=True)

    def groups(self, plan: SeedPlan, envs: np.ndarray) -> list[Group]:
        """None: the kernels read the plan."""
        return []

    def trainer(self, shared: Pass[TrainingFeed], num_batches: int, rules: Rules) -> TrainChunk:
        setup = shared.setup
        networks = _networks(shared, training_seeds(setup.shape, shared.plan))
        moves = [records.sgd_of(rule, shared.alpha.shape[0]) for rule in (rules.host, rules.seed)]
        crops_of_batches = crops_of(shared.feed)

        def train_chunk_(piece: Piece, gradients: Gradients, call: Call) -> tuple[Tensor, Tensor]:
            envs = piece.envs
            loss = torch.zeros(envs.size, dtype=torch.float32)
            correct = torch.zeros(envs.size, dtype=torch.int64)
            crops = crops_of_batches(piece.rows, 0, num_batches)
            images = crops.first.shape[1]
            steps = num_batches // setup.accumulate
            parts = (each.split(images // steps, 1) for each in (crops.first, crops.labels))
            for step, cut in enumerate(zip(*parts, strict=True)):
                call.check()
                first, labels = (each.contiguous() for each in cut)
                record = records.Training(
                    nets=networks,
                    count=envs.size,
                    batch=images // num_batches,
                    accumulate=setup.accumulate,
                    images=records.crops_record(crops.bank, first, envs.size * (images // steps)),
                    vanishing_norm=VANISHING_NORM,
                    exploding_norm=EXPLODING_NORM,
                    tiny=SMALLEST_NORM,
                )
                held: records.Held = {"envs": envs, "labels": labels}
                held |= {"loss": loss, "correct": correct, "host": moves[0], "seed": moves[1]}
                if step % setup.task.gradient_stride == 0:
                    held.update(gradients)
                records.point(record, held, rows=len(shared.alpha), slots=networks.slots)
                records.call("train_networks", record)
            return loss / num_batches, 100.0 * correct.to(STATE_FLOAT) / images

        return train_chunk_

    def validator(self, shared: Pass[ValidationFeed]) -> Measure:
        networks = _networks(shared, validation_seeds(shared.setup.shape, shared.plan))
        crops_of_envs = crops_of(shared.feed)

        def measure(job: Job, piece: Piece, call: Call) -> tuple[Tensor, Tensor]:
            envs = piece.envs
            codes = np.array(job.codes, dtype=np.int64)
            crops = crops_of_envs(piece.rows)
            first = crops.first.contiguous()
            loss = torch.zeros(envs.size, dtype=STATE_FLOAT)
            correct = torch.zeros(envs.size, codes.size, dtype=torch.int64)
            counts = torch.zeros(envs.size, dtype=torch.int64)
            record = records.Validation(
                nets=networks,
                count=envs.size,
                images=first.shape[1],
                shared=first.shape[0] == 1,
                images_of=records.crops_record(crops.bank, first, first.numel()),
                codes=codes.size,
                ablated=job.ablated,
            )
            held: records.Held = {"envs": envs, "labels": crops.labels.contiguous(), "code": codes}
            held |= {"loss": loss, "correct": correct, "counted": counts}
            right = torch.zeros(envs.size, first.shape[1], dtype=torch.uint8)
            if shared.answers is not None:
                held["answers"] = right
            records.point(record, held, orders=len(first))
            records.call("validate_networks", record)
            if shared.answers is not None:
                shared.answers[piece.rows] = right.to(shared.answers.dtype)
            return loss / counts, 100.0 * correct.to(STATE_FLOAT) / counts[:, None]

        return measure
