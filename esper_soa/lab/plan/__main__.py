"""Starts probe.py. What it imports is never searched for garbage, a sixth of the probe's time."""

import gc

from esper_soa.system.signals import torch_import_guard

with torch_import_guard():
    from esper_soa.lab.plan.probe import main

gc.freeze()
main()
