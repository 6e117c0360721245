"""The learning agent: a recurrent network that reads observations and gives an action per env.

`act` serves the rollout, one env-step of N envs at a time; `evaluate` goes over whole sequences for
the update and gives the same log-probabilities. Weights are shared by all slots.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_soa.agent import normalize
from esper_soa.agent.distribution import (
    choose,
    entropy,
    masked_log_probs,
    probabilities,
    side_by_side,
)
from esper_soa.agent.lstm import ResidualLSTM, lstm_parameters
from esper_soa.agent.normalize import Moments
from esper_soa.agent.products import Product, shared
from esper_soa.agent.protocol import Memory
from esper_soa.agent.rollout import Row
from esper_soa.agent.slots import SlotEncoder, SlotScores, place_table, slot_encoding, summary
from esper_soa.config.agent import PolicyConfig
from esper_soa.config.nets import SlotSpec
from esper_soa.env.legal import head_masks
from esper_soa.env.observation import NUM_ENV_FEATURES, NUM_SLOT_FEATURES
from esper_soa.env.reduction import ALL_ENVS, Reduction
from esper_soa.nets.graphs import StepCache, captured_call
from esper_soa.state import Action, Decision, Masks, Observation, View, chosen, unchecked
from esper_soa.vocabulary import CNN_BLUEPRINTS, HEAD_NAMES, HEADS, NUM_BLUEPRINTS, OP_NAMES

DROPOUT = 0.1  # of the contribution predictor, in updates only
EMBEDDING_STD = 0.02
# Weights with a row per blueprint.
BLUEPRINT_TABLES = ("embedding.weight", "heads.blueprint.4.weight", "heads.blueprint.4.bias")
GAIN = math.sqrt(2.0)  # of orthogonal initialisation
ACTION_GAIN = 0.01
VALUE_GAIN = 0.1


class Evaluation(NamedTuple):
    """Outputs of the network for a rollout [T, N]."""

    log_probs: Tensor  # [T, N, 8], of the recorded action
    entropies: Tensor  # [T, N, 8], in [0, 1]
    likeliest: Tensor  # bool [T, N, 8], the recorded choice is the one of highest probability
    value: Tensor  # [T, N]
    q: Tensor  # [T, N], of the recorded op; its gradient stops at the head
    contribution: Tensor  # [T, N, S], percent points; its gradient stops at the head
    hidden: Tensor  # [T, N, L, H], the memory after every env-step; without gradient
    cell: Tensor  # [P, N, L, H], its other half, after P stretches between restarts; no gradient


def _layers(*widths: int, norms: int = 0) -> nn.Sequential:
    """Linear layers with ReLU in between, and layer norm behind the first `norms` of them."""
    parts: list[nn.Module] = []
    for place, (num_inputs, num_outputs) in enumerate(pairwise(widths)):
        norm = [nn.LayerNorm(num_outputs)] if place < norms else []
        parts += [Product(num_inputs, num_outputs), *norm, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _value_head(num_inputs: int, hidden: int) -> nn.Sequential:
    return _layers(num_inputs, hidden // 2, hidden // 4, hidden // 8, 1, norms=2)


def _heads(hidden: int, slot: int, num_blueprints: int) -> nn.ModuleDict:
    """Action heads in HEADS order: op from the LSTM output, slot from that, the op and each slot,
    others with the slot, each conditioned on the earlier choices (an autoregressive factorisation).
    """
    heads = nn.ModuleDict()
    for head in HEADS:
        if head.name == "op":
            heads[head.name] = _layers(hidden, hidden // 2, len(head.names))
        elif head.name == "slot":
            heads[head.name] = SlotScores(hidden + len(OP_NAMES), slot, hidden // 2)
        elif head.name == "blueprint":
            heads[head.name] = _layers(hidden + slot, hidden, hidden // 2, num_blueprints)
        else:
            heads[head.name] = _layers(hidden + slot, hidden // 2, len(head.names))
    return heads


class ContributionPredictor(nn.Module):
    """Every slot's contribution [..., S] from the LSTM output [..., H], encodings [..., S, W]."""

    def __init__(self, hidden: int, slot: int) -> None:
        super().__init__()
        half = hidden // 2
        self.trunk = nn.Sequential(Product(hidden, half), nn.LayerNorm(half), nn.ReLU())
        self.output = SlotScores(half, slot, hidden // 4)

    def forward(self, x: Tensor, slots: Tensor, noise: Tensor) -> Tensor:
        """noise [..., H / 2], uniform in [0, 1), decides which units are dropped."""
        kept = torch.where(noise >= DROPOUT, self.trunk(x) / (1 - DROPOUT), 0.0)
        return self.output(kept, slots)


class RecurrentPolicy(nn.Module):
    """Actor and critic over one residual LSTM; an Agent (see protocol).

    Its state_dict fits a policy for any other slots: what depends on them is the fixed table of
    their places alone. It fits other blueprints once `with_blueprints` has given it their rows.
    """

    mean: Tensor  # float32 [23 + 31]: of the features of the env, then of those of a slot
    var: Tensor
    seen: Tensor
    places: Tensor  # float32 [S, 4]
    floors: Tensor  # float32 [8, 1], least probability of a legal choice, in HEADS order

    @torch.random.fork_rng(devices=[])  # layers draw weights, which are replaced
    def __init__(
        self,
        config: PolicyConfig,
        slots: Sequence[SlotSpec],
        seed: int,
        num_blueprints: int = NUM_BLUEPRINTS,
    ) -> None:
        """For hosts with these slots, in order; initial weights depend on the seed, on no slot.

        num_blueprints: P, codes of the package's blueprints and of users'.
        """
        super().__init__()
        network = config.network
        hidden = network.hidden
        width = network.features
        slot = network.slot_features
        # features of the env and of a slot
        self.sizes = NUM_ENV_FEATURES + len(config.observe), NUM_SLOT_FEATURES
        self.deterministic = config.deterministic
        # Keeps decisions on static buffers and replays them as CUDA graphs; None: as they are.
        self.steps: StepCache | None = None
        self.clip = config.ppo.observation_clip
        # the last row: empty slot
        self.embedding = nn.Embedding(num_blueprints + 1, network.blueprint_embedding)
        places = place_table(slots)
        known = NUM_SLOT_FEATURES + network.blueprint_embedding + places.shape[1]
        self.slot_encoder = SlotEncoder(known, slot)
        first = Product(self.sizes[0] + 2 * slot, width)
        self.feature_net = nn.Sequential(first, nn.LayerNorm(width), nn.ReLU())
        self.lstm = ResidualLSTM(width, hidden, network.layers)
        self.heads = _heads(hidden, slot, num_blueprints)
        self.value_head = _value_head(hidden, hidden)
        self.q_head = _value_head(hidden + len(OP_NAMES), hidden)
        self.contribution_head = ContributionPredictor(hidden, slot)
        moments = normalize.observation_moments(sum(self.sizes), torch.device("cpu"))
        for name, value in moments._asdict().items():
            self.register_buffer(name, value)
        floors = [[config.ppo.probability_floor[name]] for name in HEAD_NAMES]
        self.register_buffer("floors", torch.tensor(floors), persistent=False)
        self.register_buffer("places", places, persistent=False)
        self._initialize_(torch.Generator().manual_seed(seed))

    def _initialize_(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _orthogonal_(module, GAIN, generator)
        for head in self.heads.values():
            _orthogonal_(_last_linear(head), ACTION_GAIN, generator)
        for head in (self.value_head, self.q_head, self.contribution_head):
            _orthogonal_(_last_linear(head), VALUE_GAIN, generator)
        nn.init.normal_(self.embedding.weight, 0.0, EMBEDDING_STD, generator=generator)
        hidden = self.lstm.hidden
        for layer in self.lstm.layers:
            input_weight, recurrent_weight, *biases = lstm_parameters(layer)
            nn.init.orthogonal_(input_weight, generator=generator)
            nn.init.orthogonal_(recurrent_weight, generator=generator)
            for bias in biases:  # both carry the forget offset, as in the reference
                nn.init.zeros_(bias)
                nn.init.constant_(bias[hidden : 2 * hidden], 1 + math.log(len(self.lstm.layers)))

    def for_slots(self, slots: Sequence[SlotSpec]) -> "RecurrentPolicy":
        """The policy for hosts with other slots: weights and statistics are, and stay, shared."""
        other = copy(self)
        places = place_table(slots).to(self.places.device)
        vars(other)["_buffers"] = {**dict(self.named_buffers(recurse=False)), "places": places}
        other.steps = None
        return other

    @property
    def observation_moments(self) -> Moments:
        """Statistics that the observation is normalised with; fixed during a rollout."""
        return Moments(self.mean, self.var, self.seen)

    def set_observation_moments_(self, moments: Moments) -> None:
        """Take these statistics."""
        for old, new in zip(self.observation_moments, moments, strict=True):
            old.copy_(new)

    def update_observations_(
        self,
        rows: Sequence[tuple[Tensor, Tensor]],
        momentum: float,
        reduction: Reduction = ALL_ENVS,
    ) -> None:
        """Move the statistics by rows of rollouts: raw features [T, n, 23 + 31 S], valid [T, n].

        A slot's feature has one mean and variance for all slots. Rows are counted once, however
        many slots they have. Rows of all envs count.
        """
        parts = [(*self._split(features), valid) for features, valid in rows]
        env_rows = [(env, valid) for env, _, valid in parts]
        slot_rows = [
            (slots.flatten(1, 2), valid.unsqueeze(-1).expand(slots.shape[:-1]).flatten(1))
            for _, slots, valid in parts
        ]
        env, slot = (
            normalize.update_observation(before, seen, momentum, reduction=reduction)
            for before, seen in zip(self._part_moments(), (env_rows, slot_rows), strict=True)
        )
        mean = torch.cat([env.mean, slot.mean])
        var = torch.cat([env.var, slot.var])
        self.set_observation_moments_(Moments(mean, var, env.seen))

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """Zero memory of N envs: hidden and cell, each float32 [N, L, H]."""
        shape = (num_envs, len(self.lstm.layers), self.lstm.hidden)
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """Sample an action per env with view.noise; the likeliest of a deterministic policy."""
        return self.act_with_probabilities(view, memory)[:2]

    @torch.no_grad()
    def act_with_probabilities(self, view: View, memory: Memory) -> tuple[Decision, Memory, Tensor]:
        """Like `act`, and the probabilities of all choices: float32 [N, X] in HEADS order."""
        decide = self.decide_with_probabilities
        if self.steps is not None:
            decide = partial(captured_call, self.steps, "act", decide)
        return decide(view.observation, view.masks, view.noise, memory)

    def decide_with_probabilities(
        self, observation: Observation, masks: Masks, noise: Tensor, memory: Memory
    ) -> tuple[Decision, Memory, Tensor]:
        """`act_with_probabilities` from those parts of a View; noise float32 [N, 8]."""
        slots, features = self.encode(observation.features, observation.blueprints)
        x, memory = self.lstm.step(features, memory)
        numbers = dict(zip(HEAD_NAMES, noise.unbind(-1), strict=True))
        floors = dict(zip(HEAD_NAMES, self.floors, strict=True))
        played: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

        def play(legal: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
            """The choices of heads that do not depend on each other, side by side."""
            logits = side_by_side([self.heads[name](*inputs) for name in legal])
            floor = torch.stack([floors[name] for name in legal])
            log_probs = masked_log_probs(logits, side_by_side([*legal.values()]), floor)
            drawn = torch.stack([numbers[name] for name in legal], dim=-1)
            choice = log_probs.argmax(-1) if self.deterministic else choose(log_probs, drawn)
            choices = choice.movedim(-1, 0).contiguous()
            taken = chosen(log_probs, choice).unbind(-1)
            parts = zip(log_probs.unbind(-2), choices, taken, strict=True)
            played.update(zip(legal, parts, strict=True))
            return choices[0]

        op = play({"op": masks.op}, x)
        legal = head_masks(masks, op)
        slot = play({"slot": legal["slot"]}, torch.cat([x, indicators(op, x)], dim=-1), slots)
        details = {name: mask for name, mask in legal.items() if name not in played}
        play(details, torch.cat([x, slot_encoding(slots, slot)], dim=-1))
        ordered = [played[name] for name in HEAD_NAMES]
        distributions, choices, log_probs = zip(*ordered, strict=True)
        action = unchecked(Action, dict(zip(HEAD_NAMES, choices, strict=True)), op.shape)
        value = self.value_head(x).squeeze(-1)
        fields = {"action": action, "log_probs": torch.stack(log_probs, dim=-1), "value": value}
        masked = zip(distributions, legal.values(), strict=True)
        all_log_probs = torch.cat([head[..., : mask.shape[-1]] for head, mask in masked], dim=-1)
        return unchecked(Decision, fields, op.shape), memory, probabilities(all_log_probs)

    def evaluate(self, rows: Row, starts: list[int], noise: Tensor) -> Evaluation:
        """Evaluate the recorded actions of whole sequences, rows [T, N], under the weights of now.

        starts: `segment_starts` of the rollout; noise float32 [T, N, H / 2] in [0, 1) for dropout.
        The masks follow from the sampled op, and later heads are given the sampled op or slot, so
        that on unchanged weights the log-probabilities are those of `act`.
        """
        slots, features = self.encode(rows.features, rows.blueprints)
        x, (hidden, cell) = self.lstm.sequence(features, rows.reset, starts)
        least = self.lstm.hidden // 2  # outputs of the products below
        with_op = shared(torch.cat([x, indicators(rows.action.op, x)], dim=-1), least)
        with_slot = shared(torch.cat([x, slot_encoding(slots, rows.action.slot)], dim=-1), least)
        x = shared(x, least)
        inputs = dict.fromkeys(HEAD_NAMES, (with_slot,)) | {"op": (x,), "slot": (with_op, slots)}
        mask = side_by_side([*head_masks(rows.masks, rows.action.op).values()])
        logits = side_by_side([self.heads[name](*inputs[name]) for name in HEAD_NAMES])
        distribution = masked_log_probs(logits, mask, self.floors)
        choice = torch.stack([rows.action.get(name) for name in HEAD_NAMES], dim=-1)
        return Evaluation(
            log_probs=chosen(distribution, choice),
            entropies=entropy(distribution, mask),
            likeliest=distribution.argmax(-1) == choice,
            value=self.value_head(x).squeeze(-1),
            q=self.q_head(with_op.detach()).squeeze(-1),
            contribution=self.contribution_head(x.detach(), slots.detach(), noise),
            hidden=hidden,
            cell=cell,
        )

    def _part_moments(self) -> tuple[Moments, Moments]:
        """Statistics of the features of the env [23] and of a slot [31]."""
        parts = zip(self.mean.split(self.sizes), self.var.split(self.sizes), strict=True)
        env, slot = (Moments(mean, var, self.seen) for mean, var in parts)
        return env, slot

    def _split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the env [..., 23] and of every slot [..., S, 31]."""
        env, slots = features.tensor_split(self.sizes[:1], dim=-1)
        return env, slots.unflatten(-1, (-1, NUM_SLOT_FEATURES))

    def encode(self, features: Tensor, blueprints: Tensor) -> tuple[Tensor, Tensor]:
        """Encodings of the slots [..., S, W] and LSTM input [..., F'], from raw features and
        blueprint codes [..., S], of which -1 takes the last embedding.
        """
        env_moments, slot_moments = self._part_moments()
        raw_env, raw_slots = self._split(features)
        embedded = self.embedding(blueprints % self.embedding.num_embeddings)
        normalised = normalize.normalize_observation(slot_moments, raw_slots, self.clip)
        slots = self.slot_encoder(normalised, embedded, self.places)
        env = normalize.normalize_observation(env_moments, raw_env, self.clip)
        return slots, self.feature_net(torch.cat([env, summary(slots)], dim=-1))


def with_blueprints(
    state: Mapping[str, Tensor], before: Sequence[str], after: Sequence[str]
) -> dict[str, Tensor]:
    """A policy's state_dict for the blueprints `after`, from one for `before`; of others as it is.

    A blueprint of both keeps its rows. A new one takes the mean of those of the package that can be
    germinated, so that it is seen as some seed and is as likely as they are on average; the rows of
    a blueprint that is no more are dropped.
    """
    tables = [state.get(name) for name in BLUEPRINT_TABLES]
    sizes = [table.shape[:1] if isinstance(table, Tensor) else () for table in tables]
    fits = sizes == [(len(before) + 1,), (len(before),), (len(before),)]
    known = {name: code for code, name in enumerate(before)}

    def extended(rows: Tensor) -> Tensor:
        common = rows[list(CNN_BLUEPRINTS)].mean(0)
        rows_after = [rows[known[name]] if name in known else common for name in after]
        # the embedding of an empty slot stays the last
        return torch.stack([*rows_after, *rows[len(before) :]])

    return {**state} | {name: extended(state[name]) for name in BLUEPRINT_TABLES if fits}


def with_observed(
    state: Mapping[str, Tensor], before: Sequence[str], after: Sequence[str]
) -> dict[str, Tensor]:
    """A policy's state_dict that sees settings `after` of its env, from one that sees `before`.

    It stays as it is where it sees others. A new setting has no weight, so it changes nothing.
    """
    moments = state.get("mean")
    size = NUM_ENV_FEATURES + len(before) + NUM_SLOT_FEATURES
    fits = isinstance(moments, Tensor) and moments.shape == (size,)

    def columns(rows: Tensor, new: float) -> Tensor:
        parts = (NUM_ENV_FEATURES, len(before), rows.shape[-1] - NUM_ENV_FEATURES - len(before))
        first, seen, rest = rows.split(parts, dim=-1)
        known = {name: seen[..., place, None] for place, name in enumerate(before)}
        unknown = torch.full_like(first[..., :1], new)
        return torch.cat((first, *(known.get(name, unknown) for name in after), rest), dim=-1)

    fills = {"feature_net.0.weight": 0.0, "mean": 0.0, "var": 1.0}
    return {**state} | {name: columns(state[name], fill) for name, fill in fills.items() if fits}


def with_heads(state: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A policy's state_dict, where it lacks an action head with that of `fresh`, a new policy's."""
    known = {name.split(".")[1] for name in state if name.startswith("heads.")}
    heads = [name for name in fresh if name.startswith("heads.")]
    return {**state} | {name: fresh[name] for name in heads if name.split(".")[1] not in known}


def indicators(op: Tensor, like: Tensor) -> Tensor:
    """[..., 6], in the type of `like`: 1 for the op int64 [...], 0 for the others."""
    return (op.unsqueeze(-1) == torch.arange(len(OP_NAMES), device=op.device)).to(like.dtype)


def _last_linear(module: nn.Module) -> nn.Linear:
    return [part for part in module.modules() if isinstance(part, nn.Linear)][-1]


def _orthogonal_(linear: nn.Linear, gain: float, generator: torch.Generator) -> None:
    nn.init.orthogonal_(linear.weight, gain, generator=generator)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
