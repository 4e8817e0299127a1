"""minserve: a single-node LLM inference server that a person can read in an afternoon.

Importing the package is cheap: neither Numba, CuPy nor aiohttp is loaded here.
"""

__version__ = "0.1.0"
