"""What the advice depends on: model, cluster, storage, saves. Every default is the published case's, or says that it is ours."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinpoint.advisor.checks import choice, number, whole
from thinpoint.advisor.codecs import BUILT_IN, Codec
from thinpoint.advisor.sizes import OPTIMIZERS, PRECISIONS, Component, components_of
from thinpoint.errors import UsageError

MODES = ("sync", "async", "overlap")
SCOPES = ("aggregate", "node")
UNITS = {"GB": 10**9, "GiB": 2**30}

HOURS_PER_MONTH = 720
"""30 days: 1,440 saves at one every 30 minutes, as the published case counts."""

LLAMA3_GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
"""50,677: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, section 3.3.4)."""

_SIZE_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is saved.

    Attributes:
        params: number of parameters.
        optimizer: one of OPTIMIZERS; says which moments there are.
        weights, moments: precision, one of PRECISIONS.
        gradients, master: precision, or "none" if the checkpoint holds none. The published case saves gradients; most
            frameworks do not.
        size_gb: size of the whole in decimal GB, to be compared with what the above gives; None for no comparison.
        components: what a checkpoint holds, instead of all of the above. See `sample.sample_checkpoint`.
    """

    params: float = 70e9
    optimizer: str = "adamw"
    weights: str = "bf16"
    moments: str = "fp32"
    gradients: str = "bf16"
    master: str = "none"
    size_gb: float | None = None
    components: tuple[Component, ...] | None = None

    def __post_init__(self) -> None:
        number("model.params", self.params, least=1)
        choice("model.optimizer", self.optimizer, OPTIMIZERS)
        for name in ("weights", "moments"):
            choice(f"model.{name}", getattr(self, name), PRECISIONS)
        for name in ("gradients", "master"):
            choice(f"model.{name}", getattr(self, name), (*PRECISIONS, "none"))
        if self.size_gb is not None:
            number("model.size_gb", self.size_gb, above=True)
            found = sum(component.raw_bytes for component in self.parts()) / 1e9
            if abs(found / self.size_gb - 1) > _SIZE_TOLERANCE:
                raise UsageError(
                    "model.size_gb contradicts the other fields of model",
                    expected=f"{found:,.1f} GB, as params, optimizer and precisions give, or at most 5 % from it",
                    actual=f"{self.size_gb:,.1f} GB",
                    hint="Is there a master copy, are gradients saved, is it GiB?",
                )

    def parts(self) -> tuple[Component, ...]:
        """The components of a checkpoint."""
        if self.components is not None:
            return self.components
        return components_of(
            self.params,
            optimizer=self.optimizer,
            weights=self.weights,
            moments=self.moments,
            gradients=self.gradients,
            master=self.master,
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What it is trained on.

    Attributes:
        gpus: all that wait while a checkpoint is saved. 64 as in the published case of 70B.
        gpus_per_node: for rates per node.
        writers: GPUs that hold a part of what is saved; None for all. With replicas it is those of one replica.
        usd_per_gpu_hour: 4.40 in the published case.
        mtbf_hours: mean time between failures of the whole cluster; None for `LLAMA3_GPU_HOURS_PER_FAILURE / gpus`.
        restart_s: from a failure until the checkpoint begins to load: detecting, scheduling, starting. Our assumption.
        link_gb_per_s: from one GPU to its host; 55 on an H200, measured (docs/gpu.md).
        step_s: forward and backward of a training step, which `overlap` can hide a copy behind. Our assumption.
    """

    gpus: int = 64
    gpus_per_node: int = 8
    writers: int | None = None
    usd_per_gpu_hour: float = 4.40
    mtbf_hours: float | None = None
    restart_s: float = 600.0
    link_gb_per_s: float = 55.0
    step_s: float = 10.0

    def __post_init__(self) -> None:
        whole("cluster.gpus", self.gpus)
        whole("cluster.gpus_per_node", self.gpus_per_node)
        number("cluster.usd_per_gpu_hour", self.usd_per_gpu_hour)
        number("cluster.restart_s", self.restart_s)
        number("cluster.link_gb_per_s", self.link_gb_per_s, above=True)
        number("cluster.step_s", self.step_s)
        if self.mtbf_hours is not None:
            number("cluster.mtbf_hours", self.mtbf_hours, above=True)
        if self.writers is not None and whole("cluster.writers", self.writers) > self.gpus:
            raise UsageError(
                "cluster.writers is not valid",
                expected=f"at most cluster.gpus, {self.gpus}",
                actual=self.writers,
            )

    @property
    def num_writers(self) -> int:
        """GPUs that encode and copy."""
        return self.gpus if self.writers is None else self.writers

    @property
    def num_writing_nodes(self) -> int:
        """Nodes that write, if writers fill nodes one after the other."""
        return -(-self.num_writers // self.gpus_per_node)

    @property
    def hours_between_failures(self) -> float:
        """Mean time between failures of the cluster: independent failures add up, so it falls as one over the GPUs."""
        return LLAMA3_GPU_HOURS_PER_FAILURE / self.gpus if self.mtbf_hours is None else self.mtbf_hours


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where checkpoints go.

    Attributes:
        gb_per_s: rate of writing; 5 in the published case.
        scope: "aggregate": that is shared by all nodes, whatever their number, as published; "node": each node has it.
        read_gb_per_s: rate of reading, of the same scope; None for that of writing.
        usd_per_gb_month: 0.14 in the published case; object storage costs 0.02 to 0.05.
        kept: checkpoints that are stored at a time; 96, two days, in the published case.
        usd_per_gb_per_s_month: what one more GB/s costs a month; None if that is not known.
        unit: what a GB in rates and prices is: "GB", 10^9 bytes; "GiB", 2^30: the published case divides GiB by GB/s.
    """

    gb_per_s: float = 5.0
    scope: str = "aggregate"
    read_gb_per_s: float | None = None
    usd_per_gb_month: float = 0.14
    kept: int = 96
    usd_per_gb_per_s_month: float | None = None
    unit: str = "GB"

    def __post_init__(self) -> None:
        number("storage.gb_per_s", self.gb_per_s, above=True)
        choice("storage.scope", self.scope, SCOPES)
        number("storage.usd_per_gb_month", self.usd_per_gb_month)
        whole("storage.kept", self.kept)
        choice("storage.unit", self.unit, UNITS)
        if self.read_gb_per_s is not None:
            number("storage.read_gb_per_s", self.read_gb_per_s, above=True)
        if self.usd_per_gb_per_s_month is not None:
            number("storage.usd_per_gb_per_s_month", self.usd_per_gb_per_s_month)

    @property
    def unit_bytes(self) -> int:
        """Bytes in a GB of rates and prices."""
        return UNITS[self.unit]


@dataclass(frozen=True, kw_only=True)
class Saves:
    """When and how checkpoints are saved.

    Attributes:
        interval_min: minutes from the begin of one save to the begin of the next; 30 in the published case.
        mode: "sync": training waits until it is durable, as published; "async": until it is in host memory; "overlap": the
            copy is hidden behind the next step's forward and backward.
    """

    interval_min: float = 30.0
    mode: str = "sync"

    def __post_init__(self) -> None:
        number("saves.interval_min", self.interval_min, above=True)
        choice("saves.mode", self.mode, MODES)

    @property
    def per_month(self) -> float:
        """Saves in 30 days."""
        return HOURS_PER_MONTH * 60 / self.interval_min


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that the advice depends on.

    Attributes:
        codecs: what is compared; "none" must be among them.
    """

    model: Model = field(default_factory=Model)
    cluster: Cluster = field(default_factory=Cluster)
    storage: Storage = field(default_factory=Storage)
    saves: Saves = field(default_factory=Saves)
    codecs: tuple[Codec, ...] = BUILT_IN

    def __post_init__(self) -> None:
        names = [codec.name for codec in self.codecs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError("codecs has two of the same name", actual=", ".join(twice))
        if "none" not in names:
            raise UsageError("codecs lacks the codec that all others are compared with", expected="none")

    def codec(self, name: str) -> Codec:
        """The codec of that name.

        Raises:
            UsageError: there is none.
        """
        names = [codec.name for codec in self.codecs]
        return self.codecs[names.index(choice("codec", name, names))]
