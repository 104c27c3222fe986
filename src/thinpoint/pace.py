"""How long a save makes training wait, from the rates of its stages; and whether coding makes that longer.

Pure arithmetic without imports from this package, so that a save can ask it with the rates that it has just measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PROBE_EVERY = 20
"""Saves with `raw` after which the coder's rate is worth measuring again."""

_MARGIN = 0.05
"""A choice is changed only for a wait that is shorter by this fraction: measured rates differ by more from save to save."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes a second of each stage, all GPUs or threads together; `math.inf` for a stage that takes no time.

    Attributes:
        encode: raw bytes coded.
        link: bytes copied from devices to their hosts, after coding.
        storage: stored bytes written.
    """

    encode: float
    link: float
    storage: float


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """What a save takes.

    Attributes:
        wait_s: training stands still.
        durable_s: from the begin until the checkpoint counts.
        encode_s, link_s, write_s: each stage alone.
    """

    wait_s: float
    durable_s: float
    encode_s: float
    link_s: float
    write_s: float

    @property
    def slowest(self) -> str:
        """The stage that takes longest: "codec", "link" or "storage"."""
        return max(
            ("storage", self.write_s), ("link", self.link_s), ("codec", self.encode_s), key=lambda s: s[1]
        )[0]


def save_times(
    raw_bytes: float,
    stored_bytes: float,
    rates: Rates,
    *,
    mode: str = "sync",
    overlaps: bool = True,
    batch_bytes: float = 0.0,
    fixed_s: float = 0.0,
    window_s: float = 0.0,
    interval_s: float = math.inf,
) -> SaveTimes:
    """The times of a save whose stages are raw/encode, stored/link and stored/storage.

    sync: the slowest stage, or the sum if they do not overlap. A pipeline of n = raw / batch batches takes the slowest stage
    and 1/n of the others, through which the first and the last batch go alone. async: the same without storage; what the
    write takes beyond the interval is waited for too, as a save waits for the one before. overlap: as async, less the window.

    Source: the published case counts stored/storage alone (coding is free). A commentator's counter-case, 782 GiB at
    20 GB/s with a codec of 16 GB/s, goes from 39 to 49 s: that is the slowest stage, 782/16. The modes are those of
    docs/saving.md and docs/overlap.md.

    Args:
        mode: "sync", "async" or "overlap".
        overlaps: the stages run at the same time.
        batch_bytes: raw bytes that go through the stages together; 0 for so few that they do not matter.
        fixed_s: besides the stages, in any mode.
        window_s: for "overlap": what the copy to the host can be hidden behind.
        interval_s: from one save to the next.
    """
    encode_s, link_s, write_s = (
        raw_bytes / rates.encode,
        stored_bytes / rates.link,
        stored_bytes / rates.storage,
    )
    share = min(batch_bytes / raw_bytes, 1.0) if overlaps else 1.0

    def combine(*stages: float) -> float:
        return max(stages) + (sum(stages) - max(stages)) * share

    durable_s = combine(encode_s, link_s, write_s) + fixed_s
    if mode == "sync":
        wait_s = durable_s
    else:
        staging_s = combine(encode_s, link_s) + fixed_s
        wait_s = max(0.0, staging_s - (window_s if mode == "overlap" else 0.0)) + max(
            0.0, durable_s - interval_s
        )
    return SaveTimes(wait_s=wait_s, durable_s=durable_s, encode_s=encode_s, link_s=link_s, write_s=write_s)


def restore_time(
    raw_bytes: float,
    stored_bytes: float,
    *,
    decode: float,
    link: float,
    storage: float,
    overlaps: bool = True,
) -> float:
    """Seconds of a load: the slowest of reading stored bytes, copying them to the devices and decoding; or their sum.

    Args:
        decode: raw bytes a second; storage and link: stored bytes a second.
    """
    stages = (raw_bytes / decode, stored_bytes / link, stored_bytes / storage)
    return max(stages) if overlaps else sum(stages)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a save with codec "auto" does.

    Attributes:
        codec: "thin" or "raw".
        reason: one sentence with the numbers, for the log.
        thin_s, raw_s: the wait expected of each.
    """

    codec: str
    reason: str
    thin_s: float
    raw_s: float


def measured_rates(
    *, raw_bytes: int, stored_bytes: int, encode_s: float, write_s: float, link: float = math.inf
) -> Rates:
    """The rates of a save that coded, from its report: `stages["encode"]` (with the copy to the host), `stages["write"]`.

    Args:
        link: bytes a second to the host, if it was measured apart; a save on the CPU has none.
    """
    return Rates(
        encode=raw_bytes / encode_s if encode_s > 0 else math.inf,
        link=link,
        storage=stored_bytes / write_s if write_s > 0 else math.inf,
    )


def choose_codec(
    raw_bytes: float,
    ratio: float,
    rates: Rates,
    *,
    mode: str = "sync",
    interval_s: float = math.inf,
    now: str = "thin",
) -> Choice:
    """Code, or store raw because coding would make the wait longer. The same model as the advisor's.

    Args:
        raw_bytes: of the state to be saved.
        ratio: raw over stored bytes of the last save that coded.
        rates: as `measured_rates` gives.
        mode, interval_s: as for `save_times`. Without a rate of the link raw bytes would be staged in no time: then they count
            as if they were waited for until they are written.
        now: what the last save did; a change needs a wait that is 5 % shorter.
    """
    thin = save_times(raw_bytes, raw_bytes / ratio, rates, mode=mode, interval_s=interval_s)
    raw_rates = Rates(encode=math.inf, link=rates.link, storage=rates.storage)
    raw = save_times(raw_bytes, raw_bytes, raw_rates, mode=mode, interval_s=interval_s)
    raw_s = raw.durable_s if math.isinf(rates.link) else raw.wait_s
    if now == "raw":
        codec = "thin" if thin.wait_s < raw_s * (1 - _MARGIN) else "raw"
    else:
        codec = "raw" if raw_s < thin.wait_s * (1 - _MARGIN) else "thin"
    verb = "stored raw" if codec == "raw" else "compressed"
    reason = (
        f"{verb}: a save of {raw_bytes / 1e9:.3g} GB would wait {thin.wait_s:.3g} s compressed ({ratio:.3f}x, coded at "
        f"{rates.encode / 1e9:.3g} GB/s), {raw_s:.3g} s raw (storage {rates.storage / 1e9:.3g} GB/s)"
    )
    return Choice(codec=codec, reason=reason, thin_s=thin.wait_s, raw_s=raw_s)
