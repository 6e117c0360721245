"""Starts the probe, see probe.py; what it imports is not searched for garbage, neither while it is
imported, as in a run, nor at the end, which would take a tenth of the probe's time.
"""

import gc

from esper_soa.runtime.signals import torch_import_guard

with torch_import_guard():
    from esper_soa.lab.plan.probe import main

try:
    main()
finally:
    gc.freeze()
