"""The report that a run or a comparison of runs leaves in its folder at its end. One that cannot be
made fails nothing: why is said in one line. Needs no torch.
"""

from logging import INFO, WARNING
from pathlib import Path

from esper_soa.ops.files import LOGGER, write_text
from esper_soa.ops.session import Session
from esper_soa.report.bundle import MISSING, available, bundle
from esper_soa.report.page import NAME, page_of
from esper_soa.report.run_files import find_runs
from esper_soa.telemetry.worker import Failures


def report_in(folder: Path) -> str:
    """Write the report of the runs in `folder` there; returns why there is none, or "" where there
    is one. Raises OSError where it cannot be written.
    """
    if not available():
        return f"none, as {MISSING}"
    failures = Failures()
    text = ""
    with failures:
        text = page_of(find_runs([folder]), bundle())
    if failures.count:
        LOGGER.debug("%s", failures.trace)
        return f"none: {failures.last}"
    write_text(folder / NAME, text)
    return ""


def leave_report(within: Session) -> None:
    """Write the report of the run that has ended in the session's folder."""
    with within.unwritten.noting(NAME):
        missing = report_in(within.folder.path)
        if missing:
            LOGGER.log(WARNING if available() else INFO, "report   %s", missing)
