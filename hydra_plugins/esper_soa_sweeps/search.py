"""A sweeper of Hydra by Optuna, whose jobs are trials; what it does is in lab/sweep/search.py of
esper_soa.
"""

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """Plays trials that Optuna chooses, by whatever launcher Hydra has."""

    def __init__(self, **settings: object) -> None:
        """settings: those of hydra/sweeper/optuna.yaml; read from the configuration."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before `sweep`."""
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> float | None:
        """Play what is left of the trials; returns the best accuracy, None where no trial came to
        its end.
        """
        from esper_soa.lab.sweep.search import search

        assert self.config is not None, "setup has not been called"
        assert self.launcher is not None
        return search(self.config, arguments, self.launcher)
