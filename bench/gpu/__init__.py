"""thinpoint on a GPU beside its peers: `python -m bench.gpu --help`, from the root of a checkout."""
