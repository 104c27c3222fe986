"""Triton kernels, without the code that launches them. Everything is int64 tables and flat arrays; see `fields.py`."""
