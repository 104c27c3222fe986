"""`thinpoint doctor`: what works on this machine, and what a bug report needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from thinpoint.cli.options import Overwrite, Traceback
from thinpoint.cli.reporting import printable, reporting_errors, size_text


def doctor(
    bundle: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--bundle", metavar="FILE", help="Write everything to a JSON file, to attach to a bug report."
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Everything as JSON, for scripts.")] = False,
    overwrite: Overwrite = False,
    traceback: Traceback = False,
) -> None:
    """Check this machine: versions, backends with a short self-test, settings, and the disk of this folder.

    The bundle holds what this command shows and nothing else: no tensor data, no host or user name, no paths.
    """
    with reporting_errors(traceback):
        import json

        from thinpoint.cli.diagnosis import diagnose, failed_backends
        from thinpoint.errors import EncodeProofError

        report = diagnose()
        text = json.dumps(report, indent=1)
        if bundle is not None:
            from thinpoint.store import open_sink

            with open_sink(bundle, overwrite=overwrite) as sink:
                sink.write(f"{text}\n".encode())
        if json_output:
            typer.echo(text)
        else:
            _print(report)
            if bundle is not None:
                typer.echo(printable(f"\nwritten: {bundle}"))
        failed = failed_backends(report)
        if failed:
            raise EncodeProofError(f"the self-test of {' and '.join(failed)} failed")


def _print(report: dict[str, Any]) -> None:
    def section(title: str, lines: dict[str, str]) -> None:
        typer.echo(title)
        width = max(map(len, lines), default=0)
        for label, text in lines.items():
            typer.echo(printable(f"  {label:<{width}}  {text}"))

    section("versions", {key: value or "not installed" for key, value in report["versions"].items()})
    machine = report["machine"]
    gpus = ", ".join(machine["gpus"]) or "none that torch sees"
    section(
        "machine",
        {
            "system": machine["system"],
            "cpu": f"{machine['cpu']}, {machine['cores']} cores for this process",
            "memory": size_text(machine["memory_bytes"]),
            "gpus": gpus,
        },
    )
    backends = {}
    for name, result in report["backends"].items():
        backends[name] = (
            f"does not work here: {result['reason']}" if result["reason"] else result["self_test"]
        )
        if result.get("device"):
            backends[name] += f", on {result['device']}"
    chosen = report["chosen"]
    if chosen["problem"] is not None:
        backends["chosen"] = f"none: {chosen['problem']}"
    else:
        on_gpu = f", {chosen['gpu']} for tensors on a GPU" if chosen["gpu"] else ""
        backends["chosen"] = f"{chosen['cpu']} for tensors on the CPU{on_gpu}"
    section("backends", backends)
    settings = {}
    for name, setting in report["environment"].items():
        value = "not set" if setting["value"] is None else setting["value"]
        settings[name] = value if setting["problem"] is None else f"{value}  NOT VALID: {setting['problem']}"
    section("environment", settings)
    folder = report["folder"]
    disk = {"free": size_text(folder["free_bytes"])}
    disk["fsync"] = (
        f"{folder['fsync_ms']:.1f} ms for 1 MB" if folder["problem"] is None else folder["problem"]
    )
    section("this folder", disk)
