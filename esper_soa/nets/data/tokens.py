"""What the extra `text` brings: tokens of a tokenizer of Hugging Face's, and TinyStories.

Both are made once, and kept in the user's cache folder.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

import numpy as np

from esper_soa.config.errors import DataError, SettingError, one_line
from esper_soa.config.paths import FolderError, cache_folder, open_folder, replacing

STORIES = "roneneldan/TinyStories"
PIECE = 1 << 20  # bytes of text that are encoded at a time, or a line where that is longer


class Encoding(Protocol):
    """A text in tokens."""

    ids: list[int]


class Tokenizer(Protocol):
    """What is asked of tokenizers.Tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding: ...
    def get_vocab_size(self) -> int: ...
    def to_str(self) -> str: ...


def encode(content: np.ndarray, name: str) -> tuple[np.ndarray, int]:
    """Tokens int32 [M] of the text `content` (bytes), mapped from the cache, and the number of
    different ones; name: a tokenizer.json, or the name of a tokenizer on the hub.
    """
    tokenizer = _tokenizer(name)
    digest = hashlib.sha256(content.data)
    digest.update(tokenizer.to_str().encode())
    path = _folder() / f"{digest.hexdigest()}.npy"
    found = _kept(path)
    if found is None:
        parts = [tokenizer.encode(text, add_special_tokens=False).ids for text in _pieces(content)]
        with replacing(path) as draft, draft.open("wb") as file:
            np.save(file, np.array([token for part in parts for token in part], np.int32))
        found = _kept(path)
        assert found is not None  # just written
    return found, tokenizer.get_vocab_size()


def stories() -> Path:
    """The training stories of Eldan and Li 2023 in one file, a blank line behind each."""
    path = _folder() / "tinystories.txt"
    if not path.exists():
        datasets = _extra("datasets", "data.name=tinystories")
        try:
            texts: Iterable[str] = datasets.load_dataset(STORIES, split="train")["text"]
        except Exception as error:  # noqa: BLE001 (whatever is between here and the hub)
            reason = f"cannot be had from the internet ({one_line(error)})"
            raise DataError(f"data.name=tinystories: {STORIES} {reason}") from error
        with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
            file.writelines(f"{text.strip()}\n\n" for text in texts)
    return path


def _tokenizer(name: str) -> Tokenizer:
    """The tokenizer; SettingError where there is none of that name."""
    kind = _extra("tokenizers", f"data.tokenizer={name}").Tokenizer
    try:
        made = kind.from_file(name) if os.path.exists(name) else kind.from_pretrained(name)
        return cast(Tokenizer, made)
    except Exception as error:
        allowed = "bytes, a tokenizer.json, or the name of a tokenizer that the hub has"
        raise SettingError("data.tokenizer", name, allowed, f"{one_line(error)}.") from error


def _extra(package: str, setting: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        reason = f"needs {package}: pip install 'esper-soa[text]'"
        raise DataError(f"{setting} {reason}") from error


def _folder() -> Path:
    """Where texts and tokens are kept."""
    path = cache_folder() / "text"
    try:
        open_folder(path)
    except FolderError as error:
        raise DataError(f"tokens cannot be kept: {error}") from error
    return path


def _kept(path: Path) -> np.ndarray | None:
    """The tokens of the file; None where there is none, or not the whole of one."""
    try:
        found: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.dtype == np.int32 and found.ndim == 1 else None


def _pieces(content: np.ndarray) -> Iterator[str]:
    """The text in pieces that end with a line."""
    text = content.tobytes()
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end].decode()
        start = end
