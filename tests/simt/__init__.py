"""CUDA without a GPU: an emulator for the .cu files and a strict stand-in for CuPy, and the tests that run on them."""
