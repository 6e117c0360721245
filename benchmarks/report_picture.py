"""The picture of a report for the docs: its head, and the lanes of its seeds.

    python -m benchmarks.report_picture RUN [--out docs/report.png]

Needs the extra `report`, and playwright with a Chromium (pip install playwright; apt install
chromium).
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from esper_soa.report.page import write_report

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sys.exit(
        "error: the picture of a report needs playwright. Install it with: pip install playwright"
    )

OUT = Path(__file__).resolve().parents[1] / "docs" / "report.png"
WIDTH = 1100  # pixels
# The speed is that of whatever machine the run was on.
LEFT_OUT = """
.tile:last-child, section:not(#seeds), #seeds figure:not(#lanes), footer, details { display: none }
main { padding-bottom: 1rem } section { margin-top: 1.4rem }
"""


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="The picture of a report for the docs.")
    parser.add_argument("run")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder, "report.html")
        write_report([given.run], path)
        found = shutil.which("chromium") or playwright.chromium.executable_path
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 400}, color_scheme="light")
        page.goto(path.as_uri())
        page.add_style_tag(content=LEFT_OUT)
        page.evaluate("report.drawAll()")
        page.screenshot(path=given.out, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
