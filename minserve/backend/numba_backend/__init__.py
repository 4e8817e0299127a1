"""The CPU backend in Numba: see README.md. Importing it imports numba, but compiles nothing."""

from minserve.backend.numba_backend.backend import NumbaBackend

__all__ = ["NumbaBackend"]
