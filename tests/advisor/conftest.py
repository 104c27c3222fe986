"""Makes the benchmarks importable as they are when started in the root of a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
