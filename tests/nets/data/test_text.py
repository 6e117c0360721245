"""Text as a source of batches: three stretches, windows and their next tokens, what is refused."""

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper_soa.config.nets import DataConfig
from esper_soa.nets.data import text, tokens
from esper_soa.nets.data.batches import Draw
from esper_soa.nets.data.datasets import load_samples, sample_spec
from esper_soa.system import streams
from esper_soa.system.errors import DataError, SettingError
from tests.builders.tiny_world import CPU

SIZE = 403  # tokens: stretches of 363, 20 and 20
LENGTH = 4


@pytest.fixture
def numbered() -> text.TextSet:
    """Every token tells its own place, modulo 251."""
    tokens = (torch.arange(SIZE) % 251).to(torch.uint8)
    return text.text_set("numbered", "a text", tokens, LENGTH, 256)


def places(tokens: torch.Tensor, part_start: int) -> torch.Tensor:
    return (tokens - part_start) % 251


def test_the_parts_are_stretches_of_the_text_and_nothing_is_in_two(numbered: text.TextSet) -> None:
    assert numbered.bounds == {"train": (0, 363), "validation": (363, 383), "test": (383, 403)}
    sizes = "363 training, 20 validation and 20 test tokens."
    assert str(numbered) == f"numbered: {numbered.source}" == f"numbered: a text: {sizes}"
    for part in text.TEXT_PARTS:
        start, end = numbered.bounds[part]
        labels = numbered.labels(part)
        samples, targets = numbered.samples(part, torch.arange(len(labels)))
        assert torch.equal(targets.to(torch.uint8), labels)
        assert torch.equal(samples[:, 1:], targets[:, :-1])
        assert torch.equal(samples.flatten(), (start + torch.arange(labels.numel())) % 251)
        last = start + labels.numel() + (LENGTH - 1 if part == "train" else 0)
        assert last < end <= last + 2 * LENGTH


def test_training_begins_anywhere_in_its_part_and_at_multiples_of_the_context_without(
    numbered: text.TextSet,
) -> None:
    count = len(numbered.train_labels)
    order = torch.arange(count).repeat(3, 1)
    keys = streams.stream_keys(1, streams.AUGMENTATION, (0,), torch.arange(3))
    for augment in (True, False):
        feed = numbered.training(Draw(order, keys, 0, count, augment), torch.float32)
        x, y = feed.batch(torch.arange(3), 0)
        assert (x.shape, y.shape) == ((count, 3 * LENGTH), (count, 3, LENGTH))
        windows = x.unflatten(1, (3, LENGTH))
        assert torch.equal(windows[..., 1:], y[..., :-1])
        offsets = places(windows[..., 0], 0) - (torch.arange(count) * LENGTH % 251)[:, None]
        found = set((offsets % 251).unique().tolist())
        assert found == (set(range(LENGTH)) if augment else {0})
        alone, _ = feed.batch(torch.tensor([2]), 0)
        assert torch.equal(alone, x[:, 2 * LENGTH :])


def test_where_training_begins_follows_from_the_samples_before(numbered: text.TextSet) -> None:
    keys = streams.stream_keys(1, streams.AUGMENTATION, (0,), torch.arange(3))

    def drawn(start: int, size: int) -> torch.Tensor:
        """Of each env the sequence 0, eight times, in batches of this size."""
        draw = Draw(torch.zeros(3, 8, dtype=torch.int64), keys, start, size, True)
        feed = numbered.training(draw, torch.float32)
        return torch.cat([feed.batch(torch.arange(3), place)[0] for place in range(8 // size)])

    assert torch.equal(drawn(0, 4), drawn(0, 8))
    assert torch.equal(drawn(0, 8)[4:], drawn(4, 8)[:4])
    assert not torch.equal(drawn(0, 8), drawn(8, 8))


def test_held_out_sequences_are_in_order_and_nothing_stands_for_minus_one(
    numbered: text.TextSet,
) -> None:
    shared = numbered.validation(torch.tensor([3, 0, 1]), torch.float32)
    (x, y), (rest, _) = shared.batches(torch.arange(5), 2)
    assert (x.shape, y.shape, rest.shape) == ((2, LENGTH), (2, 1, LENGTH), (1, LENGTH))
    assert places(x[:, 0], 363 % 251).tolist() == [12, 0]
    assert len(shared.first(2).batches(torch.arange(5), 9)[0][0]) == 2
    own = numbered.test(torch.tensor([[0, 1], [2, -1]]), torch.float32)
    ((x, y),) = own.batches(torch.tensor([1, 0]), 9)
    assert x.shape == (2, 2 * LENGTH)
    assert places(x[0, [0, LENGTH]], 383 % 251).tolist() == [8, 0]
    assert y[1, 0].tolist() == [-1] * LENGTH
    assert own.first(1).order.tolist() == [[0], [2]]


def test_the_embedded_text_is_prose_without_labels_of_verses() -> None:
    found = load_samples(DataConfig(name="text"), CPU)
    assert isinstance(found, text.TextSet)
    assert len(found.tokens) == 1_510_606
    words = bytes(found.tokens.tolist()).decode()
    assert words.startswith("In the beginning God created the heaven and the earth. And the earth")
    assert ":1 " not in words
    assert found.spec == sample_spec(DataConfig(name="text"))
    origin = "Genesis to 2 Kings of the King James Bible, embedded"
    sizes = "1,359,546 training, 75,530 validation and 75,530 test tokens."
    assert (found.name, found.source) == ("kjv", f"{origin}: {sizes}")


NO_UTF_8 = r": no UTF-8 text \(byte {}\); save it as UTF-8"
FEW = "of data.context=4: give 100 at least, or lower it"
NUL = r": no text \(byte {} is NUL\); save it as UTF-8"


def own(path: Path, context: int = LENGTH) -> text.TextSet:
    return text.load_text(DataConfig(name="text", root=str(path), context=context))


@pytest.mark.filterwarnings("error")
def test_own_text_is_a_file_or_the_text_files_of_a_folder(tmp_path: Path) -> None:
    words = "Die Sonne tönt nach alter Weise. " * 20
    (tmp_path / "b.txt").write_text(words)
    (tmp_path / "a.txt").write_text("Prolog im Himmel. ")
    (tmp_path / "notes.txt.md").write_text("not this")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "z.txt").write_text("Zueignung. ")
    file = own(tmp_path / "b.txt")
    assert bytes(file.tokens.tolist()).decode() == words
    assert isinstance(text.read_bytes([tmp_path / "b.txt"]), np.memmap)
    sizes = "612 training, 34 validation and 34 test tokens."
    assert str(file) == f"b.txt: {tmp_path}/b.txt (data.root): {sizes}"
    folder = own(tmp_path)
    assert bytes(folder.tokens.tolist()).decode() == "Zueignung. Prolog im Himmel. " + words
    assert "(data.root), without 1 of other endings than .txt (.md): " in str(folder)
    for name in ("a.txt", "b.txt"):  # a byte order mark is no letter
        (tmp_path / name).write_text((tmp_path / name).read_text(), encoding="utf-8-sig")
    assert own(tmp_path).identity == folder.identity
    (tmp_path / "c").symlink_to(tmp_path / "0")  # in place of which the folder itself is read
    (tmp_path / "0" / "up").symlink_to(tmp_path)
    (tmp_path / "0" / "z.txt").rename(tmp_path / "0" / "Z.TXT")
    assert own(tmp_path).identity == folder.identity
    outside = tmp_path.with_name(f"{tmp_path.name}_outside")
    (tmp_path / "0").rename(outside)
    (tmp_path / "0").symlink_to(outside)
    assert own(tmp_path).identity == folder.identity
    assert DataConfig(root=str(tmp_path / "b.txt")).is_text  # data.name=auto
    assert len({file.identity, folder.identity, own(tmp_path / "b.txt", 5).identity}) == 3
    (tmp_path / "b.txt").write_text("abcd" * 25)
    assert len(own(tmp_path / "b.txt").tokens) == 100  # no fewer will do
    (tmp_path / "b.txt").write_bytes(b"\0")
    with pytest.raises(DataError, match=rf"^{tmp_path}/b\.txt: no text \(byte 0 is NUL\); save it"):
        own(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", ": no text in it"),
        (b"abc" * 33, r" \(data.root\): 99 tokens are too few for sequences " + FEW),
        (b"abc " * 50 + b"\xff\xfe" + b"abc " * 50, NO_UTF_8.format(200)),
        (b"abc " * 50 + "ö".encode()[:1], NO_UTF_8.format(200)),
        (("abc " * 50).encode("utf-16"), NO_UTF_8.format(0)),
        (b"abc " * 50 + b"\0" + b"abc " * 50, NUL.format(200)),
        (("abc " * 50).encode("utf-16-le"), NUL.format(1)),
    ],
)
def test_text_that_cannot_be_used_is_refused_in_a_sentence(
    content: bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.txt"
    file.write_bytes(content)
    for piece in (text.PIECE_BYTES, 7):  # also where a letter lies across two reads
        monkeypatch.setattr(text, "PIECE_BYTES", piece)
        with pytest.raises(DataError, match=f"^{file}{told}$"):
            own(file)


def test_what_is_no_text_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    folders = [tmp_path / name for name in ("empty", "pipes", "links")]
    for folder in folders:
        folder.mkdir()
    os.mkfifo(folders[1] / "pipe.txt")
    (folders[2] / "gone.txt").symlink_to("nothing.txt")
    (tmp_path / "cores.txt").symlink_to("/proc/cpuinfo")
    (tmp_path / "memory.txt").symlink_to("/proc/self/mem")
    only = "no file; only files can be read as text"
    for name, told in {
        "pipe.txt": f"data.root={tmp_path}/pipe.txt: no file or folder of text",
        "missing.txt": f"data.root={tmp_path}/missing.txt: no file or folder of text",
        "memory.txt": rf"{tmp_path}/memory.txt: cannot be read \(Input/output error\)",
        "cores.txt": f"{tmp_path}/cores.txt: no file of a size; only files can be read as text",
        "empty": rf"data.root={tmp_path}/empty: a folder without \.txt files",
        "pipes": f"{tmp_path}/pipes/pipe.txt: {only}",
        "links": f"{tmp_path}/links/gone.txt: {only}",
    }.items():
        with pytest.raises(DataError, match=f"^{told}$"):
            own(tmp_path / name)


def test_a_folder_that_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root too, who may read all files."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "a.txt").write_text("abc " * 50)
    scan = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry]:
        if Path(path).name == "inside":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"inside: cannot be read \(Permission denied\)"):
        own(tmp_path)


def test_letters_across_two_reads_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 3)
    file = tmp_path / "own.txt"
    file.write_text("öäü€" * 40)
    assert len(own(file).tokens) == 40 * 9


@pytest.mark.filterwarnings("error")
def test_tokens_of_a_tokenizer_are_made_once_and_mapped_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = "In the beginning was the word,\nand the word was here.\n" * 40
    (tmp_path / "own.txt").write_text(words)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = {"single": "! $A", "special_tokens": [("!", 0)]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**special)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([words], trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(file))
    tokenizer.no_padding()
    cfg = DataConfig(
        name="text", root=str(tmp_path / "own.txt"), context=LENGTH, tokenizer=str(file)
    )
    monkeypatch.setattr(tokens, "PIECE_BYTES", 100)
    first, _ = tokens.encode(text.read_bytes([tmp_path / "own.txt"]), str(file))
    assert isinstance(first, np.memmap)  # though it has just been made
    found = text.load_text(cfg)
    assert found.tokens.dtype == torch.int32
    assert tokenizer.decode(found.tokens.tolist()) == words
    assert found.num_tokens == tokenizer.get_vocab_size()
    (kept,) = (tmp_path / "cache" / "esper_soa" / "text").iterdir()
    before = kept.stat().st_ino
    assert text.load_text(cfg).identity == found.identity
    assert kept.stat().st_ino == before
    kept.write_bytes(kept.read_bytes()[:50])  # cut: made anew
    assert text.load_text(cfg).identity == found.identity
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.save(str(file))
    for content in (words, 2 * words):
        (tmp_path / "own.txt").write_text(content)
        assert tokenizer.decode(text.load_text(cfg).tokens.tolist()) == content.lower()
    told = r"must be bytes, a tokenizer\.json, or the name of a tokenizer that the hub has\. \w.*"
    with pytest.raises(SettingError, match=rf"^data\.tokenizer={cfg.root}: {told}\.$"):
        text.load_text(replace(cfg, tokenizer=cfg.root))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(file))
    told = f"^data.tokenizer={file}: gives the text no tokens, or some beyond the 1 that it knows"
    for words in ("a", " "):
        (tmp_path / "own.txt").write_text(words)
        with pytest.raises(DataError, match=f"{told}; take another one$"):
            text.load_text(cfg)
    saved = json.loads(file.read_text())
    saved["model"]["vocab"]["b"] = 2**31 - 5  # 9 GB as a list of all numbers below
    file.write_text(json.dumps(saved))
    with pytest.raises(DataError, match="numbers a token 2,147,483,643, and knows 2 of them"):
        text.load_text(cfg)
