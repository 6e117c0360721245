"""N envs in the stacked engine equal N plain loops, env by env, and no env feels what happens in
another.

The loops share no kernel with the engine (benchmarks/baseline_env.py): host, seeds, gradients,
running statistics, SGD, subset rows, gates, ramps and lifecycle are all computed twice.
"""

import copy
from dataclasses import fields

import pytest
import torch

from benchmarks.baseline_env import ScalarAction
from benchmarks.baseline_lifecycle import RampRecord, SeedRecord, TotalsRecord
from esper_soa.config.env import GatesConfig
from esper_soa.nets import batched
from esper_soa.vocabulary import RUNNING_STAGES, Blend, Blueprint, Op, Stage, Style
from tests.builders.loop_world import (
    TEXT,
    TEXT_TASK,
    Setting,
    StackedEnvs,
    build_loops,
    copy_host,
    copy_seeds,
    loop_weights,
    stacked_weights,
)

IDS = [0, 1, 2, 3, 4]
# Float fields of the env state that are counted out of whole images, and so equal to the last bit.
EXACT_FLOATS = ("accuracy_", "contribution", "alpha_goal")
OF_TEXT = {"source": TEXT, "task": TEXT_TASK}
KINDS = pytest.mark.parametrize("kind", [{}, OF_TEXT], ids=["images", "text"])
# Blueprints with a blend that are seen at least: of text, in the end all of them with every blend.
SETTINGS = {
    "advancing by itself, fossils ablated, two batches to an optimiser step": (
        Setting(
            ["r0c0", "r0c1", "r1c0"],
            auto_forward=True,
            reward="basic_plus",
            shared_validation=True,
            accumulate=2,
        ),
        IDS[1:],
        14,
    ),
    "every advance by an action": (Setting(steps=42), IDS[1:], 14),
    "text, advancing by itself, fossils ablated, two batches to an optimiser step": (
        Setting(**OF_TEXT, auto_forward=True, reward="basic_plus", accumulate=2),
        IDS[1:],
        14,
    ),
    "text, every advance by an action": (
        Setting(**OF_TEXT, steps=42),
        [1, 3, 6, 7, 21],
        3 * len(TEXT.blueprints),
    ),
}


def is_exact(name, value):
    counted = name.startswith(EXACT_FLOATS) and not name.endswith("velocity")
    return counted or not isinstance(value, float)


def compare_record(found, expected, kind, where):
    """Codes, counters, flags and accuracies exactly; alphas, gradient norms, averages to 1e-8."""
    for one in fields(kind):
        ours = getattr(found, one.name).item()
        theirs = getattr(expected, one.name)
        if is_exact(one.name, theirs):
            assert ours == theirs, f"{one.name} of {where}: {ours} instead of {theirs}"
        else:
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-10), f"{one.name} of {where}"


def compare_states(stacked, loops):
    state = stacked.state
    for place, loop in enumerate(loops):
        where = f"env {loop.number} after env-step {stacked.step}"
        compare_record(state.totals[place], loop.totals, TotalsRecord, where)
        for slot, machine in enumerate(loop.machines):
            here = f"slot {slot}, {where}"
            compare_record(state.slots[place, slot], machine.seed, SeedRecord, here)
            compare_record(state.ramp[place, slot], machine.ramp, RampRecord, here)


def compare_weights(stacked, loops, tolerance):
    """Largest difference over the largest number, of every vector of weights."""
    for place, loop in enumerate(loops):
        ours = stacked_weights(stacked, place, loop)
        for name, theirs in loop_weights(loop).items():
            error = (ours[name] - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
            assert error <= tolerance, (
                f"{name} of env {loop.number} at env-step {stacked.step}: off by {error:.1e}"
            )


def compare_measurements(measured, place, trained, tested, tolerance):
    assert measured.train_loss[place].item() == pytest.approx(trained.loss, rel=tolerance)
    assert measured.val_loss[place].item() == pytest.approx(tested.loss, rel=tolerance)
    assert tuple(measured.ablated[place].nonzero().flatten().tolist()) == tested.ablated


def subset_accuracies(measured, place):
    """Accuracy by subset code, in row order."""
    rows = zip(measured.subset[place].tolist(), measured.accuracy[place].tolist(), strict=True)
    return [(code, accuracy) for code, accuracy in rows if code >= 0]


def plant_newborns(stacked, loops):
    """The loops' fresh seeds get the weights that the engine's will have, which must not be what
    lay there before.
    """
    claimed = stacked.claimed()
    newborn = stacked.state.slots.newborn
    for place, loop in enumerate(loops):
        slots = newborn[place].nonzero().flatten().tolist()
        copy_seeds(stacked, claimed, place, loop, slots)
        for path in [("seeds", stacked.shape.slots[slot].name, "params") for slot in slots]:
            assert not torch.equal(claimed[path][place], stacked.weights[path][place])


def respond_both(stacked, loops, measured, readings):
    """Record, act and tick on both sides; outcomes must agree."""
    actions = stacked.actions()
    outcome = stacked.apply_action(measured, actions).outcome
    for place, (loop, action, reading) in enumerate(zip(loops, actions, readings, strict=True)):
        loop.record(*reading)
        theirs = loop.apply(action)
        ours = {name: outcome[place].get(name).item() for name in theirs._fields}
        assert ours == theirs._asdict()
        loop.tick()
    return actions


class Coverage:
    """What the scripts brought about, so that the comparison cannot become empty unnoticed."""

    def __init__(self):
        self.blended = set()
        self.stages = set()
        self.frozen = 0
        self.contributions = 0

    def note(self, loops):
        for machine in (machine for loop in loops for machine in loop.machines):
            self.stages.add(machine.seed.stage)
            self.frozen += machine.frozen
            self.contributions += machine.seed.contribution != 0
            if machine.visible:
                self.blended.add((machine.seed.blueprint, machine.seed.blend))

    def check(self, blueprints, pairs):
        assert {blueprint for blueprint, _ in self.blended} == set(blueprints)
        assert len(self.blended) >= pairs
        assert {blend for _, blend in self.blended} == {Blend.ADD, Blend.MULTIPLY, Blend.GATE}
        assert self.stages >= {*RUNNING_STAGES, Stage.EMPTY, Stage.EMBARGOED, Stage.RESETTING}
        assert self.frozen
        assert self.contributions


@pytest.mark.parametrize(
    ("setting", "ids", "pairs"),
    [
        pytest.param(*given, id=name, marks=pytest.mark.slow if given[0].steps > 24 else [])
        for name, given in SETTINGS.items()
    ],
)
def test_envs_together_equal_as_many_plain_loops_through_whole_lives(setting, ids, pairs):
    stacked = StackedEnvs(setting, ids)
    loops = build_loops(stacked)
    coverage = Coverage()
    for step in range(setting.steps):
        plant_newborns(stacked, loops)
        measured = stacked.measure()
        readings = [loop.measure(step) for loop in loops]
        for place, (trained, tested) in enumerate(readings):
            compare_measurements(measured, place, trained, tested, 1e-8)
            assert subset_accuracies(measured, place) == list(tested.accuracy.items())
            assert measured.train_accuracy[place].item() == trained.accuracy
        compare_weights(stacked, loops, 1e-8)
        coverage.note(loops)
        respond_both(stacked, loops, measured, readings)
        compare_states(stacked, loops)
    coverage.check(setting.source.blueprints, pairs)


# The manual life of the reference (its proof_baselines.py): ops by env-step, and as what the seed
# is trained from env-step 2 on. ADVANCE fails at 11, after 9 env-steps in TRAINING, and at 16, as
# alpha is still on its way up.
MANUAL_LIFE = (
    {1: Op.GERMINATE} | dict.fromkeys((2, 11, 12, 16, 17), Op.ADVANCE) | {18: Op.FOSSILIZE}
)
TRAINED_AS = [
    (Stage.GERMINATED, 0.0),
    *[(Stage.TRAINING, 0.0)] * 10,
    *[(Stage.BLENDING, alpha) for alpha in (0.2, 0.4, 0.6, 0.8, 1.0)],
    (Stage.HOLDING, 1.0),
    (Stage.FOSSILIZED, 1.0),
]


@pytest.mark.parametrize(
    ("kind", "felt"),
    [
        pytest.param({}, (Stage.HOLDING, Stage.FOSSILIZED), id="images"),
        pytest.param(OF_TEXT, (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED), id="text"),
    ],
)
def test_the_golden_life_is_felt_by_its_host_from_the_stage_that_the_topology_says(kind, felt):
    """A host feels a seed where its training step is another once no stage sends gradients."""
    setting = Setting(**kind, gates=GatesConfig(), steps=20)
    envs = StackedEnvs(setting, [1])
    story = []
    for step in range(1, 20):
        alone = copy.deepcopy(envs)
        alone.rules = alone.rules._replace(
            setup=alone.rules.setup._replace(detached_stages=RUNNING_STAGES)
        )
        slots = envs.state.slots
        story.append((slots.stage[0, 0].item(), round(slots.alpha[0, 0].item(), 9)))
        alone.measure()
        op = MANUAL_LIFE.get(step, Op.WAIT)
        act = ScalarAction(op=op, blueprint=Blueprint.NORM, style=Style.LINEAR_ADD)
        envs.apply_action(envs.measure(), [act])
        hosts = [each.weights["host", "params"] for each in (envs, alone)]
        assert torch.equal(*hosts) == (story[-1][0] not in felt), f"env-step {step}"
    assert story == [(Stage.EMPTY, 0.0), *TRAINED_AS]


def test_single_env_steps_from_the_same_state_agree_in_single_precision():
    stacked = StackedEnvs(Setting(dtype=torch.float32), IDS[1:])
    loops = build_loops(stacked)
    for step in range(9):
        plant_newborns(stacked, loops)
        claimed = stacked.claimed()
        for place, loop in enumerate(loops):
            copy_host(claimed, place, loop)
            copy_seeds(stacked, claimed, place, loop, list(loop.plants))
        measured = stacked.measure()
        readings = [loop.measure(step) for loop in loops]
        for place, (trained, tested) in enumerate(readings):
            compare_measurements(measured, place, trained, tested, 1e-4)
        compare_weights(stacked, loops, 1e-4)
        respond_both(stacked, loops, measured, readings)
        stages = [[machine.seed.stage for machine in loop.machines] for loop in loops]
        assert stages == stacked.state.slots.stage.tolist()


# --- envs keep to themselves


def everything(envs):
    """Every tensor of env state and weights, by its path."""
    both = (envs.state.to_tensordict(), envs.weights)
    return {name: one for part in both for name, one in part.flatten_keys(".").items()}


def different(ours, theirs, rows):
    """Names of the tensors whose `rows` differ in some bit."""
    return [
        name
        for name, values in ours.items()
        if not torch.equal(values[rows].view(torch.uint8), theirs[name][rows].view(torch.uint8))
    ]


@KINDS
def test_an_env_among_others_equals_the_same_env_alone(kind):
    together = StackedEnvs(Setting(**kind), IDS)
    alone = [StackedEnvs(Setting(**kind), [number]) for number in IDS[::4]]
    for envs in (together, *alone):
        envs.play(9)
    ours = everything(together)
    for place, single in zip(IDS[::4], alone, strict=True):
        for name, theirs in everything(single).items():
            tolerance = 1e-10 if theirs.is_floating_point() else 0.0
            torch.testing.assert_close(ours[name][place], theirs[0], rtol=tolerance, atol=tolerance)


def test_in_single_precision_the_size_of_a_chunk_costs_rounding_alone():
    """One env-step from the same state; a ReLU on the other side of 0 moves some by more."""
    begun = StackedEnvs(Setting(dtype=torch.float32), IDS)
    begun.play(9)
    together, alone = (copy.deepcopy(begun) for _ in range(2))
    for envs, chunk in ((together, len(IDS)), (alone, 1)):
        envs.rules = envs.rules._replace(setup=envs.rules.setup._replace(env_chunk=chunk))
    ours, theirs = (envs.measure() for envs in (together, alone))
    for name in ("train_loss", "val_loss"):
        torch.testing.assert_close(ours.get(name), theirs.get(name), rtol=1e-5, atol=0)
    assert different(everything(together), everything(alone), slice(None)), "no other sums"
    for path, rows in alone.weights.flatten_keys(".").items():
        step = rows - begun.weights.flatten_keys(".")[path]
        apart = (together.weights.flatten_keys(".")[path] - rows).norm(dim=1)
        assert (apart <= 1e-3 * step.norm(dim=1) + 1e-8).all(), path


def test_batch_norms_of_one_channel_each_are_those_of_their_networks_alone():
    g = torch.Generator().manual_seed(1)
    x, upstream = torch.randn(2, 4, 2, 3, 3, generator=g, dtype=torch.float64)
    # of a pool: scales and shifts of networks lie apart
    rows = torch.randn(2, 5, generator=g, dtype=torch.float64)

    def gradients(nets):
        seen, behind = (
            part[:, nets].contiguous(memory_format=torch.channels_last) for part in (x, upstream)
        )
        count = behind.shape[1]
        moving = (torch.zeros(count).double(), torch.ones(count).double())
        scales = rows[nets, 1:2], rows[nets, 3:4]
        out = batched.batch_norm(seen.requires_grad_(), *scales, *moving)
        return torch.autograd.grad(out, seen, behind)[0]

    alone = torch.cat([gradients(slice(0, 1)), gradients(slice(1, 2))], dim=1)
    torch.testing.assert_close(gradients(slice(0, 2)), alone)


SICK = 2  # shares its chunk with env 3


def played(setting, *poisoned, resting=False):
    """Envs of which one was poisoned on the way: NaN in its host or in its `seeds`; a `resting` one
    is judged by no gate, so that what runs beside the others stays the same.
    """
    envs = StackedEnvs(setting, IDS)
    envs.play(9)
    if resting:
        envs.scripts[SICK].todo = [[], [], []]
    for part in poisoned:
        assert part == "host" or envs.state.slots.running[SICK].any()
        pools = [envs.weights["host"]] if part == "host" else envs.weights["seeds"].values()
        for rows in pools:
            rows["params"][SICK] = torch.nan
    envs.play(4)
    return envs


def assert_others_equal(one, other):
    others = [place for place in range(len(IDS)) if place != SICK]
    assert not different(everything(one), everything(other), others)


@KINDS
def test_nan_in_the_weights_of_one_env_touches_no_other_by_a_bit(kind):
    healthy = played(Setting(**kind), resting=True)
    poisoned = played(Setting(**kind), "host", "seeds", resting=True)
    assert torch.equal(healthy.state.slots.stage, poisoned.state.slots.stage)
    assert poisoned.weights["host", "params"][SICK].isnan().all()
    assert_others_equal(healthy, poisoned)
    assert poisoned.state.isfinite().all()


def test_an_env_that_is_rolled_back_touches_no_other_by_a_bit():
    # Alone in its chunk: after the rollback other seeds run in it than in the healthy one.
    setting = Setting(env_chunk=1, governed=True)
    healthy = played(setting)
    poisoned = played(setting, "host")
    assert poisoned.weights["host"][SICK].isfinite().all()
    hosts = [envs.weights["host", "params"][SICK] for envs in (healthy, poisoned)]
    assert not torch.equal(*hosts)
    assert_others_equal(healthy, poisoned)


def sleeping(envs):
    """bool [N, S]: nothing lives in the slot, or what does is born at the next training pass."""
    return ~envs.state.slots.live | envs.state.slots.newborn


def test_garbage_in_sleeping_rows_changes_nothing_by_a_bit():
    clean = StackedEnvs(Setting(), IDS)
    littered = StackedEnvs(Setting(), IDS)
    for envs in (clean, littered):
        for place in (0, 2, 4):
            envs.scripts[place].todo[place // 2] = []  # one slot of these envs stays empty for ever
        envs.play(2)
    asleep = sleeping(littered)
    generator = torch.Generator().manual_seed(1)
    for slot, pool in enumerate(littered.weights["seeds"].values()):
        for rows in pool.values():
            garbage = 100 * torch.randn(rows.shape, generator=generator, dtype=rows.dtype)
            rows.copy_(torch.where(asleep[:, slot, None], garbage, rows))
    for envs in (clean, littered):
        envs.play(9)
    assert (asleep & clean.state.slots.running).any(), "no seed was born into a littered row"
    ours = everything(clean)
    theirs = everything(littered)
    for slot, spec in enumerate(clean.shape.slots):
        awake = ~sleeping(clean)[:, slot]
        names = [f"seeds.{spec.name}.{kind}" for kind in ("params", "momentum")]
        assert not different({name: ours.pop(name) for name in names}, theirs, awake)
    assert not different(ours, theirs, slice(None))
