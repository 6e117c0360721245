"""Starts the probe, see probe.py. What it imports is never searched for garbage, which would take a
sixth of the probe's time: while it is imported, as in a run, at work, in forks and at the end.
"""

import gc

from esper_soa.runtime.signals import torch_import_guard

with torch_import_guard():
    from esper_soa.lab.plan.probe import main

gc.freeze()
main()
