"""Runs the pieces of `thinpoint bench` one after another; their files are there as soon as they are measured."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpoint.errors import BackendUnavailableError, UnsupportedError, UsageError, from_os_error
from thinpoint.proof.page import html
from thinpoint.proof.picture import png
from thinpoint.proof.plots import plot_of
from thinpoint.proof.record import Deadline, gpu_facts, new_record, read_record, write_record
from thinpoint.proof.scale import Scale, parse_scale
from thinpoint.proof.tables import TITLES

Row = dict[str, Any]
Say = Callable[[str], object]

MIN_SAVES = 3
MIN_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and where.

    Attributes:
        scale: a name or a number of parameters, see `parse_scale`.
        out: a folder for the results; made if missing.
        folder: where checkpoints go, and are deleted again; must exist.
        device: "cpu", "cuda:0", ...; None for the first GPU, or the CPU if there is none.
        only: the pieces; empty for all.
        max_s: nothing begins after so many seconds; None for no end.
        num_saves: of each kind that count in the step times.
        num_rounds: restores of each kind.
        num_steps, num_kills: of the run that is killed; None for those of the scale.
        seed: decides when it is killed.

    Raises:
        UsageError: a value makes no sense.
    """

    scale: str = "tiny"
    out: Path
    folder: Path
    device: str | None = None
    only: tuple[str, ...] = ()
    max_s: float | None = None
    num_saves: int = 3
    num_rounds: int = 5
    num_steps: int | None = None
    num_kills: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in TITLES:
                raise UsageError("there is no such piece", expected=" or ".join(TITLES), actual=repr(name))
        if not self.folder.is_dir():
            raise UsageError("there is no such folder for checkpoints", where=self.folder)
        least: dict[str, int] = {
            "num_saves": MIN_SAVES,
            "num_rounds": 1,
            "num_steps": MIN_STEPS,
            "num_kills": 1,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{name} is too small", expected=f"at least {low}", actual=value)


def run_bench(options: Options, say: Say, show: Callable[[Row, list[Path]], object]) -> list[Row]:
    """The records of all pieces.

    A piece that fails does not end the others: its record has an "error".

    Args:
        say: told in words what begins.
        show: called with each record and the files that were written, as soon as the piece is measured.

    Raises:
        UsageError, BackendUnavailableError: nothing was begun.
        StorageError: a result could not be written.
    """
    import torch

    device = _device(options.device)
    scale = parse_scale(options.scale, on_gpu=device.type == "cuda")
    deadline = Deadline(options.max_s)
    records = []
    with _settings(scale):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for piece in options.only or TITLES:
            record = new_record(piece, _as_json(options, device), gpu_facts(device))
            record["error"] = None
            path = options.out / f"{piece}.json"
            try:
                for result in _results(piece, options, scale, device, deadline, say):
                    record["result"] = result
                    record["skipped"] = list(deadline.skipped)
                    write_record(path, record)
            except Exception as error:  # noqa: BLE001  (whatever fails, the other pieces are still worth measuring)
                record["error"] = f"{type(error).__name__}: {error}"
                record["traceback"] = traceback.format_exc()
            record["skipped"] = deadline.take_skipped()
            write_record(path, record)
            show(record, [path, *draw(path, record, say)])
            records.append(record)
    return records


def _results(
    piece: str, options: Options, scale: Scale, device: Any, deadline: Deadline, say: Say
) -> Iterator[Row]:
    """What a piece has measured so far, again and again until it is complete."""
    if piece == "rates":
        from thinpoint.proof.rates import measure_rates

        if not deadline.is_late("rates"):
            yield measure_rates(scale, device, options.folder, say)
    elif piece == "step":
        from thinpoint.proof.steps import measure_steps

        yield from measure_steps(scale, device, options.folder, options.num_saves, deadline, say)
    elif piece == "restore":
        from thinpoint.proof.restores import measure_restores

        yield from measure_restores(scale, device, options.folder, options.num_rounds, deadline, say)
    elif not deadline.is_late("resume"):
        from thinpoint.proof.resume import measure_resume

        yield measure_resume(
            scale,
            device,
            options.folder,
            options.num_steps or scale.run_steps,
            options.num_kills or scale.num_kills,
            options.seed,
            say,
        )


def draw(path: Path, record: Row, say: Say) -> list[Path]:
    """Writes the page and the picture of a record beside its JSON file; the paths.

    Without Pillow there is no PNG, and that is said.

    Raises:
        StorageError: the system refused.
    """
    try:
        page = path.with_suffix(".html")
        page.write_text(html(record), encoding="utf-8")
        picture = plot_of(record)
        if picture is None:
            return [page]
        try:
            data = png(picture)
        except UnsupportedError as error:
            say(str(error))
            return [page]
        path.with_suffix(".png").write_bytes(data)
        return [page, path.with_suffix(".png")]
    except OSError as error:
        raise from_os_error(error, "cannot write the file", where=error.filename) from error


def draw_all(folder: Path, say: Say) -> list[Path]:
    """Draws what was measured before, from the JSON files in a folder; the paths.

    Raises:
        UsageError: there is no result.
    """
    paths = [path for piece in TITLES if (path := folder / f"{piece}.json").exists()]
    if not paths:
        raise UsageError("there is no result of `thinpoint bench` in the folder", where=folder)
    return [drawn for path in paths for drawn in draw(path, read_record(path), say)]


@contextmanager
def _settings(scale: Scale) -> Iterator[None]:
    """The number of PyTorch's threads, and silence about PyTorch's own future."""
    import torch

    before = torch.get_num_threads()
    if scale.num_threads is not None:
        torch.set_num_threads(scale.num_threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before)


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError("there is no such device", expected="cpu or cuda:0", actual=repr(name)) from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError("the proofs run on a CPU or a CUDA device", actual=repr(name))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendUnavailableError(f"torch sees no device {name}")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _as_json(options: Options, device: Any) -> Row:
    """The options that can change a figure; no paths."""
    kept = ("scale", "max_s", "num_saves", "num_rounds", "num_steps", "num_kills", "seed")
    return {"device": device.type, **{name: getattr(options, name) for name in kept}}
