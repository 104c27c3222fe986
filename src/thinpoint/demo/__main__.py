"""The demo: train, kill, resume, compare. Exit status 0 only if the two runs end bit-identical."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import thinpoint
from thinpoint.demo import supervise
from thinpoint.demo.compare import count, differences
from thinpoint.demo.measure import Timing, contestants, measure
from thinpoint.demo.model import ModelConfig
from thinpoint.demo.training import RunConfig

QUICK = RunConfig(
    model=ModelConfig(width=64, num_layers=2),
    num_steps=40,
    save_every=5,
    warmup_steps=4,
    corpus_bytes=500_000,
)
_LINE_EVERY_STEPS = 20


def train(console: Console, folder: Path, config: RunConfig, kill: supervise.Killer | None = None) -> int:
    """One life of the training process; the last step it reported. Shows a bar on a terminal, a line now and then in a pipe."""
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    last_step = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("step", total=config.num_steps, note="")
        for event in supervise.follow(folder, config.dumps(), kill):
            if event["event"] == "start":
                source = f"resumes from {event['source']}" if event["source"] else "starts"
                console.print(
                    f"  {source} on {event['device']}, {event['num_parameters'] / 1e6:.1f} M parameters"
                )
                for problem in event["damaged"]:
                    console.print(f"  passed over {problem}", style="yellow")
            if "step" in event:
                progress.update(task, completed=event["step"])
            if event["event"] == "step":
                last_step = event["step"]
                progress.update(task, note=f"loss {event['loss']:.3f}")
                if not console.is_terminal and event["step"] % _LINE_EVERY_STEPS == 0:
                    console.print(f"  step {event['step']:4} of {config.num_steps}  loss {event['loss']:.3f}")
    return last_step


def kill_and_resume(console: Console, folder: Path, config: RunConfig, dice: random.Random) -> None:
    """The run that is killed twice: in mid-save, and at a random moment; then resumed to the end."""
    num_saves = config.num_steps // config.save_every
    save_step = dice.randint(3, num_saves // 2) * config.save_every
    train(console, folder, config, supervise.kill_while_saving(folder, save_step, dice))
    left = sorted(supervise.unfinished_files(folder))
    outcome = f"what it left is ignored:\n    {left[0]}" if left else "it was just complete"
    console.print(f"  SIGKILL in the save of step {save_step}; {outcome}", style="red")
    # In the first half of what is left: a fast machine must not finish before the signal arrives.
    random_step = dice.randint(save_step + 1, (save_step + config.num_steps) // 2)
    last_step = train(console, folder, config, supervise.kill_at_random(random_step, dice))
    console.print(f"  SIGKILL shortly after step {last_step}", style="red")
    train(console, folder, config)


def times_table(timings: list[Timing]) -> Table:
    """Sizes and times, a row a contestant; ratios to the plain `torch.save`."""
    plain = next(timing for timing in timings if timing.name == "torch.save")
    table = Table(title="One checkpoint of this run (medians of 5)", title_justify="left")
    table.add_column("")
    for heading in ("MB", "ratio", "save s", "load s"):
        table.add_column(heading, justify="right")
    for timing in timings:
        table.add_row(
            timing.name,
            f"{timing.file_bytes / 1e6:.2f}",
            f"{plain.file_bytes / timing.file_bytes:.3f}x",
            f"{timing.save_s:.3f}",
            f"{timing.load_s:.3f}",
        )
    return table


def role_table(report: thinpoint.SaveReport) -> Table:
    """Raw and stored size for each role a tensor can have in a training state, largest first."""
    table = Table(title="Where the bytes are", title_justify="left")
    table.add_column("role")
    for heading in ("raw MB", "stored MB", "ratio"):
        table.add_column(heading, justify="right")
    for role, (raw_bytes, stored_bytes) in sorted(report.roles.items(), key=lambda item: -item[1][0]):
        table.add_row(
            role.replace("_", " "),
            f"{raw_bytes / 1e6:.2f}",
            f"{stored_bytes / 1e6:.2f}",
            f"{raw_bytes / stored_bytes:.3f}x",
        )
    return table


def load_final(folder: Path) -> Any:
    """A run's last state as `torch.save` wrote it, not touched by thinpoint since its last resume."""
    return torch.load(folder / "final.pt", weights_only=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 if the runs are bit-identical, else 1."""
    parser = argparse.ArgumentParser(prog="python -m thinpoint.demo", description=__doc__)
    parser.add_argument(
        "--dir", type=Path, default=Path("demo-run"), help="where the files go (emptied first)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--seed", type=int, default=None, help="decides when the process is killed")
    options = parser.parse_args(arguments)
    config = QUICK if options.quick else RunConfig()
    seed = random.SystemRandom().randrange(1000) if options.seed is None else options.seed
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    begin = time.perf_counter()

    folder: Path = options.dir
    whole, killed = folder / "never-stopped", folder / "killed-and-resumed"
    for path in (whole, killed):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    make_ready(console, folder)

    console.print("[bold]1/4[/bold] Training that is never stopped, a checkpoint every few steps")
    train(console, whole, config)
    console.print(f"[bold]2/4[/bold] The same training, killed twice and resumed (kill seed {seed})")
    kill_and_resume(console, killed, config, random.Random(seed))

    console.print("[bold]3/4[/bold] Comparing the two final states, bit by bit")
    state, other = load_final(whole), load_final(killed)
    found = differences(state, other)
    num_tensors, num_bytes = count(state)
    losses = state["losses"]
    console.print(f"  {num_tensors} tensors, {num_bytes / 1e6:.1f} MB: model, AdamW moments, RNG, data order")
    console.print(f"  {len(losses)} losses, from {losses[0]:.3f} to {losses[-1]:.3f}")
    for difference in found[:10]:
        console.print(f"  differs: {difference}", style="red")

    console.print("[bold]4/4[/bold] Saving and loading that state beside torch.save")
    timings = measure(state, contestants(folder))
    report = thinpoint.save(state, folder / "final.thin")
    console.print(times_table(timings), role_table(report))
    console.print(f"Files: {report.path}\n       {whole}/step-*.thin\n       {killed}/step-*.thin")
    console.print(f"Took {time.perf_counter() - begin:.0f} s")
    if found:
        console.print("[bold red]The run that was killed and resumed DIFFERS from the one never stopped")
        return 1
    console.print(
        "[bold green]Bit-identical: the run killed twice ends with every bit of the one never stopped"
    )
    return 0


def make_ready(console: Console, folder: Path) -> None:
    """Compile the codec's kernels, which later processes find in their cache."""
    console.print("[bold]0/4[/bold] Compiling the codec for this machine (kept for later runs)")
    start = time.perf_counter()
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 256)).square().sum().backward()
    optimizer.step()
    path = folder / "first.thin"
    thinpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    thinpoint.load(path)
    path.unlink()
    console.print(f"  {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
