"""Puts this folder on the import path, so that tests can share report_runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
