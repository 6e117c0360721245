"""Env-steps of a run for the callbacks that ask for them, by way of the recorder. A run without
such a callback keeps its recorder as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from esper_soa.state import STATE_FLOAT, EnvState
from esper_soa.training.loop.callbacks import Callback, EnvStep, RunView
from esper_soa.training.loop.recorder import Facts, PassingRecorder, Recorder
from esper_soa.vocabulary import HEAD_NAMES

# The numbers [N] that callbacks get of an env-step, by name: where they are in Facts.
STEP_NUMBERS: Mapping[str, Callable[[Facts], Tensor]] = {
    "accuracy": attrgetter("observed.view.state.signals.val_accuracy"),
    "val_loss": attrgetter("observed.measured.val_loss"),
    "train_loss": attrgetter("observed.measured.train_loss"),
    "train_accuracy": attrgetter("observed.measured.train_accuracy"),
    "reward": attrgetter("result.terms.total"),
    "success": attrgetter("result.outcome.success"),
    "effective_op": attrgetter("result.outcome.effective_op"),
    "panic": attrgetter("observed.view.state.guard.panic"),
    "over": attrgetter("observed.view.state.ending.over"),
    **{head: attrgetter(f"decision.action.{head}") for head in HEAD_NAMES},
}


class StepRecorder(PassingRecorder):
    """Passes all on to another recorder, and the numbers of env-steps to callbacks."""

    def __init__(self, recorder: Recorder, run: RunView, callbacks: Sequence[Callback]) -> None:
        super().__init__(recorder)
        self._run = run
        self._callbacks = callbacks
        self._number = 0
        self._step = 0  # env-steps that have begun in this round

    def begin(self, number: int) -> None:
        self._number = number
        self._step = 0
        super().begin(number)

    def pack(self, facts: Facts) -> Tensor:
        """The numbers of callbacks, before those of the other recorder."""
        columns = [read(facts).to(STATE_FLOAT) for read in STEP_NUMBERS.values()]
        numbers = torch.stack(columns, 1)
        self._step += 1
        if any(callback.live for callback in self._callbacks):
            self._call(self._step, numbers.cpu().numpy(), facts.result.state)
        packed = self._recorder.pack(facts)
        return numbers if packed is None else torch.cat([numbers, packed], 1)

    def emit(self, step: int, numbers: np.ndarray) -> None:
        self._call(step, numbers[:, : len(STEP_NUMBERS)], None)
        if numbers.shape[1] > len(STEP_NUMBERS):
            self._recorder.emit(step, numbers[:, len(STEP_NUMBERS) :].copy())

    def _call(self, step: int, numbers: np.ndarray, state: EnvState | None) -> None:
        """Call those that ask for the state, or without one those that do not."""
        by_name = dict(zip(STEP_NUMBERS, numbers.T.copy(), strict=True))
        for callback in self._callbacks:
            if callback.live == (state is not None):
                env_step = EnvStep(self._number, step, numbers=by_name, state=state)
                callback.on_env_step(self._run, env_step)


def step_recorder(recorder: Recorder, run: RunView, callbacks: Sequence[Callback]) -> Recorder:
    """`recorder`, where callbacks ask for env-steps with these beside it."""
    asking = [
        callback for callback in callbacks if type(callback).on_env_step is not Callback.on_env_step
    ]
    if asking:
        recorder = StepRecorder(recorder, run, asking)
    for callback in callbacks:
        recorder = callback.watch(run, recorder)
    return recorder
