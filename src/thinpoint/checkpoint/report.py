"""What a save or a restore did, as values and as stable JSON."""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass, field
from typing import Any, Literal

from thinpoint.api import SaveReport
from thinpoint.checkpoint.log import rank

REPORT_VERSION = 1


def peak_process_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """What a save did.

    Attributes:
        outcome: "committed"; "failed": nothing is in place, see `error`; "skipped": another save was running.
        step: training step.
        path: the checkpoint's folder.
        save_id, run_id: ids; `save_id` is empty unless committed.
        seconds: from the call to the durable manifest, or to the failure.
        stall_seconds: for which training waited.
        stages: seconds per stage, where known.
        retries: attempts that were repeated.
        asynchronous: whether it ran beside training.
        error: what went wrong, for people.
        saved: the report of `thinpoint.save`; None if it did not get that far.
        versions: of thinpoint, the file format and the encoder.
        peak_process_bytes: the most memory that the process has had so far.
    """

    outcome: Literal["committed", "failed", "skipped"]
    step: int
    path: str
    run_id: str = ""
    save_id: str = ""
    seconds: float = 0.0
    stall_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    retries: int = 0
    asynchronous: bool = False
    error: str | None = None
    saved: SaveReport | None = None
    versions: dict[str, str] = field(default_factory=dict)
    peak_process_bytes: int = field(default_factory=peak_process_bytes)

    def to_json(self) -> str:
        """One line of JSON: version 1 of this report keeps these keys; later ones may add some."""
        saved = self.saved
        return _dump(
            {
                "event": "save",
                "outcome": self.outcome,
                "step": self.step,
                "path": self.path,
                "run_id": self.run_id,
                "save_id": self.save_id,
                "seconds": self.seconds,
                "stall_seconds": self.stall_seconds,
                "stages": self.stages,
                "retries": self.retries,
                "asynchronous": self.asynchronous,
                "error": self.error,
                "raw_bytes": saved.raw_bytes if saved else None,
                "stored_bytes": saved.file_bytes if saved else None,
                "file_id": saved.file_id if saved else None,
                "backend": saved.backend if saved else None,
                "codec": saved.codec if saved else None,
                "mode": saved.mode if saved else None,
                "fallback": saved.fallback if saved else None,
                "roles": {
                    role: {"raw_bytes": raw, "stored_bytes": stored}
                    for role, (raw, stored) in (saved.roles if saved else {}).items()
                },
                "versions": self.versions,
                "peak_process_bytes": self.peak_process_bytes,
            }
        )


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A newer checkpoint that a restore passed over.

    Attributes:
        step: training step.
        reason: why, for people.
    """

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        step: training step that was restored.
        path: the checkpoint's folder.
        save_id: the save that wrote it.
        metadata: what was given to `save`.
        skipped: newer checkpoints that were passed over, newest first.
        num_tensors, num_bytes: tensors that were filled, and their bytes.
        stored_bytes: bytes that were read.
        missing, unexpected, cast: see `LoadIntoReport`.
        seconds: from the call to the last byte.
        versions: of thinpoint, the file format and the encoder that wrote it.
    """

    step: int
    path: str
    save_id: str
    metadata: dict[str, Any]
    skipped: tuple[SkippedStep, ...]
    num_tensors: int
    num_bytes: int
    stored_bytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]
    seconds: float
    versions: dict[str, str]

    def to_json(self) -> str:
        """One line of JSON; as `CheckpointReport.to_json`."""
        fields = dict(vars(self))
        fields["skipped"] = [vars(step) for step in self.skipped]
        return _dump({"event": "restore", **fields})


def _dump(fields: dict[str, Any]) -> str:
    return json.dumps({"report": REPORT_VERSION, "rank": rank(), **fields}, sort_keys=True)
