"""The mutants of scripts/mutate_kernels: which places are broken, and that each has a name of its own."""

from __future__ import annotations

from collections import Counter

from tests.simt.mutation import FOLDER, RELEVANT, Mutant, mutants
from tests.simt.survivors import SURVIVORS


def every_mutant() -> list[Mutant]:
    return [m for file in sorted(RELEVANT) for m in mutants(file, (FOLDER / file).read_text(encoding="utf-8"))]


def test_every_kernel_file_is_broken_and_every_mutant_has_its_own_key() -> None:
    assert {path.name for path in FOLDER.glob("*.cu*")} == set(RELEVANT)
    found = Counter(m.key for m in every_mutant())
    assert [key for key, times in found.items() if times > 1] == []
    assert [key for key in SURVIVORS if key not in found] == []


def test_steps_from_pointers_grow_by_one() -> None:
    source = (
        "void f(T* out, const u8* __restrict__ data, int n) {\n"
        "  const T* row = out + (long long)(n + 1) * 8 + n % 2 * 4;\n"
        "  const int m = n * n + 3;\n"
        "  g(data + n, row + 2 * blockDim.x + threadIdx.x);\n"
        "  return n ? reinterpret_cast<T*>(data) + n : out;\n"
        "}\n"
    )
    shifted = [(m.old, m.new) for m in mutants("x.cu", source) if m.kind == "pointer shifted"]
    assert shifted == [
        ("(long long)(n + 1) * 8", "((long long)(n + 1) + 1) * 8"),
        ("n % 2 * 4", "(n % 2 + 1) * 4"),
        ("n", "(n + 1)"),
        ("2 * blockDim.x", "(2 + 1) * blockDim.x"),
        ("threadIdx.x", "(threadIdx.x + 1)"),
        ("n", "(n + 1)"),
    ]


def test_equal_lines_are_told_apart() -> None:
    source = "  __syncthreads();\n  a = b;\n  __syncthreads();\n"
    keys = [m.key for m in mutants("x.cu", source)]
    assert keys == [f"x.cu: __syncthreads(); | at 0: __syncthreads(); -> ; ({i} of 2)" for i in (1, 2)]
