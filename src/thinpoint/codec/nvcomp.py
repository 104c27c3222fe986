"""The `nvcomp-ans` chain as it is in a file: what says how its blocks were made (`spec/CODECS.md`, codec 4).

The blocks themselves only NVIDIA's nvCOMP can make and read, on its GPUs (`device/nvcomp.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from thinpoint.errors import BackendUnavailableError, MalformedFileError, UnknownCodecError

ANS_ID = 4

ANS_LAYOUT = 1
"""The layout of prefix and blocks that this version knows."""

ANS_BLOCK_BYTES = 1 << 18
"""Raw bytes of a block: on weights and moments 2-3 % smaller than in blocks of 64 KiB, as fast (H200, nvCOMP 6.0)."""

ANS_ALIGN_BYTES = 16
"""nvCOMP wants its input at such addresses; stored blocks are multiples of it."""

EXTRA = "thinpoint[nvcomp]"


@dataclass(frozen=True, kw_only=True)
class AnsMode:
    """What nvCOMP takes the bytes of a block for.

    Attributes:
        wire: its number in a prefix.
        name: nvCOMP's name.
        item_bytes: bytes of a value.
        dtypes: torch's names of what is coded so.
    """

    wire: int
    name: str
    item_bytes: int
    dtypes: tuple[str, ...] = ()


ANS_MODES = (
    AnsMode(wire=0, name="|u1", item_bytes=1),
    AnsMode(wire=1, name="|f1", item_bytes=1, dtypes=("float8_e4m3fn",)),
    AnsMode(wire=2, name="<f2", item_bytes=2, dtypes=("float16", "bfloat16")),
    AnsMode(wire=3, name="<f4", item_bytes=4, dtypes=("float32",)),
)

_VERSION = re.compile(rb"[0-9.]{1,32}")


def ans_mode(dtype: str) -> AnsMode:
    """The mode for a dtype: a float's own, bytes for all else."""
    return next((mode for mode in ANS_MODES if dtype in mode.dtypes), ANS_MODES[0])


def ans_prefix(mode: AnsMode, version: str) -> bytes:
    """The prefix of a part coded in a mode by that version of nvCOMP, digits and dots."""
    return bytes((ANS_LAYOUT, mode.wire)) + version.encode("ascii")


def read_ans_prefix(prefix: bytes, word_bytes: int) -> tuple[AnsMode, str]:
    """Mode and nvCOMP's version from a prefix, which may hold anything.

    Raises:
        UnknownCodecError: the layout is another.
        MalformedFileError: no such mode, one of another word width, or no version.
    """
    if prefix[:1] and prefix[0] != ANS_LAYOUT:
        raise UnknownCodecError(
            "a part is coded with a layout of nvcomp-ans that this version does not know",
            expected=ANS_LAYOUT,
            actual=prefix[0],
        )
    mode = next((mode for mode in ANS_MODES if prefix[1:2] == bytes((mode.wire,))), None)
    if mode is None or (mode.item_bytes not in (1, word_bytes)) or not _VERSION.fullmatch(prefix[2:]):
        raise MalformedFileError("the prefix of a part coded with nvcomp-ans is not valid")
    return mode, prefix[2:].decode("ascii")


def ans_unavailable(prefix: bytes, word_bytes: int, reason: str) -> BackendUnavailableError:
    """The error for a part that cannot be decoded here, with what it needs.

    Args:
        prefix, word_bytes: the part's, untrusted.
        reason: why not.
    """
    _, version = read_ans_prefix(prefix, word_bytes)
    return BackendUnavailableError(
        f"a part is coded with nvcomp-ans, which nvCOMP {version} wrote: {reason}",
        hint=f'Load it to an NVIDIA GPU (`map_location="cuda"`) with `pip install "{EXTRA}"`; nvCOMP '
        f"{version.split('.')[0]} reads it for certain",
    )
