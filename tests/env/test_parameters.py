"""Parameters that stand in the slots."""

import torch
from env_records import empty_state
from reward_cases import make_settings

from esper_soa.env.parameters import fossilized_params, occupied_params, total_params
from esper_soa.vocabulary import Blend, Stage


def test_live_seeds_count_with_their_gates_once_these_take_part():
    # seed of slot s and blueprint b: 100 (s + 1) + b; a gate 7; host 1000
    counts = make_settings(num_slots=3).counts
    slots = empty_state(2, 3, 1).slots.replace(
        stage=torch.tensor(
            [[Stage.TRAINING, Stage.BLENDING, Stage.FOSSILIZED], [Stage.EMBARGOED, Stage.EMPTY, 2]]
        ),
        blueprint=torch.tensor([[1, 2, 3], [4, -1, 5]]),
        blend=torch.tensor([[Blend.GATE, Blend.GATE, Blend.ADD], [Blend.GATE] * 3]),
    )
    assert occupied_params(slots, counts).tolist() == [[101.0, 209.0, 303.0], [0.0, 0.0, 305.0]]
    assert total_params(slots, counts).tolist() == [1613.0, 1305.0]
    assert fossilized_params(slots, counts).tolist() == [303.0, 0.0]
