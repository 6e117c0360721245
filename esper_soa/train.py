"""The Hydra entry: `python -m esper_soa.train +experiment=cifar_3seed`, or `esper-train`.

Composes and checks the settings, makes the run folder and hands both to the trainer. Exit status: 0 done, 1 a failure
while running or a mistake that Hydra found, 2 a mistake that we found, 130 interrupted, 143 terminated.
"""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from esper_soa.config import TrainConfig, register_schema, settings_from, settings_yaml
from esper_soa.errors import OutOfRoomError, UserError
from esper_soa.ops.interrupt import Interrupted
from esper_soa.ops.rundir import Start, open_run_folder, resume_start, write_config


def config_dir() -> str:
    """The folder of the configuration files: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "configs"
    return str(packaged if packaged.is_dir() else package.parent / "configs")


def find_start(settings: TrainConfig) -> Start:
    """Where this job begins: in a folder of its own (numbered within a sweep's folder), or after a checkpoint."""
    context = HydraConfig.get()
    run_dir = settings.run_dir
    if context.mode == RunMode.MULTIRUN:
        run_dir = str(Path(run_dir or context.sweep.dir) / str(context.job.num))
        if settings.resume not in ("", "auto"):
            raise UserError(
                f"resume={settings.resume}: the jobs of a sweep cannot share a checkpoint; take resume=auto"
            )
    if settings.resume:
        return resume_start(settings.resume, run_dir, settings.name)
    return Start(open_run_folder(run_dir, settings.name), None)


register_schema()


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="train")
def main(composed: DictConfig) -> float:
    """Run one job; returns the final validation accuracy (percent), which is what sweepers maximise."""
    try:
        settings = settings_from(composed)
        start = find_start(settings)
        if start.checkpoint is None:  # else the trainer writes it, once the checkpoint is found to fit
            write_config(start.folder, settings_yaml(settings), list(HydraConfig.get().overrides.task))
        # torch takes seconds to import: nothing before this line may need it, so that --help and --cfg stay quick.
        from esper_soa.trainer import run

        return run(settings, start.folder, start.checkpoint).accuracy
    except (UserError, OutOfRoomError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        sys.exit(interruption.status)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
