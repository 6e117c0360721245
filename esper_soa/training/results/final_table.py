"""The end of a run: the table of grown hosts and control, and summary.json. Needs no torch."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from esper_soa.config.nets import DATA_NAME
from esper_soa.system.json_lines import Json, write_json
from esper_soa.training.results.progress import duration, show
from esper_soa.training.results.statistics import source_words
from esper_soa.training.results.verdict import (
    BUDGET_WORDS,
    CONFIDENCE_LEVEL,
    Configuration,
    HostScore,
    compare,
    control_text,
    exponential,
    verdict,
)

MOST_ROWS = 32  # configurations in the table; summary.json has all
TEXT_WIDTH = 160  # columns of a table in a file
SEED_EVENTS = ("germinated", "blended", "fossilized", "pruned")  # events of seeds
SCORE_ROWS = (  # rows of the table: fields of a HostScore, titles, and how the numbers are written
    ("test_accuracy", "test accuracy, mean over hosts (%)", ".2f"),
    ("best", "test accuracy, best host (%)", ".2f"),
    ("validation_accuracy", "validation accuracy, mean (%)", ".2f"),
    ("net", "test accuracy - rent, mean over hosts", ".2f"),
    ("size", "parameters, mean over hosts", ",.0f"),
    ("flop", "training {unit}, mean over hosts", ""),
    ("flop_with_validation", "{unit} with validation, mean", ""),
)
LOSS_ROWS = (  # further rows where perplexity is a figure of the samples
    ("test_loss", "test loss, mean over hosts (nats)", ".4f"),
    ("perplexity", "test perplexity, mean over hosts", ".4g"),
)
# figures of a configuration in summary.json
CONFIGURATION_FIGURES = (
    *("test_accuracy", "validation_accuracy", "net", "size", "flop", "flop_with_validation"),
)
FLOP_UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


@dataclass(frozen=True)
class Pareto:
    """The trade-off between accuracy, stability and size over all episodes so far."""

    front_size: int  # distinct episodes that no other one beats
    # Percent x parameter ratio: area dominated between accuracy 0 and twice the host's size, the
    # reference's point; 0 where every episode ended larger than that.
    hypervolume: float


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
        return self.env_steps / self.seconds


@dataclass(frozen=True)
class Summary:
    """Contents of the final table and of summary.json."""

    name: str
    task: str
    policy: str
    data: str  # name and origin of the data set
    device: str
    envs: int
    rounds: int
    steps: int
    grown: HostScore
    controls: list[HostScore]  # on the same random seed, data order and images
    test_images: int  # in the data set; each host is measured on all of them
    validation_images: int  # in the data set; each host is measured on V of them
    seeds: dict[str, int]  # counts by SEED_EVENTS, over all envs and rounds
    reward: float  # mean over envs of the last round's episode reward
    speed: Speed
    wall_seconds: float  # seconds of this process, from start to table, the control included
    pareto: Pareto
    # Hosts that lost their way and were put back to a snapshot, in all envs and rounds.
    rollbacks: int = 0
    rounds_before: int = 0  # rounds that were done before this process went on with the run
    env_steps_before: int = 0  # env-steps of all envs in these rounds
    perplexity: bool = False  # see batches.SampleSpec
    budget: str = "steps"  # control_budget: what controls have as much of as the grown hosts
    policy_init: str = "none"  # policy.init, where the policy started
    # Level, env-steps recorded by this process, and dropped.
    telemetry: dict[str, Json] = field(default_factory=dict)
    samples: str = "images"  # plural of what the data set has

    @property
    def equal(self) -> str:
        """The quantity that grown hosts and those of controls have as much of, in words."""
        return BUDGET_WORDS[self.budget].format(samples=self.samples)


def write_summary(summary: Summary, path: Path) -> None:
    """Replace summary.json: the record and what is derived from it, NaN as null; raises OSError."""
    record = asdict(summary) | {
        "grown": _score(summary.grown),
        "controls": [_control(summary, control) for control in summary.controls],
    }
    record["configurations"] = [
        _configuration_record(summary, configuration)
        for configuration in summary.grown.configurations
    ]
    record["speed"]["eps"] = summary.speed.eps
    write_json(path, record)


def _score(score: HostScore) -> dict[str, Json]:
    """The episodes of hosts, beside them the last, and their figures; without answers."""
    episodes = [
        {name: values for name, values in vars(episode).items() if name != "answers"}
        for episode in score.episodes
    ]
    facts: dict[str, Json] = {"name": score.name, "episodes": episodes}
    return facts | episodes[-1] | score.figures | {"env_steps": score.env_steps}


def _control(summary: Summary, control: HostScore) -> dict[str, Json]:
    """The score of a control, and how far the grown hosts are ahead of it."""
    comparison = compare(summary.grown, control)
    # the bounds of a single pair
    unknown = dict.fromkeys(("low", "high")) if comparison.pairs < 2 else {}
    names = ("test_accuracy", "net", "test_loss")
    intervals = {name: getattr(comparison, name)._asdict() | unknown for name in names}
    source = source_words("hosts", comparison.sampled and summary.samples)
    facts: dict[str, Json] = {"confidence": CONFIDENCE_LEVEL, "source": source}
    facts["outcome"] = comparison.outcome
    record = comparison._asdict() | intervals
    del record["sampled"]  # as the source says
    return _score(control) | {
        "difference": facts | record,
        "verdict": verdict(comparison, control.name, equal=summary.equal),
    }


def _configuration_record(summary: Summary, configuration: Configuration) -> dict[str, Json]:
    settings: dict[str, float | str] = dict(configuration)
    controls = [_configuration(control, configuration) for control in summary.controls]
    grown = _configuration(summary.grown, configuration)
    return {"settings": settings, "grown": grown, "controls": controls}


def _configuration(score: HostScore, configuration: Configuration) -> dict[str, Json]:
    figures = score.part(configuration).figures
    return {"name": score.name, **{name: figures[name] for name in CONFIGURATION_FIGURES}}


def write_overview(summaries: Sequence[Summary], path: Path) -> None:
    """Replace summary.json of a run on several tasks: means over them; raises OSError."""
    first = summaries[0]
    seconds = sum(summary.speed.seconds for summary in summaries)
    env_steps = sum(summary.speed.env_steps for summary in summaries)
    figures = [summary.grown.figures for summary in summaries]
    record: dict[str, Json] = {
        "name": first.name,
        "tasks": [summary.task for summary in summaries],
        "policy": first.policy,
        "rounds": first.rounds,
        "grown": {
            name: fmean(task_figures[name] for task_figures in figures)
            for name in CONFIGURATION_FIGURES
        },
        "speed": {"env_steps": env_steps, "seconds": seconds, "eps": env_steps / seconds},
        "wall_seconds": max(summary.wall_seconds for summary in summaries),
    }
    write_json(path, record)


def final_accuracy(summaries: Sequence[Summary]) -> float:
    """Validation accuracy (percent) of the grown hosts, mean over tasks."""
    return fmean(summary.grown.figures["validation_accuracy"] for summary in summaries)


def print_summary(summary: Summary, console: Console) -> None:
    """Print the final table, and keep it in the log file."""
    start = f" from {summary.policy_init}" if summary.policy_init != "none" else ""
    title = f"{summary.name}: {summary.task} on {summary.data}, policy {summary.policy}{start}"
    show(console, f"{title}, {summary.device}")
    show(console, as_text(score_table(summary)))
    if summary.grown.configurations:
        show(console, as_text(configuration_table(summary)))
    for line in verdict_lines(summary) + fact_lines(summary):
        show(console, line)


def as_text(table: Table, width: int = TEXT_WIDTH) -> str:
    """The table as plain lines that are as wide as it needs to be, up to `width` columns."""
    page = Console(file=io.StringIO(), width=width)
    with page.capture() as text:
        page.print(table)
    return "".join(f"{line.rstrip()}\n" for line in text.get().splitlines() if line.strip())


def score_table(summary: Summary) -> Table:
    grown = summary.grown
    table = Table("last env-step", box=box.SIMPLE_HEAD)
    for title in ("grown", *_titles(summary)):
        table.add_column(title, justify="right")
    flop = grown.figures["flop"]
    size, unit = next((pair for pair in FLOP_UNITS if flop >= pair[0]), FLOP_UNITS[-1])
    flop_form = ",.3g" if flop < 100 * size else ",.0f"
    less = [(control, differences(grown, control)) for control in summary.controls]
    for key, title, form in (*LOSS_ROWS, *SCORE_ROWS) if summary.perplexity else SCORE_ROWS:
        scale, form = (size, flop_form) if key.startswith("flop") else (1.0, form)
        cells = [format(grown.figures[key] / scale, form)]
        for control, texts in less:
            cells += [format(control.figures[key] / scale, form), texts.get(key, "")]
        table.add_row(title.format(unit=unit), *cells)
    return table


def _titles(summary: Summary) -> list[str]:
    """The titles of the columns of controls."""
    return [
        title
        for control in summary.controls
        for title in (control_text(control.name), "difference")
    ]


def configuration_table(summary: Summary) -> Table:
    """A row for each configuration of hosts, the highest test accuracy first, MOST_ROWS at most."""
    grown = summary.grown
    table = Table("settings by env", box=box.SIMPLE_HEAD)
    for title in ("hosts", "test accuracy (%)", *_titles(summary), "parameters"):
        table.add_column(title, justify="right")
    parts = [(configuration, grown.part(configuration)) for configuration in grown.configurations]
    parts.sort(key=lambda part: -part[1].figures["test_accuracy"])
    for configuration, score in parts[:MOST_ROWS]:
        cells = [f"{score.figures['test_accuracy']:.2f}"]
        for control in summary.controls:
            beside = control.part(configuration)
            lead = compare(score, beside).test_accuracy
            cells += [f"{beside.figures['test_accuracy']:.2f}", lead.text()]
        name = " ".join(
            f"{setting}={value if isinstance(value, str) else format(value, '.4g')}"
            for setting, value in configuration
        )
        count = str(len(score.flat("parameters")))
        table.add_row(name, count, *cells, f"{score.figures['size']:,.0f}")
    return table


def differences(grown: HostScore, control: HostScore) -> dict[str, str]:
    """The last cells of the table, by what their rows show."""
    comparison = compare(grown, control)
    less = {name: figure - control.figures[name] for name, figure in grown.figures.items()}
    both = [score.figures["flop_with_validation"] for score in (grown, control)]
    return {
        "test_loss": comparison.test_loss.text("+z.4f"),
        "perplexity": f"x {exponential(less['test_loss']):.3g}",
        "test_accuracy": comparison.test_accuracy.text(),
        "best": format(less["best"], "+.2f"),
        "net": comparison.net.text(),
        "size": f"x {comparison.parameters:.2f}",
        "flop": f"x {comparison.train_flop:.2f}",
        "flop_with_validation": f"x {both[0] / both[1]:.2f}",
    }


def verdict_lines(summary: Summary) -> list[str]:
    """Whether growth paid, and what the numbers of the table were taken on."""
    count = len(summary.grown.episodes)
    rounds = f"{count} episodes (the last rounds)" if count > 1 else "1 episode (the last round)"
    samples = summary.samples
    seen = f"V={summary.speed.val_samples} of {summary.validation_images:,} validation {samples}"
    tested = f"each on all {summary.test_images:,} test {samples}"
    if DATA_NAME in summary.grown.episodes[-1].settings:
        seen = f"V={summary.speed.val_samples} validation {samples} of its data set"
        tested = f"each on all test {samples} of its data set"
    lines = [
        f"measured {summary.envs} hosts x {rounds}, {tested}",
        f"chosen   best host by accuracy on {seen}, which rewards see too",
    ]
    sentences = []
    for control in summary.controls:
        comparison = compare(summary.grown, control)
        interval = "none, as there is but one pair of hosts to compare"
        if comparison.pairs > 1:
            source = source_words("hosts", comparison.sampled and samples)
            over = f"{comparison.pairs} paired differences, over {source}"
            interval = f"{CONFIDENCE_LEVEL:.0%} t interval of {over}"
            if summary.perplexity and comparison.sampled:
                interval += "; of the loss over hosts alone"
        work = f"{control.env_steps} env-steps on the same random seed, data order and {samples}"
        lines += [f"control  {control_text(control.name)}: {work}", f"interval {interval}"]
        if comparison.left_out:
            lines.append(
                f"left out {comparison.left_out} pairs with an accuracy that is not finite"
            )
        sentences.append(verdict(comparison, control.name, equal=summary.equal))
    return sentences + list(dict.fromkeys(lines))  # most intervals are of the same kind


def fact_lines(summary: Summary) -> list[str]:
    """Seeds, rollbacks if any, reward, trade-off, speed with the work of an env-step, time."""
    seeds = summary.seeds
    speed = summary.speed
    front = f"{summary.pareto.front_size} episodes that no other beats"
    env_steps = f"{speed.env_steps} env-steps"
    if summary.rounds_before:
        local = speed.env_steps - summary.env_steps_before
        env_steps = f"{local} of {env_steps} (the others before the run was resumed)"
    if summary.controls:
        played = sum(control.env_steps for control in summary.controls)
        env_steps += f" and {played} of the control{'s' * (len(summary.controls) > 1)}"
    samples = f"{speed.train_samples} training and {speed.val_samples} validation {summary.samples}"
    work = f"{summary.envs} hosts, each with {samples}, validated {speed.alpha_rows:.1f} times"
    return [
        f"seeds    {seeds['germinated']} germinated, {seeds['blended']} blended, "
        f"{seeds['fossilized']} fossilized, {seeds['pruned']} pruned",
        *[f"governor {summary.rollbacks} rollbacks to a snapshot"] * bool(summary.rollbacks),
        f"reward   {summary.reward:+.2f} per episode in the last of {summary.rounds} rounds",
        f"outcome  {front} in accuracy, stability and size (the Pareto front)",
        f"speed    {speed.eps:.1f} env-steps/s; {work}",
        f"time     {duration(summary.wall_seconds)} for {env_steps}",
    ]
