"""Ratio and throughput from GPU memory to GPU memory: thinpoint's codec and nvCOMP on the same tensors in one run.

A component is cut into parts as a save cuts it. Batches of parts of up to so many raw bytes are in flight at a time;
a rate is the component's raw bytes over the time that all its batches take one after another. Before every decoding
the outputs are poisoned, after it every bit is compared; what is not exact is reported as such, without numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from bench.gpu.measure import POISON, rates, synchronize, timed
from bench.gpu.peers import OTHERS, NvcompBatchCoder, NvcompCoder, Peer, main_peers
from bench.gpu.record import attempt
from bench.gpu.states import State, Tensors
from torch import Tensor

from thinpoint.device.contract import EncodeItem
from thinpoint.engine.backends import Devices
from thinpoint.engine.save import part_jobs
from thinpoint.state.flatten import flatten

KEYS = {"w": "model", "m": "exp_avg", "v": "exp_avg_sq", "g": "grad"}
"""First word of a component -> the name that gives its tensors their role in a state dict."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        in_flight_bytes: raw bytes in flight, ascending; the last one is for peers too.
        modes: (checksums, proof) of thinpoint's codec, the barest first.
        num_repeats: measurements after one that only warms up; if 0, that one counts.
        peer_bytes: what nvCOMP gets of a component at most: its buffers take several times as much.
        sample_bytes: what the slow peers get.
        with_others: whether they are measured, on the dense state only.
    """

    in_flight_bytes: tuple[int, ...] = (64 << 20, 256 << 20, 1 << 30)
    modes: tuple[tuple[bool, bool], ...] = ((False, False), (True, False), (True, True))
    num_repeats: int = 5
    peer_bytes: int = 4 << 30
    sample_bytes: int = 128 << 20
    with_others: bool = True


class Coder(Protocol):
    """A codec with its inputs and outputs. The methods are called in the order in which they stand here."""

    def encode(self) -> None:
        """Encode everything; may return before the device is done."""
        ...

    def stored_bytes(self) -> int:
        """What was encoded, in bytes."""
        ...

    def uncoded_bytes(self) -> int | None:
        """Raw bytes that the codec left as they are, which takes no time on either way; None if it does not tell."""
        ...

    def poison(self) -> None:
        """Overwrite the outputs of decoding."""
        ...

    def decode(self) -> None:
        """Decode everything; may return before the device is done."""
        ...

    def exact(self) -> bool:
        """Whether every bit came back; waits for the device."""
        ...


class ThinCoder:
    """thinpoint's codec on one device.

    Args:
        codec: a `thinpoint.device.triton_codec.DeviceCodec`.
        batches: the parts, each list a wave.
        digest: compute checksums of the raw bits, both ways.
        prove: decode and compare what was encoded, as part of encoding.
    """

    def __init__(
        self,
        codec: Any,
        batches: Sequence[list[EncodeItem]],
        *,
        digest: bool,
        prove: bool,
    ) -> None:
        self.codec, self.batches, self.digest, self.prove = codec, batches, digest, prove
        self.waves: list[Any] = []
        self.outs = [[torch.empty_like(item.words) for item in batch] for batch in batches]

    def encode(self) -> None:
        self.waves = [
            self.codec.encode(batch, digest=self.digest, prove=self.prove) for batch in self.batches
        ]

    def stored_bytes(self) -> int:
        return sum(wave.stored_bytes for wave in self.waves)

    def uncoded_bytes(self) -> int:
        return sum(
            wave.items[i].words.numel()
            for wave in self.waves
            for i in (*wave.outcome.raw, *wave.outcome.host)
        )

    def poison(self) -> None:
        for outs in self.outs:
            for out in outs:
                out.fill_(POISON)

    def decode(self) -> None:
        for wave, outs in zip(self.waves, self.outs, strict=True):
            self.codec.decode(wave, outs, digest=self.digest)

    def exact(self) -> bool:
        return all(
            torch.equal(out, item.words)
            for outs, batch in zip(self.outs, self.batches, strict=True)
            for out, item in zip(outs, batch, strict=True)
        )


def encode_items(components: dict[str, Tensors]) -> list[EncodeItem]:
    """The parts of some components, cut and described as a save does it; contiguous tensors with storages of their own."""
    named = {KEYS[component[0]]: tensors for component, tensors in components.items()}
    items = []
    for job in part_jobs(flatten(named).storages, Devices()):
        key, name = job.region.name
        words = named[str(key)][str(name)].reshape(-1).view(torch.uint8)[job.start : job.end]
        items.append(EncodeItem(words=words, word_bytes=job.word_bytes, spec=job.spec))
    return items


def batches_of(items: list[EncodeItem], max_bytes: int) -> list[list[EncodeItem]]:
    """Consecutive items in lists of at most `max_bytes` raw bytes, or of one item."""
    batches: list[list[EncodeItem]] = []
    num_bytes = 0
    for item in items:
        if not batches or num_bytes + item.words.numel() > max_bytes:
            batches.append([])
            num_bytes = 0
        batches[-1].append(item)
        num_bytes += item.words.numel()
    return batches


def measure(coder: Coder, raw_bytes: int, device: torch.device, num_repeats: int) -> Row:
    """Size and rates, or an error if a bit did not come back; the first round only warms up (peers have no output yet)."""
    encode, decode = [], []
    stored_bytes = 0
    for i_round in range(num_repeats + 1):
        encode_s = timed(coder.encode, device)
        stored_bytes = coder.stored_bytes()
        coder.poison()
        if i_round and coder.exact():
            return {"error": "not poisoned: what is compared is not what was decoded"}
        decode_s = timed(coder.decode, device)
        if not coder.exact():
            return {"error": "not exact: bits came back changed"}
        if i_round or not num_repeats:
            encode.append(encode_s)
            decode.append(decode_s)
    return {
        "stored_bytes": stored_bytes,
        "uncoded_bytes": coder.uncoded_bytes(),
        "ratio": raw_bytes / stored_bytes,
        "encode": rates(raw_bytes, encode),
        "decode": rates(raw_bytes, decode),
    }


def thin_rows(items: list[EncodeItem], device: torch.device, settings: Settings) -> Iterator[Row]:
    """A row for each number of bytes in flight, with and without checksums and proof."""
    raw_bytes = sum(item.words.numel() for item in items)
    for in_flight in settings.in_flight_bytes:
        for digest, prove in settings.modes:

            def run(in_flight: int = in_flight, digest: bool = digest, prove: bool = prove) -> Row:
                batches = batches_of(items, in_flight)
                coder = ThinCoder(device_codec(device), batches, digest=digest, prove=prove)
                return measure(coder, raw_bytes, device, settings.num_repeats)

            row = {"name": "thinpoint", "in_flight_bytes": in_flight, "digest": digest, "prove": prove}
            yield {**row, **attempt(run)}


def device_codec(device: torch.device) -> Any:
    """thinpoint's codec for the device."""
    from thinpoint.device.triton_codec import DeviceCodec

    return DeviceCodec(device)


def peer_row(peer: Peer, data: Tensor, in_flight: int, num_repeats: int) -> Row:
    """A row of nvCOMP on one flat uint8 buffer. If buffers cannot be used again, that is noted and done without."""

    def run(reuse: bool) -> Row:
        coder = NvcompCoder(peer, data.split(in_flight), reuse=reuse)
        return measure(coder, data.numel(), data.device, num_repeats)

    row = {"name": peer.name, "in_flight_bytes": in_flight, "raw_bytes": data.numel()}
    found = attempt(lambda: run(True))
    if "error" in found:
        found = {"reuse_error": found["error"], **attempt(lambda: run(False))}
    return {**row, **found}


def peer_rows(items: list[EncodeItem], dtype: str, settings: Settings, state_name: str) -> Iterator[Row]:
    """A row for each way to use nvCOMP on the items' bytes end to end; for small tensors also on each alone."""
    data = torch.cat([item.words for item in batches_of(items, settings.peer_bytes)[0]])
    ans, ans_small_chunks, zstd = main_peers(dtype)
    largest = settings.in_flight_bytes[-1]
    for in_flight in settings.in_flight_bytes:
        yield peer_row(ans, data, in_flight, settings.num_repeats)
    for peer in (ans_small_chunks, zstd):
        yield peer_row(peer, data, largest, settings.num_repeats)
    if state_name == "small":
        for peer in (ans, zstd):
            batches = [[item.words for item in batch] for batch in batches_of(items, largest)]

            def run(peer: Peer = peer, batches: list[list[Tensor]] = batches) -> Row:
                coder = NvcompBatchCoder(peer, batches)
                return measure(coder, data.numel(), data.device, settings.num_repeats)

            name = f"{peer.name}, one by one"
            yield {"name": name, "in_flight_bytes": largest, "raw_bytes": data.numel(), **attempt(run)}
    elif state_name == "dense" and settings.with_others:
        sample = data[: settings.sample_bytes]
        for algorithm in OTHERS:
            yield peer_row(Peer(algorithm=algorithm), sample, largest, 3)


def groups_of(state: State) -> dict[str, tuple[str, ...]]:
    """What is measured together: every component, and w, m and v as one."""
    alone = (
        {}
        if state.name in ("small", "large")
        else {component: (component,) for component in state.components}
    )
    return {**alone, "w+m+v": ("w", "m", "v")}


def on_own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a new stream the current one: nvCOMP can be told to use that, but not the default one."""
    synchronize(device)
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def kernel_seconds(codec: Any, batch: list[EncodeItem]) -> dict[str, float]:
    """Seconds on the device of each kernel while a batch is encoded, digested and decoded once; by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    outs = [torch.empty_like(item.words) for item in batch]
    codec.decode(codec.encode(batch, digest=True, prove=False), outs)  # compiles
    synchronize(codec.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        codec.decode(codec.encode(batch, digest=True, prove=False), outs)
        synchronize(codec.device)
    seconds: dict[str, float] = {}
    for event in record.key_averages():
        micros = event.self_device_time_total
        if micros and not event.key.startswith("aten::"):
            name = event.key if event.key.isidentifier() else "copies and others"
            seconds[name] = seconds.get(name, 0.0) + micros / 1e6
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))


def measure_group(state: State, group: str, components: tuple[str, ...], settings: Settings) -> Row:
    """Sizes, a row for each contestant, and where thinpoint's time goes."""
    items = encode_items({component: state.components[component] for component in components})
    dtype = items[0].spec.dtype
    raw_bytes = sum(item.words.numel() for item in items)
    batch = batches_of(items, settings.in_flight_bytes[len(settings.in_flight_bytes) // 2])[0]

    def stages() -> Row:
        seconds = kernel_seconds(device_codec(state.device), batch)
        return {"seconds": seconds, "raw_bytes": sum(item.words.numel() for item in batch)}

    with on_own_stream(state.device):
        rows = list(thin_rows(items, state.device, settings))
        rows += peer_rows(items, dtype, settings, state.name)
        profile = attempt(stages)
    return {
        "dtype": dtype,
        "raw_bytes": raw_bytes,
        "num_values": raw_bytes // items[0].word_bytes,
        "num_parts": len(items),
        "rows": rows,
        "stages": profile,
    }
