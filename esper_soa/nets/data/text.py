"""Text as windows of T tokens, whose targets are the tokens that come next: a batches.BatchSource.
The training, validation and test part are stretches of one text, one behind the other.
"""

import codecs
import hashlib
import lzma
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.nets import TXT, DataConfig
from esper_soa.nets.data import tokens
from esper_soa.nets.data.batches import Draw, SampleSpec, origin
from esper_soa.system import streams
from esper_soa.system.errors import DataError, one_line

KJV_FILE = Path(__file__).parent / "assets" / "kjv.txt.xz"
HELD_OUT = 20  # validation and test part are each one of so many equal parts
TEXT_PARTS = ("train", "validation", "test")
BYTE_TOKENIZER = "bytes"
PIECE_BYTES = 1 << 24  # bytes that are read at a time
UTF8_REMEDY = "save it as UTF-8"
MOST_ENDINGS = 3  # of files that are left out, which are named


def text_spec(context: int) -> SampleSpec:
    """The kind of samples that sequences of `context` tokens are."""
    return SampleSpec(
        "sequences", (context,), context, test_bytes=context, num_targets=context, perplexity=True
    )


class TrainingSequences(NamedTuple):
    """Tokens [B, n*T] and the next ones [B, n, T]; they begin anywhere where drawn so."""

    source: "TextSet"
    draw: Draw

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        samples, keys, start = self.draw.batches(envs, index)
        first = samples * self.source.context
        if self.draw.augment:
            counters = start + torch.arange(samples.shape[1], device=samples.device)
            first = first + streams.integers(keys[:, None], counters, self.source.context)
        windows = self.source.windows("train", first)
        return windows[..., :-1].transpose(0, 1).flatten(1), windows[..., 1:].transpose(0, 1)


class HeldOutSequences(NamedTuple):
    """Sequences of a held-out part by `order`, [V] of all envs or [N, V]; -1 is none, label -1."""

    source: "TextSet"
    part: str
    order: Tensor

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        order = self.order[None] if self.order.ndim == 1 else self.order[envs]
        parts = []
        for samples in order.T.split(size):
            first = samples.clamp(min=0) * self.source.context
            windows = self.source.windows(self.part, first)
            labels = torch.where(samples[..., None] < 0, -1, windows[..., 1:])
            parts.append((windows[..., :-1].flatten(1), labels))
        return parts

    def first(self, count: int) -> "HeldOutSequences":
        return self._replace(order=self.order[..., :count])


@dataclass(frozen=True, eq=False, repr=False)
class TextSet:
    """A text of M tokens in three parts, on one device."""

    name: str
    source: str  # a sentence: where it is from and how long
    identity: str  # sha256 of tokens and context, hexadecimal
    tokens: Tensor  # uint8 or int32 [M]
    context: int  # T
    num_tokens: int  # V of the tokenizer; tokens are below
    tokenizer: str = BYTE_TOKENIZER

    notes = ()
    num_classes = None  # hosts may have more tokens than occur

    @property
    def spec(self) -> SampleSpec:
        return text_spec(self.context)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """First token of each part, and the end of it."""
        return part_bounds(len(self.tokens))

    def windows(self, part: str, first: Tensor) -> Tensor:
        """T + 1 tokens int64 [..., T + 1] from each place of `part` int64 [...] on."""
        start = self.bounds[part][0]
        places = start + first[..., None] + torch.arange(self.context + 1, device=first.device)
        return self.tokens[places].long()

    def labels(self, part: str) -> Tensor:
        """The targets of the part's sequences [D, T], as tokens are stored. The last
        sequences of the training part that could not begin T tokens later are left out.
        """
        start, end = self.bounds[part]
        count = (end - start - 1) // self.context - (part == "train")
        return self.tokens[start + 1 :][: count * self.context].view(count, self.context)

    @property
    def train_labels(self) -> Tensor:
        return self.labels("train")

    @property
    def val_labels(self) -> Tensor:
        return self.labels("validation")

    @property
    def test_labels(self) -> Tensor:
        return self.labels("test")

    def to(self, device: torch.device | str) -> Self:
        return replace(self, tokens=self.tokens.to(device))

    def facts(self) -> dict[str, str]:
        return origin(self) | {"tokenizer": self.tokenizer, "tokens": str(self.num_tokens)}

    def input_spec(self) -> dict:
        """The input of grown networks, int64 [T], and how text becomes that."""
        facts = {"name": "tokens", "shape": [self.context], "dtype": "int64"}
        return facts | {"tokenizer": self.tokenizer}

    def samples(self, part: str, places: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, T] and the next ones [B, T]."""
        windows = self.windows(part, places.to(self.tokens.device) * self.context)
        return windows[..., :-1], windows[..., 1:]

    def training(self, draw: Draw, dtype: torch.dtype) -> TrainingSequences:
        return TrainingSequences(self, draw)

    def validation(self, order: Tensor, dtype: torch.dtype) -> HeldOutSequences:
        return HeldOutSequences(self, "validation", order)

    def test(self, order: Tensor, dtype: torch.dtype) -> HeldOutSequences:
        return HeldOutSequences(self, "test", order)

    def __repr__(self) -> str:
        """Summary without the tokens."""
        return f"{self.name}: {self.source}"


def load_text(cfg: DataConfig) -> TextSet:
    """The text that the settings ask for, on the CPU; DataError for one that cannot be used."""
    if cfg.name == "tinystories":
        name = cfg.name
        text = "TinyStories (Eldan and Li 2023)"
        content = read_bytes([tokens.stories()])
    elif cfg.root:
        name = Path(cfg.root).name
        files, left_out = text_files(Path(cfg.root))
        text = f"{cfg.root} (data.root){left_out}"
        content = read_bytes(files)
    else:
        name = "kjv"
        text = "Genesis to 2 Kings of the King James Bible, embedded"
        content = np.frombuffer(lzma.decompress(KJV_FILE.read_bytes()), np.uint8).copy()
    count = 256
    if cfg.tokenizer != BYTE_TOKENIZER:
        content, count = tokens.encode(content, cfg.tokenizer)
    return text_set(
        name,
        text,
        torch.from_numpy(content),
        context=cfg.context,
        num_tokens=count,
        tokenizer=cfg.tokenizer,
    )


def text_set(
    name: str,
    text: str,
    content: Tensor,
    context: int,
    num_tokens: int,
    tokenizer: str = BYTE_TOKENIZER,
) -> TextSet:
    """A set of the tokens `content`, of which `text` tells the origin; DataError for too few."""
    counts = [end - start for start, end in part_bounds(len(content)).values()]
    if min(counts) <= context:
        few = f"{len(content):,} tokens are too few for sequences of data.context={context}"
        remedy = f"give {HELD_OUT * (context + 1):,} at least, or lower it"
        raise DataError(f"{text}: {few}: {remedy}")
    digest = hashlib.sha256(content.numpy().data)
    digest.update(context.to_bytes(8, "little"))
    return TextSet(
        name,
        f"{text}: {counts[0]:,} training, {counts[1]:,} validation and {counts[2]:,} test tokens.",
        digest.hexdigest(),
        tokens=content,
        context=context,
        num_tokens=num_tokens,
        tokenizer=tokenizer,
    )


def part_bounds(size: int) -> dict[str, tuple[int, int]]:
    """First token, and the end, of each part of a text of `size` tokens."""
    held_out = size // HELD_OUT
    edges = 0, size - 2 * held_out, size - held_out, size
    return dict(zip(TEXT_PARTS, pairwise(edges), strict=True))


def text_files(path: Path) -> tuple[list[Path], str]:
    """The file, or the .txt files of a folder by name, those of linked folders among them, each
    folder once, and in words how many others are left out; DataError where there is none.
    """
    if os.path.isdir(path):
        files = []
        others = list[str]()
        seen = set[str]()
        for folder, below, names in os.walk(path, onerror=_refuse, followlinks=True):
            below[:] = [] if os.path.realpath(folder) in seen else sorted(below)
            if os.path.realpath(folder) not in seen:
                files += [Path(folder, name) for name in names if name.lower().endswith(TXT)]
                others += [name for name in names if not name.lower().endswith(TXT)]
            seen.add(os.path.realpath(folder))
        files.sort()
        if not files:
            raise DataError(f"data.root={path}: a folder without {TXT} files")
        return files, _left_out(others)
    if not os.path.isfile(path):
        raise DataError(f"data.root={path}: no file or folder of text")
    return [path], ""


def _left_out(names: Sequence[str]) -> str:
    """How many files are left out, with the endings that most of them have; "" for none."""
    endings = Counter(Path(name).suffix or "no ending" for name in names).most_common(MOST_ENDINGS)
    kinds = ", ".join(one_line(ending) for ending, _ in endings)
    return f", without {len(names):,} of other endings than {TXT} ({kinds})" if names else ""


def _refuse(error: OSError, file: Path | None = None) -> None:
    place = file or error.filename  # which an error of reading does not have
    raise DataError(f"{place}: cannot be read ({error.strerror})") from error


def read_bytes(files: Sequence[Path]) -> np.ndarray:
    """The bytes uint8 [M] of files, without byte order marks, one behind the other, a single one as
    it lies on the disk; DataError for what is no UTF-8.
    """
    for file in files:
        check_encoding(file)
    mapped = [np.memmap(file, np.uint8, "c") for file in files if file.stat().st_size]
    mark = codecs.BOM_UTF8
    parts = [part[len(mark) * (bytes(part[: len(mark)]) == mark) :] for part in mapped]
    if not parts:
        raise DataError(f"{files[0]}: no text in it")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_encoding(file: Path) -> None:
    """Raise DataError for what is no file, or no UTF-8, as UTF-16 and whatever else has NUL."""
    if not os.path.isfile(file):
        raise DataError(f"{file}: no file; only files can be read as text")
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    try:
        # what has no size, as in /proc, may let its reader wait
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                read += len(piece)
                decoder.decode(piece)
                if 0 in piece:
                    place = read - len(piece) + piece.index(0)
                    raise DataError(f"{file}: no text (byte {place} is NUL); {UTF8_REMEDY}")
            decoder.decode(b"", final=True)
        if read and not file.stat().st_size:
            raise DataError(f"{file}: no file of a size; only files can be read as text")
    except UnicodeDecodeError as error:
        place = read - len(error.object) + error.start
        raise DataError(f"{file}: no UTF-8 text (byte {place}); {UTF8_REMEDY}") from error
    except OSError as error:
        _refuse(error, file)
