"""The runs in the folders that a user names, by labels that tell them apart, and the settings of
each.

A run folder is one whose config.yaml has rounds; a folder that holds some, as a sweep does, stands
for all of them. Needs no torch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from esper_soa.config import flat_settings
from esper_soa.errors import UserError, one_line
from esper_soa.ops.rundir import RunFolder
from esper_soa.paths import user_path

DEPTH = 3  # folders below the given one in which runs are looked for: runs/<name>/<sweep>/<job>


def find_run_folders(given: Sequence[str | Path]) -> dict[str, Path]:
    """The run folders in `given` by labels: the ends of their paths, as short as they can be and
    still differ.

    A run that is found twice counts once. Raises UserError where a folder holds none.
    """
    paths: list[Path] = []
    for one in given:
        place = user_path("RUN", str(one))
        found = list(_run_folders(place, DEPTH))
        if not found:
            raise UserError(
                f"RUN={one_line(one)}: holds no run: there is no config.yaml of a run in it or "
                "below it"
            )
        paths += [path for path in found if path not in paths]
    return dict(zip(_labels(paths), paths, strict=True))


def read_settings(path: Path) -> dict[str, object]:
    """The settings in config.yaml by dotted names; none where it is not there or cannot be read."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, OmegaConfBaseException, YAMLError):
        return {}
    return flat_settings(cast(dict, found)) if isinstance(found, dict) else {}


def _run_folders(place: Path, depth: int) -> Iterator[Path]:
    """Run folders in `place` and below, in the order of their names, numbers by their value."""
    if "rounds" in read_settings(RunFolder(place).config):
        yield place.resolve()
    elif depth and place.is_dir():
        below = sorted((one for one in place.iterdir() if one.is_dir()), key=_by_number)
        for one in below:
            yield from _run_folders(one, depth - 1)


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else -1, path.name)


def _labels(paths: Sequence[Path]) -> list[str]:
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        ends = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return [str(path) for path in paths]
