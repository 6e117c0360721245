"""A reward: what an env-step gained in accuracy, less what grown parameters cost. All tensors are
float64.
"""

from torch import Tensor

import esper_soa
from esper_soa import RewardInputs

PRICE = 0.02  # percent points per env-step, of a host that has doubled


@esper_soa.reward("thrifty")
def thrifty(inputs: RewardInputs) -> dict[str, Tensor]:
    """Two terms [N]: the gain under the reward's own name, the rent under that of the package's
    records.
    """
    gain = inputs.accuracy_delta.where(inputs.step > 1, 0.0)  # the first env-step is no change
    growth = (inputs.total_params - inputs.host_params) / inputs.host_params.clamp(min=1)
    return {"own": gain, "compute_rent": -PRICE * growth}
