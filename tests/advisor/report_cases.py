"""Cases whose reports look different: many codecs, long names, extremes."""

from thinpoint.advisor import BUILT_IN, Case, Cluster, Codec, Component, Model, Saves, Storage

_MINE = tuple(
    Codec(name=name, ratio=1.1 + i / 10, encode_gb_per_s=1.0 * 10**i, scope="aggregate")
    for i, name in enumerate(
        ("a codec with a very long name that nobody would choose, but who knows", "<b>&\"'", "x")
    )
)
_STRANGE = (
    Component(
        name="weights", precision="float8_e4m3fnuz and some more words that make it long", raw_bytes=1.0
    ),
    Component(name="other", precision="int64", raw_bytes=1e15),
)

CASES = {
    "default": Case(),
    "async": Case(saves=Saves(mode="async")),
    "overlap": Case(saves=Saves(mode="overlap")),
    "many codecs": Case(codecs=(*BUILT_IN, *_MINE)),
    "only none": Case(codecs=BUILT_IN[:1]),
    "tiny": Case(
        model=Model(params=1),
        cluster=Cluster(gpus=1, usd_per_gpu_hour=0),
        storage=Storage(usd_per_gb_month=0),
    ),
    "huge": Case(model=Model(params=1e15), cluster=Cluster(gpus=1_000_000), storage=Storage(gb_per_s=1e-2)),
    "fast": Case(storage=Storage(gb_per_s=1e6)),
    "node": Case(storage=Storage(gb_per_s=2.5, scope="node")),
    "many parts": Case(model=Model(master="fp32")),
    "strange parts": Case(model=Model(components=_STRANGE)),
}
