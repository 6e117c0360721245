"""The heuristic policy against episodes of decisions recorded from the reference."""

import torch
from torch.nn.functional import pad

from esper_soa.agent.scripted import (
    HeuristicConstants,
    HeuristicMemory,
    HeuristicPolicy,
    decay_penalties,
    heuristic_choice,
)
from esper_soa.config.agent import HeuristicConfig
from esper_soa.state import EnvState
from esper_soa.vocabulary import BLUEPRINT_NAMES, Blueprint, Op, Stage
from tests.builders.env_records import empty_state, with_values
from tests.parity.parity_vectors import columns, load

SETTINGS = {
    "plateau_epochs_to_germinate": "plateau_steps_to_germinate",
    "min_epochs_before_germinate": "min_steps_before_germinate",
    "prune_after_epochs_without_improvement": "prune_after_steps_without_improvement",
    "prune_if_accuracy_drops_by": "prune_if_accuracy_drops_by",
    "min_improvement_to_fossilize": "min_improvement_to_fossilize",
}
CONSTANTS = {
    "embargo_epochs_after_prune": "embargo_steps",
    "blueprint_penalty_on_prune": "prune_penalty",
    "blueprint_penalty_decay": "penalty_decay",
    "blueprint_penalty_threshold": "penalty_threshold",
}


def per_episode_settings(rows: dict) -> tuple[HeuristicConfig, HeuristicConstants]:
    """Settings and constants that are columns [N], one row per recorded episode."""
    cfg = HeuristicConfig(blueprint_rotation=rows["rotation"].tolist())
    recorded = columns(rows["config_columns"], rows["config"])
    for name, setting in SETTINGS.items():
        setattr(cfg, setting, recorded.pop(name))
    return cfg, HeuristicConstants(**{CONSTANTS[name]: column for name, column in recorded.items()})


def state_at(rows: dict, step: int) -> EnvState:
    signals = columns(rows["signal_columns"], rows["signals"][:, step])
    seeds = columns(rows["seed_columns"], rows["seeds"][:, step])
    absent = seeds["stage"].isnan()
    names = torch.tensor([BLUEPRINT_NAMES.index(name) for name in rows["blueprints"].tolist()])
    blueprint = names[seeds["blueprint"].nan_to_num(0.0).long()]
    fields = {
        # a seed that is absent leaves no free slot: the recording tells of these apart
        "stage": torch.where(absent, Stage.DORMANT, seeds["stage"]),
        "blueprint": torch.where(absent, Blueprint.NONE, blueprint),
        "stage_age": seeds["epochs_in_stage"].nan_to_num(0.0),
        "accuracy_current": seeds["current_val_accuracy"],
        "accuracy_stage_start": seeds["accuracy_at_stage_start"],
        "accuracy_initial": seeds["initial_val_accuracy"],
        "alpha": seeds["alpha"],
        "contribution": seeds["counterfactual_contribution"],
        "contribution_known": ~seeds["counterfactual_contribution"].isnan(),
    }
    fields = {name: pad(column, (0, 1)) for name, column in fields.items()}
    fields["stage"][:, -1] = torch.where(signals["available_slots"] > 0, Stage.EMPTY, Stage.DORMANT)
    state = empty_state(*fields["stage"].shape, 1)
    mode = pad(seeds["alpha_mode"].nan_to_num(0.0), (0, 1))
    target = pad(seeds["alpha_target"], (0, 1))
    stabilized = signals["host_stabilized"] == 1
    return state.replace(
        slots=with_values(state.slots, **fields),
        ramp=with_values(state.ramp, target=target, mode=mode),
        signals=with_values(
            state.signals,
            step=signals["epoch"],
            stabilized=stabilized,
            plateau=signals["plateau_epochs"],
        ),
    )


def test_every_decision_of_every_episode_equals_the_recording() -> None:
    rows = load("heuristic")
    cfg, constants = per_episode_settings(rows)
    actions = [name.split("_", 1) for name in rows["action_names"].tolist()]
    ops = torch.tensor([getattr(Op, parts[0]) for parts in actions])
    blueprints = torch.tensor(
        [BLUEPRINT_NAMES.index(parts[1].lower()) if len(parts) > 1 else -1 for parts in actions]
    )
    policy = HeuristicPolicy(
        HeuristicConfig(blueprint_rotation=rows["rotation"].tolist()), BLUEPRINT_NAMES
    )
    memory = HeuristicMemory(*policy.start(len(rows["action"]), torch.device("cpu")))
    recorded = torch.from_numpy(rows["action"])
    target = torch.from_numpy(rows["target_seed"])
    for step in range(recorded.shape[1]):
        state = state_at(rows, step)
        decayed = decay_penalties(memory, state.signals.step, constants)
        wish, memory = heuristic_choice(state, decayed, cfg, BLUEPRINT_NAMES, constants)
        assert torch.equal(wish.op, ops[recorded[:, step]]), step
        named = blueprints[recorded[:, step]]
        assert torch.equal(torch.where(named >= 0, wish.blueprint, -1), named), step
        aimed = target[:, step]
        assert torch.equal(torch.where(aimed >= 0, wish.slot, -1), aimed), step
