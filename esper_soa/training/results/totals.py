"""Sums over the rounds of a task, which the final table shows and checkpoints keep."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from esper_soa.env.outcome import hypervolume, trade_offs
from esper_soa.env.topology import Topology
from esper_soa.state import STATE_FLOAT
from esper_soa.training.results.final_table import Pareto
from esper_soa.training.results.metrics import RoundResult


@dataclass
class FinalHosts:
    """The hosts at the end of a round, for its control and the final table."""

    accuracies: list[float]  # validation accuracy per env, percent
    parameters: list[float]
    train_flop: list[float]
    blueprint: list[list[int]]  # per env and slot, as in env/topology.py, and so the next two
    blend: list[list[int]]
    alpha: list[list[float]]
    test_accuracies: list[float] = field(default_factory=list)  # percent; none where not measured
    test_losses: list[float] = field(default_factory=list)  # nats; likewise
    settings: dict[str, list[float | str]] = field(default_factory=dict)  # see RoundResult
    num_steps: list[int] = field(default_factory=list)  # env-steps; none in earlier checkpoints
    all_flop: list[float] = field(default_factory=list)  # likewise
    validation_losses: list[float] = field(default_factory=list)  # nats; likewise
    answers: Tensor | None = None  # see RoundResult; None where not measured

    @classmethod
    def of(cls, result: RoundResult) -> "FinalHosts":
        topology = result.topology
        return cls(
            accuracies=result.accuracies,
            parameters=result.parameters,
            train_flop=result.train_flop,
            blueprint=topology.blueprint.tolist(),
            blend=topology.blend.tolist(),
            alpha=topology.alpha.tolist(),
            test_accuracies=list(result.test_accuracies),
            test_losses=list(result.test_losses),
            settings={name: list(values) for name, values in result.settings.items()},
            num_steps=result.num_steps,
            all_flop=result.all_flop,
            answers=result.answers,
            validation_losses=result.validation_losses,
        )

    @property
    def topology(self) -> Topology:
        alpha = torch.tensor(self.alpha, dtype=STATE_FLOAT)
        return Topology(torch.tensor(self.blueprint), torch.tensor(self.blend), alpha)


@dataclass
class RunTotals:
    """Sums over the rounds of a task in a run, and its last rounds."""

    rounds_done: int = 0
    seconds: float = 0.0  # spent on collecting and updating
    alpha_rows: float = 0.0  # sum over rounds of the mean number validated per env-step
    seeds: dict[str, int] = field(default_factory=dict)  # events by name
    # Pareto front: accuracy, stability, parameter ratio.
    front: list[list[float]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # per env, of the last round
    # The last rounds, control_rounds of them, oldest first.
    recent: list[FinalHosts] = field(default_factory=list)
    rewards_not_finite: int = 0  # env-steps whose reward is NaN or infinite
    # Env-steps that were not simulated, as the episodes of their envs had ended early.
    cut_off: int = 0

    def add(self, result: RoundResult, seconds: float, env_steps: int, keep: int) -> None:
        """Add a round of so many env-steps of all envs where no episode ends early.

        seconds: of collecting and updating. keep: how many of the last rounds stay.
        """
        self.rounds_done += 1
        self.cut_off += env_steps - result.env_steps
        self.seconds += seconds
        self.rewards_not_finite += int(str(result.record["rewards_not_finite"]))
        self.alpha_rows += float(result.record["alpha_rows"])  # type: ignore[arg-type]
        self.seeds = {name: self.seeds.get(name, 0) + count for name, count in result.seeds.items()}
        points = torch.tensor(self.front + result.points, dtype=STATE_FLOAT)
        self.front = trade_offs(points).tolist()
        self.rewards = result.rewards
        self.recent = [*self.recent, FinalHosts.of(result)][-keep:]

    def env_steps(self, of_a_round: int) -> int:
        """Number of env-steps so far, of all envs; of_a_round: where no episode ends early."""
        return self.rounds_done * of_a_round - self.cut_off

    def pareto(self) -> Pareto:
        """The trade-offs that the run has found so far."""
        front = torch.tensor(self.front, dtype=STATE_FLOAT).view(-1, 3)
        return Pareto(len(front), float(hypervolume(front[:, 0], front[:, 2])))
