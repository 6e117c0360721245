"""The report that a run leaves in its folder at its end (the setting `report`).

Called by the trainer. A report that cannot be made fails no run: what it lacks is said in one line, and where that came
from stands in the log. Needs no torch.
"""

from esper_soa.ops.files import LOGGER
from esper_soa.ops.session import Session
from esper_soa.report.bundle import MISSING, available
from esper_soa.report.page import NAME, write_report
from esper_soa.telemetry.worker import Failures


def leave_report(within: Session) -> None:
    """Write the report of the run that has ended in the session's folder."""
    if not available():
        LOGGER.info("report   none, as %s", MISSING)
        return
    failures = Failures()
    with failures, within.unwritten.noting(NAME):
        write_report([str(within.folder.path)], within.folder.path / NAME)
    if failures.count:
        LOGGER.warning("report   none: %s", failures.last)
        LOGGER.debug("%s", failures.trace)
