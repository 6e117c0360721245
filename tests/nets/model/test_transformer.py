"""Transformers of n networks at once against plain modules one by one: values, gradients, steps,
losses in pieces, dropout, and that an env is the same in any company.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_soa.config.nets import DataConfig, TaskConfig, TransformerConfig, host_slots
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.env import Env
from esper_soa.grown.build import SlotContents, grown_hosts
from esper_soa.nets import sequences
from esper_soa.nets.engine import EngineChoice
from esper_soa.nets.engines.cpu.sequences import (
    NativeHead,
    NativeLayers,
    NativeSeed,
    SequenceEngine,
    native_seed,
    native_shape,
)
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.model.blueprints import (
    SEQUENCE_BLUEPRINTS,
    initial_seeds,
    seed_forward,
    seed_table,
)
from esper_soa.nets.model.host import host_shape, train_loss
from esper_soa.nets.model.parts import Parameter, Table, normal_numbers
from esper_soa.nets.model.segments import Forward
from esper_soa.nets.model.sequence_parts import Dense
from esper_soa.nets.model.transformer import drop
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.seeds import TrainingSeeds
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import CLIP_EPS
from esper_soa.system import streams
from esper_soa.training.loop.build import build_world
from esper_soa.training.results.profile import PhaseProfile
from esper_soa.vocabulary import SEQUENCE_BLUEPRINTS as CODES
from esper_soa.vocabulary import Blend, Stage
from tests.builders.tiny_world import CPU, planned, seeds_where

TOKENS, LENGTH, BATCH, BATCHES = 13, 6, 3, 2
SIZES = TransformerConfig(width=8, layers=2, heads=2, context=LENGTH, segments=2)
TASK = TaskConfig(
    host="transformer",
    num_classes=TOKENS,
    blueprints=[one.name for one in SEQUENCE_BLUEPRINTS[1:]],
    transformer=SIZES,
    weight_decay=0.01,
)
SHAPE = host_shape(TASK, host_slots(TASK)[:1], SEQUENCE_BLUEPRINTS)
KINDS = [(code, blend) for code in CODES for blend in (Blend.ADD, Blend.MULTIPLY, Blend.GATE)]
ALPHA = 0.375  # exact in every format


class OneText:
    """The same sequences for all envs."""

    def __init__(self) -> None:
        numbers = torch.arange(BATCHES * BATCH * (LENGTH + 1))
        self.tokens = streams.integers(torch.tensor(3), numbers, TOKENS).view(BATCHES, BATCH, -1)

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokens[index]
        labels = tokens[:, None, 1:].expand(-1, len(envs), -1)
        return tokens[:, :-1].repeat(1, len(envs)), labels

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """The second label of the first sequence does not count."""
        labels = self.tokens[..., 1:].clone()
        labels[0, 0, 1] = -1
        return [(x[:, :-1], y[:, None]) for x, y in zip(self.tokens, labels, strict=True)]


@pytest.fixture
def case():
    """A host per kind of seed, which blends at ALPHA; every number drawn, in double precision."""
    count = len(KINDS)
    weights = pools.allocate(SHAPE, count, CPU, torch.float64)
    keys = streams.stream_keys(3, streams.HOST_INIT, (), torch.arange(count))
    pools.initialise_hosts_(weights, SHAPE, keys)
    code, blend = np.array(KINDS)[:, None].transpose(2, 0, 1)
    born = {"newborn": True, "fresh_momentum": True, "ablated": True}
    active = seeds_where(np.ones((count, 1)), Stage.BLENDING, code, blend, **born)
    pools.claim_(weights, SHAPE, pools.claims_of(SHAPE, active), keys)
    for rows in (weights["host", "params"], weights["seeds", "r0c0", "params"]):
        draws = streams.uniform(keys[:, None], torch.arange(rows.shape[1]), torch.float64)
        rows += 0.3 * (draws - 0.5)  # what begins at 0 too
    nets = Setup(SHAPE, TASK, (Stage.TRAINING,), count, 4)
    return nets, weights, torch.full((count, 1), ALPHA, dtype=torch.float64), active


def plain(weights, env: int) -> nn.Module:
    """The host as modules of its own."""
    code, blend = KINDS[env]
    contents = SlotContents([Stage.BLENDING], [code], [blend], [ALPHA])
    inputs = {"name": "tokens", "shape": [LENGTH], "dtype": "int64", "tokenizer": "bytes"}
    return grown_hosts(SHAPE, weights, [env], [contents], [inputs])[0].network().double()


def plain_step(net: nn.Module, x: Tensor, y: Tensor, momentum: dict[str, Tensor]) -> float:
    """A step of SGD as the engine's, host and seed clipped each by itself; the loss."""
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
    named = dict(net.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    grads = {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}
    for seed in (False, True):
        own = {name: grad for name, grad in grads.items() if name.startswith("r0c0.") == seed}
        norm = torch.stack([grad.norm() for grad in own.values()]).norm()
        for name, grad in own.items():
            change = grad * min(1.0, float(TASK.max_grad_norm / (norm + CLIP_EPS)))
            change = change if seed else change + TASK.weight_decay * named[name].detach()
            momentum[name] = TASK.momentum * momentum.get(name, 0.0) + change
            named[name].data -= TASK.host_lr * momentum[name]
    return float(loss.detach())


def test_all_blueprints_and_blends_train_as_plain_modules_in_a_loop(case) -> None:
    nets, weights, alpha, active = case
    networks = [plain(weights, env) for env in range(len(KINDS))]
    feed = OneText()
    plan = planned(TorchEngine(), nets, active)
    report = TorchEngine().train_(nets, weights, alpha, plan, feed, BATCHES)
    for env, net in enumerate(networks):
        momentum: dict[str, Tensor] = {}
        losses = []
        hits = 0
        for x, y in zip(feed.tokens[..., :-1], feed.tokens[..., 1:], strict=True):
            hits += int((net(x).argmax(-1) == y).sum())
            losses.append(plain_step(net, x, y, momentum))
        assert float(report.accuracy[env]) == pytest.approx(100 * hits / (BATCHES * BATCH * LENGTH))
        torch.testing.assert_close(
            float(report.loss[env]), sum(losses) / BATCHES, rtol=1e-10, atol=0
        )
        trained = dict(plain(weights, env).named_parameters())
        for name, expected in net.named_parameters():
            torch.testing.assert_close(
                trained[name],
                expected,
                rtol=1e-8,
                atol=1e-8,
                msg=lambda m, n=name, e=env: f"{KINDS[e]} {n}: {m}",
            )


def test_subset_rows_are_plain_modules_with_and_without_the_seed(case) -> None:
    nets, weights, alpha, active = case
    feed = OneText()
    answers = torch.zeros(len(KINDS), BATCHES * BATCH, dtype=torch.int8)
    plan = planned(TorchEngine(), nets, active)
    report = TorchEngine().validate(nets, weights, alpha, plan, feed, answers=answers)
    assert report.subset.tolist() == [[1, 0]] * len(KINDS)
    x = feed.tokens[..., :-1].flatten(0, 1)
    y = torch.cat([labels[:, 0] for _, labels in feed.batches(torch.arange(1), 9)])
    for env in range(len(KINDS)):
        net = plain(weights, env)
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=-1)
        torch.testing.assert_close(report.loss[env], loss.detach(), rtol=1e-10, atol=0)
        assert answers[env].tolist() == (net(x).argmax(-1) == y).sum(1).tolist()
        for row in range(2):
            hits = (net(x).argmax(-1) == y).sum() / (y >= 0).sum()
            assert float(report.accuracy[env, row]) == pytest.approx(100 * float(hits))
            net.r0c0 = nn.Identity()


@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.TRAINING])
def test_native_kernels_come_to_what_torch_does_in_double_precision(case, stage: Stage) -> None:
    nets, weights, alpha, active = case
    born = {"newborn": True, "fresh_momentum": True, "ablated": stage == Stage.BLENDING}
    active = seeds_where(active.running, stage, active.blueprint, active.blend, **born)
    found = []
    for engine, dtype in (
        (TorchEngine(), torch.float64),
        (SequenceEngine(EngineChoice(True, ""), TorchEngine()), torch.float32),
    ):
        own = weights.clone().to(dtype)
        given = nets, own, alpha, planned(engine, nets, active), OneText()
        answers = torch.zeros(len(KINDS), BATCHES * BATCH, dtype=torch.int8)
        reports = engine.train_(*given, BATCHES), engine.validate(*given, answers=answers)
        rows = {str(name): one for name, one in own.flatten_keys(".").items() if one.numel()}
        gradients = {"gradients": reports[0].gradients.l2, "answers": answers.double()}
        numbers = [{"loss": one.loss, "accuracy": one.accuracy} for one in reports]
        found.append([rows | gradients, *numbers])
    for expected, actual in zip(*found, strict=True):
        for name, one in expected.items():
            torch.testing.assert_close(
                actual[name].double(), one, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_the_kernels_have_all_layers_and_blueprints_but_the_norm() -> None:
    shape = native_shape(SHAPE)
    assert [type(one) for one in shape.segments[1:]] == [NativeLayers, NativeLayers, NativeHead]
    native = {one.name for one in shape.blueprints if isinstance((*one.parts, 0)[0], NativeSeed)}
    assert native == {one.name for one in SEQUENCE_BLUEPRINTS} - {"noop", "norm"}
    for own, plain in zip(shape.blueprints, SHAPE.blueprints, strict=True):
        assert seed_table(own, 8).parameters == seed_table(plain, 8).parameters
    assert shape.parameters == SHAPE.parameters
    full, large = (replace(TASK, num_classes=2**18 // SIZES.width + more) for more in (0, 1))
    drops = replace(TASK, transformer=replace(SIZES, dropout=0.1))
    for task, kinds in ((full, set()), (large, {"tied_head"}), (drops, {"transformer_layers"})):
        plain = host_shape(task, host_slots(task))
        kept = set(plain.segments) & set(native_shape(plain).segments)
        assert {one.kind for one in kept} == {"embedding"} | kinds


@pytest.mark.parametrize(
    "changed",
    [
        {"parts": (Dense(gelu=True), Dense(gelu=True))},
        {"parts": (Dense(), Dense(bias=False))},
        {"parts": (Dense(), Dense(), Dense())},
        {"parts": (Dense(), Dense()), "residual": False},
        {"residual": False},  # attention alone
    ],
)
def test_a_blueprint_that_the_kernels_lack_stays_as_it_is(changed: dict) -> None:
    (attention,) = (one for one in SEQUENCE_BLUEPRINTS if one.name == "attention")
    own = replace(attention, **changed)
    assert native_seed(own) is own


def test_a_seed_in_training_is_not_noticed_and_one_that_blends_is_felt_by_the_host(case) -> None:
    """The gradient of a host under a seed in training is that of the host alone."""
    nets, weights, alpha, active = case
    rows = weights["host", "params"][:1]
    gradients = []
    for stage, detached in ((None, False), (Stage.TRAINING, True), (Stage.BLENDING, False)):
        host = {"params": rows.clone(), "momentum": torch.zeros_like(rows)}
        own = weights[:1].clone()
        own["host"].update_({**host, "statistics": own["host", "statistics"]})
        running = np.ones((1, 1)) if stage is not None else np.zeros((1, 1))
        kind = np.array([[CODES[0]]])
        seeds = seeds_where(running, stage or Stage.EMPTY, kind, np.array([[Blend.ADD]]))
        chunk = nets._replace(env_chunk=1, detached_stages=(Stage.TRAINING,) if detached else ())
        level = alpha[:1] * (stage == Stage.BLENDING)
        plan = planned(TorchEngine(), chunk, seeds)
        TorchEngine().train_(chunk, own, level, plan, OneText(), 1)
        gradients.append(own["host", "momentum"])
    assert torch.equal(gradients[0], gradients[1])
    assert (gradients[0] - gradients[2]).norm() > 1e-3


@pytest.mark.parametrize("most", [1, 2 * TOKENS, 7 * TOKENS, 10**6])
def test_losses_in_pieces_are_those_of_all_logits_at_once(most: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    table = torch.randn(2, TOKENS, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.tensor([[0, 3, 12, 5, 5], [1, 1, 2, 0, 12]])
    losses, right = sequences.SummedTokenLoss.apply(rows, table, labels, most)
    logits = rows @ table.transpose(1, 2)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    torch.testing.assert_close(losses, each.sum(1))
    assert torch.equal(right, logits.argmax(-1) == labels)
    factors = torch.tensor([0.5, 2.0], dtype=torch.float64)
    actual = torch.autograd.grad((losses * factors).sum(), (rows, table))
    expected = torch.autograd.grad((each.sum(1) * factors).sum(), (rows, table))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_pieces_keep_within_the_budget_and_do_not_depend_on_the_number_of_networks() -> None:
    tokens, most = 50_257, 2**23
    for nets in (1, 4):
        pieces = sequences.logit_pieces((nets, 8192), tokens, most)
        sizes = [(two.stop - two.start) * (one.stop - one.start) for one, two in pieces]
        assert max(sizes) * tokens <= most
        assert {two.stop - two.start for _, two in pieces} == {most // tokens}
    assert sequences.logit_pieces((3, 10), 4, 10**6) == [(slice(0, 25000), slice(0, 10))]


# --- draws


def tiny_text(envs: int, dropout: float, **changes: object) -> TrainConfig:
    sizes = replace(SIZES, dropout=dropout)
    task = replace(TASK, num_classes=256, transformer=sizes, **changes)
    return TrainConfig(
        device="cpu",
        envs=envs,
        steps=4,
        batch_size=4,
        train_samples=16,
        val_samples=8,
        slots=["r0c0", "r0c1"],
        task=task,
        data=DataConfig(name="text", context=LENGTH),
        compute=ComputeConfig(workers=1),
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])  # by native kernels, and by torch
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_env_is_the_same_to_the_bit_in_any_company(optimizer: str, dropout: float) -> None:
    """Data, dropout, start and steps follow from its own streams."""
    found = []
    for envs in (1, 3):
        world = build_world(tiny_text(envs, dropout, optimizer=optimizer), CPU)
        assert isinstance(world.rules.engine, SequenceEngine) == (dropout == 0)
        state = world.start_round(0)
        work = world.work(0)
        engine = world.rules.engine
        seeds = pools.slot_seeds(state.slots, state.ramp, False)
        given = world.rules.setup._replace(env_chunk=1), world.weights
        active = engine.claim_(*given, seeds, work.seed_keys)
        alpha = state.slots.alpha
        report = engine.train_(*given, alpha, active, work.training, work.num_batches)
        checked = engine.validate(*given, alpha, active, work.validation)
        rows = [world.weights["host", name][0] for name in ("params", "momentum")]
        found.append([*rows, report.loss[0], checked.loss[0]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_dropout_is_drawn_where_phases_are_timed() -> None:
    env = Env(build_world(tiny_text(1, 0.3), CPU), PhaseProfile(CPU))
    env.begin_(0, None)
    assert env.observe_().view.state.signals.step.item() == 1


def test_dropout_drops_the_share_it_is_told_to_and_keeps_the_mean() -> None:
    keys = streams.stream_keys(1, streams.DROPOUT, (), torch.arange(2))
    factors = sequences.dropout_factors(keys, 4, (50, 40), 0.25)
    assert factors.shape == (2, 50, 40)
    assert factors.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(float((factors == 0).float().mean()) - 0.25) < 0.02
    assert not torch.equal(factors[0], factors[1])
    assert not torch.equal(factors, sequences.dropout_factors(keys, 5, (50, 40), 0.25))
    assert torch.equal(factors[1:], sequences.dropout_factors(keys[1:], 4, (50, 40), 0.25))


def test_layers_are_numbered_through_all_segments() -> None:
    task = replace(TASK, transformer=replace(SIZES, layers=6))
    body = host_shape(task, host_slots(TASK)[:1]).segments[1:-1]
    assert [(one.first, one.count) for one in body] == [(0, 3), (3, 3)]


def test_dropout_is_in_every_place_of_training_and_in_none_of_validation() -> None:
    shape = host_shape(replace(TASK, transformer=replace(SIZES, dropout=0.5)), host_slots(TASK)[:1])
    rows = shape.parameters.initial(torch.arange(1), torch.float64)
    tokens = OneText().tokens[0]
    x, y = tokens[:, :-1], tokens[:, None, 1:]
    sites = list[int]()

    def losses(noise):
        parameters = shape.parameters.unpack(rows)
        return train_loss(shape, parameters, [], (x, y), TrainingSeeds([], 1), noise)[0]

    real = sequences.dropout_factors
    with pytest.MonkeyPatch.context() as patch:
        spy = lambda keys, site, size, rate: (sites.append(site), real(keys, site, size, rate))[1]  # noqa: E731
        patch.setattr(sequences, "dropout_factors", spy)
        first = losses(lambda: torch.tensor([1]))
    assert sorted(sites) == list(range(1 + 3 * SIZES.layers))
    assert not torch.equal(first, losses(lambda: torch.tensor([2])))
    assert torch.equal(first, losses(lambda: torch.tensor([1])))
    assert torch.equal(losses(None), losses(None))


def test_a_norm_leaves_features_as_they_are_at_first() -> None:
    (norm,) = (one for one in SEQUENCE_BLUEPRINTS if one.name == "norm")
    keys = streams.stream_keys(1, streams.SEED_INIT, (), torch.arange(2))
    rows = initial_seeds(norm, 8, keys, torch.zeros(2, dtype=torch.bool), torch.float32)
    x = torch.randn(3, 2 * 8, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(seed_forward(norm, seed_table(norm, 8).unpack(rows), x), x)


def test_embeddings_begin_as_normal_numbers_of_the_streams() -> None:
    keys = streams.stream_keys(1, streams.HOST_INIT, (), torch.arange(2))
    table = Table((Parameter((3,), bound=1.0), Parameter((200, 100), std=0.5)))
    rows = table.initial(keys, torch.float32)
    numbers = rows[:, 3:]
    assert rows[:, :3].abs().max() <= 1
    assert abs(float(numbers.mean())) < 0.01
    assert abs(float(numbers.std()) - 0.5) < 0.01
    assert abs(float((numbers.abs() < 0.5).float().mean()) - 0.6827) < 0.01
    for dtype, step in ((torch.float32, 2.0**-24), (torch.float64, 2.0**-53)):
        ends = normal_numbers(torch.tensor([0.0, 0.5, 1 - step], dtype=dtype))
        assert ends.isfinite().all()
        assert ends[0] == torch.special.ndtri(torch.tensor(step / 2, dtype=dtype))
        assert ends[2] > 4


def test_attention_with_dropout_sees_no_later_position_either() -> None:
    rows = torch.randn(2, 3 * LENGTH, 24, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(2 * 3, 2, LENGTH, LENGTH)
    expected = sequences.causal_attention(rows, 2, LENGTH)
    torch.testing.assert_close(sequences.causal_attention(rows, 2, LENGTH, ones), expected)
    assert not torch.allclose(sequences.causal_attention(rows, 2, LENGTH, ones.tril(-1)), expected)


def test_the_memory_of_a_loss_is_that_of_its_logits_and_gradients() -> None:
    """Logits with their logarithms, and the gradient of the embeddings twice."""
    head = SHAPE.segments[-1]
    sizes = 2 * BATCH * LENGTH * TOKENS, 2 * TOKENS * SIZES.width
    assert head.loss_bytes(2, BATCH) == 8 * sizes[0] + 8 * sizes[1]
    assert replace(head, most=100).loss_bytes(2, BATCH) == 8 * 100 + 8 * sizes[1]
    assert head.most == SIZES.logits_mib * 2**20 // 8
    assert SHAPE.segments[1].activations == LENGTH * 16 * SIZES.width  # without dropout


def test_dropout_leaves_numbers_in_their_format() -> None:
    rows = torch.ones(1, BATCH * LENGTH, 4, dtype=torch.bfloat16)
    assert drop(rows, torch.tensor([1]), 0, 0.5).dtype == torch.bfloat16


def test_the_loss_of_validation_is_that_of_the_row_asked_for() -> None:
    own = SHAPE.parameters.unpack(SHAPE.parameters.initial(torch.arange(1), torch.float64))
    run = Forward(None, 1, torch.float64)
    folded = [*own[-2:], own[0]]
    parts = torch.randn(3, BATCH, SIZES.width, LENGTH, dtype=torch.float64)
    labels = OneText().tokens[0][:, None, 1:]
    for row in range(3):
        found, correct = SHAPE.head.measure(run, folded, parts.flatten(0, 1), labels, row)
        expected, right = SHAPE.head.measure(run, folded, parts[row], labels, 0)
        torch.testing.assert_close(found, expected)
        assert torch.equal(correct[row], right[0])
