"""Columns of the tables that kernels share. All tables are int64 matrices on the device, one row for each thing.

Offsets within a part are below 2^26 and int32 in the kernels; addresses and offsets in shared arrays are int64.
"""

import triton.language as tl

LANES = tl.constexpr(32)
GROUP = tl.constexpr(256)
SYMBOLS = tl.constexpr(256)
PROB_BITS = tl.constexpr(12)
PROB_SCALE = tl.constexpr(4096)
STATE_LOW = tl.constexpr(1 << 15)
BINS = tl.constexpr(512)
BIN_OF_ZERO = tl.constexpr(256)
HIST_COLUMNS = tl.constexpr(516)
"""Bins, the number of zero tops, the number of differences in no bin, and two more: rows begin at multiples of 16 bytes."""
WINDOW = tl.constexpr(255)
NO_MEAN = tl.constexpr(-1)

# Planning; the numbers of `codec/plan.py`.
CANDIDATES = tl.constexpr(3)
"""Ways to predict: one mean, group means, group means and a profile."""
SAMPLE_GROUPS = tl.constexpr(256)
SAMPLE_DIVISOR = tl.constexpr(32)
PATCH_BITS = tl.constexpr(48)
COST_SCALE_BITS = tl.constexpr(16)
MAX_PROFILE_ROWS = tl.constexpr(512)
UNSEEN = tl.constexpr(-(1 << 31))

# A decoder's table, uint32, in three pieces. A step looks at few cache lines this way: one uint32 for each of the 4,096 slots
# would spread 32 lanes over 28 lines.
TABLE_WORDS = tl.constexpr(128 + 256 + 1024)
BUCKET_SLOTS = tl.constexpr(32)
"""So many slots share an entry of the first piece: first symbol | second symbol << 8 | slots of the first << 16 |
whether there are more symbols << 31."""
TABLE_SYMBOLS_AT = tl.constexpr(128)
"""One entry for each symbol: frequency | first slot << 16."""
TABLE_SLOTS_AT = tl.constexpr(128 + 256)
"""The symbol of every slot, a byte each."""

# One row for each part. The host fills the first block, the planning kernels the second.
PART_COLUMNS = tl.constexpr(34)
ADDRESS = tl.constexpr(0)
NUM_ELEMS = tl.constexpr(1)
TOP_SHIFT = tl.constexpr(2)
TOP_MASK = tl.constexpr(3)
TRAILING_ZEROS = tl.constexpr(4)
LOW_BITS = tl.constexpr(5)
SIGN_STORED = tl.constexpr(6)
SIGN_VALUE = tl.constexpr(7)
"""The word's highest bit where it is constant."""
RAW_BITS = tl.constexpr(8)
GROUP_MEANS_AT = tl.constexpr(9)
"""First of the part's group means in the array of means; the single mean of the part follows the last."""
ROW_ELEMS = tl.constexpr(10)
"""Columns of a profile, 0 if none is tried."""
PROFILE_AT = tl.constexpr(11)
ORDER_AT = tl.constexpr(12)
"""First of the part's coded groups in the array `order`, or -1 if all groups are coded."""
NUM_CANDIDATES = tl.constexpr(13)
"""Groups that are coded."""
NUM_CODED = tl.constexpr(14)
"""Values that are coded."""
FIXED_BITS = tl.constexpr(15)
PROFILE_ALONE = tl.constexpr(16)
"""Whether a profile is tried though group means alone do not pay."""
STEPS = tl.constexpr(17)
"""Steps of a whole segment."""
WORD_BITS = tl.constexpr(18)

NUM_PATCHES = tl.constexpr(19)
MEANS_AT = tl.constexpr(20)
MEANS_STRIDE = tl.constexpr(21)
"""1: a mean for each group; 0: one for the part."""
HAS_PROFILE = tl.constexpr(22)
WINDOW_BASE = tl.constexpr(23)
LOWEST = tl.constexpr(24)
HIGHEST = tl.constexpr(25)
ZERO_PRESENT = tl.constexpr(26)
FILL = tl.constexpr(27)
SINGLE = tl.constexpr(28)
"""The only symbol, or -1."""
ESTIMATED_BITS = tl.constexpr(29)
SAMPLE_RANGE = tl.constexpr(30)
"""Highest minus lowest of the sampled group means."""
PROFILE_RANGE = tl.constexpr(31)
TABLE_BYTES = tl.constexpr(32)
"""Size of the frequencies as stored."""

# What one look at every word of a part gives.
MASK_COLUMNS = tl.constexpr(6)
OR_MASK = tl.constexpr(0)
NOR_MASK = tl.constexpr(1)
"""OR of the complements: the complement of the AND."""
NUM_IDLE = tl.constexpr(2)
"""Groups of which all words are zero."""
HIGHEST_MEAN = tl.constexpr(3)
"""0 if no group has a mean; means are at least 1."""
LOWEST_MEAN = tl.constexpr(4)
"""MEAN_BOUND minus the lowest mean, 0 if no group has one."""
MEAN_BOUND = tl.constexpr(1 << 20)

# One row for each segment, those of a block one after the other.
SEGMENT_COLUMNS = tl.constexpr(8)
SEG_PART = tl.constexpr(0)
SEG_INDEX = tl.constexpr(1)
"""Index in its part."""
SEG_VALUES = tl.constexpr(2)
"""Coded values."""
SEG_RAW_AT = tl.constexpr(3)
"""First word in the raw plane, in uint32."""
SEG_SCRATCH_AT = tl.constexpr(4)
"""First word in the encoder's scratch, in uint16."""
SEG_ORDER_AT = tl.constexpr(5)
"""First of the segment's groups in `order`, if its part has one."""
SEG_WORDS_AT = tl.constexpr(6)
"""For the decoder: first word in the entropy plane, in uint16."""
SEG_STATES_AT = tl.constexpr(7)
"""For the decoder: lane states in the entropy plane, in uint32."""

# One row for each block.
BLOCK_COLUMNS = tl.constexpr(4)
BLOCK_SEGMENT = tl.constexpr(0)
"""Its first row in the table of segments."""
BLOCK_SEGMENTS = tl.constexpr(1)
BLOCK_AT = tl.constexpr(2)
"""Where it begins in the entropy plane, in bytes."""
BLOCK_BYTES = tl.constexpr(3)

# What a decoder finds wrong, or-ed for each part.
BAD_COUNTS = tl.constexpr(1)
BAD_STATE = tl.constexpr(2)
BAD_END = tl.constexpr(4)
