"""Saved by four ranks in one way, loaded in another: every bit is compared."""

from __future__ import annotations

import pytest
from ranks_reshard import CHECKS
from ranks_support import assert_passed, outcomes_of


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_four_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_passed(outcomes_of("ranks_reshard", 4, tmp_path_factory), name)
