"""Run folders as a user names them: the runs in them, their settings, and whether they have ended.

A run folder is one whose config.yaml has rounds; a folder that holds some, as a sweep does, stands
for all of them, and so does that of a run on several tasks, with a folder each. Needs no torch.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

from esper_soa.config.paths import user_path
from esper_soa.config.settings import TrainConfig, flat_settings
from esper_soa.system.errors import UserError, one_line, reading
from esper_soa.system.files import LOGGER
from esper_soa.system.plain_files import FOLDER, OTHER, list_folder, read_text
from esper_soa.training.files.run_folder import RunFolder, read_config

MAX_DEPTH = 3  # folders below the given one in which runs are looked for: runs/<name>/<sweep>/<job>
NUMBER = re.compile(r"(?<==)[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?=[ ,\]]|$)")  # of a setting
COMPARISON_FILE = "compare.json"  # in the folder of a study by esper-compare
# The numbers that studies compare, in percent points, with their titles.
MEASURES = {"test_accuracy": "test accuracy", "net": "test accuracy less rent"}


def by_value(names: Iterable[str]) -> list[str]:
    """The names in their order, but those that differ in numbers of settings alone, such as
    lr=0.1 and lr=0.02, by these.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(NUMBER.sub("#", name), []).append(name)
    return [
        name
        for part in alike.values()
        for name in sorted(part, key=lambda name: [*map(float, NUMBER.findall(name))])
    ]


def finished_accuracy(folder: RunFolder, settings: TrainConfig) -> float | None:
    """The final validation accuracy in `folder`, if the run was of these settings and has ended."""
    if not folder.summary.is_file() or not resumes(folder, settings):
        return None
    with suppress(UserError), reading(folder.summary, UserError, "a summary"):
        accuracy = json.loads(read_text(folder.summary))["grown"]["validation_accuracy"]
        return accuracy if isinstance(accuracy, float) else None
    return None


def resumes(folder: RunFolder, settings: TrainConfig) -> bool:
    """Whether `settings` ask to go on with the run in `folder`, and it was of the same; settings
    that it does not know, as of an earlier version, had their defaults.
    """
    if settings.resume != "auto":
        return False
    recorded = read_settings(folder.config)
    ignored = {"resume": "", "run_dir": ""}
    known = flat_settings(asdict(TrainConfig())) | recorded | ignored
    return bool(recorded) and known == flat_settings(asdict(settings)) | ignored


def find_run_folders(folders: Sequence[str | Path]) -> dict[str, Path]:
    """The run folders in `folders` by labels: the ends of their paths, the shortest that differ.

    A run that is found twice counts once. Raises UserError where a folder holds none.
    """
    paths: list[Path] = []
    for given in folders:
        place = user_path("RUN", str(given)).resolve()
        folders_here = list(_run_folders(place, MAX_DEPTH))
        if not folders_here:
            reason = "holds no run: there is no config.yaml of a run in it or below it"
            raise UserError(f"RUN={one_line(given)}: {reason}")
        paths += [path for path in folders_here if path not in paths]
    return dict(zip(_labels(paths), paths, strict=True))


def read_settings(path: Path) -> dict[str, object]:
    """The settings in config.yaml by dotted names; none where it is not there or cannot be read."""
    with suppress(UserError):
        return flat_settings(read_config(path))
    return {}


def _run_folders(place: Path, depth: int) -> Iterator[Path]:
    """Run folders in `place` and below, in the order of their names, numbers by their value."""
    config = RunFolder(place).config
    settings = read_settings(config)
    several = any(name.startswith("worlds.") for name in settings)
    if "rounds" in settings and not several:
        yield place
        return
    if config.exists() and not settings:
        LOGGER.warning("runs     without %s: no settings that can be read", one_line(config))
    if depth + several > 0:
        # a run's own copies of its settings, by Hydra, are in a hidden folder
        entries = {path: kind for path, kind in list_folder(place).items() if path.name[0] != "."}
        for path in sorted(entries, key=_by_number):
            if entries[path] == FOLDER:
                yield from _run_folders(path, depth - 1)
            elif entries[path] == OTHER and path.is_dir():
                LOGGER.warning("runs     without %s: a link. Name it to have it", one_line(path))


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else -1, path.name)


def _labels(paths: Sequence[Path]) -> list[str]:
    ends = (["/".join(path.parts[-depth:]) for path in paths] for depth in count(1))
    return next(labels for labels in ends if len(set(labels)) == len(labels))
