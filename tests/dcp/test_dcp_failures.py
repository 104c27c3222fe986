"""Saves of two ranks that fail leave what was there; damage is named; ranks that differ are refused."""

from __future__ import annotations

import pytest
from ranks_failures import CHECKS
from ranks_support import assert_passed, outcomes_of


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_passed(outcomes_of("ranks_failures", 2, tmp_path_factory), name)
