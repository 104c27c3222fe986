"""Feeds damaged and hostile files to the reader: `python fuzz/fuzz_reader.py --seconds 60 --seed 1`.

Only a ThinpointError may come out, within a limit of time and memory per file. A case is decided by seed and
number alone: `--seed 1 --start 4711 --iterations 1` runs that one again. The first failure is written to
--crash-dir and ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "fuzz"), str(ROOT / "src")]

import numpy as np  # noqa: E402
from thin_pieces import open_bytes, small_file, take_apart, two_plane_file  # noqa: E402

import thinpoint  # noqa: E402
from thinpoint.digest import digest  # noqa: E402
from thinpoint.errors import ThinpointError  # noqa: E402
from thinpoint.file.head import HEAD, HEAD_FIXED_BYTES  # noqa: E402
from thinpoint.file.json_text import dump_json  # noqa: E402
from thinpoint.file.layout import Trailer  # noqa: E402
from thinpoint.file.verify import verify_stored  # noqa: E402

CASE_SECONDS = 10.0
HEADROOM_BYTES = 1 << 30
MAX_SEED_FILE_BYTES = 1 << 20

HOSTILE_INTS = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 255, 256, 4095, 4096, 0xFFFF, 0x10000]
HOSTILE_INTS += [1 << bits for bits in (20, 24, 26, 28, 31, 32, 33, 40, 48, 53, 62, 63)]
HOSTILE_INTS += [(1 << bits) - 1 for bits in (26, 31, 32, 48, 63, 64)]
HOSTILE_VALUES: list[Any] = [
    *HOSTILE_INTS,
    *[-1, -(1 << 63), 1.5, 1e300, True, False, None, "", "x" * 5000, "float32", "quint2x4", "\ud800"],
    *[[], {}, [[]], [0] * 100, {"storage": 0}, {"": None}],
]


def read_everything(data: bytes) -> None:
    """Opens the file and reads every head and block of it."""
    reader = open_bytes(data)
    verify_stored(reader)
    for part in range(len(reader.index.parts)):
        head = reader.read_head(part)
        for plane in range(head.num_planes):
            reader.read_blocks(part, head, plane, 0, head.num_blocks)


def load_everything(data: bytes) -> None:
    """Decodes every part and builds the object."""
    thinpoint.load(io.BytesIO(data), map_location="cpu", num_threads=1)


def verify_deeply(data: bytes) -> None:
    """Decodes every part and compares its bits."""
    thinpoint.verify(io.BytesIO(data), deep=True, num_threads=1)


TARGETS: list[Callable[[bytes], None]] = [read_everything, load_everything, verify_deeply]
"""What each case is given to; may raise a ThinpointError and nothing else."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the fuzzer; 0 if nothing but errors of ours came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit")
    parser.add_argument("--iterations", type=int, help="run so many cases instead of for a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--crash-dir", type=Path, default=ROOT / "build" / "fuzz")
    options = parser.parse_args(arguments)

    seeds = seed_files()
    for data in seeds:
        read_everything(data)
        # Loads what is loaded on first use, whose memory and time are not the cases'; a synthetic file may hold no state.
        for target in TARGETS[1:]:
            with contextlib.suppress(ThinpointError):
                target(data)
    # The compiled digest is loaded on first use; that memory is not the case's.
    digest(np.zeros(1 << 20, np.uint8))
    limit_memory()
    signal.signal(signal.SIGALRM, on_alarm)

    start = time.monotonic()
    outcomes = {"refused": 0, "accepted": 0}
    numbers = itertools.count(options.start)
    if options.iterations is not None:
        numbers = iter(range(options.start, options.start + options.iterations))
    for number in numbers:
        if options.iterations is None and time.monotonic() - start > options.seconds:
            break
        data = make_case(seeds, random.Random(f"{options.seed}-{number}"))
        for target in TARGETS:
            outcome = run_case(target, data, f"{options.seed}-{number}", options.crash_dir)
            if outcome == "failed":
                return 1
            outcomes[outcome] += 1
    print(
        f"{outcomes['refused']} refused, {outcomes['accepted']} accepted in {time.monotonic() - start:.1f} s"
    )
    return 0


def run_case(target: Callable[[bytes], None], data: bytes, name: str, crash_dir: Path) -> str:
    """One of "accepted", "refused" or "failed"; a failure is reported and its file kept."""
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    try:
        target(data)
    except ThinpointError:
        return "refused"
    except (Exception, CaseTimeout):  # noqa: BLE001
        signal.setitimer(signal.ITIMER_REAL, 0)
        traceback.print_exc()
        crash_dir.mkdir(parents=True, exist_ok=True)
        path = crash_dir / f"{target.__name__}-{name}.thin"
        path.write_bytes(data)
        print(f"FAILED: case {name}, kept as {path}")
        return "failed"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "accepted"


class CaseTimeout(BaseException):
    """A case took too long; no Exception, so that no handler on the way swallows it."""


def on_alarm(*_: object) -> None:
    """Ends a case that hangs."""
    raise CaseTimeout(f"the case took more than {CASE_SECONDS} s")


def limit_memory() -> None:
    """Lets the process grow by HEADROOM_BYTES at most; what asks for more gets a MemoryError."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            limit = int(line.split()[1]) * 1024 + HEADROOM_BYTES
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def seed_files() -> list[bytes]:
    """The valid files that cases are made from: synthetic ones, and the golden files if there are any."""
    golden = sorted((ROOT / "tests" / "golden").rglob("*.thin"))
    small = [path for path in golden if path.stat().st_size <= MAX_SEED_FILE_BYTES]
    return [small_file(), two_plane_file(), *(path.read_bytes() for path in small)]


def make_case(seeds: list[bytes], rng: random.Random) -> bytes:
    """One damaged file: bytes changed anywhere, or one piece changed and all digests made to fit."""
    data = rng.choice(seeds)
    change = rng.choice([change_bytes, change_bytes, change_header, change_head, change_body, change_index])
    if change is change_bytes:
        return change_bytes(data, rng)
    pieces = take_apart(data)
    if not pieces.heads and change in (change_head, change_body):
        change = change_index
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        change(pieces, rng)
    sealed = pieces.seal()
    return change_bytes(sealed, rng) if rng.random() < 0.05 else sealed


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flips, sets, cuts, copies and inserts bytes."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.randbytes(rng.choice([1, 8, 72, 1000]))
            case 4:
                start = rng.randrange(len(out) + 1)
                out[at:at] = out[start : start + rng.choice([8, 32, 72, 400])]
            case 5:
                del out[at : at + rng.choice([1, 8, 72])]
            case _:
                overwrite_int(out, rng)
        if not out:
            break
    return bytes(out)


def overwrite_int(out: bytearray, rng: random.Random) -> None:
    """Writes a hostile integer over an aligned 1, 2, 4 or 8 bytes."""
    size = rng.choice([1, 2, 4, 4, 8, 8])
    if len(out) >= size:
        at = rng.randrange(0, len(out) - size + 1, size)
        out[at : at + size] = (rng.choice(HOSTILE_INTS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def change_header(pieces: Any, rng: random.Random) -> None:
    """A field of the header or the trailer."""
    if rng.random() < 0.3:
        overwrite_int(pieces.header, rng)
        return
    name = rng.choice([*Trailer.__dataclass_fields__, "reserved"])
    bits = 32 if name in ("num_parts", "reserved") else 64
    pieces.trailer[name] = rng.choice(HOSTILE_INTS) & ((1 << bits) - 1)


def change_head(pieces: Any, rng: random.Random) -> None:
    """A field of a part's head, often with the same number in the index."""
    part = rng.randrange(len(pieces.heads))
    head = pieces.heads[part]
    if rng.random() < 0.3:
        head[:] = change_bytes(bytes(head), rng)
    else:
        overwrite_int(head, rng)
    parts = pieces.index.get("parts")
    if len(head) < HEAD_FIXED_BYTES or not isinstance(parts, list) or rng.random() < 0.3:
        return
    fields = HEAD.unpack(bytes(head[:HEAD_FIXED_BYTES]))
    _, head_bytes, body_bytes, _, storage, start, elems, raw_digest, codec, word_bytes, *_ = fields
    parts[part].update(storage=storage, start=start, elems=elems, word_bytes=word_bytes, codec=codec)
    parts[part].update(body_bytes=body_bytes, raw_digest=f"{raw_digest:016x}")
    if rng.random() < 0.5:
        parts[part]["head_bytes"] = head_bytes


def change_body(pieces: Any, rng: random.Random) -> None:
    """A part's prefix, blocks or both, with digests that fit."""
    part = rng.randrange(len(pieces.heads))
    body = pieces.bodies[part]
    for _ in range(rng.choice([1, 1, 3, 10])):
        if body and rng.random() < 0.7:
            at = rng.randrange(len(body))
            body[at] = rng.choice([0, 0xFF, body[at] ^ (1 << rng.randrange(8)), rng.randrange(256)])
        else:
            head = pieces.heads[part]
            at = rng.randrange(HEAD_FIXED_BYTES, len(head))
            head[at] = rng.choice([0, 0xFF, head[at] ^ (1 << rng.randrange(8)), rng.randrange(256)])
    if len(pieces.heads[part]) >= HEAD_FIXED_BYTES:
        pieces.seal_blocks(part)


def change_index(pieces: Any, rng: random.Random) -> None:
    """A value, key or byte of the index."""
    if rng.random() < 0.15:
        pieces.raw_index = change_bytes(dump_json(pieces.index), rng)
        return
    if rng.random() < 0.05:
        pieces.raw_index = rng.choice([b"[", b'{"a":', b'"\\"']) * rng.choice([600, 100_000])
        return
    node: Any = pieces.index
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        child = node[key]
        if isinstance(child, dict | list) and child and rng.random() < 0.9:
            node = child
            continue
        break
    match rng.randrange(5):
        case 0:
            del node[key]
        case 1 if isinstance(node, list):
            node.insert(key, copy.deepcopy(rng.choice(node)))
        case 1:
            node["extra"] = copy.deepcopy(rng.choice(HOSTILE_VALUES))
        case 2 if isinstance(child, int):
            node[key] = child + rng.choice([-8, -1, 1, 8, 1 << 32])
        case _:
            node[key] = copy.deepcopy(rng.choice(HOSTILE_VALUES))


if __name__ == "__main__":
    sys.exit(main())
