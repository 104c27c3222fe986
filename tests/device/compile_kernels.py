"""Compiles every kernel for targets that need not be here; prints one line for each. Not under Triton's interpreter.

python compile_kernels.py cuda:90 hip:gfx942
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinpoint.device import launch, plans, ranges, worklists
from thinpoint.device.kernels import decode, encode, general, patching, plan, planes, scan
from thinpoint.device.tables import FAST, Variant

TABLE, INT32, UINT32, UINT16, UINT8 = "*i64", "*i32", "*u32", "*u16", "*u8"
TYPES = {
    **dict.fromkeys(
        ("chunks", "parts", "masks", "rows", "tiles", "profile_parts", "table_rows", "entries"), TABLE
    ),
    **dict.fromkeys(
        ("programs", "segments", "blocks", "template", "sizes", "patches", "num_patches", "sums"), TABLE
    ),
    **dict.fromkeys(
        ("means", "profiles", "order", "histograms", "table_histograms", "log2", "freqs_out"), INT32
    ),
    **dict.fromkeys(("counts", "errors", "freqs", "differences", "block_of_segment"), INT32),
    **dict.fromkeys(("raw", "states", "plane32", "entropy_states", "tables"), UINT32),
    **dict.fromkeys(("scratch", "plane16", "entropy_words"), UINT16),
    "kept": UINT8,
    "slots": UINT8,
    "capacity": "i32",
    "length": "i32",
    "num_blocks": "i32",
    "num_words": "i32",
    **dict.fromkeys(("source", "host"), TABLE),
}
WIDTHS = (8, 16, 32, 64)


def jobs(every_split: bool = True) -> list[tuple[Any, dict[str, Any], int]]:
    """(kernel, its constants, warps) for everything that is launched."""
    made: list[tuple[Any, dict[str, Any], int]] = []
    for width in WIDTHS:
        for aligned in (True, False):
            constants = {
                "WORD_BITS": width,
                "GROUPS": plans.SCAN_GROUPS,
                "ROUNDS": worklists.SCAN_STEP // plans.SCAN_GROUPS,
                "ALIGNED": aligned,
            }
            made.append((scan.scan_groups, constants, plans.SCAN_WARPS))
        groups = {"WIDTH": width, "GROUPS": plans.HISTOGRAM_GROUPS}
        made.append((plan.sample_histograms, groups, 4))
        made.append(
            (plan.table_histograms, {**groups, "ROUNDS": worklists.TABLE_STEP // plans.HISTOGRAM_GROUPS}, 4)
        )
        made += [(general.encode_any, {"WIDTH": width}, 1), (general.decode_any, {"WIDTH": width}, 1)]
        made.append((patching.apply_patches, {"WIDTH": width, "BLOCK": 256}, 1))
    made += [
        (plan.part_means, {}, 4),
        (plan.column_sums, {"COLUMNS": worklists.PROFILE_COLUMNS, "ROWS": plans.PROFILE_ROWS}, 4),
        (plan.finish_profiles, {"TILE": 1024}, 4),
        (plan.choose_candidates, {}, 4),
        (plan.make_tables, {}, 4),
        (planes.report, {"WORDS": launch.REPORT_WORDS}, 4),
        (planes.place_blocks, {"BLOCKS": 512, "SEGMENTS": 8}, 8),
        (planes.compact, {"CHUNK": 512}, 1),
        (planes.open_blocks, {"SEGMENTS": 8}, 1),
        (planes.open_blocks, {"SEGMENTS": 1024}, 1),
        (planes.decode_tables, {"SLOTS": launch.TABLE_SLOTS}, 4),
    ]
    for aligned in (True, False):
        sizes = {"WORDS": ranges.DIGEST_WORDS, "ROUNDS": ranges.DIGEST_ROUNDS, "ALIGNED": aligned}
        made.append((planes.digest_ranges, sizes, 4))
        sizes = {
            "BYTES": ranges.COMPARE_BYTES,
            "ROUNDS": ranges.COMPARE_ROUNDS,
            "WIDTH": 64 if aligned else 8,
        }
        made.append((planes.compare_ranges, sizes, 4))
    usual = {Variant(32, 21, 0, True), Variant(16, 5, 0, True)}
    for variant in sorted(FAST if every_split else usual, key=str):
        constants = launch.fast_constants(variant)
        made += [(encode.encode_whole, constants, 1), (decode.decode_whole, constants, 1)]
    return made


def compile_one(kernel: Any, constants: dict[str, Any], warps: int, target: GPUTarget) -> Any:
    """The compiled kernel."""
    signature = {
        name: "constexpr" if name in constants else TYPES[name]
        for name in inspect.signature(kernel.fn).parameters
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options={"num_warps": warps})


def main(arguments: list[str]) -> None:
    for name in arguments:
        if name == "--all":
            continue
        backend, arch = name.split(":")
        target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if arch == "gfx942" else 32)
        done = set()
        for kernel, constants, warps in jobs("--all" in arguments):
            compile_one(kernel, constants, warps, target)
            done.add(kernel.fn.__name__)
            print(name, kernel.fn.__name__, constants, flush=True)
        expected = {
            k
            for module in (decode, encode, general, patching, plan, planes, scan)
            for k, v in vars(module).items()
            if isinstance(v, triton.JITFunction)
            and v.fn.__module__ == module.__name__
            and TYPES.keys() & set(v.arg_names)
        }
        print(name, "compiled", len(done), "kernels; others:", sorted(expected - done))


if __name__ == "__main__":
    main(sys.argv[1:])
