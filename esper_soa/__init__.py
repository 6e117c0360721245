"""Neural networks that grow while they train: a struct-of-arrays simulator with a learning policy."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper_soa.nets.your_images import check_images, images

__all__ = ["check_images", "images"]

# Where public names are. They are imported when first asked for: torch takes seconds, and commands hear signals before.
_PLACES = {"check_images": "esper_soa.nets.your_images", "images": "esper_soa.nets.your_images"}


def __getattr__(name: str) -> object:
    """The public name `name`, imported when it is first asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(_PLACES[name]))[name]
