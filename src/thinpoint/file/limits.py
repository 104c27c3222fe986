"""The largest value of every size that a reader takes from a file (`spec/FORMAT.md`, Limits)."""

MAX_INDEX_RAW_BYTES = 64 << 20
INDEX_RATIO = 64
INDEX_SLACK_BYTES = 1 << 20
MAX_JSON_DEPTH = 512
MAX_JSON_INT_CHARS = 20

MAX_HEAD_BYTES = 256 << 20
MAX_BODY_BYTES = 1 << 30
MAX_LABEL_BYTES = 4096
MAX_PLANES = 4
MAX_BLOCK_ELEMS = 1 << 26
MAX_PART_ELEMS = 1 << 26

MAX_STORAGE_BYTES = 1 << 48
MAX_STORAGES = 1 << 20
MAX_PARTS = 1 << 20
MAX_TENSORS = 1 << 20
MAX_FEATURES = 256
MAX_FEATURE_CHARS = 64
MAX_TEXT_CHARS = 256
MAX_DIMS = 64
MAX_INT64 = (1 << 63) - 1


def max_index_raw_bytes(stored_bytes: int) -> int:
    """The most bytes that an index of `stored_bytes` may decompress to."""
    return min(MAX_INDEX_RAW_BYTES, INDEX_SLACK_BYTES + INDEX_RATIO * stored_bytes)
