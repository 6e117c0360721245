"""Measures what actions bring, as `effects.ops` asks: draws them, wakes a twin for each, and writes
the differences as the table `effects` of the run folder. The run itself never sees a twin.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.settings import EffectsConfig
from esper_soa.lab.effects.twins import ACCURACY, FLOP, LOSS, PARAMETERS, Twins, measured
from esper_soa.lab.telemetry.schema import SCHEMA_VERSION, TABLES
from esper_soa.lab.telemetry.table_files import (
    TABLES_FOLDER,
    Texts,
    Values,
    table_bytes,
    table_path,
)
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.state import STATE_FLOAT
from esper_soa.system import streams
from esper_soa.system.files import LOGGER, write_bytes
from esper_soa.system.plain_files import make_folder
from esper_soa.training.loop.callbacks import Callback, RunView
from esper_soa.training.loop.recorder import Facts, PassingRecorder, Recorder
from esper_soa.vocabulary import OP_NAMES

TABLE = "effects"
HORIZONS = (1, 5, 10)  # env-steps after an action at which its effect is measured, and at the last
END = "end"
DRAWS = 3  # numbers of an action: whether it is measured, by a placebo too, which weight moves


@dataclass
class MeasuredAction:
    """An action whose effect is measured."""

    env: int
    step: int  # from 1
    op: int
    slot: int
    blueprint: int
    alpha: float
    seed_age: int
    placebo: bool
    after: list[tuple[str, int, np.ndarray]] = field(default_factory=list)  # horizon, env-steps
    test: tuple[float, float] = (np.nan, np.nan)  # accuracy and loss, at the end


class Effects(Callback):
    """Gives every round an EffectRecorder."""

    def __init__(self) -> None:
        self.twins: Twins | None = None
        self.events = self.left_out = 0

    def on_run_start(self, run: RunView) -> None:
        self.twins = Twins(run.world, run.cfg.effects.rows)

    def watch(self, run: RunView, recorder: Recorder) -> Recorder:
        assert self.twins is not None
        return EffectRecorder(recorder, run, self)

    def on_round_end(self, run: RunView, metrics: object) -> None:
        words = f"{self.events} twins were measured"
        LOGGER.info("effects  %s, %d found no free row", words, self.left_out)


class EffectRecorder(PassingRecorder):
    """Plays the twins of a round, and writes what came out."""

    def __init__(self, recorder: Recorder, run: RunView, effects: Effects) -> None:
        super().__init__(recorder)
        assert effects.twins is not None
        self.twins: Twins = effects.twins
        self.effects = effects
        self.cfg: EffectsConfig = run.cfg.effects
        self.session = run.session
        self.world = run.world
        self.names = names_by_code(run.world.setup.shape.blueprints)
        self.number = self.step = self.left_out = 0
        self.rows: list[MeasuredAction | None] = []  # the event of every row; None: it is free
        self.ended = list[int]()  # rows whose episodes have ended
        self.done = list[MeasuredAction]()

    def begin(self, number: int) -> None:
        super().begin(number)
        self.number = number
        self.step = self.left_out = 0
        self.rows = [None] * self.cfg.rows
        self.ended = []
        self.done = []
        self.twins.begin_()

    def pack(self, facts: Facts) -> Tensor | None:
        packed = super().pack(facts)
        self.step += 1
        is_last = self.step == self.world.rules.max_steps
        numbers = self._numbers(facts)
        if self.playing:
            self._measure(facts, numbers, is_last)
        if not is_last:
            self._wake(facts, numbers)
            if self.playing:
                self.twins.act_(facts.decision.action)
        return packed

    @property
    def playing(self) -> list[int]:
        """Rows that are twins, whose episodes have not ended."""
        rows = enumerate(self.rows)
        return [row for row, event in rows if event is not None and row not in self.ended]

    def _numbers(self, facts: Facts) -> np.ndarray:
        """By env what is measured, whether its episode ends here, the drawn numbers, and its op."""
        view = facts.observed.view
        outcome = facts.result.outcome
        over = self.world.rules.ended(facts.result.state)
        over = torch.zeros_like(outcome.success) if over is None else over
        keys = streams.fold(self.world.keys(streams.EFFECTS), self.step)
        places = torch.arange(DRAWS, device=keys.device)
        columns = [
            measured(self.world, view.state),
            over[:, None],
            streams.uniform(keys[:, None], places, STATE_FLOAT),
            torch.where(outcome.success, outcome.effective_op, 0)[:, None],
            facts.decision.action.slot[:, None],
        ]
        return torch.cat([column.to(STATE_FLOAT) for column in columns], 1).cpu().numpy()

    def _measure(self, facts: Facts, numbers: np.ndarray, is_last: bool) -> None:
        """Note the differences that are due; twins that have come to their horizon sleep."""
        found = self.twins.observe_(self.step - 1).cpu().numpy()
        horizon = self.cfg.horizon
        over = numbers[:, 4] > 0
        free = np.zeros(len(self.rows), bool)
        ends = free.copy()
        for row in self.playing:
            event = self.rows[row]
            assert event is not None
            after = self.step - event.step
            ends[row] = is_last or over[event.env]
            is_due = after in HORIZONS and (horizon == END or after < int(horizon))
            difference = numbers[event.env, :4] - found[row]
            if is_due:
                event.after.append((str(after), after, difference))
            if str(after) == horizon or (horizon == END and ends[row]):
                event.after.append((horizon, after, difference))
            if str(after) == horizon or (horizon != END and ends[row]):
                self.done.append(event)
                self.rows[row] = None
                free[row] = True
            elif ends[row]:
                self.ended.append(row)
        device = self.world.device
        if ends.any():
            self.twins.end_(facts.observed, torch.tensor(ends & ~free, device=device))
        if free.any():
            self.twins.sleep_(torch.tensor(free, device=device))

    def _wake(self, facts: Facts, numbers: np.ndarray) -> None:
        """Make twins of the rows that sleep, for the actions that are drawn."""
        ops = [OP_NAMES.index(name) for name in self.cfg.ops]
        drawn = np.isin(numbers[:, 8], ops) & (numbers[:, 5] < self.cfg.share)
        drawn &= numbers[:, 4] == 0
        free = [row for row, event in enumerate(self.rows) if event is None]
        # so many placebos for a twin that they are their share of both
        beside = drawn & (numbers[:, 6] * (1 - self.cfg.placebo) < self.cfg.placebo)
        wanted = [(env, False) for env in np.flatnonzero(drawn).tolist()]
        wanted += [(env, True) for env in np.flatnonzero(beside).tolist()]
        self.left_out += max(0, len(wanted) - len(free))
        pairs = list(zip(free, wanted, strict=False))
        if not pairs:
            return
        before = facts.observed.view.state.slots
        after = facts.result.state.slots
        rows = len(self.rows)
        source = self.twins.source.clone()
        slots = torch.full((rows,), -1, dtype=torch.int64)
        fresh = torch.zeros(rows, dtype=torch.bool)
        for row, (env, placebo) in pairs:
            op, slot = (int(number) for number in numbers[env, 8:10])
            born = op == OP_NAMES.index("germinate")
            self.rows[row] = MeasuredAction(
                env,
                self.step,
                op=op,
                slot=slot,
                blueprint=int((after if born else before).blueprint[env, slot]),
                alpha=float(before.alpha[env, slot]),
                seed_age=int(before.seed_age[env, slot]),
                placebo=placebo,
            )
            source[row] = env
            slots[row] = -1 if placebo else slot
            fresh[row] = True
        device = self.world.device
        self.twins.wake_(facts.observed, source, slots.to(device), fresh=fresh.to(device))
        width = self.world.weights["host", "params"].shape[1]
        for row, (env, placebo) in pairs:
            if placebo:
                self.twins.move_(row, int(numbers[env, 7] * width))

    def end(self) -> None:
        super().end()
        where = torch.zeros(len(self.rows), dtype=torch.bool)
        where[self.ended] = True
        if self.ended:
            theirs, own = self.twins.test_(where.to(self.world.device))
            for row in self.ended:
                event = self.rows[row]
                assert event is not None
                accuracy, loss = (theirs - own)[:, row].tolist()
                event.test = accuracy, loss
                self.done.append(event)
        self.effects.events += len(self.done)
        self.effects.left_out += self.left_out
        self._write()

    def _write(self) -> None:
        """Write the table of the round."""
        rows = [
            (event, horizon, after, difference)
            for event in sorted(self.done, key=lambda event: (event.step, event.env))
            for horizon, after, difference in event.after
        ]
        events = [row[0] for row in rows]
        found = np.array([row[3] for row in rows]).reshape(-1, 4)
        found = np.where(np.isfinite(found), found, np.nan)
        # on test images alone where both were measured as the episode ended
        known = [row[1] == END and not np.isnan(row[3][ACCURACY]) for row in rows]
        test = np.array([event.test for event in events]).reshape(-1, 2)
        test = np.where(np.array(known, bool)[:, None], test, np.nan)
        horizons = [*map(str, HORIZONS), self.cfg.horizon]
        horizons = list(dict.fromkeys(horizons))
        shape = self.world.setup.shape
        columns: dict[str, Values] = {
            "round": np.full(len(rows), self.number),
            "step": np.array([event.step for event in events], int),
            "env": np.array([event.env for event in events], int),
            "op": Texts(np.array([event.op for event in events], int), OP_NAMES),
            "slot": Texts(
                np.array([event.slot for event in events], int), [spec.name for spec in shape.slots]
            ),
            "blueprint": Texts(np.array([event.blueprint for event in events], int), self.names),
            "alpha": np.array([event.alpha for event in events], float),
            "seed_age": np.array([event.seed_age for event in events], int),
            "placebo": np.array([event.placebo for event in events], bool),
            "horizon": Texts(np.array([horizons.index(row[1]) for row in rows], int), horizons),
            "after": np.array([row[2] for row in rows], int),
            "accuracy": found[:, ACCURACY],
            "loss": found[:, LOSS],
            "train_flop": found[:, FLOP],
            "parameters": found[:, PARAMETERS],
            "test_accuracy": test[:, 0],
            "test_loss": test[:, 1],
        }
        facts = {"table": TABLE, "schema": str(SCHEMA_VERSION), "complete": "true"}
        content = table_bytes(TABLES[TABLE], columns, facts | {"left_out": str(self.left_out)})
        path = table_path(self.session.folder.path, TABLE, self.number)
        with self.session.write_errors.attempt(TABLES_FOLDER):
            make_folder(path.parent)
            write_bytes(path, content)
