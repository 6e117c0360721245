"""What Hydra 1.3 and 1.4, and the OmegaConf that each brings, call by other names."""

from collections.abc import Callable

import hydra
from omegaconf import OmegaConf

_IS_1_3 = hydra.__version__.startswith("1.3.")

# Arguments of hydra.main and of initialize: 1.3 needs a version to behave as, 1.4 warns of one.
DEFAULTS: dict[str, str] = {"version_base": "1.3"} if _IS_1_3 else {}
register_resolver: Callable[..., None] = (
    OmegaConf.register_new_resolver if _IS_1_3 else OmegaConf.register_resolver
)
