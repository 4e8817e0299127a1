"""Every instantiation compiles for real GPUs, with hardly a spilled register. Needs NVRTC's wheels, not a GPU."""

from __future__ import annotations

import re

import pytest

from minserve.backend.cuda_backend.kernels import flatten
from tests.simt import kernel_readme, nvrtc
from tests.simt.instances import INSTANCES
from tests.simt.nvrtc import ARCHITECTURES, Architecture, Usage, compile_file, occupancy

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
NO_SPILLS = {"decode_attention", "prefill_attention", "rms_norm", "skinny_gemm", "rope_kv"}
SPILL_LIMIT = 16  # bytes a thread, elsewhere


@needs_nvrtc
@pytest.mark.parametrize("sm", ARCHITECTURES, ids=lambda sm: sm.name)
@pytest.mark.parametrize("file", INSTANCES)
def test_compiles_within_its_registers(file: str, sm: Architecture) -> None:
    limit = 0 if file in NO_SPILLS else SPILL_LIMIT
    for name, usage in compile_file(file, INSTANCES[file], sm.name).items():
        assert usage.spill <= limit, f"{name} on {sm.name}: {usage}"
        assert usage.shared <= 48 * 1024
        assert occupancy(usage, *nvrtc.launch_shape(file, name), sm) > 0, f"{name} does not fit on {sm.name}"


@needs_nvrtc
def test_the_table_is_what_nvrtc_says() -> None:
    stored = kernel_readme.stored("compile report")
    made_by = re.search(r"NVRTC (\d+\.\d+)", stored)
    assert made_by is not None
    if made_by[1] != nvrtc.version():
        pytest.skip(f"the table is NVRTC {made_by[1]}'s, here is {nvrtc.version()}: registers may differ")
    assert kernel_readme.compile_report() == stored, "run scripts/compile_report"


@needs_nvrtc
def test_errors_come_with_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "flatten", lambda name: "__global__ void f() { not_a_thing; }")
    with pytest.raises(RuntimeError, match=r"(?s)sm_90.*not_a_thing"):
        compile_file("nothing", ["f"], "sm_90")


def test_instructions_that_touch_memory_say_so() -> None:
    """Else the compiler may move loads and stores of C++ across them: PTX's operands name addresses, not memory."""
    statements = re.findall(r"asm volatile\((.*?)\);", flatten("mma.cuh"), re.S)
    touching = [statement for statement in statements if re.search("cp.async|ldmatrix", statement)]
    assert len(touching) == 5
    assert all(statement.endswith('"memory"') for statement in touching)


def test_occupancy() -> None:
    a100 = ARCHITECTURES[0]
    assert occupancy(Usage(32, 0, 0, 0), 256, 0, a100) == 64  # 8 blocks of 8 warps
    assert occupancy(Usage(255, 0, 0, 0), 128, 0, a100) == 8  # registers: 2 blocks
    assert occupancy(Usage(32, 0, 0, 0), 128, 69632, a100) == 8  # shared memory: 2 blocks
    assert occupancy(Usage(32, 0, 0, 0), 32, 0, a100) == 32  # blocks


def test_bytes_and_times_on_paper_are_those_of_the_code() -> None:
    assert kernel_readme.PARTS["paper"]() == kernel_readme.stored("paper"), "run scripts/compile_report"
