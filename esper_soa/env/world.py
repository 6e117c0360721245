"""N envs with weights and data: fresh hosts when a round starts, and the work of env-steps.

Everything random is keyed by seed, round, env and env-step, so a round can be played again, by
another policy, on the same hosts and data. `reduction` says which envs of a run a process has.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from esper_soa.config.env import ENV_SETTINGS, EPISODE_LENGTH, EarlyStopConfig
from esper_soa.config.nets import lr_factor
from esper_soa.config.ranges import EnvDraw, EnvNumber, EnvSettings
from esper_soa.env.reduction import ALL_ENVS, Reduction
from esper_soa.env.reward import episode_lengths, final_rents
from esper_soa.env.step import EAGER, EnvRules, StepData, StepKernels, initial_state
from esper_soa.env.topology import Topology, state_with_topology
from esper_soa.nets.data import batches, orders
from esper_soa.nets.data.image_set import DatasetEntry, ImageSet, sets_of
from esper_soa.nets.precision import add_loss_scales_, reset_loss_scales_
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.snapshot import add_snapshot_, copy_envs_, snapshot_where_
from esper_soa.nets.setup import Setup, lay_out
from esper_soa.nets.sgd import rules_of
from esper_soa.state import STATE_FLOAT, EnvState
from esper_soa.system import streams
from esper_soa.system.errors import check
from esper_soa.system.transfers import move
from esper_soa.vocabulary import HEADS, Stage

# Numbers of heads, env-step after env-step, that a stream draws side by side; those of further
# heads come from far behind them, so that a new head moves no number of the others.
HEADS_TOGETHER = 8
FURTHER_HEADS = 2**40


class World:
    """Memory and data of N envs; `start_round` makes their hosts, `work` hands out data."""

    def __init__(
        self,
        rules: EnvRules,
        data: batches.BatchSource,
        seed: int,
        kernels: StepKernels = EAGER,
        reduction: Reduction = ALL_ENVS,
    ) -> None:
        if isinstance(data, ImageSet) and data.sets:
            data = replace(data, first_env=reduction.first_env)
        setup = rules.setup
        self.data = data
        self.seed = seed
        self.kernels = kernels
        self.reduction = reduction
        self.lengths: Sequence[int] = ()  # see `lasting`
        setup = _fitted(setup, data)
        self._check_data(setup)
        all_envs = reduction.all_envs(setup.num_envs)
        self.split: orders.Split | None = None
        if setup.data.split:
            self.split = share = orders.split_sizes(
                data, setup.batch_size, all_envs, accumulate=setup.accumulate
            )
            setup = setup._replace(train_samples=share.train_samples, val_samples=share.val_samples)
        self.rules = rules._replace(setup=setup)
        self.device = data.train_labels.device
        self.flop = rules.reward.flop
        self.envs = reduction.first_env + torch.arange(setup.num_envs, device=self.device)
        heads = torch.arange(len(HEADS), device=self.device)
        self.heads = heads // HEADS_TOGETHER * FURTHER_HEADS + heads % HEADS_TOGETHER
        self.weights = pools.allocate(
            setup.shape,
            setup.num_envs,
            self.device,
            dtype=torch.float32,
            optimizer=setup.task.optimizer,
        )
        add_snapshot_(self.weights)
        if setup.precision == torch.float16:
            add_loss_scales_(self.weights)
        # places of the validation samples, int64 [V], or of each env, [N, V]; -1 where it has fewer
        self.validation_order = self._validation_order()
        self.validation = data.validation(self.validation_order, self.dtype)
        self.first = self._first_samples()
        self._enter_round(0)

    def take_compiled(self, step: int) -> None:
        """Go on in kernels that were compiled beside the run, once they are there: from env-step
        `step` (from 0) of this round on.
        """
        kernels = self.kernels.awaited and self.kernels.awaited()
        if kernels:
            since = f"from env-step {step + 1} of round {self.round + 1} on"
            self.kernels = self.kernels._replace(
                record_and_observe=kernels.record_and_observe,
                apply_action=kernels.apply_action,
                reason=f"{kernels.reason}, {since}",
                awaited=None,
            )

    def _check_data(self, setup: Setup) -> None:
        """Raise SettingError where hosts cannot take a data set, or it has too few samples."""
        sources = list(dict.fromkeys(entry.source for entry in sets_of(self.data)))
        for source in sources:
            batches.check_inputs(source, setup.task.host, setup.shape.input_shape)
            batches.check_classes(source, setup.shape.num_classes, len(sources) == 1)
            if not setup.data.split:
                batches.check_work(source, setup.train_samples, setup.val_samples)

    def lasting(self, lengths: Sequence[int]) -> "World":
        """A world on the same weights and data, whose episodes have these lengths and do not end
        earlier.

        lengths: env-steps, of every env of the run. Kernels of the env state are not compiled.
        """
        rules = self.rules
        steps = max(lengths)
        lasting = copy(self)
        lasting.kernels = EAGER
        lasting.lengths = lengths
        lasting.rules = rules._replace(
            setup=rules.setup._replace(steps=steps),
            reward=rules.reward.lasting(steps),
            early_stop=EarlyStopConfig(length=steps),
            kernel_settings=tuple(dict.fromkeys((*rules.kernel_settings, EPISODE_LENGTH))),
        )
        lasting._enter_round(self.round)
        return lasting

    @property
    def setup(self) -> Setup:
        """Networks, work and layout; samples of an env-step are those of the split where it is."""
        return self.rules.setup

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.weights["host", "params"].dtype

    def start_round(self, number: int, topology: Topology | None = None) -> EnvState:
        """Fresh hosts, a snapshot of them and a fresh state for round `number`, from 0.

        With a `topology`, of all envs of the run, its seeds are there from the start, and in the
        snapshot; the first env-step gives them the same weights again.
        """
        self._enter_round(number)
        pools.initialise_hosts_(self.weights, self.setup.shape, self.keys(streams.HOST_INIT))
        reset_loss_scales_(self.weights)
        state = initial_state(self.rules, self.setup.num_envs, self.device)
        if topology is not None:
            state = state_with_topology(state, Topology(*map(self.reduction.rows_here, topology)))
            seeds = pools.slot_seeds(state.slots, state.ramp, ablate_fossils=False)
            self.rules.engine.claim_(self.setup, self.weights, seeds, keys=self.seed_keys(0))
        all_envs = torch.ones_like(self.envs, dtype=torch.bool)
        fossil = state.slots.stage == Stage.FOSSILIZED
        snapshot_where_(self.weights, self.setup.shape, all_envs, fossil=fossil, rising=fossil)
        return state

    def _enter_round(self, number: int) -> None:
        self.round = number
        self._draw_as(self.envs)
        rules = self.rules
        all_envs = self.reduction.all_envs(self.setup.num_envs)
        reward = rules.reward.config
        hosts = (self.setup.task, self.setup.data, reward, reward.loss)
        parts = (*hosts, rules.early_stop, rules.gates, rules.lifecycle)
        settings = {part.path + name: value for part in parts for name, value in vars(part).items()}
        names = {*rules.differing, *rules.kernel_settings}
        values = values_of_envs(settings, names, self.seed, number=number, num_envs=all_envs)
        if self.lengths:
            values[EPISODE_LENGTH] = torch.tensor(self.lengths, dtype=STATE_FLOAT)
        # by name of what differs, the value of every env of the run in this round
        self.settings: EnvSettings = {
            name: ENV_SETTINGS[name].named(settings[name], values[name].tolist())
            for name in rules.differing
        }
        self.num_steps = rules.max_steps  # of the episodes, where these do not differ
        factors: list[Tensor] = []
        if rules.early_stop.length != 0:
            steps = episode_lengths(values[EPISODE_LENGTH], rules.max_steps)
            different, places = steps.unique(return_inverse=True)
            self.num_steps = different[0].item()
            if len(different) > 1 and self.setup.task.lr_schedule != "constant":
                table = self._rate_factors(different.tolist())
                factors = [table, self.reduction.rows_here(places)]
        rows = map(self.reduction.rows_here, values.values())
        here = move([*rows, *factors], self.device)
        self.values = dict(zip(values, here, strict=False))
        self.factors = here[len(values) :]
        self.kernel_values = tuple(self.values[name] for name in rules.kernel_settings)

    def _draw_as(self, envs: Tensor) -> None:
        """From here on the rows have the data order and the draws of these envs of the run."""
        self.drawn_as = envs
        self._keys = dict[int, Tensor]()
        all_envs = self.reduction.all_envs(self.setup.num_envs)
        keys = self.keys(streams.DATA_ORDER)
        self.orders = [
            orders.SampleOrders(keys[envs], len(entry.source.train_labels), all_envs)
            for envs, entry in self.sets
        ]

    def copy_envs_(self, source: Tensor, same_draws: bool) -> None:
        """Give every env i the weights and settings of env source[i] (int64 [N], rows here), and
        with `same_draws` its data order and draws too, until the round ends.

        The host reads `source` where settings differ by env. Raises SettingError where envs do not
        have the whole data set, or not the same.
        """
        self._check_shared_data()
        is_copy = source != torch.arange(len(source), device=source.device)
        copy_envs_(self.weights, self.weights, source, where=is_copy)
        self._take_settings(self, source)
        if self.settings:
            first = self.reduction.first_env
            envs = [*range(self.reduction.all_envs(self.setup.num_envs))]
            envs[first : first + len(source)] = [first + row for row in source.tolist()]
            self.settings = {
                name: [numbers[env] for env in envs] for name, numbers in self.settings.items()
            }
        if same_draws:
            self._take_draws(self, source)

    def _check_shared_data(self) -> None:
        """Raise SettingError where an env cannot train on the samples of any other."""
        remedy = "Copied envs train on the samples of their source."
        check(not self.setup.data.split, "data.split", True, allowed="False", remedy=remedy)
        names = self.setup.data.name
        check(len(sets_of(self.data)) == 1, "data.name", names, allowed="one set", remedy=remedy)

    def _take_settings(self, origin: "World", source: Tensor) -> None:
        self.values = {name: values[source] for name, values in origin.values.items()}
        self.kernel_values = tuple(self.values[name] for name in self.rules.kernel_settings)
        self.factors = list(origin.factors)
        if origin.factors:
            table, places = origin.factors
            self.factors = [table, places[source]]

    def _take_draws(self, origin: "World", source: Tensor) -> None:
        self.drawn_as = origin.drawn_as[source]
        self._keys = {}
        self.orders = [order.rows(source) for order in origin.orders]

    def beside(self, rows: int) -> "World":
        """A world on the same data, with weights for so many envs, each of which is what `follow_`
        makes of it; their episodes end early where their state says so.

        Kernels of the env state are not compiled. Raises SettingError where envs do not have the
        whole data set, or not the same.
        """
        self._check_shared_data()
        first = torch.zeros(rows, dtype=torch.int64, device=self.device)
        beside = copy(self)
        beside.kernels = EAGER
        beside.reduction = ALL_ENVS
        beside.settings = {}
        beside.rules = self.rules._replace(
            setup=lay_out(self.setup, rows), early_stop=EarlyStopConfig(length=self.rules.max_steps)
        )
        beside.envs = self.envs[first]
        beside.weights = self.weights[first]
        beside.follow_(self, first)
        return beside

    def follow_(self, origin: "World", source: Tensor) -> None:
        """From here on every env i has the settings, the data order and the draws that env
        source[i] (int64 [N]) of `origin` has in its round.
        """
        self.round = origin.round
        self._take_settings(origin, source)
        self._take_draws(origin, source)

    def copy(self) -> "World":
        """A world that stands where this one does, with weights of its own, on the same data."""
        twin = copy(self)
        twin.weights = self.weights.clone()
        steps = self.kernels.steps
        twin.kernels = self.kernels._replace(steps=None if steps is None else steps.empty())
        twin._draw_as(self.drawn_as)
        return twin

    def _rate_factors(self, lengths: Sequence[int]) -> Tensor:
        """Factors of the learning rates at all env-steps of episodes so long, float64 [T, .]."""
        schedule = self.setup.task.lr_schedule
        steps = range(self.rules.max_steps)
        factors = [[lr_factor(schedule, step, length) for length in lengths] for step in steps]
        return torch.tensor(factors, dtype=STATE_FLOAT)

    def _rate_factor(self, step: int) -> float | Tensor:
        """Factor of the learning rates, float64 [N, 1] where episodes differ in length."""
        if self.factors:
            table, places = self.factors
            return table[step][places, None]
        return lr_factor(self.setup.task.lr_schedule, step, self.num_steps)

    def keys(self, purpose: int) -> Tensor:
        """int64 [N]: one random stream per env for `purpose` in this round; see `copy_envs_`."""
        if purpose not in self._keys:
            self._keys[purpose] = streams.stream_keys(
                self.seed, purpose, (self.round,), envs=self.drawn_as
            )
        return self._keys[purpose]

    def work(self, step: int) -> StepData:
        """The data of env-step `step` (from 0) of this round."""
        setup = self.setup
        start = step * setup.train_samples
        keys = self.keys(streams.AUGMENTATION)
        order = self._training_order(step)
        noise = self._label_noise()
        draw = batches.Draw(
            order,
            keys,
            start,
            batch_size=setup.batch_size,
            augment=self.setup.data.augment,
            label_noise=noise,
        )
        training = self.data.training(draw, self.dtype)
        moves = rules_of(setup.task, self._rate_factor(step), self.values)
        count = setup.train_samples // setup.batch_size
        return StepData(
            training, count, self.validation, seed_keys=self.seed_keys(step), rules=moves
        )

    def seed_keys(self, step: int) -> Tensor:
        """int64 [N]: the streams that seeds which are new at env-step `step` draw weights from."""
        return streams.fold(self.keys(streams.SEED_INIT), step)

    def noise(self, step: int) -> Tensor:
        """float32 [N, 8] in [0, 1): what the policy samples its heads with at env-step `step`."""
        counters = self.heads + step * HEADS_TOGETHER
        return streams.uniform(self.keys(streams.POLICY_SAMPLE)[:, None], counters)

    def final_rents(
        self, parameters: Sequence[float], train_flop: Sequence[float], settings: EnvSettings
    ) -> list[float]:
        """Rents of all hosts of the run at the end, see reward.py; settings: that differ by env."""
        reward = self.rules.reward
        lengths = settings.get(EPISODE_LENGTH) or [self.rules.early_stop.number("length")]
        steps = episode_lengths(torch.tensor(lengths, dtype=STATE_FLOAT), self.rules.max_steps)
        host = self.setup.train_samples * max(1.0, self.flop.host) * steps.to(STATE_FLOAT)
        ratios = torch.tensor(train_flop, dtype=STATE_FLOAT) / host
        return final_rents(
            parameters, reward.counts.host, reward.config, settings=settings, flop=ratios
        )

    def _training_order(self, step: int) -> Tensor:
        setup = self.setup
        if self.split is None:
            share = self._own("share")
            parts = []
            for (envs, entry), order in zip(self.sets, self.orders, strict=True):
                part = order.draw(step * setup.train_samples, setup.train_samples)
                if not isinstance(share, float) or share != 1:
                    own = share if isinstance(share, float) else share[envs]
                    size = len(entry.source.train_labels)
                    part = orders.members_of_share(part, own, self.seed, size=size)
                parts.append(part)
            drawn = self.join(parts)
            return drawn if self.first is None else drawn + self.first
        first = torch.zeros_like(self.envs[:1])
        shared = streams.stream_keys(self.seed, streams.DATA_ORDER, (self.round,), envs=first)
        num_train = len(self.data.train_labels)
        return self.reduction.rows_here(
            orders.split_training_order(shared, num_train, step, split=self.split)
        )

    def _label_noise(self) -> batches.LabelNoise | None:
        share = self._own("label_noise")
        if isinstance(share, float):
            if share == 0:
                return None
            share = torch.full(self.envs.shape, share, dtype=STATE_FLOAT, device=self.device)
        keys = self.keys(streams.LABEL_NOISE)
        return batches.LabelNoise(share, keys, self.setup.shape.num_classes, first=self.first)

    def _own(self, name: str) -> float | Tensor:
        """A setting of the data: the number of all envs, or float64 [N]."""
        own = self.values.get(self.setup.data.path + name)
        return self.setup.data.number(name) if own is None else own

    @property
    def sets(self) -> list[tuple[slice, DatasetEntry]]:
        """The data sets that envs here take, each behind the rows of its envs."""
        every = sets_of(self.data)
        firsts = [(place - self.reduction.first_env) % len(every) for place in range(len(every))]
        pairs = zip(firsts, every, strict=True)
        num_envs = self.setup.num_envs
        return [(slice(row, None, len(every)), entry) for row, entry in pairs if row < num_envs]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows [N, .] of the envs here from those, or the one, of each of `sets`; one as it is."""
        if len(parts) == 1:
            return parts[0]
        rows = parts[0].new_empty(self.setup.num_envs, parts[0].shape[-1])
        for (envs, _), part in zip(self.sets, parts, strict=True):
            rows[envs] = part
        return rows

    def _first_samples(self) -> Tensor | None:
        """int64 [N, 1], where the training samples of each env begin; None of a single data set."""
        if len(sets_of(self.data)) == 1:
            return None
        starts = [torch.full((1,), entry.train, device=self.device) for _, entry in self.sets]
        return self.join(starts).view(-1, 1)

    def _validation_order(self) -> Tensor:
        if self.split is None:
            sets = [entry for _, entry in self.sets]
            drawn = [
                orders.validation_order(
                    len(entry.source.val_labels),
                    self.setup.val_samples,
                    self.seed,
                    device=self.device,
                )
                for entry in sets
            ]
            return self.join(
                [order + entry.validation for order, entry in zip(drawn, sets, strict=True)]
            )
        num_val = len(self.data.val_labels)
        return self.reduction.rows_here(
            orders.split_validation_order(num_val, self.split, self.device)
        )


def values_of_envs(
    settings: Mapping[str, EnvNumber], names: Iterable[str], seed: int, number: int, num_envs: int
) -> dict[str, Tensor]:
    """Values float64 [N] of the settings `names` in round `number`, on the host.

    settings: by dotted names; see `numbers` of their rules. A draw follows from seed, round, env
    and name, and nothing else.
    """
    envs = torch.arange(num_envs)
    keys = streams.stream_keys(seed, streams.ENV_SETTINGS, (number,), envs=envs)
    values = {}
    for name in names:
        numbers = ENV_SETTINGS[name].numbers(settings[name])
        if isinstance(numbers, EnvDraw):
            name_keys = streams.fold(keys, crc32(name.encode()))
            shares = streams.uniform(name_keys, torch.zeros_like(name_keys), STATE_FLOAT).tolist()
            # each by itself, as a vector of powers may round by where it is cut
            drawn = [numbers.at(share) for share in shares]
            values[name] = torch.tensor(drawn, dtype=STATE_FLOAT)
        else:
            values[name] = torch.tensor(numbers, dtype=STATE_FLOAT)[envs % len(numbers)]
    return values


def _fitted(setup: Setup, data: batches.BatchSource) -> Setup:
    """The setup with as many samples per env-step as a small set of a user's images has."""
    sources = [entry.source for entry in sets_of(data)]
    is_users = (isinstance(x, ImageSet) and x.num_classes is not None for x in sources)
    if setup.data.split or not all(is_users):
        return setup
    step = setup.batch_size * setup.accumulate
    train = min(setup.train_samples, *(len(x.train_labels) // step * step or step for x in sources))
    val = min(setup.val_samples, *(len(source.val_labels) for source in sources))
    return setup._replace(train_samples=train, val_samples=val)
