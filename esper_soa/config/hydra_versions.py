"""Names that differ between Hydra 1.3 and 1.4, and the OmegaConf that each brings."""

from collections.abc import Callable

import hydra
from omegaconf import OmegaConf

_IS_1_3 = hydra.__version__.startswith("1.3.")

# Arguments of `initialize`: 1.3 needs a version to behave as, 1.4 warns of one.
INITIALIZE: dict[str, str] = {"version_base": "1.3"} if _IS_1_3 else {}
# Arguments of `hydra.main`. Settings are code (docs/security.md): a `_target_` may name any class.
MAIN = INITIALIZE or {
    "execution_whitelist": hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS  # type: ignore[attr-defined]
}
register_resolver: Callable[..., None] = (
    OmegaConf.register_new_resolver if _IS_1_3 else OmegaConf.register_resolver
)
