"""`dcp.async_save` with AsyncCheckpointerType.PROCESS, torch's own stager and ThinWriter: two ranks."""

from __future__ import annotations

import pytest
import torch.distributed.checkpoint.staging as torch_staging
from ranks_support import assert_passed, outcomes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(torch_staging, "DefaultStager"), reason="this torch has no stager for another process"
    ),
]


@pytest.mark.parametrize(
    "name", ["what_was_staged_is_saved", "an_error_in_the_process_is_in_the_future_of_every_rank"]
)
def test_two_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_passed(outcomes_of("ranks_process_mode", 2, tmp_path_factory), name)
