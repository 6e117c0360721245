"""Action masks against recordings of the reference."""

import torch
from parity_vectors import load

from esper_soa.env.masks import MaskRules, SlotFacts, legal_choices
from esper_soa.vocabulary import CNN_BLUEPRINTS, HEAD_NAMES, Stage

MIN_PRUNE_AGE = 5
TRANSFORMER_BLUEPRINTS = (2, 3, 8, 9, 10, 11, 12)  # those of the reference that no task here has


def test_every_mask_equals_the_recording() -> None:
    rows = {name: torch.from_numpy(array).long() for name, array in load("action_masks").items()}
    stage = torch.where(rows["in_slot_stage"] < 0, Stage.EMPTY, rows["in_slot_stage"])
    facts = SlotFacts(
        stage, rows["in_slot_age"], rows["in_slot_alpha_mode"], rows["in_slot_enabled"].bool()
    )
    topologies = torch.zeros(2, 13, dtype=torch.bool)
    topologies[0, list(CNN_BLUEPRINTS)] = True
    topologies[1, list(TRANSFORMER_BLUEPRINTS)] = True
    rules = MaskRules(
        num_seeds=rows["in_total_seeds"][:, None],
        max_seeds=rows["in_max_seeds"][:, None],
        min_prune_age=MIN_PRUNE_AGE,
        advance_disabled=rows["in_disable_advance"].bool()[:, None],
        moving_prunable=rows["in_governor_override"].bool()[:, None],
        blueprints=topologies[rows["in_topology"]],
    )
    masks = legal_choices(facts, rules)
    for name in (*HEAD_NAMES, "slot_by_op"):
        torch.testing.assert_close(
            masks.get(name),
            rows[f"out_{name}"].bool(),
            msg=lambda text, name=name: f"{name}: {text}",
        )
