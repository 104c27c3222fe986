"""What is found of a damaged file is what was written, and all that a digest proves is found."""

from __future__ import annotations

import io

import numpy as np
import pytest
from thin_pieces import open_bytes, raw_part, small_file, take_apart, two_plane_file

from thinpoint.digest import digest
from thinpoint.errors import (
    DamagedFileError,
    LimitExceededError,
    NotThinFileError,
    ThinpointError,
    UnsupportedVersionError,
)
from thinpoint.file.index import Index, StorageEntry
from thinpoint.file.layout import HEADER_BYTES, TRAILER_BYTES, WORD
from thinpoint.file.salvage import Findings, find, read_part
from thinpoint.file.writer import FileWriter
from thinpoint.store.fileobj import FileObjectSink, FileObjectSource

LABEL = {"name": ["w"], "dtype": "int32", "shape": [50], "role": "weight"}


def source_of(data: bytes) -> FileObjectSource:
    return FileObjectSource(io.BytesIO(data))


def many_parts(num_parts: int = 6, words: int = 50) -> bytes:
    sink = io.BytesIO()
    writer = FileWriter(FileObjectSink(sink))
    for i in range(num_parts):
        part = raw_part(np.arange(i, i + words, dtype=np.uint32), 32)
        writer.add_part(part, storage=i, start_bytes=0, dtype="int32", role="weight", label=LABEL)
    writer.finish(
        storages=[StorageEntry(bytes=4 * words, device="cpu")] * num_parts,
        tensors=[],
        tree="x" * 300,
        meta={},
        encoder=0,
        writer_version="0.1.0",
    )
    return sink.getvalue()


def intact_parts(data: bytes, findings: Findings) -> dict[int, bytes]:
    """The stored bytes, head excluded, of every part that can be read, by its number in the old file."""
    if findings.index is None:
        numbered = [(part.part_index, part.entry) for part in findings.found]
    else:
        numbered = list(enumerate(findings.index.parts))
    found = {}
    for number, entry in numbered:
        try:
            _, planes = read_part(source_of(data), entry)
        except ThinpointError:
            continue
        found[number] = b"".join(block.tobytes() for plane in planes for block in plane)
    return found


def truth(data: bytes) -> tuple[Index, dict[int, bytes]]:
    index = open_bytes(data).index
    return index, {
        i: data[part.offset + part.head_bytes : part.offset + part.stored_bytes]
        for i, part in enumerate(index.parts)
    }


def check(damaged: bytes, index: Index, parts: dict[int, bytes]) -> tuple[bool, set[int]]:
    """Whether the index was found, and which parts; everything found is as it was written."""
    try:
        findings = find(source_of(damaged))
    except DamagedFileError:
        return False, set()
    assert findings.index in (None, index)
    found = intact_parts(damaged, findings)
    assert all(parts[number] == stored for number, stored in found.items())
    return findings.index is not None, set(found)


@pytest.mark.parametrize("make", [small_file, two_plane_file, many_parts])
def test_an_intact_file_has_its_index_and_no_problems(make):
    data = make()
    findings = find(source_of(data))
    assert (findings.index, findings.found, findings.problems) == (open_bytes(data).index, (), ())
    assert intact_parts(data, findings) == truth(data)[1]


@pytest.mark.parametrize("make", [small_file, two_plane_file])
def test_one_flipped_bit_costs_at_most_the_part_or_the_index_it_is_in(make):
    data = make()
    index, parts = truth(data)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        has_index, found = check(bytes(changed), index, parts)
        hit = {i for i, part in enumerate(index.parts) if part.offset <= at < part.offset + part.stored_bytes}
        in_index = index.parts[-1].offset + index.parts[-1].stored_bytes <= at < len(data) - TRAILER_BYTES
        assert found == set(parts) - hit, f"byte {at}"
        # A bit of the frame that does not count leaves the text as it was, and that has a digest of its own.
        assert has_index or in_index, f"byte {at}"


@pytest.mark.parametrize("make", [small_file, two_plane_file, many_parts])
def test_of_a_file_cut_anywhere_every_whole_part_is_found(make):
    data = make()
    index, parts = truth(data)
    for size in range(len(data)):
        has_index, found = check(data[:size], index, parts)
        assert found == {i for i, part in enumerate(index.parts) if part.offset + part.stored_bytes <= size}
        # 32 bytes of the trailer hold the index's digest.
        assert has_index == (size >= len(data) - TRAILER_BYTES + 32)


def test_parts_behind_a_damaged_head_are_found_without_the_index():
    data = bytearray(many_parts()[:-100])
    index, parts = truth(many_parts())
    for i in (1, 3):
        data[index.parts[i].offset + 20] ^= 4
    findings = find(source_of(bytes(data)))
    assert findings.index is None
    assert intact_parts(bytes(data), findings) == {i: parts[i] for i in (0, 2, 4, 5)}
    assert [part.label for part in findings.found] == [LABEL] * 4
    lost = [problem for problem in findings.problems if "lost with its head" in problem.what]
    assert [problem.offset for problem in lost] == [index.parts[1].offset, index.parts[3].offset]


def test_a_zeroed_stretch_over_several_parts_costs_these():
    data = bytearray(many_parts(40))
    index, parts = truth(bytes(data))
    start, end = index.parts[0].offset, index.parts[30].offset + 8
    data[start - 32 : end] = bytes(end - start + 32)
    data[-TRAILER_BYTES:] = bytes(TRAILER_BYTES)
    findings = find(source_of(bytes(data)))
    assert intact_parts(bytes(data), findings) == {i: parts[i] for i in range(31, 40)}
    assert any("31 parts are lost" in problem.what for problem in findings.problems)


def test_bytes_behind_the_end_do_not_hide_the_index():
    data = many_parts()
    index, parts = truth(data)
    for extra in (b"\0", b"\0" * 4096, data[-TRAILER_BYTES:]):
        assert check(data + extra, index, parts) == (True, set(parts))


def test_an_index_that_no_digest_proves_is_not_used():
    data = bytearray(many_parts())
    index, parts = truth(bytes(data))
    data[-TRAILER_BYTES + 24 : -TRAILER_BYTES + 40] = bytes(16)
    assert check(bytes(data), index, parts) == (False, set(parts))


def test_parts_of_another_file_inside_a_part_are_not_taken():
    inner = np.frombuffer(many_parts(9), np.uint8)
    sink = io.BytesIO()
    writer = FileWriter(FileObjectSink(sink))
    for i, words in enumerate((np.arange(20, dtype=np.uint8), inner, np.arange(9, dtype=np.uint8))):
        writer.add_part(
            raw_part(words, 1 << 20), storage=i, start_bytes=0, dtype="uint8", role="other", label={}
        )
    outer = bytearray(sink.getvalue())
    findings = find(source_of(bytes(outer)))
    assert [part.part_index for part in findings.found] == [0, 1, 2]
    outer[findings.found[1].entry.offset + 30] ^= 1
    again = find(source_of(bytes(outer)))
    assert [part.part_index for part in again.found] == [0]
    assert any("another .thin file begins here" in problem.what for problem in again.problems)


def test_parts_that_contradict_each_other_are_not_taken():
    data = many_parts()
    index, _ = truth(data)
    first, second = (data[part.offset : part.offset + part.stored_bytes] for part in index.parts[1:3])
    head = data[: index.parts[1].offset]
    findings = find(source_of(head + bytes(64) + second + first + bytes(64)))
    assert [part.part_index for part in findings.found] == [0]
    assert any("contradict" in problem.what for problem in findings.problems)


def test_what_is_no_thin_file_is_refused_as_such():
    for data in (b"", b"hello", b"PK\x03\x04" + bytes(5000), b"PART" * 2000):
        with pytest.raises(DamagedFileError) as caught:
            find(source_of(data))
        assert data == b"" or type(caught.value) is NotThinFileError


def test_a_newer_file_is_left_to_a_newer_version():
    pieces = take_apart(small_file())
    pieces.header[10:12] = (9).to_bytes(2, "little")
    with pytest.raises(UnsupportedVersionError):
        find(source_of(pieces.seal()))


def test_a_file_full_of_false_heads_is_given_up():
    # Each claims a head of 65,536 bytes whose fields fit, so that all of it must be read to find that it is none.
    head = take_apart(many_parts(1)).heads[0]
    label_bytes = int.from_bytes(head[64:66], "little")
    sizes = 4 * ((1 << 16) - 72 - -(-label_bytes // 8) * 8 - 8) // 4
    head[4:8] = (1 << 16).to_bytes(4, "little")
    head[51:52], head[52:56], head[56:60] = b"\0", (1).to_bytes(4, "little"), bytes(4)
    head[60:64] = sizes.to_bytes(4, "little")
    data = bytes(HEADER_BYTES) + bytes(head[:72]) * 9000
    with pytest.raises(LimitExceededError, match="looks like the head"):
        find(source_of(data))


def test_a_part_whose_head_is_not_the_one_expected_is_refused():
    data = many_parts()
    index, _ = truth(data)
    changed = bytearray(data)
    at = index.parts[2].offset
    changed[at + 20 : at + 24] = (7).to_bytes(4, "little")
    end = at + index.parts[2].head_bytes
    changed[end - 8 : end] = WORD.pack(digest(bytes(changed[at : end - 8])))
    with pytest.raises(DamagedFileError, match="not the one"):
        read_part(source_of(bytes(changed)), index.parts[2])
