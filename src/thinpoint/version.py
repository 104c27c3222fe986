"""The version, apart from the package's `__init__` so that every room may import it."""

from __future__ import annotations

__version__ = "0.1.0"
