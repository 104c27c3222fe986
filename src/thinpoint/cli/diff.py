"""`thinpoint diff`: how two checkpoints of any kinds differ, in bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinpoint.cli.convert import Names
from thinpoint.cli.options import AllowPickle, Threads, Traceback, check_threads
from thinpoint.cli.reporting import count_text, printable, reporting_errors

if TYPE_CHECKING:
    from thinpoint.formats.difference import Difference, OtherDifference, TensorDifference

JSON_FORMAT = "thinpoint-diff"
JSON_VERSION = 1
DIFFERENT = 1
UNEXPECTED = 70
"""Exit code for a bug: 1 is taken."""


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any kind that `convert` reads.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    names: Names = None,
    json_output: Annotated[bool, typer.Option("--json", help="Everything as JSON, for scripts.")] = False,
    allow_pickle: AllowPickle = False,
    threads: Threads = None,
    traceback: Traceback = False,
) -> None:
    """Show which values of two checkpoints differ, and how far. Values are matched by name and compared bit by bit.

    The exit code is 0 if they are equal and 1 if they differ.
    """
    with reporting_errors(traceback, unexpected=UNEXPECTED):
        check_threads(threads)
        found = _compare(a, b, names or None, allow_pickle, threads)
        if json_output:
            import json

            typer.echo(json.dumps(_as_json(a, b, found), indent=1))
        else:
            _print(a, b, found)
        if not found.is_equal:
            raise typer.Exit(DIFFERENT)


def _compare(a: str, b: str, names: list[str] | None, allow_pickle: bool, threads: int | None) -> Difference:
    from thinpoint.cli.progress import progress_bar
    from thinpoint.cli.sources import newest_or_itself
    from thinpoint.formats.difference import compare
    from thinpoint.formats.opening import open_checkpoint

    options: dict[str, Any] = {"threads": threads, "allow_pickle": allow_pickle}
    with (
        open_checkpoint(newest_or_itself(a), **options) as in_a,
        open_checkpoint(newest_or_itself(b), **options) as in_b,
    ):
        chosen_a, chosen_b = in_a.selected(names), in_b.selected(names)
        done = 0
        with progress_bar("compare", chosen_a.tensor_bytes) as progress:

            def advance(size: int) -> None:
                nonlocal done
                done += size
                progress(done)

            return compare(chosen_a, chosen_b, advance)


def _print(a: str, b: str, found: Difference) -> None:
    from thinpoint.cli.tables import Column, print_table

    if found.tensors:
        columns = [
            Column(title="tensor", is_number=False, min_width=16),
            Column(title="dtype", is_number=False),
            Column(title="shape", is_number=False, min_width=11),
            *(Column(title=title) for title in ("different", "of", "steps", "largest")),
            Column(title="first at", is_number=False),
        ]
        print_table(columns, [_cells(tensor) for tensor in found.tensors])
        typer.echo()
    for label, others in (("form", found.forms), ("value", found.objects)):
        for other in others:
            typer.echo(printable(f"{label} of {other.name}: {other.a} in A, {other.b} in B"))
    for label, only in (("A", found.only_a), ("B", found.only_b)):
        for name in only:
            typer.echo(printable(f"only in {label}: {name or '(the state)'}"))
    counts = f"{count_text(found.num_tensors, 'tensor')}, {count_text(found.num_objects, 'other value')}"
    if found.is_equal:
        typer.echo(printable(f"equal: {a} and {b}  {counts}, bit for bit"))
        return
    parts = {
        "with other bits": len(found.tensors),
        "of another dtype, shape or kind": len(found.forms),
        "other values": len(found.objects),
        "only in A": len(found.only_a),
        "only in B": len(found.only_b),
    }
    told = ", ".join(f"{count:,} {what}" for what, count in parts.items() if count)
    typer.echo(printable(f"different: {a} and {b}  {told}; in both {counts}"))


def _cells(tensor: TensorDifference) -> list[str]:
    return [
        tensor.name or "(the state)",
        tensor.dtype,
        "x".join(map(str, tensor.shape)) or "scalar",
        f"{tensor.num_different:,}" + (f" ({tensor.num_nan:,} NaN)" if tensor.num_nan else ""),
        f"{tensor.num_values:,}",
        "-" if tensor.steps is None else f"{tensor.steps:,}",
        "-" if tensor.largest is None else f"{tensor.largest:.6g}",
        f"[{', '.join(map(str, tensor.first))}]",
    ]


def _as_json(a: str, b: str, found: Difference) -> dict[str, Any]:
    """Everything as a JSON object, described in docs/cli.md."""
    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "a": a,
        "b": b,
        "equal": found.is_equal,
        "num_tensors": found.num_tensors,
        "num_objects": found.num_objects,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "forms": [_other(other) for other in found.forms],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "num_values": tensor.num_values,
                "num_different": tensor.num_different,
                "num_nan": tensor.num_nan,
                "first": list(tensor.first),
                "steps": tensor.steps,
                "largest": _finite(tensor.largest),
            }
            for tensor in found.tensors
        ],
        "objects": [_other(other) for other in found.objects],
    }


def _other(other: OtherDifference) -> dict[str, str]:
    return {"name": other.name, "a": other.a, "b": other.b}


def _finite(value: float | int | None) -> float | int | str | None:
    return "inf" if isinstance(value, float) and math.isinf(value) else value
