"""Stacked hosts and seeds against the recorded forward and backward passes of the reference.

Every recorded case is one network of a stack: cases of a blueprint and blend that differ only in
alpha run together.
"""

import itertools

import pytest
import torch
from torch.nn import functional as F

from esper_soa.config.nets import TaskConfig, sort_slots
from esper_soa.nets.engines.torch.engine import SubsetSeeds
from esper_soa.nets.model.blueprints import BLUEPRINTS
from esper_soa.nets.model.host import evaluate_forward, fold_batch_norm, host_shape, split_values
from esper_soa.nets.model.segments import Forward
from esper_soa.nets.seeds.seed_plan import Group
from esper_soa.nets.seeds.seeds import ActiveGroup, TrainingSeeds
from esper_soa.vocabulary import BLUEPRINT_NAMES, Blend
from tests.parity.parity_vectors import load_networks

CHANNELS = {"r0c0": 8, "r0c1": 16, "r0c2": 32}
BLENDS = {"ADD": Blend.ADD, "MULTIPLY": Blend.MULTIPLY, "GATE": Blend.GATE}
FILES = [(slot, isolated) for slot in CHANNELS for isolated in (0, 1)]
close = {"rtol": 1e-5, "atol": 1e-5}


def row(tensors):
    return (
        torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        if tensors
        else torch.zeros(0)
    )


def train_logits(shape, parameters, statistics, x, filler):
    """Logits [B, n, classes] by batch statistics."""
    run = Forward(filler, parameters[0].shape[0], x.dtype)
    for segment, values in split_values(shape.segments, parameters, statistics):
        x = segment.train(run, values, x)
    return x


def host_rows(state, count):
    """(parameters, statistics) rows [count, .] of the recorded host."""
    params = {k: v for k, v in state.items() if "running" not in k and "num_batches" not in k}
    stats = {k: v for k, v in state.items() if "running" in k}
    return row(params).repeat(count, 1), row(stats).repeat(count, 1)


def stacks(recorded):
    """Runs of cases that share seed weights and stage, with those weights."""
    weights = {}
    for case in recorded["cases"]:
        if "seed_weights" in case:
            weights[case["blueprint"], case["algorithm"]] = (
                case["seed_weights"],
                case["gate_weights"],
            )
    key = lambda case: (case["blueprint"], case["algorithm"], case["stage"])  # noqa: E731
    for (blueprint, algorithm, stage), cases in itertools.groupby(recorded["cases"], key):
        yield blueprint, algorithm, stage, list(cases), weights[blueprint, algorithm]


def active_group(case, stage, count, weights, alphas):
    seed, gate = weights
    blend = BLENDS[case["algorithm"]] if stage == 4 else 0
    code = BLUEPRINT_NAMES.index(case["blueprint"])
    group = Group(0, code, blend, case["isolate_gradients"], False, True, None, torch.arange(count))
    rows = torch.cat([row(seed), row(gate) if blend == Blend.GATE else torch.zeros(0)]).repeat(
        count, 1
    )
    channels = CHANNELS[case["slot"]]
    return ActiveGroup(
        group, BLUEPRINTS[code], channels, rows, torch.zeros_like(rows), torch.tensor(alphas)
    )


@pytest.mark.parametrize(("slot", "isolated"), FILES)
def test_training_pass_gives_the_recorded_outputs_and_gradients(slot, isolated):
    recorded = load_networks(f"host_{slot}_iso{isolated}")
    shape = host_shape(TaskConfig(), sort_slots(TaskConfig(), [slot]))
    seen = 0
    for blueprint, algorithm, stage, cases, weights in stacks(recorded):
        count = len(cases)
        params, stats = host_rows(recorded["host_state_dict"], count)
        active = active_group(cases[0], stage, count, weights, [case["alpha"] for case in cases])
        leaf = params.requires_grad_()
        images = recorded["input"].repeat(1, count, 1, 1).requires_grad_()
        seeds = TrainingSeeds([active], count)
        statistics = [part.reshape(-1).clone() for part in shape.statistics.unpack(stats)]
        parameters = shape.parameters.unpack(leaf)
        logits = train_logits(shape, parameters, statistics, images, seeds)
        targets = recorded["targets"][:, None].expand(-1, count)
        losses = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            .view(-1, count)
            .mean(0)
        )
        inputs = [leaf, images, *(s for s in seeds.leaves if s.numel())]
        host_grad, image_grad, *seed_grad = torch.autograd.grad(
            losses.sum(), inputs, allow_unused=True
        )
        for i, case in enumerate(cases):
            where = f"{slot} {blueprint} {algorithm} alpha {case['alpha']} stage {stage}"
            torch.testing.assert_close(
                logits[:, i], case["logits"], **close, msg=lambda m, w=where: f"{w}: {m}"
            )
            torch.testing.assert_close(losses[i], case["loss"], **close)
            torch.testing.assert_close(
                image_grad[:, 3 * i : 3 * i + 3], case["grad_input"], **close
            )
            torch.testing.assert_close(
                host_grad[i], row(case["grad_host"]), **close, msg=lambda m, w=where: f"{w}: {m}"
            )
            if seed_grad and seed_grad[0] is not None and case["grad_seed"] | case["grad_gate"]:
                gate = case["grad_gate"] if active.group.blend == Blend.GATE else {}
                expected = torch.cat([row(case["grad_seed"]), row(gate)])
                torch.testing.assert_close(
                    seed_grad[0][i],
                    expected,
                    rtol=1e-4,
                    atol=1e-5,
                    msg=lambda m, w=where: f"{w}: {m}",
                )
            seen += 1
    assert seen == len(recorded["cases"]) > 0


@pytest.mark.parametrize(("slot", "isolated"), FILES)
def test_validation_pass_gives_the_recorded_logits(slot, isolated):
    recorded = load_networks(f"host_{slot}_iso{isolated}")
    shape = host_shape(TaskConfig(), sort_slots(TaskConfig(), [slot]))
    for _, _, stage, cases, weights in stacks(recorded):
        count = len(cases)
        params, stats = host_rows(recorded["host_state_dict"], count)
        folded = fold_batch_norm(
            shape, shape.parameters.unpack(params), shape.statistics.unpack(stats)
        )
        active = active_group(cases[0], stage, count, weights, [case["alpha"] for case in cases])
        seeds = SubsetSeeds([active], count, {}, 2)
        logits = evaluate_forward(shape, folded, recorded["input"], seeds)
        for i, case in enumerate(cases):
            torch.testing.assert_close(logits[:, i], case["logits_eval"], **close)


def test_hosts_without_seeds_give_the_recorded_logits_and_gradients():
    recorded = load_networks("host_r0c0_iso1")
    shape = host_shape(TaskConfig(), sort_slots(TaskConfig(), ["r0c0"]))
    params, stats = host_rows(recorded["host_state_dict"], 2)
    images = recorded["input"].repeat(1, 2, 1, 1).requires_grad_()
    statistics = [part.reshape(-1).clone() for part in shape.statistics.unpack(stats)]
    leaf = params.requires_grad_()
    parameters = shape.parameters.unpack(leaf)
    logits = train_logits(shape, parameters, statistics, images, TrainingSeeds([], 2))
    loss = sum(F.cross_entropy(logits[:, i], recorded["targets"]) for i in range(2))
    host_grad, image_grad = torch.autograd.grad(loss, [leaf, images])
    expected = recorded["base"]["host_only_train"]
    torch.testing.assert_close(logits[:, 1], expected["logits"], **close)
    torch.testing.assert_close(host_grad[1], row(expected["grads"]), **close)
    torch.testing.assert_close(image_grad[:, 3:], expected["grad_input"], **close)


def test_every_override_row_of_the_fused_pass_is_one_alpha_of_the_stack():
    recorded = load_networks("host_fused")
    shape = host_shape(TaskConfig(), sort_slots(TaskConfig(), list(CHANNELS)))
    params, stats = host_rows(recorded["host_state_dict"], 12)
    folded = fold_batch_norm(shape, shape.parameters.unpack(params), shape.statistics.unpack(stats))
    assert len(recorded["cases"]) > 0
    for case in recorded["cases"]:
        plain = (torch.full((3, 12), 0.4), case["plain_logits_alpha0.4"].expand(12, -1, -1))
        for alphas, expected in ((case["alpha_rows"], case["fused_logits"]), plain):
            actives = fused_groups(case, alphas)
            logits = evaluate_forward(
                shape, folded, recorded["input"], SubsetSeeds(actives, 12, {}, 2)
            )
            torch.testing.assert_close(logits.transpose(0, 1), expected, **close)


def fused_groups(case, alphas):
    found = []
    for slot, name in enumerate(CHANNELS):
        parts = {
            k: v for k, v in case["seed_state_dict"].items() if k.startswith(f"seed_slots.{name}.")
        }
        gate = {k: v for k, v in parts.items() if ".alpha_schedule." in k}
        seed = {k: v for k, v in parts.items() if ".seed." in k}
        code = BLUEPRINT_NAMES.index(case["blueprints"][slot])
        group = Group(
            slot, code, BLENDS[case["algorithm"]], True, False, True, None, torch.arange(12)
        )
        rows = torch.cat([row(seed), row(gate)]).repeat(12, 1)
        still = torch.zeros_like(rows)
        alpha = alphas[slot].float()
        found.append(ActiveGroup(group, BLUEPRINTS[code], CHANNELS[name], rows, still, alpha))
    return found
