"""The code of docs/environments.md and docs/training.md runs, on little work, and so does the
command that the first names.
"""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("sb3_contrib")
pytest.importorskip("torchrl")
environments = pytest.importorskip("benchmarks.environments")

DOCS = Path(__file__).resolve().parents[2] / "docs"
CODE, TRAINING = (
    re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text(encoding="utf-8"), re.M | re.S)
    for name in ("environments.md", "training.md")
)
LITTLE = {"cifar_3seed": "smoke", "16": "2", "75": "6", "batch_size=300": "batch_size=4"}
LITTLE_TRAINING = {"learn_impaired": "smoke", "32": "2", "40": "6", "range(10)": "range(2)"}
LITTLE_TRAINING |= {"10 * ": "2 * ", "batch_size=160": "batch_size=4"}


@pytest.mark.parametrize("place", range(3))
def test_the_code_of_the_page_runs(place: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = CODE[place]
    for word, little in LITTLE.items():
        code = code.replace(word, little)
    names: dict[str, object] = {}
    exec(code, names)
    lines = capsys.readouterr().out.splitlines()
    if "batch" in names:
        assert names["batch"].shape == (2, 6)
        assert len(lines) == 2, "a round each"
    elif "model" in names:
        assert names["model"].num_timesteps == 12
    else:
        assert names["observation"]["action_mask"].any(1).all()
    assert len(CODE) == 3


@pytest.mark.parametrize("place", range(2))
def test_the_learners_of_the_page_on_training_learn(place: int) -> None:
    code = TRAINING[place]
    for word, little in LITTLE_TRAINING.items():
        code = code.replace(word, little)
    names: dict[str, object] = {}
    exec(code, names)
    if "model" in names:
        assert names["model"].num_timesteps == 24
    else:
        assert names["rollout"]["action"].shape == (2, 6)
        assert names["optimizer"].state_dict()["state"][0]["step"] == 2 * 4
    assert len(TRAINING) == 2


def test_every_side_of_the_benchmark_plays_whole_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--experiment", "smoke", "--envs", "2", "--steps", "6", "--repeats", "2"]
    environments.main([*sizes, "--results", str(tmp_path)])
    (kept,) = map(json.loads, (tmp_path / "environments.jsonl").read_text().splitlines())
    assert [row["side"] for row in kept["rows"]] == [
        "simulator",
        "gymnasium",
        "MaskablePPO",
        "Collector",
    ]
    assert all(0 < row["low"] <= row["eps"] <= row["high"] for row in kept["rows"])
    assert "2 hosts of smoke, medians of 2 rounds of 6 env-steps" in capsys.readouterr().out
