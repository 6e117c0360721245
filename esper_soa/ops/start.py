"""Where a run with given settings takes place and begins: asked by the command line and by `esper_soa.train`.

Needs no torch.
"""

from esper_soa.agent.config import SCRATCH
from esper_soa.config import TrainConfig
from esper_soa.ops.rundir import RunFolder, Start, open_run_folder, resume_start
from esper_soa.ops.shipped import find_policy


def folder_for(settings: TrainConfig, asked: str) -> RunFolder:
    """The folder of a run, made where it is new: `asked`, or one of its name and the time; that of what it resumes.

    Raises UserError where there can be none, before it is made where a policy to start from leads nowhere.
    """
    if settings.resume:
        return resume_start(settings.resume, asked, settings.name).folder
    if settings.policy.name == "ppo" and settings.policy.init != SCRATCH:
        find_policy(settings.policy.init)
    return open_run_folder(asked, settings.name)


def find_start(settings: TrainConfig, folder: RunFolder) -> Start:
    """Where the run in `folder` begins; asked for once nobody else can write there."""
    if not settings.resume:
        return Start(open_run_folder(str(folder.path), settings.name), None)
    if settings.resume == "auto":
        return resume_start("auto", str(folder.path), settings.name)
    return resume_start(settings.resume, "", settings.name)
