"""The manifest of a checkpoint: written last, it is what makes a checkpoint of the files beside it (`spec/FOLDER.md`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from thinpoint.errors import MalformedFileError, UnsupportedVersionError, UsageError
from thinpoint.file.json_text import parse_json
from thinpoint.file.limits import MAX_INT64
from thinpoint.folder import records
from thinpoint.folder.names import MAX_RANKS, MAX_STEP, is_id, layout_name, rank_of, save_id_of

VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20
MAX_METADATA_BYTES = 1 << 20
MAX_FILES = MAX_RANKS
MAX_NAMES = 1 << 10

_OPTIONAL = ("step", "run_id", "generation", "world_size")
_HEX = set("0123456789abcdef")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A data file that belongs to a checkpoint.

    Attributes:
        name: in the checkpoint's folder.
        num_bytes: its size.
        file_id: digest of its index, 16 hex digits: the identity of what it holds.
        digest: digest of its index as stored, 16 hex digits. The index holds the digests of all parts, these those of
            their blocks: with it every byte of the file is named.
    """

    name: str
    num_bytes: int
    file_id: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class LayoutRecord:
    """The file that says how the tensors of a checkpoint lie in the files of its ranks.

    Attributes:
        name: in the checkpoint's folder.
        num_bytes: its size.
        digest: of its bytes, 16 hex digits.
    """

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is made of, and where it came from.

    Attributes:
        step: training step; None if whoever saved did not say.
        save_id: the save that wrote it; of many ranks, that of rank 0.
        run_id, generation: the run that wrote it; None without a directory of checkpoints.
        time_s: when, seconds since 1970.
        files: the data files; of many ranks, one of each in their order.
        roles: for each role (raw bytes, stored bytes).
        trainable: digest of the bits of all weights, 32 hex digits; None if the state has none.
        versions: of thinpoint, the file format and the encoder.
        metadata: the user's, any JSON object.
        world_size: ranks that saved it; None if it is one file that holds everything.
        layout: with a world size, where everything is.
    """

    step: int | None
    save_id: str
    run_id: str | None
    generation: int | None
    time_s: float
    files: tuple[FileRecord, ...]
    roles: dict[str, tuple[int, int]]
    trainable: str | None
    versions: dict[str, str]
    metadata: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    layout: LayoutRecord | None = None

    @property
    def training_step(self) -> int:
        """The training step, which every checkpoint in a directory of them has."""
        if self.step is None:
            raise UsageError("the checkpoint does not say its training step", where=self.save_id)
        return self.step

    @property
    def num_bytes(self) -> int:
        """Bytes of all its data files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def raw_bytes(self) -> int:
        """Bytes of what they hold, before coding."""
        return sum(raw for raw, _ in self.roles.values())


def check_metadata(metadata: Any) -> dict[str, Any]:
    """The user's metadata, if a manifest can hold them.

    Raises:
        UsageError: they are no JSON object, or too large.
    """
    if not isinstance(metadata, dict):
        raise UsageError("metadata must be a dict of JSON values", actual=type(metadata).__name__)
    raw = records.dump(metadata)
    try:
        parse_json(raw, what="the metadata", where="the call")
    except MalformedFileError as error:
        raise UsageError(f"the metadata cannot be stored: {error}") from error
    if len(raw) > MAX_METADATA_BYTES:
        raise UsageError(
            "the metadata is too large",
            expected=f"at most {MAX_METADATA_BYTES:,} bytes",
            actual=f"{len(raw):,}",
            hint="Keep it in the state",
        )
    return metadata


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as stored, read back by the rules of `parse_manifest` before it is returned."""
    fields = {
        "manifest": VERSION,
        "save_id": manifest.save_id,
        "time_s": manifest.time_s,
        "files": [
            {"name": f.name, "bytes": f.num_bytes, "file_id": f.file_id, "digest": f.digest}
            for f in manifest.files
        ],
        "roles": {
            role: {"raw_bytes": raw, "stored_bytes": stored} for role, (raw, stored) in manifest.roles.items()
        },
        "trainable": manifest.trainable,
        "versions": manifest.versions,
        "metadata": manifest.metadata,
    }
    for name in _OPTIONAL:
        if getattr(manifest, name) is not None:
            fields[name] = getattr(manifest, name)
    if manifest.layout is not None:
        layout = manifest.layout
        fields["layout"] = {"name": layout.name, "bytes": layout.num_bytes, "digest": layout.digest}
    raw = records.dump(fields)
    parse_manifest(raw, where="the manifest to be written", step=manifest.step)
    return raw


def parse_manifest(raw: bytes, *, where: str, step: int | None = None) -> Manifest:
    """The manifest in untrusted bytes.

    Args:
        where: the file, for messages.
        step: the training step whose folder it lies in; None if it may be any.

    Raises:
        MalformedFileError, LimitExceededError: it is damaged, or made to cause harm.
        UnsupportedVersionError: it was written by a newer version.
    """
    fields = records.Fields.parse(raw, what="the manifest", where=where)
    version = fields.number("manifest", MAX_INT64)
    if version > VERSION:
        raise UnsupportedVersionError(
            "the manifest is of a newer version", where=where, expected=f"at most {VERSION}", actual=version
        )
    run_id = None if not fields.has("run_id") else _an_id(fields, "run_id")
    manifest = Manifest(
        step=_optional_number(fields, "step", MAX_STEP),
        save_id=_an_id(fields, "save_id"),
        run_id=run_id,
        generation=_optional_number(fields, "generation", MAX_INT64),
        time_s=fields.seconds("time_s"),
        files=tuple(_file(item) for item in fields.objects("files", MAX_FILES)),
        roles={
            role: (item.number("raw_bytes", MAX_INT64), item.number("stored_bytes", MAX_INT64))
            for role, item in fields.named_objects("roles", MAX_NAMES).items()
        },
        trainable=None if not fields.has("trainable") else _hex(fields, "trainable", 32),
        versions=fields.named_texts("versions", MAX_NAMES),
        metadata=fields.get("metadata", dict),
        world_size=_optional_number(fields, "world_size", MAX_FILES),
        layout=None if not fields.has("layout") else _layout(fields.below("layout")),
    )
    if step is not None and manifest.step != step:
        raise fields.error("step is not that of the folder", step, manifest.step)
    _check_names(manifest, fields)
    return manifest


def _check_names(manifest: Manifest, fields: records.Fields) -> None:
    """That the files are those of one save: one that holds everything, or one of each rank and a layout."""
    names = [file.name for file in manifest.files]
    if not names or len(set(names)) != len(names):
        raise fields.error("files", "at least one, none twice", names)
    if manifest.world_size is None:
        if manifest.layout is not None:
            raise fields.error("world_size", "a number, as there is a layout", None)
        for name in names:
            if save_id_of(name) != manifest.save_id:
                raise fields.error("the name of a file", f"{manifest.save_id}-rank00000.thin", name)
        return
    if manifest.layout is None or manifest.layout.name != layout_name(manifest.save_id):
        actual = manifest.layout and manifest.layout.name
        raise fields.error("the name of the layout", layout_name(manifest.save_id), actual)
    if len(names) != manifest.world_size:
        raise fields.error("the number of files", manifest.world_size, len(names))
    for rank, name in enumerate(names):
        if rank_of(name) != rank:
            raise fields.error("the name of a file", f"an id and -rank{rank:05d}.thin", name)


def _layout(fields: records.Fields) -> LayoutRecord:
    return LayoutRecord(
        name=fields.text("name"),
        num_bytes=fields.number("bytes", MAX_INT64),
        digest=_hex(fields, "digest", 16),
    )


def _optional_number(fields: records.Fields, name: str, most: int) -> int | None:
    return fields.number(name, most) if fields.has(name) else None


def _file(fields: records.Fields) -> FileRecord:
    return FileRecord(
        name=fields.text("name"),
        num_bytes=fields.number("bytes", MAX_INT64),
        file_id=_hex(fields, "file_id", 16),
        digest=_hex(fields, "digest", 16),
    )


def _an_id(fields: records.Fields, name: str) -> str:
    value = fields.text(name)
    if not is_id(value):
        raise fields.error(name, "24 hexadecimal digits", value)
    return value


def _hex(fields: records.Fields, name: str, num_chars: int) -> str:
    value = fields.text(name)
    if len(value) != num_chars or not set(value) <= _HEX:
        raise fields.error(name, f"{num_chars} hexadecimal digits", value)
    return value
