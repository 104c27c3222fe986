"""`thinpoint advise`: does compressing checkpoints pay here, with what, and how much."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from thinpoint.cli.options import AllowPickle, Overwrite, Traceback
from thinpoint.cli.reporting import printable, reporting_errors

if TYPE_CHECKING:
    from thinpoint.advisor import Advice, Case
    from thinpoint.advisor.measure import Measured
    from thinpoint.advisor.sample import Sample

Text = Optional[str]  # noqa: UP045  (typer evaluates these at run time on Python 3.10)


def _field(flag: str, help: str, metavar: str) -> Any:
    return typer.Option(flag, help=help, metavar=metavar)


def advise_command(
    params: Annotated[Text, _field("--params", "Parameters: 70b, 125m, 1.3e9.", "N")] = None,
    optimizer: Annotated[Text, _field("--optimizer", "adamw, lion, muon, sgd, ...", "NAME")] = None,
    weights: Annotated[Text, _field("--weights", "fp32, bf16, fp16, fp8, int8, fp4.", "DTYPE")] = None,
    moments: Annotated[Text, _field("--moments", "As --weights.", "DTYPE")] = None,
    gradients: Annotated[
        Text, _field("--gradients", "As --weights, or none if they are not saved.", "DTYPE")
    ] = None,
    master: Annotated[Text, _field("--master", "A master copy of the weights, or none.", "DTYPE")] = None,
    size_gb: Annotated[
        Text, _field("--size-gb", "Size of a checkpoint, to check the above by.", "GB")
    ] = None,
    gpus: Annotated[Text, _field("--gpus", "GPUs that wait for a save.", "N")] = None,
    gpus_per_node: Annotated[Text, _field("--gpus-per-node", "GPUs of a node.", "N")] = None,
    writers: Annotated[
        Text, _field("--writers", "GPUs that hold a share of what is saved; else all.", "N")
    ] = None,
    usd_per_gpu_hour: Annotated[Text, _field("--usd-per-gpu-hour", "Price.", "USD")] = None,
    mtbf_hours: Annotated[
        Text, _field("--mtbf-hours", "Mean time between failures of the cluster.", "H")
    ] = None,
    restart_s: Annotated[Text, _field("--restart-s", "From a failure until loading begins.", "S")] = None,
    link_gb_per_s: Annotated[Text, _field("--link-gb-per-s", "From one GPU to its host.", "GB/S")] = None,
    step_s: Annotated[
        Text, _field("--step-s", "Forward and backward, which `overlap` copies behind.", "S")
    ] = None,
    storage_gb_per_s: Annotated[Text, _field("--storage-gb-per-s", "Writing.", "GB/S")] = None,
    storage_scope: Annotated[
        Text, _field("--storage-scope", "Whose rate that is: aggregate or node.", "SCOPE")
    ] = None,
    read_gb_per_s: Annotated[Text, _field("--read-gb-per-s", "Reading; else as writing.", "GB/S")] = None,
    usd_per_gb_month: Annotated[Text, _field("--usd-per-gb-month", "Price.", "USD")] = None,
    kept: Annotated[Text, _field("--kept", "Checkpoints that are stored at a time.", "N")] = None,
    usd_per_gb_per_s_month: Annotated[
        Text, _field("--usd-per-gb-per-s-month", "What one more GB/s costs a month.", "USD")
    ] = None,
    unit: Annotated[Text, _field("--unit", "What a GB in rates and prices is: GB or GiB.", "UNIT")] = None,
    interval_min: Annotated[
        Text, _field("--interval-min", "Minutes from one save to the next.", "MIN")
    ] = None,
    mode: Annotated[Text, _field("--mode", "sync, async or overlap.", "MODE")] = None,
    add_codec: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--add-codec",
            metavar="NAME=RATIO[@GB/S]",
            help="One more codec: one ratio for everything, and raw GB/s a GPU; without a rate it takes no time.",
        ),
    ] = None,
    case_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--case", metavar="FILE", help="All of this from a YAML or JSON file; options go before it."
        ),
    ] = None,
    checkpoint: Annotated[
        Text,
        typer.Option(
            "--checkpoint", metavar="FILE", help="Sizes, and ratios of a sample, from a checkpoint."
        ),
    ] = None,
    sample_mb: Annotated[
        int, typer.Option("--sample-mb", min=1, max=100_000, metavar="MB", help="Of each component of it.")
    ] = 64,
    allow_pickle: AllowPickle = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure codec, link and storage rates on this machine.")
    ] = False,
    measure_dir: Annotated[
        Text,
        typer.Option(
            "--measure-dir", metavar="DIR", help="Storage to measure, a path or URL; else none is written to."
        ),
    ] = None,
    measure_mb: Annotated[
        int, typer.Option("--measure-mb", min=1, max=8000, metavar="MB", help="Size of what is written.")
    ] = 256,
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--report", metavar="OUT.html", help="One file with plots, which needs no network."),
    ] = None,
    overwrite: Overwrite = False,
    json_output: Annotated[bool, typer.Option("--json", help="Everything as JSON, for scripts.")] = False,
    traceback: Traceback = False,
) -> None:
    """Tell whether compressing checkpoints pays, with what, and how much.

    Defaults are a published case: 70 billion parameters on 64 GPUs, a save every 30 minutes to storage of 5 GB/s.
    """
    with reporting_errors(traceback):
        from thinpoint.advisor import advise, case_from, read_case_file

        values = read_case_file(case_file) if case_file is not None else {}
        flags = {
            "model": {
                "params": params,
                "optimizer": optimizer,
                "weights": weights,
                "moments": moments,
                "gradients": gradients,
                "master": master,
                "size_gb": size_gb,
            },
            "cluster": {
                "gpus": gpus,
                "gpus_per_node": gpus_per_node,
                "writers": writers,
                "usd_per_gpu_hour": usd_per_gpu_hour,
                "mtbf_hours": mtbf_hours,
                "restart_s": restart_s,
                "link_gb_per_s": link_gb_per_s,
                "step_s": step_s,
            },
            "storage": {
                "gb_per_s": storage_gb_per_s,
                "scope": storage_scope,
                "read_gb_per_s": read_gb_per_s,
                "usd_per_gb_month": usd_per_gb_month,
                "kept": kept,
                "usd_per_gb_per_s_month": usd_per_gb_per_s_month,
                "unit": unit,
            },
            "saves": {"interval_min": interval_min, "mode": mode},
            "codecs": _added_codecs(add_codec or []),
        }
        _check_together(measure, measure_dir, checkpoint, params)
        case = case_from(_merged(values, flags))
        sample, measured = None, None
        if checkpoint is not None:
            case, sample = _sampled(case, checkpoint, sample_mb, allow_pickle)
        if measure:
            case, measured = _measured(case, measure_dir, measure_mb, keeps_scope=storage_scope is not None)
        advice = advise(case)
        if report is not None:
            from thinpoint.advisor.html import report_html
            from thinpoint.store import open_sink

            with open_sink(report, overwrite=overwrite) as sink:
                sink.write(report_html(advice).encode())
        _print(advice, sample, measured, json_output)
        if report is not None:
            typer.echo(printable(f"written: {report}"), err=json_output)


def _merged(values: dict[str, Any], flags: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The file's values with those of the flags that were given before them."""
    merged = dict(values)
    for section, given in flags.items():
        chosen = {key: value for key, value in given.items() if value is not None}
        below = merged.get(section)
        if chosen and (below is None or isinstance(below, dict)):
            merged[section] = {**(below or {}), **chosen}
    return merged


def _added_codecs(texts: list[str]) -> dict[str, Any]:
    from thinpoint.advisor.case_file import parse_number
    from thinpoint.errors import UsageError

    found: dict[str, Any] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        ratio_text, _, rate_text = rest.partition("@")
        ratio, rate = parse_number(ratio_text), parse_number(rate_text) if rate_text else None
        if not name or ratio is None or (rate_text and rate is None):
            raise UsageError(
                "--add-codec is not valid", expected="NAME=RATIO or NAME=RATIO@GB/S", actual=repr(text)
            )
        found[name] = {
            "ratio": ratio,
            "encode_gb_per_s": rate,
            "decode_gb_per_s": rate,
            "source": "--add-codec",
        }
    return found


def _check_together(
    measure: bool, measure_dir: str | None, checkpoint: str | None, params: str | None
) -> None:
    from thinpoint.errors import UsageError

    if measure_dir is not None and not measure:
        raise UsageError("--measure-dir needs --measure, which writes to it")
    if checkpoint is not None and params is not None:
        raise UsageError("--checkpoint says what is saved; --params must not be given too")


def _sampled(case: Case, target: str, sample_mb: int, allow_pickle: bool) -> tuple[Case, Sample]:
    from thinpoint.advisor.sample import sample_checkpoint
    from thinpoint.cli.progress import progress_bar

    with progress_bar("sample", sample_mb * 1_000_000) as progress:
        sample = sample_checkpoint(
            target, budget_bytes=sample_mb * 1_000_000, allow_pickle=allow_pickle, progress=progress
        )
    return sample.apply(case), sample


def _measured(case: Case, folder: str | None, megabytes: int, *, keeps_scope: bool) -> tuple[Case, Measured]:
    from thinpoint.advisor.measure import measure, plan_text

    say: Callable[[str], None] = lambda text: print(printable(text), file=sys.stderr)  # noqa: E731
    num_bytes = megabytes << 20
    say(plan_text(folder, num_bytes))
    measured = measure(folder, num_bytes=num_bytes, say=say)
    return measured.apply(case, keeps_scope=keeps_scope), measured


def _print(advice: Advice, sample: Sample | None, measured: Measured | None, json_output: bool) -> None:
    if json_output:
        import json

        from thinpoint.advisor.as_json import advice_json

        typer.echo(
            json.dumps(advice_json(advice, sample=sample, measured=measured), indent=1, allow_nan=False)
        )
        return
    from thinpoint.cli.advise_text import print_advice

    print_advice(advice, sample=sample, measured=measured)
