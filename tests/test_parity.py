"""The recorded vectors of the reference against our kernels, one module per topic in tests/parity/.

The vectors lie in the folder named by ESPER_SOA_VECTORS, or in ../shared/vectors beside the
project; without them the sample in tests/vectors is read, some rows of every recording. Rows that
differ on purpose are named, with the reason, in the module of their topic.
"""

# ruff: noqa: E402, F403
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "parity"
TOPICS = (
    "agent",
    "baseline",
    "governor",
    "heuristic",
    "lifecycle",
    "masks",
    "networks",
    "observation",
    "reward",
    "shapley",
    "text",
)
pytest.register_assert_rewrite(*(f"tests.parity.{topic}_parity" for topic in TOPICS))

from tests.parity.agent_parity import *
from tests.parity.baseline_parity import *
from tests.parity.governor_parity import *
from tests.parity.heuristic_parity import *
from tests.parity.lifecycle_parity import *
from tests.parity.masks_parity import *
from tests.parity.networks_parity import *
from tests.parity.observation_parity import *
from tests.parity.parity_vectors import vectors_dir
from tests.parity.reward_parity import *
from tests.parity.shapley_parity import *
from tests.parity.text_parity import *


def test_every_recorded_file_is_checked_by_some_topic() -> None:
    sources = {path.stem: path.read_text() for path in FOLDER.glob("*_parity.py")}
    assert sorted(sources) == [f"{topic}_parity" for topic in TOPICS]
    text = "".join(sources.values()) + " ".join(f"features_{slots}slot" for slots in (1, 3, 6))
    unread = [
        path.name
        for path in vectors_dir().iterdir()
        if path.suffix in (".npz", ".pt") and path.stem not in text
    ]
    families = ("rewards_", "host_r", "features_")  # read by a name that is put together
    assert [name for name in unread if not name.startswith(families)] == []
