"""The Hydra entry: `python -m esper_soa.train +experiment=cifar_3seed`, or `esper-train`.

Composes and checks the settings, makes the run folder and hands both to the trainer. Exit status: 0 done, 1 a failure
while running or a mistake that Hydra found, 2 a mistake that we found, 130 interrupted.
"""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from esper_soa.config import register_schema, settings_from
from esper_soa.errors import UserError
from esper_soa.ops.rundir import RunFolder, open_run_folder, open_sweep_folder, write_config


def config_dir() -> str:
    """The folder of the configuration files: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "configs"
    return str(packaged if packaged.is_dir() else package.parent / "configs")


def make_folder(run_dir: str, name: str) -> RunFolder:
    """The folder of this job: its own for a single run, a numbered one inside the sweep's folder for a sweep."""
    context = HydraConfig.get()
    if context.mode == RunMode.MULTIRUN:
        return open_sweep_folder(run_dir or context.sweep.dir, context.job.num)
    return open_run_folder(run_dir, name)


register_schema()


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="train")
def main(composed: DictConfig) -> float:
    """Run one job; returns the final validation accuracy (percent), which is what sweepers maximise."""
    try:
        settings = settings_from(composed)
        folder = make_folder(settings.run_dir, settings.name)
        write_config(folder, OmegaConf.to_yaml(composed, resolve=True), list(HydraConfig.get().overrides.task))
        # torch takes seconds to import: nothing before this line may need it, so that --help and --cfg stay quick.
        from esper_soa.trainer import run

        return run(settings, folder).accuracy
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
