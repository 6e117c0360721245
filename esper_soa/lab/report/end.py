"""The report that a run leaves in its folder at its end, as the setting `report` asks."""

from esper_soa.lab.report.page import try_write_report
from esper_soa.training.loop.callbacks import Callback, RunView
from esper_soa.training.results.final_table import Summary


class EndReport(Callback):
    """Writes report.html."""

    def on_run_end(self, run: RunView, summary: Summary) -> None:
        try_write_report(run.session)
