"""Grown transformers as plain modules: every format, the tied head, causality, generated text."""

import copy
import importlib
import json
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import esper_soa
from esper_soa.grown import networks
from esper_soa.grown.formats import EXPORTER_LOGGER
from esper_soa.nets.model.modules import GrownNetwork, TokenEmbedding, TransformerLayer

TINY = [
    "device=cpu",
    "task.transformer.context=8",
    "task.transformer.width=8",
    "envs=2",
    "steps=10",
    "batch_size=4",
    "train_samples=16",
    "val_samples=16",
    "telemetry.progress=off",
    "compute.workers=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> esper_soa.RecordedRun:
    folder = tmp_path_factory.mktemp("text")
    words = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    (folder / "own.txt").write_text(words)
    given = [*TINY, f"data.root={folder / 'own.txt'}", f"run_dir={folder / 'run'}"]
    return esper_soa.train("text_3seed", given, verbose=0)


@pytest.fixture
def net(run: esper_soa.RecordedRun) -> GrownNetwork:
    return run.export()


def test_the_best_host_has_the_figures_of_the_run(
    run: esper_soa.RecordedRun, net: GrownNetwork
) -> None:
    assert {seed["blueprint"] for seed in net.spec["seeds"]} == {"mlp"}
    assert net.spec["validation_sequences"] == 16
    assert net.spec["test_sequences"] > 16
    found = run.evaluate(net)
    assert found.accuracy == net.spec["test_accuracy"]
    validated = run.evaluate(net, "validation")
    assert validated.loss == pytest.approx(net.spec["validation_loss"], abs=1e-5)
    page = (run.path / "report.html").read_text() if (run.path / "report.html").exists() else ""
    assert "test images" not in page
    log = (run.path / "log.txt").read_text()
    assert "test perplexity, mean over hosts" in log
    assert " kernels  native, " in log


def test_its_table_of_tokens_is_there_once_and_shared_with_the_head(net: GrownNetwork) -> None:
    tables = [name for name, one in net.state_dict().items() if one.shape == (256, 8)]
    assert tables == ["embedding.embed.tokens.weight"]
    tokens = torch.arange(8)[None]
    for one in (net, copy.deepcopy(net)):
        before = one(tokens)
        with torch.no_grad():
            one.embedding.embed.tokens.weight[200] += 1.0  # a token that the inputs do not have
        changed = (one(tokens) - before).abs().amax((0, 1))
        assert changed[200] > 0
        assert changed[:200].max() == 0


def test_it_is_saved_in_every_format(net: GrownNetwork, tmp_path: Path) -> None:
    tokens = torch.arange(16).view(2, 8)
    logits = net(tokens)
    assert logits.shape == (2, 8, 256)
    loaded = esper_soa.load(esper_soa.export(net, tmp_path / "net.safetensors"))
    assert torch.equal(loaded(tokens), logits)  # type: ignore[operator]
    program = torch.export.load(esper_soa.export(net, tmp_path / "net.pt2")).module()
    torch.testing.assert_close(program(tokens), logits)
    if find_spec("onnx") and find_spec("onnxscript") and find_spec("onnxruntime"):
        file = esper_soa.export(net, tmp_path / "net.onnx")
        session = importlib.import_module("onnxruntime").InferenceSession(str(file))
        assert logging.getLogger(EXPORTER_LOGGER).level == logging.NOTSET  # as it was
        (found,) = session.run(None, {"tokens": tokens.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), logits, rtol=1e-4, atol=1e-4)
        assert json.loads(session.get_modelmeta().custom_metadata_map["spec"]) == net.spec


def test_a_position_does_not_see_those_behind_it(net: GrownNetwork) -> None:
    tokens = torch.arange(8)[None]
    other = tokens.clone()
    other[0, 5:] = 99
    difference = (net(tokens) - net(other)).abs().amax((0, 2))
    assert difference[:5].max() == 0
    assert difference[5:].min() > 0


def written_by_hand(net: GrownNetwork, count: int, temperature: float) -> str:
    tokens = list(b"The beginning")  # longer than the context
    for _ in range(count):
        logits = net(torch.tensor([tokens[-8:]]))[0, -1].detach()
        likeliest = int(logits.argmax())
        weights = (logits / (temperature or 1.0)).softmax(-1)
        tokens.append(int(torch.multinomial(weights, 1)) if temperature else likeliest)
    return bytes(tokens).decode(errors="replace")


def test_text_is_generated_token_by_token(net: GrownNetwork) -> None:
    for temperature in (0, 0.25, 3.0):
        torch.manual_seed(5)
        written = written_by_hand(net, 24, temperature)
        torch.manual_seed(5)
        with torch.device("meta"):  # of the caller
            assert net.generate("The beginning", 24, temperature) == written
    assert "\ufffd" in written  # bytes that are no text
    tokens = torch.tensor([[84, 104, 101], [65, 32, 98]])
    more = net.generate(tokens, 4, temperature=0)
    assert isinstance(more, torch.Tensor)
    assert more.shape == (2, 7)
    logits = net(more[:, :6])
    assert torch.equal(more[:, 6], logits[:, -1].argmax(-1))
    spec = copy.deepcopy(net.spec)
    spec["host"][0]["layers"][0]["arguments"]["tokens"] = 10_000  # most are no bytes
    assert isinstance(GrownNetwork(spec).generate("a", 9), str)


def test_what_cannot_be_continued_is_refused(net: GrownNetwork) -> None:
    with pytest.raises(ValueError, match="^generate: the prompt is empty$"):
        net.generate("", 3)
    by_file = GrownNetwork(net.spec | {"input": net.spec["input"] | {"tokenizer": "own.json"}})
    with pytest.raises(ValueError, match=r"^generate: this network takes tokens int64 \[B, t\]$"):
        by_file.generate("words", 3)
    images = {"input": {"mean": [0.0], "std": [1.0], "shape": [3, 32, 32]}, "host": [], "seeds": []}
    with pytest.raises(ValueError, match="^generate: this network takes no tokens$"):
        GrownNetwork(images).generate("words", 3)


def test_all_places_of_dropout_are_in_training_alone() -> None:
    layer = TransformerLayer(8, heads=2, dropout=1.0, eps=1e-5)  # drops all
    x = torch.rand(2, 8, 4)
    assert torch.equal(layer(x), x)
    bias = layer.attention.proj.bias[:, None].expand_as(x)
    assert torch.equal(layer.attention(x), bias)
    embedding = TokenEmbedding(5, 8, 4, dropout=1.0)
    tokens = torch.arange(4)[None]
    assert not embedding(tokens).any()
    net = nn.Sequential(embedding, layer).eval()
    plain = nn.Sequential(TokenEmbedding(5, 8, 4, 0.0), TransformerLayer(8, 2, 0.0, 1e-5))
    plain.load_state_dict(net.state_dict())
    assert torch.equal(net(tokens), plain(tokens))
    assert torch.equal(plain.eval()(tokens), net(tokens))


def test_it_can_be_trained_on_as_a_module(net: GrownNetwork) -> None:
    tokens = torch.arange(8)[None]
    loss = nn.functional.cross_entropy(net(tokens)[0, :-1], tokens[0, 1:])
    loss.backward()
    assert all(one.grad is not None for one in net.parameters())


def test_a_network_is_scored_as_it_predicts_in_parts_and_is_left_as_it_was() -> None:
    seen = []

    class Noting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((len(x), self.training, torch.is_grad_enabled()))
            return x

    net = Noting()
    networks.score_network(net, torch.zeros(300, 2), torch.zeros(300, dtype=torch.int64))
    assert seen == [(rows, False, False) for rows in (1, 256, 44)]
    assert net.training
    with pytest.raises(ValueError, match="batch_size"):
        networks.score_network(net, torch.zeros(300, 2), torch.zeros(2, dtype=torch.int64))
    assert net.training


def test_scores_are_of_targets_and_in_small_passes_those_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = torch.nn.Embedding(50, 50)
    inputs = torch.arange(120).reshape(30, 4) % 50
    logits = net(inputs).detach()
    labels = logits.argmax(-1)
    labels[:6, 1:] = (labels[:6, 1:] + 1) % 50  # 18 of 120 are wrong
    whole = networks.score_network(net, inputs, labels)
    assert whole.accuracy == 85.0
    losses = nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    assert whole.loss == pytest.approx(float(losses), rel=1e-12)
    assert networks.score_network(nn.Identity(), logits, labels) == pytest.approx(whole, rel=1e-12)
    monkeypatch.setattr(networks, "MAX_LOGITS", 1000)  # five samples of 200 logits
    monkeypatch.setattr(networks, "MAX_DOUBLES", 100)  # half a sample
    assert networks.score_network(net, inputs, labels) == pytest.approx(whole, rel=1e-12)
