"""The team of threads and the JIT: no CPU without work, no thread left behind, kernels found again in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import llvmlite
import numba
import numpy as np
import pytest

from minserve.backend import create_backend
from minserve.backend.base import BackendError, Peaks, StepLimits
from minserve.backend.numba_backend import NumbaBackend, jit
from minserve.backend.numba_backend.program import NumbaProgram
from minserve.config import EngineConfig, ModelConfig
from minserve.models import load
from minserve.weights.dummy import load_dummy
from tests.helpers import Part, make_batch, make_sampling

LIMITS = StepLimits(max_tokens=64, max_requests=4, max_rows=8, max_model_len=256, num_blocks=32)
ROOT = Path(__file__).parents[3]


def build(threads: int = 2) -> NumbaProgram:
    backend = NumbaBackend(threads=threads)
    model = load(load_dummy("dummy:llama-tiny:Q4_1").checkpoint, backend, 256)
    return backend.build(model.forward, model.spec, LIMITS)


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("minserve-worker")]


def test_threads_burn_no_cpu_between_requests_and_wake_up_again() -> None:
    program = build(threads=3)
    batch = make_batch([Part(0, [1, 2, 3], [0])])
    first = program.logits(batch)
    time.sleep(0.3)  # they spin for a moment, then park
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    for _ in range(20):  # parked and spinning workers both follow
        np.testing.assert_array_equal(program.logits(batch), first)
    program.close()


def test_close_ends_the_threads_and_may_be_called_twice() -> None:
    others = len(workers())
    program = build(threads=3)
    program.logits(make_batch([Part(0, [1], [0])]))
    assert len(workers()) == others + 2
    program.close()
    program.close()
    assert len(workers()) == others


def test_a_step_lets_other_threads_run() -> None:
    """The interpreter releases the GIL: a loop of a server keeps turning while a step computes."""
    program = build(threads=1)
    batch = make_batch([Part(0, list(range(64)), range(4))])
    done = threading.Event()

    def work() -> None:
        for _ in range(200):
            program.logits(batch)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0.0005)
    thread.join()
    assert turns > 10
    program.close()


def test_run_samples_in_the_program_and_leaves_the_rare_rows_to_the_specification() -> None:
    program = build()
    sampling = make_sampling(3, temperature=[0, 1.0, 0], uniforms=0.4, logprobs=[-1, -1, 2], seats=[0, 1, 2])
    batch = make_batch([Part(0, [5, 6, 7], [3], rows=(0, 1, 2))], sampling=sampling)
    result, logits = program.run(batch), program.logits(batch)
    assert result.tokens[0] == logits[0].argmax()
    assert result.tokens[2] == logits[2].argmax()
    assert result.logprobs[:2] == (None, None)
    assert result.logprobs[2] is not None
    assert [token for token, _ in result.logprobs[2].top] == np.argsort(-logits[2], kind="stable")[:2].tolist()
    program.close()


def test_peaks_are_measured_once() -> None:
    backend = NumbaBackend(threads=1)
    peaks = backend.peaks()
    assert isinstance(peaks, Peaks)
    assert peaks.bandwidth > 1e8
    assert peaks.flops > 1e8
    assert backend.peaks() is peaks


def test_the_backend_comes_from_the_configuration() -> None:
    engine = EngineConfig(backend="numba", threads=1, activations="int8")
    backend = create_backend(engine, ModelConfig(), weights_id=b"")
    assert backend.name == "numba"
    assert "1 thread," in backend.description
    assert "8-bit" in backend.description
    assert backend.block_size == 16
    with pytest.raises(BackendError, match="block_size = 32"):
        create_backend(EngineConfig(backend="numba", block_size=32), ModelConfig())


# -- the JIT


SMALL_STEP = """
import sys, numpy as np
from tests.backend.numba.test_numba_team import build
from tests.helpers import Part, make_batch
from minserve.backend.numba_backend.dot import HAS_AVX2, HAS_VNNI
program = build(threads=2)
batches = [make_batch([Part(0, list(range(60)), range(4), rows=(5, 59))]), make_batch([Part(60, [4], range(4))])]
whole = [program.logits(batch) for batch in batches]
np.savez(sys.argv[1], *whole, path=[HAS_AVX2, HAS_VNNI])
for i in range(60):
    alone = program.logits(make_batch([Part(i, [i], range(4, 8))]))
assert (alone[0] == whole[0][1]).all()  # a token's bits don't depend on its company
program.close()
"""


def in_process(code: str, *arguments: str, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, text=True).stdout


CPUS = {
    "avx2": ("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2,+avx,+sse4.2,+popcnt"),
    "portable": ("x86-64", "+sse2"),
}
AVX512 = "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx512vnni,+avx512bf16," + CPUS["avx2"][1]
NEWER = {"zen": ("znver4", AVX512), "intel": ("cooperlake", AVX512)}  # neither has a matrix unit
newer = pytest.mark.skipif(not all(jit.cpu_has(f) for f in ("avx512vnni", "avx512bf16")), reason="no AVX-512 here")


@pytest.mark.slow
@pytest.mark.skipif(jit.machine() != "x86_64", reason="these are x86 processors")
@pytest.mark.parametrize("cpu", [*CPUS, *(pytest.param(cpu, marks=newer) for cpu in NEWER)])
def test_other_processors_compute_the_same(cpu: str, tmp_path: Path) -> None:
    """One source, other instructions: integers are equal, floats differ by rounding of bfloat16 sums alone."""
    name, features = (CPUS | NEWER)[cpu]
    in_process(SMALL_STEP, str(tmp_path / "old.npz"), NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    old = np.load(tmp_path / "old.npz")
    assert list(old["path"]) == [cpu == "avx2", cpu in NEWER]
    program = build()
    for i, batch in enumerate(
        [make_batch([Part(0, list(range(60)), range(4), rows=(5, 59))]), make_batch([Part(60, [4], range(4))])]
    ):
        np.testing.assert_allclose(program.logits(batch), old[f"arr_{i}"], rtol=0.02, atol=0.02)
    program.close()


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    code = """
from minserve.backend.numba_backend import rows
from minserve.backend.numba_backend.jit import Kernel
print(rows.add.cached)
rows.add.address
print(len(Kernel.seconds), rows.add.cached)
print(rows.add._compiled.cache_hits)
"""
    first = in_process(code, MINSERVE_CACHE=str(tmp_path)).split()
    second = in_process(code, MINSERVE_CACHE=str(tmp_path)).split()
    assert first == ["False", "1", "True", "0"]
    assert second == ["True", "1", "True", "1"]


def test_kernels_work_without_a_place_to_keep_them(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    code = "from minserve.backend.numba_backend import rows; print(rows.add.address > 0)"
    assert in_process(code, MINSERVE_CACHE=str(blocked)).strip() == "True"


def test_other_users_of_numba_keep_their_cache_folder(tmp_path: Path) -> None:
    code = """
import numba
numba.config.CACHE_DIR = "mine"
from minserve.backend.numba_backend import rows
rows.add.address
print(numba.config.CACHE_DIR)
"""
    assert in_process(code, MINSERVE_CACHE=str(tmp_path)).strip() == "mine"


def test_the_cache_is_named_after_sources_versions_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [jit.fingerprint.__wrapped__()]
    monkeypatch.setattr(numba.config, "CPU_NAME", "other")
    names.append(jit.fingerprint.__wrapped__())
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+sse2")
    names.append(jit.fingerprint.__wrapped__())
    monkeypatch.setattr(llvmlite, "__version__", "0.0")
    names.append(jit.fingerprint.__wrapped__())
    assert len(set(names)) == 4
