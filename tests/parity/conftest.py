"""Puts this folder on the import path, so that parity tests can import parity_vectors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
