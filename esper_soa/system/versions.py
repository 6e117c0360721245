"""Versions of the packages that results depend on. Needs no torch."""

from contextlib import suppress
from functools import cache
from importlib import metadata

NAMED_PACKAGES = ("esper-soa", "torch", "tensordict", "numpy", "hydra-core", "rich")


@cache
def package_versions() -> dict[str, str | None]:
    """Version by package; None for one that is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(NAMED_PACKAGES)
    for name in NAMED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
