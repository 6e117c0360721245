"""test_answers.npz of a run folder: how many targets of every test sample the hosts of the last
rounds have right, by which samples count as a source of chance. Needs no torch.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from esper_soa.system.errors import DataError, reading
from esper_soa.system.files import write_bytes
from esper_soa.system.plain_files import open_plain
from esper_soa.training.results.verdict import HostScore

GROWN = "grown"  # name of the array of grown hosts; a control's is the name of the control
NUM_TARGETS = "targets"  # name of the number of targets of a sample
MAX_BYTES = 1 << 28  # in memory, of a file that is read: that of 4096 hosts on 10,000 images
MAX_SAMPLES = 1 << 21  # of all arrays of a file


class Answers(NamedTuple):
    """The contents of a file."""

    right: dict[str, np.ndarray]  # by name: right targets [episodes, N, J], -1 = no sample of it
    targets: int  # of a sample

    def means(self, name: str, hosts: np.ndarray | None = None) -> np.ndarray | None:
        """Percent of the targets of each test sample, mean over the `hosts` (bool [episodes, N],
        None = all) of a name; None where there are none, or they have met different samples.
        """
        if name not in self.right:
            return None
        rows = self.right[name]
        rows = rows.reshape(-1, rows.shape[2]) if hosts is None else rows[hosts]
        if not len(rows):
            return None
        known = rows[0] >= 0
        sums = np.zeros(len(known), np.int64)
        step = max(1, MAX_SAMPLES // len(known))  # few at a time, as the rows may fill the memory
        for part in (rows[start : start + step] for start in range(0, len(rows), step)):
            if ((part >= 0) != known).any():
                return None
            sums += part.sum(0)
        return 100 / self.targets * (sums[known] / len(rows))


def stacked(rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """`Answers.means` of runs as rows; None where a run has none, or they differ in length."""
    known = [row for row in rows if row is not None]
    alike = len(known) == len(rows) > 0 and len({len(row) for row in known}) == 1
    return np.stack(known) if alike else None


def write_answers(path: Path, grown: HostScore, controls: Sequence[HostScore]) -> None:
    """Replace the file by the answers of those of which they are known; raises OSError."""
    scores = {GROWN: grown} | {control.name: control for control in controls}
    arrays = {
        name: np.stack([episode.answers for episode in score.episodes])
        for name, score in scores.items()
        if all(len(episode.answers) for episode in score.episodes)
    }
    content = io.BytesIO()
    arrays[NUM_TARGETS] = np.array(grown.num_targets)
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    write_bytes(path, content.getvalue())


def read_answers(path: Path) -> Answers:
    """The contents of a file, which may be a stranger's; without arrays where there is none. Raises
    DataError for what is no such file.
    """
    with reading(path, DataError, "answers of hosts"):
        try:
            file = os.fdopen(open_plain(path), "rb")
        except FileNotFoundError:
            return Answers({}, 1)
        with file, np.load(file, allow_pickle=False) as archive:
            size = sum(entry.file_size for entry in archive.zip.infolist())
            if size > MAX_BYTES:
                raise ValueError(f"of {MAX_BYTES:,} bytes at most, not {size:,}")
            right = {name: archive[name] for name in archive.files}
            targets = int(right.pop(NUM_TARGETS))
            samples = sum(rows.shape[-1] for rows in right.values() if rows.ndim)
            if samples > MAX_SAMPLES:
                raise ValueError(f"of {MAX_SAMPLES:,} samples at most, not {samples:,}")
            kinds = {(rows.dtype.kind, rows.shape) for rows in right.values()}
            alike = len(kinds) <= 1 and all(
                kind == "i" and len(shape) == 3 and 0 not in shape for kind, shape in kinds
            )
            if targets < 1 or not alike:
                raise ValueError("whole numbers [episodes, hosts, samples] of one shape")
    return Answers(right, targets)
