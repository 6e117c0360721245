"""The page on own images does what it says: its code runs as it stands, in an empty folder."""

import re
import sys
from pathlib import Path

import warm
from program import ENVIRONMENT, PATIENCE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "images.md"


def blocks(language: str) -> list[str]:
    """The code of the page in `language`, in its order."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def done(command: list[str], folder: Path) -> str:
    ended = warm.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_the_code_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    program = "\n".join(blocks("python"))
    (command,) = blocks("sh")
    told = done([sys.executable, "-c", program], tmp_path)
    assert told.startswith("stripes: own images from stripes.npz (sha256 ")
    assert "\n  40x40 pixels, scaled to 32x32 (bilinear and antialiased) (resize=auto)\n" in told
    assert told.endswith("2 classes: 0 upright, 1 level\n[]\n")
    python, *rest = command.split()
    assert python == "python"
    told = done([sys.executable, *rest], tmp_path)
    assert "data     stripes: own images from stripes.npz" in told
    assert (tmp_path / "stripes" / "summary.json").is_file()
