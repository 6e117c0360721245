"""Makes a policy that ships: trains it in stages, each from what the one before has learned; writes
weights and card.

    python -m benchmarks.ship NAME [--data-root DIR --into DIR --results FILE] [setting=value ...]

The stages are those of benchmarks/conf/ship/NAME.yaml, or of a file; settings on the command line
hold for every stage. A stage is a run in a folder of its own: one that has ended is not done again,
one that was cut off goes on. `--results` puts what an evaluation or a benchmark has printed into
the card; where nothing is left to train, weights and card are written anew.
"""

import argparse
import json
import shlex
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from benchmarks.processes import ROOT, train
from benchmarks.records import Line, markdown
from esper_soa.config.compose import compose_settings
from esper_soa.config.ranges import NAME_PATTERN
from esper_soa.config.settings import TrainConfig
from esper_soa.lab.run_folders import finished_accuracy
from esper_soa.system.errors import UserError, one_line
from esper_soa.system.files import write_text
from esper_soa.training.files.find_policy import POLICY_FOLDER, POLICY_SUFFIX
from esper_soa.training.files.policies import save_policy
from esper_soa.training.files.run_folder import RunFolder, find_checkpoint
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.results.progress import duration

PLANS = ROOT / "benchmarks" / "conf" / "ship"
# What stages get from here; the first has no policy.init.
PLACED = ("run_dir=", "resume=", "data.root=", "policy.init=")


@dataclass
class Stage:
    """A part of a plan."""

    name: str = MISSING  # of its folder
    settings: list[str] = MISSING  # as on the command line of esper_soa.train


@dataclass
class Plan:
    """How a policy is made."""

    name: str = MISSING
    purpose: str = MISSING  # what it is good for, in a sentence or two
    stages: list[Stage] = MISSING


class Job(NamedTuple):
    """A stage and the run that does it."""

    name: str  # of the stage
    given: list[str]  # settings of the plan and of the command line
    placed: list[str]  # settings that tell its place
    settings: TrainConfig
    folder: RunFolder
    done: bool


def read_plan(given: str) -> Plan:
    """The plan `given`: a name in benchmarks/conf/ship, or a file. Else UserError."""
    path = Path(given) if given.endswith(".yaml") else PLANS / f"{given}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PLANS.glob("*.yaml")))
        raise UserError(
            f"plan={one_line(given)}: there is no such plan. Give one of {known}, or a file *.yaml"
        )
    try:
        read = OmegaConf.merge(OmegaConf.structured(Plan(name=path.stem)), OmegaConf.load(path))
        plan = OmegaConf.to_object(read)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {one_line(error)}") from error
    assert isinstance(plan, Plan)
    names = {stage.name for stage in plan.stages if NAME_PATTERN.fullmatch(stage.name)}
    if not 0 < len(plan.stages) == len(names):
        raise UserError(f"{path}: the names of stages must be different and fit for folders")
    return plan


def jobs_of(plan: Plan, folder: Path, settings: Sequence[str], data_root: str = "") -> list[Job]:
    """The runs of all stages in `folder`, checked, with `settings` after those of every stage.

    data_root: the files of CIFAR-10, for the stages with data.name=cifar10. Raises UserError for
    settings that are wrong, and where a folder holds a stage that ended with others.
    """
    found: list[Job] = []
    for stage in plan.stages:
        given = [*stage.settings, *settings]
        place = RunFolder(folder / stage.name)
        for setting in given:
            if setting.lstrip("+").startswith(PLACED if found else PLACED[:3]):
                raise UserError(f"stage {stage.name}: {setting} is not for a plan to say")
        placed = [f"run_dir={_quoted(place.path)}", "resume=auto"]
        placed += [f"policy.init={_quoted(found[-1].folder.path)}"] if found else []
        try:
            cfg = compose_settings("", [*given, *placed])
            if data_root and cfg.data.name == "cifar10":
                placed.append(f"data.root={_quoted(Path(data_root).resolve())}")
                cfg = compose_settings("", [*given, *placed])
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error
        done = finished_accuracy(place, cfg) is not None
        if place.summary.exists() and not done:
            raise UserError(
                f"{place.path}: this stage has ended with other settings. Give another --folder"
            )
        found.append(Job(stage.name, given, placed, cfg, place, done))
    return found


def stage_facts(job: Job) -> dict:
    """What a stage was and came to, without anything about the place where it was done."""
    cfg = job.settings
    summary = json.loads(job.folder.summary.read_text(encoding="utf-8"))
    versions = json.loads(job.folder.versions.read_text(encoding="utf-8"))
    control = next(iter(summary["controls"]), {"validation_accuracy": None, "size": None})
    return {
        "name": job.name,
        "settings": job.given,
        "seed": cfg.seed,
        "rounds": cfg.rounds,
        "imitation_rounds": min(cfg.policy.imitation.rounds, cfg.rounds),
        "env_steps": cfg.rounds * cfg.envs * cfg.steps,
        "task": cfg.task.name,
        "slots": list(cfg.slots),
        "data": versions["data"]["name"],
        "data_identity": versions["data"]["identity"],
        "accuracy": summary["grown"]["validation_accuracy"],
        "parameters": summary["grown"]["size"],
        "control_accuracy": control["validation_accuracy"],
        "control_parameters": control["size"],
        "seconds": summary["speed"]["seconds"],
        "device": versions["device"],
        "commit": versions["git"] or "unknown",
        "python": versions["python"],
        "packages": versions["packages"],
    }


def facts_of(plan: Plan, jobs: list[Job], settings: Sequence[str]) -> dict:
    """What is known of a policy all of whose stages have ended."""
    stages = [stage_facts(job) for job in jobs]
    files = any(job.settings.data.root for job in jobs)
    given = [*(["--data-root FOLDER"] if files else []), *settings]
    ended = datetime.fromtimestamp(jobs[-1].folder.summary.stat().st_mtime, UTC)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "name": plan.name,
        "purpose": " ".join(plan.purpose.split()),
        "date": f"{ended:%Y-%m-%d}",
        "licence": project["license"],
        "command": " ".join(["python -m benchmarks.ship", plan.name, *given]),
        "rounds": sum(stage["rounds"] for stage in stages),
        "stages": stages,
        "tasks": list(dict.fromkeys(stage["task"] for stage in stages)),
        "data": list(dict.fromkeys(stage["data"] for stage in stages)),
    }


def stage_row(stage: dict) -> Line:
    """What a stage was and came to, a cell each."""
    accuracy, sizes = "", f"{stage['parameters']:,.0f}"
    if stage["control_accuracy"] is not None:
        accuracy = f"{stage['control_accuracy']:.2f}"
        sizes += f" / {stage['control_parameters']:,.0f}"
    return (
        stage["name"],
        stage["task"],
        stage["data"],
        str(stage["seed"]),
        f"{stage['rounds']} ({stage['imitation_rounds']})",
        f"{stage['env_steps']:,}",
        f"{duration(stage['seconds'])} on {stage['device']}",
        f"{stage['accuracy']:.2f}",
        accuracy,
        sizes,
    )


def card(facts: dict, results: Sequence[tuple[str, str]]) -> str:
    """The card of a policy, in Markdown; results are names of files and what they hold."""
    stages = facts["stages"]
    slots = dict.fromkeys(", ".join(stage["slots"]) for stage in stages)
    commits = dict.fromkeys(stage["commit"] for stage in stages)
    packages = stages[-1]["packages"].items()
    versions = [f"{name} {version}" for name, version in packages if version]
    heads = "stage | task | data | seed | rounds (of imitation) | env-steps | time"
    heads += " | accuracy, last round (%) | without growth (%) | parameters"
    lines = [
        f"# The policy `{facts['name']}`\n",
        f"{facts['purpose']}\n",
        f"- Start from it: `policy.init={facts['name']}`",
        f"- Made by `{facts['command']}`, {facts['rounds']} rounds, stages: {len(stages)}",
        f"- Hosts that it has met: {', '.join(facts['tasks'])}, slots {' and '.join(slots)}",
        f"- Date: {facts['date']}",
        f"- Licence: {facts['licence']}, that of the project; weights of its own training alone",
        f"- Commit: {', '.join(commits)}",
        f"- Versions of the last stage: Python {stages[-1]['python']}, {', '.join(versions)}",
        "\n## Stages\n",
        *markdown(heads, [stage_row(stage) for stage in stages]),
        "Accuracies are means over hosts at the end of the last round, on validation images.",
    ]
    for stage in stages:
        images = f"{stage['data']}, sha256 `{stage['data_identity']}`"
        given = shlex.join(stage["settings"])
        lines.append(f"\nSettings of {stage['name']}: `{given}`. Images: {images}.")
    for name, text in results:
        plain = text.strip() if name.endswith(".md") else f"```\n{text.rstrip()}\n```"
        lines.append(f"\n## Results: {name}\n\n{plain}")
    return "\n".join(lines) + "\n"


def write(facts: dict, run: RunFolder, into: Path, results: Sequence[tuple[str, str]]) -> Path:
    """Write the weights of the last run, and their card; returns the file of the weights."""
    into.mkdir(parents=True, exist_ok=True)
    target = into.resolve() / f"{facts['name']}{POLICY_SUFFIX}"
    last = find_checkpoint(str(run.path), "folder")
    save_policy(target, read_run(last, torch.device("cpu")), facts)
    write_text(target.with_suffix(".md"), card(facts, results))
    return target


def _quoted(path: Path) -> str:
    return QuotedString(str(path), Quote.single).with_quotes()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a policy in stages, and write it as one that ships."
    )
    add = parser.add_argument
    add("plan", help="a name in benchmarks/conf/ship, or a file *.yaml")
    words = "settings of every stage, as on the command line of esper_soa.train"
    add("settings", nargs="*", help=words)
    add("--folder", type=Path, help="of the runs; default: runs/ship/NAME")
    add("--data-root", default="", help="the files of CIFAR-10, for stages with data=cifar10")
    words = "folder of the policy; default: that of the package"
    add("--into", type=Path, default=POLICY_FOLDER, help=words)
    words = "text or Markdown for the card; may be given again"
    add("--results", type=Path, action="append", default=[], help=words)
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    """Say what will be done, train what is left, write."""
    options = parse()
    try:
        plan = read_plan(options.plan)
        folder = (options.folder or ROOT / "runs" / "ship" / plan.name).resolve()
        jobs = jobs_of(plan, folder, options.settings, options.data_root)
        results = [(path.name, path.read_text(encoding="utf-8")) for path in options.results]
        for job in jobs:
            print(
                f"{job.name}: {'done' if job.done else 'played'} in {job.folder.path}", flush=True
            )
            if not job.done:
                train(*job.given, *job.placed)
        facts = facts_of(plan, jobs, options.settings)
        target = write(facts, jobs[-1].folder, options.into, results)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{target} and {target.with_suffix('.md').name} are written")


if __name__ == "__main__":
    main()
