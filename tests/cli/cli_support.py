"""What the tests of the command line share."""

from __future__ import annotations

import sys
from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]
"""Runs a command, given as its arguments; gives exit code, stdout, stderr. See the fixture `run`."""

NO_TORCH = [
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = None; from thinpoint.cli.main import main; main()",
]
