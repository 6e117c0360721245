"""The page on own images does what it says: its code runs as it stands, in an empty folder."""

import re
from pathlib import Path

import pytest

from tests.builders.program import finished

PAGE = Path(__file__).resolve().parents[1] / "docs" / "images.md"


def blocks(language: str) -> list[str]:
    """The code of the page in `language`, in its order."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_code_of_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(blocks("python")), {})
    told = capsys.readouterr().out
    assert told.startswith("stripes: own images from stripes.npz (sha256 ")
    assert "\n  40x40 pixels, scaled to 32x32 (bilinear and antialiased) (resize=auto)\n" in told
    assert told.endswith("2 classes: 0 upright, 1 level\n[]\n")
    (command,) = blocks("sh")
    python, option, module, *overrides = command.split()
    assert [python, option, module] == ["python", "-m", "esper_soa.train"]
    ended = finished(*overrides, "rounds=1", "steps=2", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "data     stripes: own images from stripes.npz" in ended.stdout
    assert (tmp_path / "stripes" / "summary.json").is_file()
