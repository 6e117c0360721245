"""TensorBoard: event files in the folder `tensorboard` of the run, one per process that has played
it: `tensorboard --logdir runs` shows all runs.
"""

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from esper_soa.lab.telemetry.tracking import TrackedRun


class TensorBoard:
    def __init__(self, tracked: TrackedRun) -> None:
        folder = str(tracked.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=tracked.last_round + 1)
        self.id = "tensorboard"  # all of the folder is one run there

    def log(self, number: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


open_tracker = TensorBoard
