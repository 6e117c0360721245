"""A table of the envs of a run for a terminal, env-step by env-step: accuracy, reward, op, and what
is in the slots."""

import numpy as np
from rich import box
from rich.table import Table

from esper_soa.lab.telemetry.pack import unpack
from esper_soa.lab.telemetry.rows import Legend, RoundRecord
from esper_soa.lab.telemetry.schema import EARLY_ENDINGS
from esper_soa.vocabulary import LIVE_STAGES, OP_NAMES, STAGE_NAMES

MAX_SHOWN_ENVS = 24  # rows, so that a terminal holds them


class EnvsTable:
    """Shows the newest env-step that it was given; a renderable of rich."""

    def __init__(self, legend: Legend) -> None:
        self._legend = legend
        # the newest env-step: round and step from 1, float64 [N, C] of lab/telemetry/pack.py
        self._latest: tuple[int, int, np.ndarray] | None = None

    def show(self, number: int, step: int, numbers: np.ndarray) -> None:
        """Take an env-step: round and env-step from 1, numbers float64 [N, C]."""
        self._latest = (number, step, numbers)

    def __rich__(self) -> Table:
        """Rows of the first MAX_SHOWN_ENVS envs; none before the first env-step."""
        table = Table(box=box.SIMPLE, title_justify="left", caption_justify="left")
        for heading in ("env", "accuracy %", "reward"):
            table.add_column(heading, justify="right")
        for heading in ("op", *self._legend.slots):
            table.add_column(heading)
        if self._latest is None:
            return table
        number, step, numbers = self._latest
        record = unpack(self._legend, number, np.array([step]), numbers=numbers[None])
        table.title = f"round {number}, env-step {step}"
        for env in range(min(len(numbers), MAX_SHOWN_ENVS)):
            slots = [self._slot(record, env, slot) for slot in range(len(self._legend.slots))]
            accuracy = f"{float(record.read('accuracy')[0, env]):.2f}"
            table.add_row(str(env), accuracy, *self._turn(record, env), *slots)
        hidden = len(numbers) - MAX_SHOWN_ENVS
        table.caption = f"and {hidden} more" if hidden > 0 else None
        return table

    @staticmethod
    def _turn(record: RoundRecord, env: int) -> tuple[str, str]:
        """Reward and op of an env; if its episode ended early no reward, and why it has."""
        if record.flag("over")[0, env]:
            return "", f"over: {EARLY_ENDINGS[int(record.code('ending')[0, env]) - 1]}"
        op = OP_NAMES[int(record.code("effective_op")[0, env])]
        return f"{float(record.read('reward')[0, env]):+.3f}", "" if op == "wait" else op

    def _slot(self, record: RoundRecord, env: int, slot: int) -> str:
        """A seed as blueprint, stage, alpha and contribution; nothing for an empty slot."""

        def read(name: str) -> float:
            return float(record.read(f"slot.{name}")[0, env, slot])

        stage = int(read("stage"))
        if stage not in LIVE_STAGES:
            return ""
        known = f" {read('contribution'):+.1f}" if read("measured") else ""
        blueprint = self._legend.blueprints[int(read("blueprint"))]
        return f"{blueprint} {STAGE_NAMES[stage]} {read('alpha'):.2f}{known}"
