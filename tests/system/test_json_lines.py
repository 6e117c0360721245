"""metrics.jsonl: always valid JSON, one line per record, on disk at once."""

import json
import math
from contextlib import closing
from pathlib import Path

import pytest

from esper_soa.system.files import LineFile
from esper_soa.system.json_lines import json_line, keep_rounds, write_json


def strict(line: str) -> object:
    """Parse JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(line, parse_constant=refuse)


def test_a_record_comes_back_as_it_went_in() -> None:
    record = {
        "round": 3,
        "accuracy": 41.25,
        "heads": {"op": 0.5},
        "stages": [1, 2],
        "done": True,
        "note": "a\nb",
        "x": None,
    }
    assert strict(json_line(record)) == record
    assert "\n" not in json_line(record)


def test_what_json_cannot_hold_becomes_null_and_is_named() -> None:
    record = {"loss": math.nan, "heads": {"op": math.inf, "slot": 1.0}, "rewards": [0.0, -math.inf]}
    assert strict(json_line(record)) == {
        "loss": None,
        "heads": {"op": None, "slot": 1.0},
        "rewards": [0.0, None],
        "non_finite": ["loss=nan", "heads.op=inf", "rewards[1]=-inf"],
    }


def test_a_file_of_json_is_indented_and_holds_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"reward": math.nan, "seeds": {"pruned": 2}})
    assert (tmp_path / "a.json").read_text() == (
        '{\n  "reward": null,\n  "seeds": {\n    "pruned": 2\n  },\n'
        '  "non_finite": [\n    "reward=nan"\n  ]\n}\n'
    )


def test_a_value_that_is_no_plain_number_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"^heads\.op: a complex cannot be written as JSON; give plain numbers, texts "
            r"or lists$"
        ),
    ):
        json_line({"heads": {"op": 1j}})  # type: ignore[dict-item]


def test_every_line_is_on_disk_before_the_writer_closes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(LineFile(path)) as metrics:
        metrics.write(json_line({"round": 1}))
        assert path.read_text() == '{"round":1}\n'
        metrics.write(json_line({"round": 2}))
    assert [strict(line) for line in path.read_text().splitlines()] == [{"round": 1}, {"round": 2}]
    with path.open() as reused:  # the number of the closed file
        metrics.close()
        assert reused.read()


@pytest.mark.parametrize(
    ("text", "rounds", "kept"),
    [
        ('{"round":1}\n{"round":2,"env":0}\n{"round":2,"env":1}\n{"round":3}\n', 2, 3),
        ('{"round":1}\n{"round":2}\n', 2, 2),
        ('{"round":1}\n{"round":2}', 2, 1),  # cut off behind the last brace
        ('{"round":1}\n{"rou', 2, 1),
        ('{"round":1}\n', 0, 0),
        ("", 3, 0),
        # what is none of ours goes, wherever it stands
        ('{"round":1}\nnone\n[1]\n{"round":0}\n{"round":"1"}\n{"env":1}\n{"round":2}\n', 2, 2),
    ],
)
def test_the_lines_of_the_first_rounds_are_kept(
    tmp_path: Path, text: str, rounds: int, kept: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    lines = [line for line in text.splitlines(keepends=True) if '"round":' in line]
    first = [line for line in lines if line.endswith("\n") and line[9] in "12"]
    assert keep_rounds(path, rounds) == kept
    assert path.read_text() == "".join(first[:kept])
    assert keep_rounds(tmp_path / "none", rounds) == 0
    assert not (tmp_path / "none").exists()
