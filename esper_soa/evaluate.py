"""The Hydra entry of evaluations: `python -m esper_soa.evaluate checkpoint=RUN policies=[ppo,heuristic,wait]`.

Composes and checks the settings, makes the folder of the results and hands both to esper_soa/evaluation.py. Exit
status as that of training.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from esper_soa.config import evaluation_from, register_schema
from esper_soa.errors import OutOfRoomError, UserError
from esper_soa.ops.rundir import find_checkpoint, open_run_folder, write_config
from esper_soa.train import config_dir

register_schema()


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="evaluate")
def main(composed: DictConfig) -> None:
    """Run one evaluation."""
    try:
        settings = evaluation_from(composed)
        find_checkpoint(settings.checkpoint, "checkpoint")  # refuses what leads nowhere before a folder is made
        folder = open_run_folder(settings.run_dir, settings.name)
        write_config(folder, OmegaConf.to_yaml(composed, resolve=True), list(HydraConfig.get().overrides.task))
        # torch takes seconds to import: nothing before this line may need it, so that --help and --cfg stay quick.
        from esper_soa.evaluation import evaluate

        evaluate(settings, folder)
    except (UserError, OutOfRoomError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
