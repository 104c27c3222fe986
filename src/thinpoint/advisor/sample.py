"""What a checkpoint holds, by component, and how far each codec shrinks a sample of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thinpoint.advisor.codecs import Key
from thinpoint.advisor.inputs import Case
from thinpoint.advisor.sizes import FIRST, SECOND, Component
from thinpoint.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from thinpoint.formats.leaves import TensorLeaf

DEFAULT_BYTES = 64 << 20
"""Bytes read of each component: some seconds on one core."""

_RUN_BYTES = 4 << 20
"""Bytes read in one place: 256 rows of 4,096 FP32 values, enough for a column profile."""

_LEAST_POINTS = 16
"""A smaller budget makes runs shorter, not fewer."""

_PRECISIONS = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
    "float4_e2m1fn_x2": "fp4",
}
_NAMES = {"weight": "weights", "first_moment": FIRST, "second_moment": SECOND, "gradient": "gradients"}
_MASTERS = ("master", "main_param", "fp32_param", "fp32 param")
_HOST_CODECS = {"thinpoint": "thin", "nvcomp-zstd": "zstd"}
"""Which codec on the host gives a codec's ratio. nvCOMP's ANS runs on NVIDIA's GPUs alone."""

_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was found in a checkpoint.

    Attributes:
        name: the file.
        components: what it holds, with sizes of the whole.
        ratios: by codec, of the components; what was not measured is missing.
        params: values of the weights.
        read_bytes: how much was coded to learn this.
    """

    name: str
    components: tuple[Component, ...]
    ratios: dict[str, dict[Key, float]]
    params: int
    read_bytes: int

    def apply(self, case: Case) -> Case:
        """The case with this checkpoint's components, and ratios where they were measured."""
        codecs = tuple(
            replace(
                codec,
                ratio=None,
                ratios={**codec.ratios, **self.ratios[codec.name]},
                source=f"{codec.source}; ratios sampled from {self.name}",
            )
            if codec.name in self.ratios
            else codec
            for codec in case.codecs
        )
        model = replace(case.model, params=max(self.params, 1), components=self.components)
        return replace(case, model=model, codecs=codecs)


def sample_checkpoint(
    target: str,
    *,
    budget_bytes: int = DEFAULT_BYTES,
    allow_pickle: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Sample:
    """The components of a checkpoint and the ratio of each, from evenly spread runs of its bytes; codes on the CPU.

    Args:
        target: a checkpoint of any kind that `thinpoint convert` reads: .thin, .pt, .safetensors, folders of them.
        budget_bytes: read of each component; what has fewer is read whole.
        allow_pickle: as for `thinpoint convert`.
        progress: called with bytes coded so far.

    Raises:
        UsageError: no checkpoint, or one without tensors.
        DamagedFileError, UnsupportedError, UnsafeObjectError, StorageError: as opening and reading it.
    """
    from thinpoint.codec.backend import get_backend
    from thinpoint.codec.contract import PartSpec
    from thinpoint.formats.opening import open_checkpoint

    backends = {name: get_backend("auto", codec=codec) for name, codec in _HOST_CODECS.items()}
    ratios: dict[str, dict[Key, float]] = {name: {} for name in backends}
    components: list[Component] = []
    params = read_bytes = 0
    with open_checkpoint(target, allow_pickle=allow_pickle) as checkpoint:
        for (name, precision), leaves in _by_component(checkpoint.tree).items():
            raw_bytes = sum(leaf.num_bytes for leaf, _ in leaves)
            components.append(Component(name=name, precision=precision, raw_bytes=raw_bytes))
            params += sum(leaf.num_elems for leaf, _ in leaves) if name == "weights" else 0
            weight = 0.0
            shares = dict.fromkeys(backends, 0.0)
            for leaf, role, words, share in _sampled(leaves, raw_bytes, budget_bytes):
                spec = PartSpec(dtype=leaf.dtype_name, role=role, row_elems=_row_elems(leaf))
                for codec, backend in backends.items():
                    shares[codec] += share * backend.encode(words, spec).stored_bytes / words.nbytes
                weight += share
                read_bytes += words.nbytes
                if progress:
                    progress(read_bytes)
            for codec, stored in shares.items():
                ratios[codec][name, precision] = weight / stored
    if not components:
        raise UsageError("the checkpoint holds no tensors", where=target)
    return Sample(
        name=target, components=tuple(components), ratios=ratios, params=params, read_bytes=read_bytes
    )


_Leaves = list[tuple["TensorLeaf", str]]


def _by_component(tree: Any) -> dict[tuple[str, str], _Leaves]:
    """Tensors with their roles by component and precision; one that has several names counts once."""
    found: dict[tuple[str, str], _Leaves] = {}
    seen: set[int] = set()
    for path, leaf, in_optimizer in _walk(tree, (), False):
        if id(leaf) in seen or not leaf.num_bytes:
            continue
        seen.add(id(leaf))
        role, name = _named(path, leaf.dtype_name, in_optimizer)
        precision = _PRECISIONS.get(leaf.dtype_name, leaf.dtype_name)
        found.setdefault((name, precision), []).append((leaf, role))
    return found


def _walk(
    tree: Any, path: tuple[Any, ...], in_optimizer: bool
) -> Iterator[tuple[tuple[Any, ...], TensorLeaf, bool]]:
    from thinpoint.formats.leaves import ObjectLeaf, TensorLeaf, items
    from thinpoint.state.roles import is_optimizer_state

    if isinstance(tree, ObjectLeaf):
        return
    if isinstance(tree, TensorLeaf):
        yield path, tree, in_optimizer
        return
    inside = in_optimizer or (isinstance(tree, dict) and is_optimizer_state(tree))
    for key, value in items(tree):
        yield from _walk(value, (*path, key), inside)


def _named(path: tuple[Any, ...], dtype: str, in_optimizer: bool) -> tuple[str, str]:
    """A tensor's role for the coder, and the component it belongs to."""
    from thinpoint.state.roles import role_of

    role = role_of(path, dtype, in_optimizer=in_optimizer)
    name = _NAMES.get(role, "other")
    text = ".".join(map(str, path)).lower()
    if name == "weights" and any(word in text for word in _MASTERS):
        name = "master"
    return role, name


def _sampled(
    leaves: _Leaves, raw_bytes: int, budget_bytes: int
) -> Iterator[tuple[TensorLeaf, str, np.ndarray, float]]:
    """Tensors with words to code and the weight of each: all of them whole, by size, if that is within the budget.

    Else those that contain points lying evenly on all their bytes, by the number of points; the words are runs around the points.
    """
    if raw_bytes <= budget_bytes:
        for leaf, role in leaves:
            yield leaf, role, _words(leaf, [(0, leaf.num_elems)]), leaf.num_bytes
        return
    run_bytes = max(min(_RUN_BYTES, budget_bytes // _LEAST_POINTS), 1)
    num_points = budget_bytes // run_bytes
    points = [int((i + 0.5) * raw_bytes / num_points) for i in range(num_points)]
    begin = 0
    for leaf, role in leaves:
        end = begin + leaf.num_bytes
        inside = [point - begin for point in points if begin <= point < end]
        if inside:
            yield leaf, role, _words(leaf, _runs(leaf, inside, run_bytes)), len(inside)
        begin = end


def _runs(leaf: TensorLeaf, points: list[int], run_bytes: int) -> list[tuple[int, int]]:
    """Disjoint ranges of elements, each of whole rows and about `run_bytes`, from offsets in bytes on."""
    row = _row_elems(leaf) or 1
    long = max(run_bytes // leaf.dtype.itemsize // row, 1) * row
    found: list[tuple[int, int]] = []
    for point in points:
        start = min(point // leaf.dtype.itemsize // row * row, max(leaf.num_elems - long, 0)) // row * row
        start = max(start, found[-1][1] if found else 0)
        end = min(start + long, leaf.num_elems)
        if end > start:
            found.append((start, end))
    return found


def _row_elems(leaf: TensorLeaf) -> int:
    return leaf.shape[-1] if len(leaf.shape) > 1 else 0


def _words(leaf: TensorLeaf, runs: list[tuple[int, int]]) -> np.ndarray:
    """The elements of some ranges as unsigned words."""
    import numpy as np
    import torch

    from thinpoint.formats.leaves import boxes

    pieces = [
        leaf.read(box).contiguous().reshape(-1).view(torch.uint8).numpy()
        for start, end in runs
        for box in boxes(leaf.shape, start, end)
    ]
    data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return data.view(_WORDS[min(leaf.dtype.itemsize, 8)])
