"""Where a run with given settings takes place and begins, and whether it ended. Needs no torch."""

import json
from dataclasses import asdict

from esper_soa.agent.config import SCRATCH
from esper_soa.config import TrainConfig, flat_settings
from esper_soa.ops.found_runs import read_settings
from esper_soa.ops.rundir import RunFolder, Start, open_run_folder, resume_start
from esper_soa.ops.shipped import find_policy
from esper_soa.ops.torchrun import launched_folder, place


def folder_for(settings: TrainConfig, asked: str) -> RunFolder:
    """The folder of a run, made where it is new: `asked`, or one of its name and the time; that of
    what it resumes.

    Where torchrun has started the ranks of the run, the id of its launch stands for the time.
    Raises UserError where there can be none, before it is made where a policy to start from leads
    nowhere.
    """
    if settings.resume:
        return resume_start(settings.resume, asked, settings.name).folder
    if settings.policy.name == "ppo" and settings.policy.init != SCRATCH:
        find_policy(settings.policy.init)
    here = place()
    if here is not None:
        return launched_folder(here, asked, settings.name)
    return open_run_folder(asked, settings.name)


def find_start(settings: TrainConfig, folder: RunFolder) -> Start:
    """Where the run in `folder` begins; asked for once nobody else can write there.

    Where a launcher has started its ranks, at the newest checkpoint that there is: it may have
    started them again.
    """
    here = place()
    restarted = here is not None and (here.restarts or not settings.resume)
    if restarted or settings.resume == "auto":
        return resume_start("auto", str(folder.path), settings.name)
    if settings.resume:
        return resume_start(settings.resume, "", settings.name)
    return Start(open_run_folder(str(folder.path), settings.name), None)


def finished_accuracy(folder: RunFolder, settings: TrainConfig) -> float | None:
    """The final accuracy in `folder`, if the run was of these settings and has ended."""
    if not folder.summary.is_file() or not goes_on_in(folder, settings):
        return None
    try:
        accuracy = json.loads(folder.summary.read_text(encoding="utf-8"))["grown"]["accuracy"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return accuracy if isinstance(accuracy, float) else None


def goes_on_in(folder: RunFolder, settings: TrainConfig) -> bool:
    """Whether `settings` ask to go on with the run in `folder`, and it was of the same."""
    if settings.resume != "auto":
        return False
    there = read_settings(folder.config)
    place = {"resume": "", "run_dir": ""}
    asked = flat_settings(asdict(settings))
    return bool(there) and there | place == asked | place
