"""Which paths of a tree are kept. Torch-free."""

from __future__ import annotations

from collections.abc import Collection

from thinpoint.state.tree import Path


class Selection:
    """Which paths are kept whole, and which are on the way to one.

    Args:
        paths: of leaves to keep, or of containers to keep whole; None keeps everything.
    """

    def __init__(self, paths: Collection[Path] | None) -> None:
        self._paths = None if paths is None else frozenset(paths)
        self._prefixes = {path[:n] for path in self._paths or () for n in range(len(path))}

    def whole(self, path: Path) -> bool:
        """Whether the node at this path is kept with all that is below it."""
        if self._paths is None:
            return True
        return any(path[:n] in self._paths for n in range(len(path) + 1))

    def partly(self, path: Path) -> bool:
        """Whether something below this path is kept."""
        return path in self._prefixes
