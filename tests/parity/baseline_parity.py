"""The plain loop of benchmarks/ against the recorded vectors, which makes it an oracle for the
stacked engine.

Every recorded host case (forward, gradients of host, seed, gate and images) and every recorded slot
program.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from benchmarks.baseline_lifecycle import SlotMachine, TotalsRecord, curve_progress
from benchmarks.baseline_modules import SEEDS, FlatModule, Gate, Graft, Host
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.nets import TaskConfig
from esper_soa.vocabulary import (
    BLUEPRINT_NAMES,
    CURVE_CHOICES,
    CURVE_STEEPNESS,
    TEMPO_STEPS,
    Blend,
    Blueprint,
    Stage,
)
from tests.parity.parity_vectors import load, load_networks

CHANNELS = {"r0c0": 8, "r0c1": 16, "r0c2": 32}
BLENDS = {"ADD": Blend.ADD, "MULTIPLY": Blend.MULTIPLY, "GATE": Blend.GATE}


def cat(tensors):
    """Recorded tensors, in their order of registration, as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def make_host(recorded):
    host = Host(TaskConfig())
    host.load_state_dict(recorded["host_state_dict"])
    return host


def load_if_any(module, weights):
    if weights:
        module.load_flat(cat(weights))


def gradients(module: FlatModule):
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def assert_gradients(module, recorded):
    found = gradients(module)
    assert len(found) == len(recorded)
    for gradient, expected in zip(found, recorded.values(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def check_case(recorded, case, weights):
    """Evaluation logits first, then one training pass forward and backward."""
    host = make_host(recorded)
    channels = CHANNELS[case["slot"]]
    seed = SEEDS[BLUEPRINT_NAMES.index(case["blueprint"])](channels)
    gate = Gate(channels) if case["algorithm"] == "GATE" else None
    load_if_any(seed, weights["seed_weights"])
    if gate is not None:
        load_if_any(gate, weights["gate_weights"])
    graft = Graft(
        seed=seed,
        gate=gate,
        blend=BLENDS[case["algorithm"]],
        alpha=case["alpha"],
        incubating=case["stage"] == Stage.TRAINING,
        detached=case["isolate_gradients"],
    )
    images = recorded["input"].clone().requires_grad_()
    host.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            host(images, {case["slot"]: graft}), case["logits_eval"], rtol=1e-5, atol=1e-5
        )
    host.train()
    logits = host(images, {case["slot"]: graft})
    loss = F.cross_entropy(logits, recorded["targets"])
    loss.backward()
    torch.testing.assert_close(logits, case["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, case["loss"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(images.grad, case["grad_input"], rtol=1e-4, atol=1e-5)
    assert_gradients(host, case["grad_host"])
    assert_gradients(seed, case["grad_seed"])
    if gate is not None:
        assert_gradients(gate, case["grad_gate"])


@pytest.mark.parametrize("slot", CHANNELS)
@pytest.mark.parametrize("isolated", [0, 1])
def test_host_with_one_seed_gives_the_recorded_logits_and_gradients(slot, isolated):
    recorded = load_networks(f"host_{slot}_iso{isolated}")
    weights = {
        (c["blueprint"], c["algorithm"]): c for c in recorded["cases"] if "seed_weights" in c
    }
    assert len(recorded["cases"]) > 0
    for case in recorded["cases"]:
        check_case(recorded, case, weights[case["blueprint"], case["algorithm"]])


def test_host_alone_gives_the_recorded_logits_and_gradients():
    recorded = load_networks("host_r0c0_iso1")
    host = make_host(recorded)
    base = recorded["base"]["host_only_train"]
    logits = host(recorded["input"], {})
    F.cross_entropy(logits, recorded["targets"]).backward()
    torch.testing.assert_close(logits, base["logits"], rtol=1e-5, atol=1e-5)
    assert_gradients(host, base["grads"])


def weights_of(case, slot, part):
    return {
        key: value
        for key, value in case["seed_state_dict"].items()
        if key.startswith(f"seed_slots.{slot}.{part}")
    }


def test_one_pass_with_an_alpha_per_image_gives_the_recorded_fused_logits():
    recorded = load_networks("host_fused")
    host = make_host(recorded).eval()
    for case in recorded["cases"]:
        num_rows, batch = case["fused_logits"].shape[:2]
        grafts = {}
        for slot, blueprint, alphas in zip(
            CHANNELS, case["blueprints"], case["alpha_rows"], strict=True
        ):
            seed = SEEDS[BLUEPRINT_NAMES.index(blueprint)](CHANNELS[slot])
            gate = Gate(CHANNELS[slot])
            seed.load_flat(cat(weights_of(case, slot, "seed")))
            load_if_any(gate, weights_of(case, slot, "alpha_schedule"))
            per_image = alphas.repeat_interleave(batch).view(-1, 1, 1, 1)
            grafts[slot] = Graft(
                seed, gate, BLENDS[case["algorithm"]], per_image, incubating=False, detached=True
            )
        with torch.no_grad():
            logits = host(recorded["input"].repeat(num_rows, 1, 1, 1), grafts)
        torch.testing.assert_close(
            logits.view(num_rows, batch, -1), case["fused_logits"], rtol=1e-5, atol=1e-5
        )


def test_parameter_counts_of_seeds_are_the_recorded_ones():
    recorded = load("blueprint_params")
    for name, row in zip(recorded["blueprints"], recorded["params"], strict=True):
        seed = SEEDS[BLUEPRINT_NAMES.index(str(name))]
        assert [
            seed(int(channels)).num_parameters() for channels in recorded["channels"]
        ] == row.tolist()


def test_alpha_curves_give_the_recorded_progress():
    recorded = load("alpha_curves")
    found = [
        [
            [curve_progress(t, curve, steepness) for t in recorded["t"]]
            for steepness in recorded["steepness"]
        ]
        for curve in recorded["curve"]
    ]
    np.testing.assert_allclose(found, recorded["progress"], rtol=0, atol=1e-9)


# What a SlotMachine shows of the columns of `result`; isolation and presence of the gate differ on
# purpose.
SHOWN = [
    "stage (1 = slot empty)",
    "alpha",
    "alpha_mode",
    "alpha_target",
    "alpha_steps_total",
    "alpha_steps_done",
    "alpha_algorithm",
    "epochs_total",
    "epochs_in_stage",
    "previous_stage",
    "previous_epochs_in_stage",
    "seed module present",
]


def shown(machine: SlotMachine):
    seed = machine.seed
    ramp = machine.ramp
    if seed.stage == Stage.EMPTY:
        return [1.0] + [0.0] * 11
    return [
        seed.stage,
        seed.alpha,
        ramp.mode,
        ramp.target,
        ramp.length,
        ramp.done,
        seed.blend,
        seed.seed_age,
        seed.stage_age,
        seed.previous_stage,
        seed.previous_stage_age,
        float(machine.live),
    ]


def record(machine: SlotMachine, value, health, exploding, ratio, recorded):
    """One env-step: accuracy, gradient telemetry, tick."""
    if recorded:
        machine.record_accuracy(value)
    if machine.live:
        machine.seed.gradient_norm = 1.0
        machine.seed.gradient_health = health / 1000
        machine.seed.gradient_exploding = bool(exploding)
        machine.seed.gradient_measured = True
        machine.seed.gradient_ratio = ratio
        machine.seed.gradient_ratio_known = True
    machine.tick()


def run_operation(machine: SlotMachine, name, row):
    """The machine's answer, or None where there is none."""
    value = row[1]
    steps = int(row[2])
    curve = int(row[3])
    blend = int(row[4])
    if name == "step_epoch":
        return machine.tick()
    if name == "advance_stage":
        return machine.advance()
    if name == "set_alpha_target":
        choice = (CURVE_CHOICES[curve], CURVE_STEEPNESS[curve])
        return machine.set_alpha_target(value, steps, *choice, blend or machine.seed.blend)
    if name == "schedule_prune":
        return machine.schedule_prune(steps, CURVE_CHOICES[curve], CURVE_STEEPNESS[curve])
    if name == "prune":
        return machine.prune()
    if name == "fossilize":
        return machine.fossilize()
    if name == "record_accuracy":
        return record(machine, *row[1:])
    assert name == "set_contribution"
    machine.seed.contribution = value
    machine.seed.contribution_known = True
    return None


def test_random_slot_programs_give_the_recorded_states():
    recorded = load("slot_lifecycles")
    columns = [list(recorded["result_columns"]).index(name) for name in SHOWN]
    codes = recorded["result"][..., -1]
    names = [str(name) for name in recorded["ops"]]
    for k in range(len(recorded["program"])):
        auto = bool(recorded["auto_forward"][k])
        machine = SlotMachine(
            LifecycleConfig(auto_forward_g1=auto, auto_forward_g2=auto, auto_forward_g3=auto),
            GatesConfig(permissive=bool(recorded["permissive"][k])),
            TotalsRecord(),
        )
        tempo = TEMPO_STEPS[recorded["tempo"][k]]
        machine.germinate(
            Blueprint.NORM, int(recorded["style"][k]), tempo, recorded["alpha_target0"][k], 0.0
        )
        found = []
        for row, code in zip(recorded["program"][k], codes[k], strict=True):
            answer = run_operation(machine, names[int(row[0])], row)
            if answer is not None and code >= 0:
                assert answer == bool(code)
            found.append(shown(machine))
        np.testing.assert_allclose(
            found, recorded["result"][k][:, columns], rtol=0, atol=1e-9, err_msg=f"program {k}"
        )
