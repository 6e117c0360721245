"""Files that may come from strangers, changed at random: each reader returns or raises the error
that it documents, soon, with little memory, and runs nothing.

Bytes are cut, changed and added; of files with a digest, values within are replaced and the digest
is made anew, as whoever means harm would.
"""

import hashlib
import io
import json
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from esper_soa import images
from esper_soa.agent.controller import Controller, controller_spec
from esper_soa.config.agent import NetworkConfig, PolicyConfig
from esper_soa.config.nets import DataConfig, TaskConfig, sort_slots
from esper_soa.config.settings import TrainConfig, settings_yaml
from esper_soa.grown.module_files import METADATA_ENTRY, ModuleFileError, load, save
from esper_soa.lab.report.page import page_of
from esper_soa.lab.report.run_files import read_run
from esper_soa.lab.run_folders import find_run_folders, read_settings
from esper_soa.lab.telemetry.table_files import read_file, table_files
from esper_soa.nets.data.text import TextSet, load_text
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.system.errors import DataError, UserError
from esper_soa.system.json_lines import keep_rounds
from esper_soa.training.files.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from esper_soa.training.files.checksum import write_sealed
from esper_soa.training.files.find_policy import POLICY_FOLDER, packaged_policies
from esper_soa.training.files.policies import load_policy
from esper_soa.training.files.saved_run import read_run as read_checkpoint
from esper_soa.training.results.anomalies import WatchState
from esper_soa.training.results.totals import RunTotals
from esper_soa.training.start.runs import RecordedRun
from tests.builders import user_files
from tests.builders.lanes import some_of
from tests.builders.report_runs import PROGRAM, line, make_run, summary, write_round

COUNTS = [100, pytest.param(2000, marks=pytest.mark.slow)]
MOST_MEMORY = 600_000  # kB by which this process may grow, most of it once
CPU = torch.device("cpu")
MOST_OF_A_FILE = 400_000  # kB of a report of a run with one file of a stranger's
MOST_OF_ALL = 500_000  # of one all of whose files are
Edit: TypeAlias = tuple[int, int, bytes]

# Where bytes go, how many, and what comes in their place.
EDITS = st.lists(
    st.tuples(st.integers(0, 2**20), st.integers(0, 40), st.binary(max_size=9)), max_size=4
)
HUGE = (10**9, 10**30, -1, 0, 1e308, math.inf, math.nan)
WORDS = ("", "x", "cpu", "cuda:0", "os:system", "builtins:exec", "\ud800", "[/x]", "9" * 400)
NASTY = st.sampled_from([None, True, *HUGE, *WORDS, [], [[]], {}, {"a": {"b": 1}}, [1, "x"]])
CHANGES = st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=7), NASTY), max_size=3)


def edited(content: bytes, edits: list[Edit]) -> bytes:
    for place, gone, new in edits:
        at = place % (len(content) + 1)
        content = content[:at] + new + content[at + gone :]
    return content


def replaced(tree: object, path: list[int], value: object) -> object:
    """The tree with one part replaced: each number of `path` takes an entry on the way there."""
    if not path or not isinstance(tree, dict | list) or not tree:
        return value
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = keys[path[0] % len(keys)]
    made = tree.copy()
    made[key] = replaced(tree[key], path[1:], value)  # type: ignore[index, call-overload]
    return made


def changed(tree: object, changes: list[tuple[list[int], object]]) -> object:
    for path, value in changes:
        tree = replaced(tree, path, value)
    return tree


def fuzz(count: int, check: Callable[[list, list], object]) -> None:
    """Call `check` for so many random edits of bytes and changes of values, with little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = settings(
        max_examples=count,
        deadline=10_000,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    limits(given(EDITS, CHANGES)(lambda edits, changes: check(edits, changes)))()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY


def reads(read: Callable[[], object], *known: type[Exception]) -> None:
    """Call a reader, which may refuse the file by a known error of one line."""
    told = ""
    try:
        read()
    except known as error:
        told = str(error)
    assert "\n" not in told


def layer(name: str, kind: str, **arguments: float | bool) -> dict:
    return {"name": name, "kind": kind, "arguments": arguments}


SPEC: dict = {
    "input": {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
    "host": [
        {
            "name": "block0",
            "layers": [layer("conv", "Conv2d", in_channels=3, out_channels=4, kernel_size=3)],
        },
        {"name": "head", "layers": [layer("linear", "Linear", in_features=4, out_features=3)]},
    ],
    "seeds": [
        {
            "slot": "r0c0",
            "after": "block0",
            "residual": True,
            "layers": [layer("norm", "SoftNorm", num_groups=1, num_channels=4, eps=1e-5)],
            "gate": layer("gate", "Squeeze", inputs=4, hidden=2, outputs=1, hidden_bias=True),
            "blend": "gate",
            "alpha": 0.5,
        }
    ],
}


@cache
def module_bytes(kind: str) -> bytes:
    """A file of a network or a policy."""
    slots = sort_slots(TaskConfig(), ["r0c0", "r0c1"])
    sizes = NetworkConfig(hidden=16, features=8, slot_features=8)
    policy = controller_spec(PolicyConfig(network=sizes), slots)
    made = GrownNetwork(SPEC) if kind == "network" else Controller(policy)
    path = Path(f"{kind}.safetensors")
    save(made, path)
    return path.read_bytes()


def with_entry(content: bytes, changes: list) -> bytes:
    """The file of a module with parts of its description replaced."""
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    head["__metadata__"][METADATA_ENTRY] = json.dumps(
        changed(json.loads(head["__metadata__"][METADATA_ENTRY]), changes)
    )
    again = json.dumps(head).encode()
    return len(again).to_bytes(8, "little") + again + content[end:]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["network", "policy"])
def test_files_of_networks_and_policies(kind: str, count: int) -> None:
    def check(edits: list[Edit], changes: list) -> None:
        content = with_entry(module_bytes(kind), changes)
        Path("file").write_bytes(edited(content, edits[: not changes]))
        reads(lambda: load("file"), ModuleFileError)

    fuzz(count, check)


@pytest.mark.parametrize("count", COUNTS)
def test_npz_files(count: int) -> None:
    whole = user_files.write(Path("whole.npz"), user_files.arrays((4, 4))).read_bytes()

    def check(edits: list[Edit], changes: list) -> None:
        Path("file.npz").write_bytes(edited(whole, edits))
        reads(lambda: images("file.npz"), UserError)

    fuzz(count, check)


TEXT = ("Im Anfang war das Wort, und es schön zu lesen: äöü, €, 你好, 🌱.\n" * 20).encode()


def text_of(root: Path | str, **more: str) -> TextSet:
    return load_text(DataConfig(name="text", root=str(root), context=8, **more))


@pytest.mark.parametrize("count", COUNTS)
def test_text_files_alone_and_in_a_folder(count: int) -> None:
    Path("texts").mkdir()
    Path("texts/whole.txt").write_bytes(TEXT)

    def check(edits: list[Edit], changes: list) -> None:
        Path("texts/a.txt").write_bytes(edited(TEXT, edits))
        for root in ("texts/a.txt", "texts"):
            reads(lambda: text_of(root), DataError)  # noqa: B023, called at once

    fuzz(count, check)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer of a word each; tokens are kept below `cache`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted(set(TEXT.decode().split()))
    model = tokenizers.models.WordLevel({word: code for code, word in enumerate(words)}, words[0])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    Path("text.txt").write_bytes(TEXT)
    made.save("tokenizer.json")
    return Path("tokenizer.json")


@pytest.mark.parametrize("count", COUNTS)
def test_kept_tokens_that_were_cut_or_changed_are_those_of_the_text(
    tokenizer: Path, count: int
) -> None:
    whole = text_of("text.txt", tokenizer=str(tokenizer))
    (kept,) = Path("cache").rglob("*.tokens")
    plain = kept.read_bytes()

    def check(edits: list[Edit], changes: list) -> None:
        kept.write_bytes(edited(plain, edits))
        assert text_of("text.txt", tokenizer=str(tokenizer)).identity == whole.identity

    first, second = len(plain) - 8, len(plain) - 4
    swapped = [(first, 4, plain[second:]), (second, 4, plain[first:second])]
    assert edited(plain, swapped) != plain  # and as good as tokens, but in another order
    check(swapped, [])
    fuzz(count, check)


@pytest.mark.timeout(60)
def test_what_is_no_file_among_kept_tokens_is_replaced_or_told(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> TextSet:
        return text_of("text.txt", tokenizer=str(tokenizer))

    whole = load()
    (kept,) = Path("cache").rglob("*.tokens")
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.touch):
        kept.unlink()
        put(kept)
        assert load().identity == whole.identity
    numbers = np.full(999, 10**9, np.int32)
    kept.write_bytes(hashlib.sha256(numbers.data).digest() + numbers.tobytes())
    assert load().identity == whole.identity
    kept.unlink()
    kept.mkdir()
    with pytest.raises(DataError, match=rf"^.*{kept}: cannot be kept \(Is a directory\)$"):
        load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("text.txt").absolute()))
    told = r"^text cannot be kept: the cache folder .*text\.txt/esper_soa/text cannot be "
    with pytest.raises(DataError, match=told):
        load()


@pytest.mark.parametrize("count", COUNTS)
def test_checkpoints_and_policy_files_under_a_seal_that_fits(count: int) -> None:
    data = {"name": "x", "source": "x", "identity": "x"}
    content = {
        "tasks": {"a": {"progress": asdict(RunTotals(rewards=[1.0])), "data": data}},
        "settings": asdict(TrainConfig()),
        "best_accuracy": 1.0,
        "versions": {"torch": "2"},
        "watch": asdict(WatchState()),
        "learner": {"policy": {"weight": torch.zeros(3)}},
    }
    policy = load_checkpoint(POLICY_FOLDER / f"{packaged_policies()[0]}.policy", CPU)
    policy["learner"] = {"policy": {"weight": torch.zeros(3)}}

    def check(edits: list[Edit], changes: list) -> None:
        for whole, read in ((content, read_checkpoint), (policy, load_policy)):
            written = changed(whole, changes)
            archive = io.BytesIO()
            torch.save(written, archive)
            write_sealed(Path("file"), edited(archive.getvalue(), edits[: not changes]))
            given_to = "file" if read is load_policy else Path("file")
            reads(lambda: read(given_to, CPU), UserError)  # noqa: B023, called at once
        save_checkpoint(Path("file"), content)
        Path("file").write_bytes(edited(Path("file").read_bytes(), edits))
        reads(lambda: load_checkpoint(Path("file"), CPU), CheckpointError)

    fuzz(count, check)


@pytest.mark.parametrize("count", COUNTS)
def test_parquet_files(count: int) -> None:
    run = make_run(Path("run"))
    write_round(run, 1, envs=2, steps=6)
    path = table_files(run, "steps")[1]
    whole = path.read_bytes()

    def check(edits: list[Edit], changes: list) -> None:
        path.write_bytes(edited(whole, edits))
        reads(lambda: read_file(path, "steps"), DataError)

    fuzz(count, check)


@pytest.mark.parametrize("count", COUNTS)
def test_settings_in_yaml(count: int) -> None:
    whole = settings_yaml(TrainConfig()).encode()

    def check(edits: list[Edit], changes: list) -> None:
        Path("config.yaml").write_bytes(edited(whole, edits))
        assert isinstance(read_settings(Path("config.yaml")), dict)

    fuzz(count, check)


@pytest.mark.parametrize("count", COUNTS)
def test_lines_of_json_and_the_report_of_their_run(count: int) -> None:
    run = make_run(Path("run"), ended=summary([50.0]), overrides=["reward=net"])
    lines = [line(1, 40.0), line(2, 41.5)]
    plain = (run / "config.yaml").read_bytes()

    def check(edits: list[Edit], changes: list) -> None:
        told = [changed(lines, changes), changed(summary([50.0]), changes)]
        rounds = told[0] if isinstance(told[0], list) else [told[0]]
        text = "".join(f"{json.dumps(one)}\n" for one in rounds).encode()
        (run / "metrics.jsonl").write_bytes(edited(text, edits))
        (run / "episodes.jsonl").write_bytes(edited(text, edits[1:]))
        (run / "summary.json").write_text(json.dumps(told[1]))
        (run / "config.yaml").write_bytes(edited(plain, edits[2:]))
        page_of([read_run(run)], PROGRAM)
        keep_rounds(run / "metrics.jsonl", 1)

    fuzz(count, check)


EMPTIES = "{}," * 330_000
MANY = 200_000  # rows


def _same_rows(run: Path, table: str) -> None:
    """A table of a file of some 50 KB: as many rows of the same as take 1 GB as they were."""
    write_round(run, 1, envs=2, steps=6)
    path = table_files(run, table)[1]
    first = parquet.read_table(path).slice(0, 1)
    parquet.write_table(first.take(np.zeros(MANY, int)), path, compression="zstd")


def _answers(run: Path, *shape: int) -> None:
    """Answers in a file of 260 KB, and 268 MB of memory."""
    np.savez_compressed(run / "test_answers.npz", grown=np.zeros(shape, np.int8), targets=1)


def _page_of_a_text(run: Path) -> None:
    """A table with a text of 300 MB in a file of 15 KB whose foot says that it is small."""
    write_round(run, 1, envs=2, steps=6)
    path = table_files(run, "slots")[1]
    table = parquet.read_table(path).drop_columns("slot")
    texts = ["a" * 300_000_000, *["r0c0"] * (len(table) - 1)]
    parquet.write_table(table.append_column("slot", [texts]), path, compression="zstd")
    size = parquet.read_metadata(path).row_group(0).total_byte_size * 2
    said = bytes(size >> bits & 127 | 128 * (size >> bits > 127) for bits in range(0, 35, 7))
    head, told, foot = path.read_bytes().rpartition(said)
    path.write_bytes(head + b"\x80" * (len(told) - 1) + b"\0" + foot)


NESTED = ",".join(['{"a":' * 30 + "1" + "}" * 30] * 5000)
BOMBS: dict[str, Callable[[Path], object]] = {
    "rows of steps": lambda run: _same_rows(run, "steps"),
    "rows of slots": lambda run: _same_rows(run, "slots"),
    "rows of a text": _page_of_a_text,
    "rows of events": lambda run: _same_rows(run, "events"),
    "values of a round": lambda run: (run / "metrics.jsonl").write_text(
        f'{{"round": 1, "x": [{EMPTIES}1]}}\n' * 9
    ),
    "values of a summary": lambda run: (run / "summary.json").write_text(f"[{EMPTIES * 9}1]"),
    "lists of settings": lambda run: (run / "config.yaml").write_text(f"rounds: [{EMPTIES}]"),
    "lines of a run": lambda run: (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line(number, number % 7 / 3)) + "\n" for number in range(1, 25_000))
    ),
    "lines of episodes": lambda run: (run / "episodes.jsonl").write_text(
        f'{{"round": 1, "shapley": [{NESTED}]}}\n' * 30
    ),
    "answers of hosts": lambda run: _answers(run, 1, 26_000, 10_000),
    "all": lambda run: [BOMBS[name](run) for name in ALL],
    **{
        f"nothing in {name}": lambda run, name=name: os.truncate(run / name, 2**31)
        for name in ("config.yaml", "overrides.txt", "versions.json", "episodes.jsonl")
    },
}

ALL = [name for name in BOMBS if name.startswith(("rows", "lines of e", "lines of a", "answers"))]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("bomb", some_of(BOMBS, "rows of a text", "answers of hosts"))
def test_a_small_file_of_a_run_takes_little_memory(bomb: str) -> None:
    run = make_run(Path("run"), [line(1, 40.0)], ended=summary([50.0]))
    BOMBS[bomb](run)
    made = "from pathlib import Path; from esper_soa.lab.report.page import page_of; "
    made += "from esper_soa.lab.report.run_files import read_run; "
    made += "page_of([read_run(Path('run'))], ''); print(Path('/proc/self/status').read_text())"
    done = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=True)
    most = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    assert most
    assert int(most[1]) < (MOST_OF_ALL if bomb == "all" else MOST_OF_A_FILE), done.stderr


DEEP = "[" * 50_000
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
NAMES = ("config.yaml", "metrics.jsonl", "episodes.jsonl", "summary.json", "versions.json")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [*NAMES, "overrides.txt"])
def test_pipes_depth_long_numbers_and_aliases_stop_no_report(name: str) -> None:
    run = make_run(Path("run"), [line(1, 40.0)], ended=summary([50.0]))
    plain = (run / name).read_text()
    long = '{"round": 1, "grown": {"accuracy": 1' + "0" * 400 + "}}\n"
    for content in (
        plain + DEEP,
        plain + LAUGHS,
        plain + "rounds: 1\nx: &x [*x]\n",
        long,
        "\ud800",
    ):
        (run / name).write_text(content, errors="surrogatepass")
        page_of([read_run(run)], PROGRAM).encode()
        read_settings(run / name)
        reads(lambda: RecordedRun(run.resolve()).settings, UserError)
        keep_rounds(run / name, 1)
    (run / name).unlink()
    os.mkfifo(run / name)
    page_of([read_run(run)], PROGRAM)
    assert find_run_folders([Path()]) if name != "config.yaml" else read_settings(run / name) == {}
