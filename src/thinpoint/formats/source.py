"""What a file made by `thinpoint compress` notes about where it came from, in the index's `meta`."""

from __future__ import annotations

from typing import Any

from thinpoint.errors import MalformedFileError

TORCH = "torch"
SAFETENSORS = "safetensors"
META_KEY = "source"


def source_of(meta: dict[str, Any], where: object) -> dict[str, Any] | None:
    """The note about the original file, or None for a file that `thinpoint.save` wrote.

    Raises:
        MalformedFileError: the note is not what `torch_note` or `safetensors_note` gives.
    """
    note = meta.get(META_KEY)
    if note is None:
        return None
    if isinstance(note, dict):
        if note.get("kind") == TORCH and isinstance(note.get("zip"), bool):
            return note
        if note.get("kind") == SAFETENSORS and isinstance(note.get("header"), str):
            return note
    raise MalformedFileError("the note about the original file is not one this version knows", where=where)


def torch_note(*, is_zip: bool) -> dict[str, Any]:
    """The note for a file that `torch.save` wrote, as a zip archive or in the format before torch 1.6."""
    return {META_KEY: {"kind": TORCH, "zip": is_zip}}


def safetensors_note(header: str) -> dict[str, Any]:
    """The note for a `.safetensors` file with this header, padding included."""
    return {META_KEY: {"kind": SAFETENSORS, "header": header}}
