"""Data loaders with a state of their own, saved by two ranks and restored by three."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_ranks import BATCH_SIZE, BATCHES_BEFORE, NUM_SAMPLES, go_on_with_the_data, save_amid_the_data
from group_ranks import results_of, run_ranks


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_three_ranks_go_on_with_what_two_have_not_yielded(num_workers: int, tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    folder = tmp_path / "run"
    before = results_of(run_ranks(2, save_amid_the_data, tmp_path, folder, num_workers))
    assert [len(samples) for samples in before] == [BATCHES_BEFORE * BATCH_SIZE] * 2

    found = results_of(run_ranks(3, go_on_with_the_data, tmp_path, folder, num_workers))
    everything = list(range(NUM_SAMPLES))
    for rank, (refused, next_sample, _) in enumerate(found):
        assert refused[0] == "StateMismatchError", refused
        assert all(text in refused[1] for text in ("loader", "2 ranks", "loaded by 3", "merge")), refused
        assert next_sample == rank, "what is refused leaves the loader as it was"

    after = [samples for _, _, samples in found]
    yielded = [sample for samples in (*before, *after) for sample in samples]
    assert len(yielded) == len(set(yielded)), "no sample comes twice"
    assert sorted(yielded) == everything, "none is left out"
    lengths = [len(samples) for samples in after]
    assert max(lengths) - min(lengths) <= 1, "each takes its part"
