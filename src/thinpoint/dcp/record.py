"""What a rank tells the coordinator of its file, and how ranks that do not save in the same way are found out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from thinpoint.codec.plan import ENCODER_VERSION
from thinpoint.engine.report import bytes_of_roles
from thinpoint.engine.save import Written
from thinpoint.errors import UsageError
from thinpoint.file.layout import WRITE_VERSION, hex64
from thinpoint.folder.manifest import FileRecord
from thinpoint.folder.trainable import trainable_digest
from thinpoint.version import __version__


def versions() -> dict[str, str]:
    """Of what this process writes, as a manifest notes them."""
    return {"thinpoint": __version__, "format": str(WRITE_VERSION), "encoder": str(ENCODER_VERSION)}


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """A rank's file, durable.

    Attributes:
        rank: whose it is.
        file: what the manifest says of it.
        roles: for each role (raw bytes, stored bytes).
        trainable: digest of the bits of its weights; None if it has none.
        way: versions and options, that all ranks must share.
        rank_states: the names of the objects in it that are the state of one rank.
    """

    rank: int
    file: FileRecord
    roles: dict[str, tuple[int, int]]
    trainable: str | None
    way: dict[str, str]
    rank_states: tuple[str, ...]


def record_of(
    written: Written, *, rank: int, name: str, way: dict[str, str], rank_states: Iterable[str]
) -> RankRecord:
    """The record of a file that was written."""
    summary = written.summary
    return RankRecord(
        rank=rank,
        file=FileRecord(
            name=name,
            num_bytes=summary.file_bytes,
            file_id=hex64(summary.file_id),
            digest=hex64(summary.index_digest),
        ),
        roles=bytes_of_roles(written.entries),
        trainable=trainable_digest(written.entries),
        way=way,
        rank_states=tuple(rank_states),
    )


def trainable_of_all(records: Iterable[RankRecord]) -> str | None:
    """The digest of the weights of all ranks, in their order; None if there are none."""
    known = [f"{record.rank} {record.trainable}\n" for record in records if record.trainable is not None]
    return blake2b("".join(known).encode(), digest_size=16).hexdigest() if known else None


def roles_of_all(records: Iterable[RankRecord]) -> dict[str, tuple[int, int]]:
    """For each role (raw bytes, stored bytes) of all ranks together."""
    roles: dict[str, tuple[int, int]] = {}
    for record in records:
        for role, (raw, stored) in record.roles.items():
            raw_before, stored_before = roles.get(role, (0, 0))
            roles[role] = raw_before + raw, stored_before + stored
    return roles


def check_same_way(ways: Mapping[int, Mapping[str, str]]) -> None:
    """Refuses ranks that do not save in the same way.

    Args:
        ways: for each rank its versions and options.

    Raises:
        UsageError: they differ; the message lists what each rank has.
    """
    ranks: dict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
    for rank, way in sorted(ways.items()):
        ranks[tuple(sorted(way.items()))].append(rank)
    if len(ranks) < 2:
        return
    shared = set.intersection(*(set(way) for way in ranks))
    lines = [
        f"rank{'s' if len(of) > 1 else ''} {_list(of)}: "
        + ", ".join(f"{name} {value}" for name, value in way if (name, value) not in shared)
        for way, of in ranks.items()
    ]
    raise UsageError(
        f"the ranks do not save in the same way ({'; '.join(lines)})",
        hint="Give all ranks the same version of thinpoint, the same options and the same environment",
    )


def _list(ranks: list[int]) -> str:
    """Ranks for people: 0-3, 5."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
