"""The reward modes against recorded calls of the reference: totals and every component."""

import dataclasses

import numpy as np
import pytest
import torch

from esper_soa.config.env import LossRewardConfig, RewardConfig
from esper_soa.env.reward import HINDSIGHT_WEIGHT, hindsight_credit
from esper_soa.env.reward_modes import score
from esper_soa.env.reward_records import RewardInputs
from esper_soa.env.reward_terms import seed_potential, shaping, stage_potential
from esper_soa.env.user_reward import sample_inputs
from esper_soa.vocabulary import Op, Stage
from tests.parity.parity_vectors import load

VARIANTS = (
    {},
    {"disable_pbrs": True},
    {"disable_terminal_reward": True},
    {"disable_anti_gaming": True},
    {"disable_timing_discount": True},
    {"attribution_formula": "minimum"},
    {"escrow_delta_clip": 0.0},
    {"rent_host_params_floor": 20000, "max_rent": 0.4},
    {"param_budget": 20000, "param_penalty_weight": 0.5},
    {"sparse_reward_scale": 3.0, "param_penalty_weight": 2.0, "param_budget": 1000},
    {"germination_warmup_steps": 0},
    {"early_prune_threshold": 12, "min_prune_bonus_age": 9},
    {"free_slots": 0, "seed_occupancy_cost": 0.05},
    {"drip_fraction": 0.25, "max_drip_per_step": 0.02, "negative_drip_ratio": 1.0},
    {"alpha_shock_coef": 0.0},
    {"contribution_weight": 2.0, "improvement_safe_threshold": 1.0, "hacking_ratio_threshold": 2.0},
)
CONTRIBUTION_COLUMNS = {
    "blending_warning": "blending_warning",
    "holding_warning": "holding_warning",
    "pbrs_bonus": "pbrs_bonus",
    "synergy_bonus": "synergy_bonus",
    "compute_rent": "compute_rent",
    "alpha_shock": "alpha_shock",
    "action_shaping": "action_shaping",
    "terminal_bonus": "terminal_bonus",
    "fossilize_terminal_bonus": "fossilize_bonus",
    "drip_this_epoch": "drip",
    "total_reward": "total",
}
SAMPLE = sample_inputs(1, 1, 2, torch.device("cpu"))  # of the right shapes and dtypes
NEGATED_COLUMNS = {"occupancy_rent": "occupancy_rent", "fossilized_rent": "fossilized_rent"}
# which our rewards work out, but keep no record of
UNSEEN_COLUMNS = (
    "growth_ratio",
    "attribution_discount",
    "timing_discount",
    "ratio_penalty",
    "progress_since_germination",
    "escrow_credit_target",
)


def config(mode: str, variant: int, named: int) -> RewardConfig:
    """The configuration of a variant; the drip fraction is left out of modes that do not read it.

    The reference drips only for seeds that have a name, as all of ours have: without one, it is
    basic without drip.
    """
    settings = dict(VARIANTS[variant])
    if mode not in ("basic", "basic_plus") or not named:
        settings.pop("drip_fraction", None)
        mode = "basic" if mode == "basic_plus" else mode
    return RewardConfig(mode=mode, **settings)


def batches() -> list[tuple[np.ndarray, int, int]]:
    """The rows of every configuration, its variant, and whether the seeds have names."""
    data = load("rewards_inputs")
    keys = [(variant, named) for variant in np.unique(data["variant"]) for named in (0, 1)]
    return [
        (np.flatnonzero((data["variant"] == v) & (data["ids"] == named)), v, named)
        for v, named in keys
    ]


def known(values: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Values with 0 for None, and which are there."""
    tensor = torch.from_numpy(values.astype(np.float64))
    return tensor.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), ~tensor.isnan()


def single_slot(columns: dict[str, torch.Tensor]) -> RewardInputs:
    """Inputs of envs with one slot each, the target of the action; what is not given is 0, False or
    unlimited.
    """
    rows = len(columns["op"])
    fields = {}
    for name, sample in SAMPLE.items():
        value = columns.get(name, torch.zeros(rows)).to(sample.dtype)
        fields[name] = value.unsqueeze(1) if sample.ndim > value.ndim else value
    fields["target"] = torch.ones(rows, 1, dtype=torch.bool)
    fields["drip_left"] = torch.full_like(fields["drip_scale"], torch.inf)
    return RewardInputs(**fields, batch_size=[rows])


def recorded_inputs(rows: np.ndarray) -> RewardInputs:
    data = {name: values[rows] for name, values in load("rewards_inputs").items()}
    columns = {}
    for ours, theirs in {
        "improvement": "improvement_since_stage_start",
        "contribution": "seed_contribution",
        "accuracy_germination": "acc_at_germination",
        "total": "counterfactual_total_improvement",
    }.items():
        flag = {"accuracy_germination": "germination_known"}.get(ours, ours + "_known")
        columns[ours], columns[flag] = known(data[theirs])
    for ours, theirs in {
        "has_seed": "seed",
        "stage": "stage",
        "stage_age": "epochs_in_stage",
        "previous_stage": "previous_stage",
        "previous_stage_age": "previous_epochs_in_stage",
        "seed_age": "seed_age",
        "interaction_sum": "interaction_sum",
        "escrow": "escrow_credit_prev",
        "op": "action",
        "val_accuracy": "val_acc",
        "stable_accuracy": "stable_val_acc",
        "accuracy_delta": "acc_delta",
        "committed_accuracy": "committed_val_acc",
        "alpha_delta_sq": "alpha_delta_sq_sum",
        "total_params": "total_params",
        "host_params": "host_params",
        "fossilized_params": "fossilized_seed_params",
        "num_active": "n_active_seeds",
        "num_fossilized": "num_fossilized_seeds",
        "num_contributing": "num_contributing_fossilized",
        "step": "epoch",
        "max_steps": "max_epochs",
    }.items():
        columns[ours] = torch.from_numpy(data[theirs])
    effective, given = known(data["effective_seed_params"])
    overhead = torch.from_numpy(data["total_params"] - data["host_params"]).clamp(min=0)
    columns["effective_params"] = torch.where(given, effective, overhead)
    columns["drip_scale"], columns["drip_live"] = known(data["drip_scale"])
    columns["drip_contribution"] = known(data["drip_contribution"])[0]
    return single_slot(columns)


def check_columns(recorded: dict, rows: np.ndarray, inputs: RewardInputs, terms, readings) -> None:
    """Every recorded component of these rows is ours."""
    for column, name in enumerate(recorded["component_names"]):
        theirs, _ = known(recorded["components"][rows, column])
        if name in UNSEEN_COLUMNS:
            continue
        if name == "bounded_attribution":
            ours = terms.attribution + terms.ratio_penalty
        elif name == "escrow_delta":
            ours = (readings.escrow_next - inputs.escrow)[:, 0]
        elif name in NEGATED_COLUMNS:
            ours = -getattr(terms, NEGATED_COLUMNS[name])
        elif name == "escrow_credit_next":
            ours = readings.escrow_next[:, 0]
        else:
            ours = getattr(terms, CONTRIBUTION_COLUMNS[name])
        torch.testing.assert_close(
            ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "mode", ["shaped", "escrow", "basic", "basic_plus", "sparse", "minimal", "simplified"]
)
def test_every_mode_pays_what_the_reference_pays(mode):
    recorded = load(f"rewards_{mode}")
    for rows, variant, named in batches():
        inputs = recorded_inputs(rows)
        terms, readings = score(inputs, config(mode, variant, named))
        reward = torch.from_numpy(recorded["reward"][rows])
        torch.testing.assert_close(terms.total, reward, rtol=1e-9, atol=1e-9)
        check_columns(recorded, rows, inputs, terms, readings)
        if "basic" not in mode:
            continue
        for column, ours in ((0, readings.drip_total), (1, readings.drip_scale)):
            theirs, _ = known(recorded["new_drip"][rows, column])
            torch.testing.assert_close(ours[:, 0], theirs, rtol=1e-9, atol=1e-9)
        paid, _ = known(recorded["drip_paid"][rows])
        torch.testing.assert_close(readings.drip_payment, paid, rtol=1e-9, atol=1e-9)


def test_the_loss_mode_pays_what_the_reference_pays():
    data = load("rewards_loss_family")
    fields = [name.replace("epochs", "steps") for name in data["cfg_fields"]]
    for index, values in enumerate(data["cfg_values"]):
        settings = dict(zip(fields, values.tolist(), strict=True))
        cfg = RewardConfig(mode="loss", loss=dataclasses.replace(LossRewardConfig(), **settings))
        rows = np.flatnonzero(data["cfg"] == index)
        names = {
            "op": "action",
            "has_seed": "seed",
            "stage": "stage",
            "previous_stage": "previous_stage",
            "stage_age": "epochs_in_stage",
            "seed_age": "seed_age",
            "step": "epoch",
            "max_steps": "max_epochs",
            "total_params": "total_params",
            "host_params": "host_params",
            "loss_delta": "loss_delta",
            "val_loss": "val_loss",
        }
        inputs = single_slot(
            {ours: torch.from_numpy(data[theirs][rows]) for ours, theirs in names.items()}
        )
        terms, _ = score(inputs, cfg)
        torch.testing.assert_close(
            terms.total, torch.from_numpy(data["reward"][rows]), rtol=1e-9, atol=1e-9
        )


def test_potentials_and_shaping_are_those_of_the_reference():
    data = {name: torch.from_numpy(values) for name, values in load("rewards_helpers").items()}
    torch.testing.assert_close(
        stage_potential(data["stage_potential_stage"]), data["stage_potential"]
    )
    stage = data["seed_stage"]
    cfg = RewardConfig()
    # the reference's helper: 0 without a seed
    active = (data["seed_has_active"] == 1) & (stage > Stage.DORMANT)
    potential = torch.where(active, seed_potential(stage, data["seed_epochs"], cfg), 0.0)
    torch.testing.assert_close(potential, data["seed_potential"], rtol=1e-9, atol=1e-9)
    bonus = shaping(data["pbrs_prev"], data["pbrs_next"])
    torch.testing.assert_close(bonus, data["pbrs_bonus"], rtol=1e-9, atol=1e-9)


def test_hindsight_credit_of_one_boost_is_that_of_the_reference():
    data = {name: torch.from_numpy(values) for name, values in load("rewards_helpers").items()}
    boost = data["hindsight_boost"].clamp(min=0).float()
    gain = data["hindsight_improvement"]
    helped = torch.tensor([[True, False]]).expand(len(boost), 2)
    credit = hindsight_credit(
        boost.view(-1, 1, 1), helped, gain, torch.ones_like(gain, dtype=torch.int64)
    )
    credit = credit / HINDSIGHT_WEIGHT * data["hindsight_weight"]
    # the env state is float32
    torch.testing.assert_close(credit, data["hindsight_credit"], rtol=1e-6, atol=1e-7)


def test_the_costs_of_the_ops_are_those_of_the_reference():
    data = load("rewards_helpers")
    cfg = RewardConfig()
    costs = {
        Op.WAIT: 0.0,
        Op.GERMINATE: cfg.germinate_cost,
        Op.SET_ALPHA_TARGET: cfg.set_alpha_target_cost,
        Op.PRUNE: cfg.prune_cost,
        Op.FOSSILIZE: cfg.fossilize_cost,
        Op.ADVANCE: 0.0,
    }
    assert [costs[op] for op in data["intervention_op"]] == data["intervention_cost"].tolist()
