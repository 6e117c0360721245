"""TinyStories and tokens, which the extra `text` brings, kept in the user's cache folder."""

import hashlib
import io
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from esper_soa.nets.data.kept import keep, kept, kept_folder
from esper_soa.system.errors import DataError, SettingError, one_line
from esper_soa.system.plain_files import replacing

STORIES_NAME = "roneneldan/TinyStories"
MAX_SPREAD = 64  # times the number of tokens, below which their numbers are
PIECE_BYTES = 1 << 20  # bytes of text that are encoded at a time, or a line where that is longer


def encode(content: np.ndarray, name: str) -> tuple[np.ndarray, int]:
    """Tokens int32 [M] of the text `content` (bytes), mapped from the cache, and the number of
    different ones; name: a tokenizer.json, or the name of a tokenizer on the hub.
    """
    kind = _extra("tokenizers", f"data.tokenizer={name}").Tokenizer
    try:
        tokenizer = kind.from_file(name) if os.path.exists(name) else kind.from_pretrained(name)
    except Exception as error:
        allowed = "bytes, a tokenizer.json, or the name of a tokenizer that the hub has"
        raise SettingError("data.tokenizer", name, allowed, remedy=f"{one_line(error)}.") from error
    count = tokenizer.get_vocab_size()
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest > MAX_SPREAD * (count + 1):  # whose text would list every number below
        reason = f"numbers a token {largest:,}, and knows {count:,} of them"
        raise DataError(f"data.tokenizer={one_line(name)}: {reason}; take another one")
    # those of sentence models cut a text, or fill it up
    tokenizer.no_truncation()
    tokenizer.no_padding()
    digest = hashlib.sha256(content.data)
    digest.update(tokenizer.to_str().encode())
    path = kept_folder("text") / f"{digest.hexdigest()}.tokens"
    found = _kept(path, count)
    if found is None:
        tokens = list[int]()
        stream = io.BytesIO(content.tobytes())
        while lines := stream.readlines(PIECE_BYTES + 1):
            text = b"".join(lines).decode()
            tokens += tokenizer.encode(text, add_special_tokens=False).ids
        made = np.array(tokens, np.int32)
        if not made.size or made.max() >= count:
            reason = f"gives the text no tokens, or some beyond the {count} that it knows"
            raise DataError(f"data.tokenizer={name}: {reason}; take another one")
        keep(path, made)
        stored = _kept(path, count)
        found = made if stored is None else stored
    return found, count


def stories() -> Path:
    """The training stories of Eldan and Li 2023 in one file, a blank line behind each."""
    path = kept_folder("text") / "tinystories.txt"
    if not path.exists():
        datasets = _extra("datasets", "data.name=tinystories")
        try:
            texts: Iterable[str] = datasets.load_dataset(STORIES_NAME, split="train")["text"]
        except Exception as error:  # noqa: BLE001 (whatever is between here and the hub)
            reason = f"cannot be had from the internet ({one_line(error)})"
            raise DataError(f"data.name=tinystories: {STORIES_NAME} {reason}") from error
        with replacing(path.resolve()) as draft:
            draft.writelines(f"{text.strip()}\n\n".encode() for text in texts)
    return path


def _extra(package: str, setting: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        reason = f"needs {package}: pip install 'esper-soa[text]'"
        raise DataError(f"{setting} {reason}") from error


def _kept(path: Path, count: int) -> np.ndarray | None:
    """The tokens of the file, below `count`; None where there is none, or something else."""
    tokens = kept(path, np.dtype(np.int32))
    if tokens is None:
        return None
    return tokens if tokens.min() >= 0 and tokens.max() < count else None
