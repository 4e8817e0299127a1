"""The CPU backend in Numba: see README.md. Importing it imports numba, but compiles nothing."""

from minserve.backend.numba_backend.backend import NumbaBackend, create

__all__ = ["NumbaBackend", "create"]
