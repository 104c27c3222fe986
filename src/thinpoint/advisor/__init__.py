"""Does compressing checkpoints pay here, with what, and how much: a published cost model with rates that can be measured.

`advise(Case(...))` is all of it; `thinpoint advise` the same on the command line. docs/cost-model.md explains the
model. Torch-free but for `measure` and `sample`, which load torch when they run.
"""

from thinpoint.advisor.advice import Advice, advise
from thinpoint.advisor.case_file import case_from, read_case_file
from thinpoint.advisor.codecs import BUILT_IN, Codec
from thinpoint.advisor.costs import Costs, costs_of
from thinpoint.advisor.inputs import Case, Cluster, Model, Saves, Storage
from thinpoint.advisor.sizes import Component

__all__ = [
    "BUILT_IN",
    "Advice",
    "Case",
    "Cluster",
    "Codec",
    "Component",
    "Costs",
    "Model",
    "Saves",
    "Storage",
    "advise",
    "case_from",
    "costs_of",
    "read_case_file",
]
