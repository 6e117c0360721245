"""The report that a run leaves in its folder at its end, as the setting `report` asks."""

from esper_soa.lab.report.page import try_write_report
from esper_soa.training.callbacks import Callback
from esper_soa.training.final_table import Summary
from esper_soa.training.task_run import TaskRun


class EndReport(Callback):
    """Writes report.html."""

    def on_run_end(self, run: TaskRun, summary: Summary) -> None:
        try_write_report(run.session)
