"""A checkpoint of many ranks, opened: what it holds at once, tensors and slices of them when asked for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from thinpoint.dcp.boxes import box_of, empty_box, meeting
from thinpoint.dcp.rank_file import RankFile
from thinpoint.engine.workers import Pool
from thinpoint.errors import (
    NotFoundError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
)
from thinpoint.folder.layout import Chunk, Keys, TensorLayout
from thinpoint.folder.layout_file import MAX_LAYOUT_BYTES, parse_layout
from thinpoint.folder.manifest import MAX_MANIFEST_BYTES, Manifest, parse_manifest
from thinpoint.folder.names import MANIFEST
from thinpoint.store import open_store
from thinpoint.store.contract import Store

if TYPE_CHECKING:
    import torch

OPEN_AHEAD = 8
"""Files that are opened while another is read: over a network that is a few round trips each."""


def read_manifest(store: Store) -> Manifest:
    """The manifest in a folder.

    Raises:
        NotFoundError: it has none.
        MalformedFileError, LimitExceededError, UnsupportedVersionError: it is damaged, or newer.
        StorageError: the store refused.
    """
    try:
        raw = store.get(MANIFEST, MAX_MANIFEST_BYTES)
    except NotFoundError as error:
        raise NotFoundError(
            "there is no checkpoint here: no manifest",
            errno=error.errno,
            where=store.url,
            hint="A save that was not finished leaves none",
        ) from error
    return parse_manifest(raw, where=f"{store.url}/{MANIFEST}")


class ThinFolder:
    """Names, dtypes, shapes and chunks of a checkpoint of many ranks. A context manager. Not to be shared between threads.

    No process group is needed, and nothing in the folder that is a pickle is opened.

    Args:
        target: path or URL of the folder, or a store.
        backend, num_threads: as for `thinpoint.load`.

    Attributes:
        store: where it is.
        manifest: which files it is made of.
        layout: where everything is in them.

    Raises:
        NotFoundError: there is no manifest, or a file that it names is missing.
        UnsupportedError: the folder holds a checkpoint of a single file.
        DamagedFileError (and its classes): manifest or layout is damaged.
        StorageError: the store refused.
    """

    def __init__(self, target: Any, *, backend: str = "auto", num_threads: int | None = None) -> None:
        self._backend = backend
        self._num_threads = num_threads
        self._pinned: dict[int, RankFile] = {}
        self.store = open_store(target)
        self.manifest = read_manifest(self.store)
        record = self.manifest.layout
        if record is None:
            raise UnsupportedError(
                "the checkpoint in this folder is a single file, without a layout",
                where=self.store.url,
                hint=f"Open the file itself: {self.manifest.files[0].name}",
            )
        where = f"{self.store.url}/{record.name}"
        self.layout = parse_layout(self.store.get(record.name, MAX_LAYOUT_BYTES), record, where=where)

    def __enter__(self) -> ThinFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. Closing twice is no error."""
        while self._pinned:
            self._pinned.popitem()[1].close()

    @property
    def tensors(self) -> Mapping[str, TensorLayout]:
        """Each tensor's dtype, shape and chunks, by its name."""
        return self.layout.tensors

    @property
    def objects(self) -> Mapping[str, int]:
        """For the name of each object that is no tensor the rank whose file holds it."""
        return self.layout.objects

    @property
    def planner_data(self) -> dict[str, Keys] | None:
        """For each name in the state the keys that lead there; None if the planner left none."""
        return self.layout.planner_data

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return self.layout.world_size

    def rank_file(self, rank: int) -> RankFile:
        """The file of a rank, a `ThinFile`; open until the folder is closed.

        Raises:
            UsageError: there is no such rank.
            And what opening a file raises.
        """
        if rank not in self._pinned:
            self._pinned[rank] = self._open(rank)
        return self._pinned[rank]

    def read(self, fqn: str, index: Any = ()) -> torch.Tensor:
        """A new contiguous CPU tensor: all of a tensor, or a box of it; other blocks are not read.

        Args:
            index: slices without a step, one for each dimension from the first on.

        Raises:
            UnknownNameError: there is no tensor of that name.
            UsageError: the index is not valid.
            NotEnoughMemoryError: it does not fit into memory.
            DamagedFileError (and its classes): what is read is damaged, or contradicts the layout.
        """
        import torch

        tensor = self.tensor(fqn)
        start, end = box_of(tensor, index)
        out = empty_box(tensor, start, end, tensor_name=fqn, where=self.store.url)
        wanted: dict[int, list[Chunk]] = defaultdict(list)
        for chunk in tensor.overlapping(start, end):
            wanted[chunk.rank].append(chunk)
        with torch.no_grad():
            for rank, file in self.files(sorted(wanted)):
                file.read_parts(
                    (file.chunk(fqn, chunk, tensor.dtype), *meeting(chunk, start, out))
                    for chunk in wanted[rank]
                )
        return out

    def tensor(self, fqn: str) -> TensorLayout:
        """A tensor's layout.

        Raises:
            UnknownNameError: there is no tensor of that name.
        """
        if fqn not in self.tensors:
            raise UnknownNameError(f"{fqn!r} is no tensor", where=self.store.url)
        return self.tensors[fqn]

    def load_object(self, fqn: str, *, weights_only: bool = True) -> Any:
        """An object that is no tensor; the state of one rank comes as a `RankState`. Tensors in it are on the CPU.

        Raises:
            UnknownNameError: there is no object of that name.
            UnsafeObjectError: it holds a pickled object and `weights_only` is True.
        """
        return self.load_objects([fqn], weights_only=weights_only)[fqn]

    def load_objects(self, fqns: Iterable[str], *, weights_only: bool = True) -> dict[str, Any]:
        """As `load_object`, for several; each file is opened once."""
        wanted: dict[int, list[str]] = defaultdict(list)
        for fqn in fqns:
            if fqn not in self.objects:
                raise UnknownNameError(f"{fqn!r} is no object", where=self.store.url)
            wanted[self.objects[fqn]].append(fqn)
        objects: dict[str, Any] = {}
        for rank, file in self.files(sorted(wanted)):
            objects |= file.load_objects(wanted[rank], self.layout.rank_states, weights_only=weights_only)
        return objects

    def files(self, ranks: Iterable[int]) -> Iterator[tuple[int, RankFile]]:
        """The files of ranks, each closed when the next one is asked for; the next are opened meanwhile."""
        todo = deque(ranks)
        if len(todo) == 1:
            yield from ((rank, file) for rank in todo for file in self._lent(rank, None))
            return
        pool = Pool(OPEN_AHEAD, "thinpoint-open")
        ahead: deque[tuple[int, Future[RankFile] | None]] = deque()
        try:
            while todo or ahead:
                while todo and len(ahead) < OPEN_AHEAD:
                    rank = todo.popleft()
                    opening = None if rank in self._pinned else pool.submit(self._open, rank)
                    ahead.append((rank, opening))
                rank, opening = ahead.popleft()
                for file in self._lent(rank, opening):
                    yield rank, file
        finally:
            pool.close(cancel=True)
            for _, opening in ahead:
                with suppress(BaseException):
                    if opening is not None and not opening.cancelled():
                        opening.result().close()

    def verify(self, deep: bool = False, progress: Callable[[int], None] | None = None) -> None:
        """Reads every byte of every file and returns if all is as it was written.

        Args:
            deep: also decode every tensor and compare its bits with their checksum.
            progress: called with bytes of all files done so far.

        Raises:
            DamagedFileError, UnsupportedError: the first problem, with the file of its rank; all of that file are in its
                attribute `problems`.
            NotFoundError, StorageError: the store refused.
        """
        chunks: dict[int, list[tuple[str, TensorLayout, Chunk]]] = defaultdict(list)
        for fqn, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                chunks[chunk.rank].append((fqn, tensor, chunk))
        names: dict[int, list[str]] = defaultdict(list)
        for fqn, rank in self.objects.items():
            names[rank].append(fqn)
        done = 0
        for rank, file in self.files(range(self.world_size)):
            file.verify(deep=deep, progress=progress and partial(_report, progress, done))
            file.check_chunks(chunks[rank])
            file.check_objects(names[rank], self.layout.rank_states)
            done += file.file_bytes

    def _open(self, rank: int) -> RankFile:
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"there is no rank {rank}", where=self.store.url, expected=f"0 to {self.world_size - 1}"
            )
        record = self.manifest.files[rank]
        return RankFile(self.store, record, rank, backend=self._backend, num_threads=self._num_threads)

    def _lent(self, rank: int, opening: Future[RankFile] | None) -> Iterator[RankFile]:
        """A file that is closed afterwards, unless it is to stay open."""
        if rank in self._pinned:
            yield self._pinned[rank]
            return
        file = self._open(rank) if opening is None else opening.result()
        with file:
            yield file


def _report(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)
