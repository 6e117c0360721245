"""The protocol of engines, which train and validate N networks, and its records."""

from typing import NamedTuple, Protocol, TypeVar

from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.needs import Need
from esper_soa.nets.seeds.pools import SlotSeeds
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import Rules
from esper_soa.state import GradientStats

# what an engine has to know of the seeds in an env-step, on the host or on the device
Active = TypeVar("Active")


class TrainReport(NamedTuple):
    """Results of a training pass over N envs; of samples with several targets those of a target."""

    loss: Tensor  # float64 [N], mean of batch means
    accuracy: Tensor  # float64 [N], percent of the targets
    gradients: GradientStats  # [N, S]


class ValidationReport(NamedTuple):
    """Accuracies of N envs by subset row; see state.Measurements."""

    loss: Tensor  # float64 [N], of row 0
    accuracy: Tensor  # float64 [N, R], percent of the targets
    subset: Tensor  # int64 [N, R], -1 = row not evaluated
    ablated: Tensor  # bool [N, S]


class EngineChoice(NamedTuple):
    """Which engine computes, and why, in words for logs."""

    native: bool  # whether it is the native kernels
    reason: str
    fallback: bool = False  # they belong here, yet cannot run
    sha256: str = ""  # of the library that computes, where it is native
    name: str = "torch"  # of the engine, as in compute.engine
    tried: tuple[str, ...] = ()  # what became of the engines that were tried, a clause each

    def facts(self) -> dict[str, str]:
        """For versions.json."""
        tried = "; ".join(self.tried)
        return {"engine": self.name, "kind": self.reason, "sha256": self.sha256, "tried": tried}


class Engine(Protocol[Active]):
    """Trains and validates N networks, whose weights are its caller's; the torch engine says what
    is right. What `claim_` gives is for `train_` and `validate` of the same env-step.
    """

    @property
    def chosen(self) -> EngineChoice:
        """Why it is this one."""

    def needs(self, setup: Setup) -> list[Need]:
        """Memory that training takes beside weights and samples."""

    def claim_(self, setup: Setup, weights: TensorDict, seeds: SlotSeeds, keys: Tensor) -> Active:
        """Initialise newborn seeds, clear momentum that starts afresh; the seeds of this env-step.

        seeds: [N, S]. keys: int64 [N], the streams of this env-step. An engine that has to know on
        the host which seeds run reads it here, once per env-step; none reads it anywhere else.
        """

    def train_(
        self,
        setup: Setup,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: Active,
        feed: TrainingFeed,
        num_batches: int,
        rules: Rules | None = None,
    ) -> TrainReport:
        """Train every host and every running seed on `num_batches` batches; alpha: [N, S].

        An optimiser step follows every setup.accumulate batches, whose multiple num_batches is:
        clipping, weight decay, momentum and gradient statistics see the mean of their gradients.
        Batch norm normalises every batch by itself, and moves its running statistics with each.
        rules: how hosts and seeds move at this env-step; those of setup.task where None.
        """

    def validate(
        self,
        setup: Setup,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: Active,
        feed: ValidationFeed,
        answers: Tensor | None = None,
    ) -> ValidationReport:
        """Accuracy of every env by subset row it needs, loss with all seeds on; alpha [N, S].

        answers: whole numbers [N, V], which get the right targets of each sample of the feed with
        all seeds on, 0 of one without a label.
        """
