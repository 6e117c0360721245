"""The end of a run: the table that answers what growing bought, and the same as summary.json.

Given a Summary of plain numbers by the trainer. Needs no torch.
"""

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from esper_soa.ops.files import write_text
from esper_soa.ops.progress import duration, show
from esper_soa.ops.telemetry import finite_record

TEXT_WIDTH = 160  # columns of a table in a file


@dataclass(frozen=True)
class HostScore:
    """How N hosts stood at the last env-step of the last round."""

    accuracies: list[float]  # validation accuracy per env, percent
    parameters: list[float]  # trainable parameters per env: the host and the seeds that take part in it

    @property
    def accuracy(self) -> float:
        """Mean over envs, percent."""
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def best(self) -> float:
        """The best env, percent."""
        return max(self.accuracies)

    @property
    def size(self) -> float:
        """Mean number of parameters over envs."""
        return sum(self.parameters) / len(self.parameters)


@dataclass(frozen=True)
class SeedCounts:
    """What happened to seeds in all envs and rounds."""

    germinated: int
    blended: int
    fossilized: int
    pruned: int


@dataclass(frozen=True)
class Pareto:
    """The trade-off between accuracy, stability and size over all episodes so far."""

    front_size: int  # distinct episodes that no other one beats
    hypervolume: float  # percent x parameter ratio, area dominated between accuracy 0 and twice the host's size


@dataclass(frozen=True)
class Speed:
    """Env-steps of the growing hosts per second, and the work in one of them."""

    env_steps: int
    seconds: float  # spent on those env-steps and the policy updates between them
    train_samples: int  # T per env-step
    val_samples: int  # V per env-step and alpha row
    alpha_rows: float  # K, mean number of alpha rows validated per env-step

    @property
    def eps(self) -> float:
        """Env-steps per second."""
        return self.env_steps / self.seconds if self.seconds > 0 else float("nan")


@dataclass(frozen=True)
class Summary:
    """Everything that the final table and summary.json say."""

    name: str
    task: str
    policy: str
    data: str  # name and origin of the data set
    device: str
    envs: int
    rounds: int
    steps: int
    grown: HostScore
    control: HostScore | None  # the same hosts on the same data without growth; None where not run
    seeds: SeedCounts
    reward: float  # mean over envs of the last round's episode reward
    speed: Speed
    wall_seconds: float  # of this process, from start to table, the control included
    pareto: Pareto
    rollbacks: int = 0  # hosts that lost their way and were put back to a snapshot, in all envs and rounds
    rounds_before: int = 0  # rounds that were done before this process went on with the run
    policy_init: str = "none"  # what the policy started from, as policy.init

    @property
    def accuracy(self) -> float:
        """Final validation accuracy of the grown hosts, percent, mean over envs."""
        return self.grown.accuracy

    @property
    def played(self) -> int:
        """Env-steps of the growing hosts that this process has played."""
        return self.speed.env_steps - self.rounds_before * self.envs * self.steps

    @property
    def control_env_steps(self) -> int:
        """Env-steps without growth: one episode of every env, or none."""
        return self.envs * self.steps if self.control is not None else 0


def write_summary(summary: Summary, path: Path) -> None:
    """Replace summary.json: the fields of the record and the numbers derived from them, NaN as null; raises OSError."""
    record = asdict(summary)
    for key, score in (("grown", summary.grown), ("control", summary.control)):
        if score is not None:
            record[key] |= {"accuracy": score.accuracy, "best": score.best, "size": score.size}
    record["speed"]["eps"] = summary.speed.eps
    record["control_env_steps"] = summary.control_env_steps
    write_text(path, json.dumps(finite_record(record), indent=2) + "\n")


def print_summary(summary: Summary, console: Console) -> None:
    """Print the final table, and keep it in the log file."""
    policy = summary.policy + (f" from {summary.policy_init}" if summary.policy_init != "none" else "")
    show(console, f"{summary.name}: {summary.task} on {summary.data}, policy {policy}, {summary.device}")
    show(console, as_text(score_table(summary.grown, summary.control)))
    for line in fact_lines(summary):
        show(console, line)


def as_text(table: Table) -> str:
    """The table as plain lines that are as wide as it needs to be."""
    page = Console(file=io.StringIO(), width=TEXT_WIDTH)
    with page.capture() as text:
        page.print(table)
    return "".join(f"{line.rstrip()}\n" for line in text.get().splitlines() if line.strip())


def score_table(grown: HostScore, control: HostScore | None) -> Table:
    """Accuracy and size of the grown hosts, beside the control's where there is one."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("last env-step")
    table.add_column("grown", justify="right")
    if control is not None:
        table.add_column("no growth", justify="right")
        table.add_column("difference", justify="right")
    rows = [("accuracy, mean over hosts (%)", "accuracy", ",.2f"), ("accuracy, best host (%)", "best", ",.2f"),
            ("parameters, mean over hosts", "size", ",.0f")]  # fmt: skip
    for title, key, form in rows:
        mine = getattr(grown, key)
        cells = [title, format(mine, form)]
        if control is not None:
            other = getattr(control, key)
            cells += [format(other, form), format(mine - other, "+" + form)]
        table.add_row(*cells)
    return table


def fact_lines(summary: Summary) -> list[str]:
    """Counts of seeds, rollbacks if any, reward, trade-off, speed with the work it was measured on, and wall time."""
    seeds, speed = summary.seeds, summary.speed
    rollbacks = [f"governor {summary.rollbacks} rollbacks to a snapshot"] if summary.rollbacks else []
    return [
        f"seeds    {seeds.germinated} germinated, {seeds.blended} blended, {seeds.fossilized} fossilised, "
        f"{seeds.pruned} pruned",
        *rollbacks,
        f"reward   {summary.reward:+.2f} per episode in the last of {summary.rounds} rounds",
        f"outcome  {summary.pareto.front_size} episodes on the Pareto front of accuracy, stability and size, "
        f"hypervolume {summary.pareto.hypervolume:.2f}",
        f"speed    {speed.eps:.1f} env-steps/s at T={speed.train_samples}, V={speed.val_samples}, "
        f"K={speed.alpha_rows:.1f} (N={summary.envs})",
        f"time     {duration(summary.wall_seconds)} for {work_words(summary)}",
    ]


def work_words(summary: Summary) -> str:
    """What was played in the time that the table gives."""
    all_steps = summary.speed.env_steps
    control = f" and {summary.control_env_steps} without growth" if summary.control is not None else ""
    if summary.rounds_before:
        return f"{summary.played} of {all_steps} env-steps (the others before the run was resumed){control}"
    return f"{all_steps} env-steps{control}"
