"""A picture for each proof. Needs no torch."""

from __future__ import annotations

from typing import Any

from thinpoint.proof.axes import COLORS, GREY, LIGHT, Axis, Panel, legend, linear, logarithmic
from thinpoint.proof.picture import Box, Line, Picture, Text
from thinpoint.proof.tables import three_digits

Row = dict[str, Any]

_WIDTH = 960
_LEFT = 70
_LOOP_HEIGHT = 440
_BLUE, _ORANGE, _GREEN = COLORS[:3]


def plot_of(record: Row) -> Picture | None:
    """The picture of a record; None if it has none, or nothing was measured."""
    result = record["result"]
    if record["piece"] == "step" and any(
        "cost" in row for loop in result.get("loops", ()) for row in loop["rows"]
    ):
        return _step(result)
    if record["piece"] == "restore" and result.get("rows"):
        return _restore(result)
    if record["piece"] == "resume" and "losses" in result:
        return _resume(result)
    return None


def _step(result: Row) -> Picture:
    """For each loop: what a checkpoint costs, and the steps around one."""
    loops = [loop for loop in result["loops"] if any("cost" in row for row in loop["rows"])]
    picture = Picture(_WIDTH, _LOOP_HEIGHT * len(loops))
    for i, loop in enumerate(loops):
        rows = [row for row in loop["rows"] if "cost" in row]
        _costs(picture, _LOOP_HEIGHT * i + 60, loop["name"], rows)
        _traces(picture, _LOOP_HEIGHT * i + 60, loop, rows)
    return picture


def _costs(picture: Picture, top: float, name: str, rows: list[Row]) -> None:
    """Bars: the part in which training waits, then the slow-down of steps; a thin line from least to greatest."""
    ends = [1e3 * row["cost"][key] for row in rows for key in ("least", "greatest")]
    waits = [1e3 * (row["stall"]["median"] + row["held"]["median"]) for row in rows]
    panel = Panel(
        picture=picture,
        left=200,
        top=top,
        width=230,
        height=250,
        x=linear([*ends, *waits]),
        y=Axis(low=0, high=len(rows)),
    )
    picture.add(Text(16, top - 28, f"Cost of one checkpoint, {name}", size=14, color="#111111"))
    bottom = top + panel.height
    for value in panel.x.ticks():
        x = panel.place(value, 0)[0]
        picture.add(Line([(x, top), (x, bottom)], LIGHT, 1))
        picture.add(Text(x, bottom + 14, f"{value:,g}", "middle", 11, GREY))
    picture.add(Text(panel.left + panel.width / 2, bottom + 32, "ms of training time", "middle", 11, GREY))
    for i, row in enumerate(rows):
        middle = len(rows) - i - 0.5
        left, y = panel.place(0, middle)
        wait = panel.place(waits[i], middle)[0]
        end = panel.place(1e3 * row["cost"]["median"], middle)[0]
        picture.add(Text(panel.left - 8, y, row["name"].replace("thinpoint.", ""), "end", 12))
        picture.add(Box(min(left, wait), y - 11, abs(wait - left), 11, _ORANGE))
        picture.add(Box(min(left, end), y, abs(end - left), 11, _BLUE))
        least, greatest = (panel.place(1e3 * row["cost"][key], middle)[0] for key in ("least", "greatest"))
        picture.add(Line([(least, y + 5.5), (greatest, y + 5.5)], "#111111", 1.2))
        # Beside a save of seconds one of milliseconds has no length.
        label = f"{three_digits(1e3 * row['cost']['median'])} ms"
        picture.add(Text(max(greatest, end, wait, left) + 6, y + 5.5, label, size=11))
    legend(
        picture,
        16,
        bottom + 54,
        [
            (_ORANGE, "waiting: stall of the call, and optimizer steps held back"),
            (_BLUE, "whole cost; the black line is the least to the greatest"),
        ],
    )


def _traces(picture: Picture, top: float, loop: Row, rows: list[Row]) -> None:
    """Step after step around one save of each kind."""
    traces = [(row["name"], row["trace"]) for row in rows]
    times = [1e3 * step for _, trace in traces for step in trace["steps"]] + [1e3 * loop["step"]["median"]]
    before = max(trace["num_before"] for _, trace in traces)
    after = max(len(trace["steps"]) - trace["num_before"] for _, trace in traces)
    panel = Panel(
        picture=picture,
        left=540,
        top=top,
        width=400,
        height=250,
        x=Axis(low=-before, high=after),
        y=logarithmic(times),
    )
    panel.frame(f"Steps around a save, {loop['name']}", "training steps from the call", "ms a step")
    panel.level(1e3 * loop["step"]["median"])
    for i, (_, trace) in enumerate(traces):
        points = [(number - trace["num_before"], 1e3 * step) for number, step in enumerate(trace["steps"])]
        panel.line(points, COLORS[i % len(COLORS)])
    half = (len(traces) + 1) // 2
    for column, part in enumerate((traces[:half], traces[half:])):
        entries = [
            (COLORS[(column * half + i) % len(COLORS)], name.replace("thinpoint.", ""))
            for i, (name, _) in enumerate(part)
        ]
        legend(picture, 520 + 225 * column, top + 304, entries)


def _restore(result: Row) -> Picture:
    """Time over that of the codec raw, for each kind of storage."""
    rows = result["rows"]
    names = list(dict.fromkeys(way["name"] for row in rows for way in row["ways"]))
    colors = dict(zip(names, (_BLUE, GREY, _ORANGE, _GREEN, *COLORS[3:]), strict=False))
    shown = [
        (i, way["name"], way["over_raw"])
        for i, row in enumerate(rows)
        for way in row["ways"]
        if "over_raw" in way and way["name"] != "thinpoint, codec raw"
    ]
    picture = Picture(_WIDTH, 430)
    ends = [ratio[key] for _, _, ratio in shown for key in ("least", "greatest")]
    panel = Panel(
        picture=picture,
        left=_LEFT,
        top=60,
        width=_WIDTH - _LEFT - 30,
        height=270,
        x=Axis(low=-0.5, high=len(rows) - 0.5),
        y=linear([*ends, 1.0]),
    )
    panel.frame(
        "Time of a restore over that of uncompressed bytes",
        "storage; below the dashed line a restore is shorter than that of uncompressed bytes",
        "times the restore with codec raw",
        x_ticks=False,
    )
    for i, row in enumerate(rows):
        label = row["storage"] if row["gb_per_s"] else f"{row['filesystem']}{', cold' if row['cold'] else ''}"
        picture.add(Text(panel.place(i, 0)[0], panel.top + panel.height + 14, label, "middle", 12))
    panel.level(result["target"])
    others = [name for name in names if name != "thinpoint, codec raw"]
    for i, name, ratio in shown:
        x = i + 0.12 * (others.index(name) - (len(others) - 1) / 2)
        panel.line([(x, ratio["least"]), (x, ratio["greatest"])], colors[name], 2)
        panel.dot(x, ratio["median"], colors[name])
    for i, name in enumerate(others):
        legend(picture, _LEFT + 200 * i, 395, [(colors[name], name)])
    return picture


def _resume(result: Row) -> Picture:
    """The loss of the run, and how far it had come each time it was killed."""
    picture = Picture(_WIDTH, 640)
    stride, losses = result["losses"]["stride"], result["losses"]["values"]
    x = Axis(low=0, high=result["num_steps"])
    top = Panel(
        picture=picture,
        left=_LEFT,
        top=60,
        width=_WIDTH - 100,
        height=210,
        x=x,
        y=linear(losses, from_zero=False),
    )
    verdict = {
        "identical": "the same bits in the run that was killed",
        "different": "the run that was killed has OTHER BITS",
        "inconclusive": "inconclusive: runs that were never stopped differ",
    }[result["verdict"]]
    top.frame(f"Loss, never stopped; {verdict}", "training step (upright lines: kills)", "loss")
    for kill in result["kills"]:
        top.upright(kill["last_step"], _ORANGE)
    top.line([(1 + i * stride, loss) for i, loss in enumerate(losses)], _BLUE)

    lives = [(kill["start"], kill["last_step"], kill["in_save"]) for kill in result["kills"]]
    lives.append((result["last_start"], result["num_steps"], None))
    trained = sum(end - start for start, end, _ in lives)
    below = Panel(
        picture=picture,
        left=_LEFT,
        top=345,
        width=_WIDTH - 100,
        height=210,
        x=Axis(low=0, high=max(1, trained)),
        y=Axis(low=0, high=result["num_steps"]),
    )
    below.frame(
        "How far the run that is killed has come",
        "training steps done, those done again too",
        "training step",
    )
    done = 0
    for start, end, in_save in lives:
        below.line([(done, start), (done + end - start, end)], _BLUE, 2)
        done += end - start
        if in_save is not None:
            below.dot(done, end, _ORANGE if in_save else GREY)
    legend(picture, _LEFT, 615, [(_ORANGE, "killed in the middle of a save")])
    legend(picture, _LEFT + 240, 615, [(GREY, "killed between saves")])
    return picture
