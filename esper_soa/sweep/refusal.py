"""How a run or a sweep that cannot be ends the program before it begins, inside of what Hydra
calls. Needs no torch.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig

from esper_soa.errors import UserError


@contextmanager
def refused() -> Iterator[None]:
    """End the program with the message of a UserError, and status 2: Hydra drops or decorates what
    is raised.
    """
    try:
        yield
    except UserError as error:
        HydraConfig.instance().cfg = None  # there is no sweep to say anything of at the end
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
