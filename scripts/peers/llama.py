"""llama.cpp: built here once, and its programs, each with the model that it is given."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from peers import CACHE, sh

SDIST = "llama-cpp-python==0.3.36"  # its source distribution holds all of llama.cpp's
FOLDER = CACHE / "llama.cpp"


def program(name: str) -> str:
    """The path of a program of llama.cpp: a native Release build, made where it is missing."""
    binary = FOLDER / "build" / "bin" / name
    if not binary.exists():
        if not FOLDER.exists():
            _fetch()
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
        options += ["-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF", *_compiler()]
        sh("cmake", "-B", "build", *options, cwd=FOLDER)
        sh("cmake", "--build", "build", "--target", name, "-j", str(os.cpu_count()), cwd=FOLDER)
    return str(binary)


def _compiler() -> list[str]:
    """Beside AMX, gcc before 13 drops the stores of a tile's shape, and the program ends with SIGILL: then Clang.

    OpenMP is off there. SmolLM2 as Q8_0 on two cores of a Sapphire Rapids, 2026-11-30, one run each of
    `bench_peers --rounds 1 --only single`: 65 tokens/s and 389 ms for a
    prompt of 512; with OpenMP 22 and 684; by gcc, without AMX, 48 and 855.
    """
    version = subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True).stdout.partition(".")[0].strip()
    cpu = Path("/proc/cpuinfo")
    if not (version.isdigit() and int(version) < 13 and cpu.exists() and "amx_tile" in cpu.read_text()):
        return []
    for number in range(25, 15, -1):
        if shutil.which(f"clang-{number}"):
            compilers = [f"-DCMAKE_C_COMPILER=clang-{number}", f"-DCMAKE_CXX_COMPILER=clang++-{number}"]
            return [*compilers, "-DGGML_OPENMP=OFF"]
    sys.exit("llama.cpp needs gcc 13 or Clang on this processor: apt-get install clang-19")


def _fetch() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    download = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d"]
    sh(sys.executable, *download, str(CACHE), SDIST)
    shutil.unpack_archive(next(CACHE.glob("llama_cpp_python-*.tar.gz")), CACHE)
    source = next(CACHE.glob("llama_cpp_python-*/vendor/llama.cpp"))
    (source / ".git").unlink(missing_ok=True)  # a stray link of the archive: it makes the build loop
    source.rename(FOLDER)


def requantized(source: Path, target: Path, kind: str) -> Path:
    """`source` in another format (Q8_0, F32 ...), made once."""
    if not target.is_file():
        partial = target.with_suffix(".partial")
        sh(program("llama-quantize"), "--allow-requantize", str(source), str(partial), kind, "2")
        partial.replace(target)
    return target


@dataclass(frozen=True)
class Llama:
    """A model, and the options that it needs."""

    model: Path
    options: tuple[str, ...] = ()

    def command(self, name: str, context: int, *more: str) -> list[str]:
        return [program(name), "-m", str(self.model), "-c", str(context), *self.options, *more]

    @contextmanager
    def serving(self, context: int) -> Iterator[str]:
        """The address of a server with one seat."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        where = ("--host", "127.0.0.1", "--port", str(port), "-np", "1", "--no-webui")
        command = self.command("llama-server", context, *where)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url, process)
            yield url
        finally:
            process.terminate()
            process.wait(20)

    def perplexity(self, text: Path, context: int, windows: int) -> float:
        more = ("-f", str(text), "-b", "512", "--chunks", str(windows))
        done = subprocess.run(self.command("llama-perplexity", context, *more), capture_output=True, text=True)
        found = re.search(r"PPL = ([\d.]+)", done.stdout + done.stderr)
        if found is None:
            sys.exit("llama-perplexity gave no number:\n" + (done.stdout + done.stderr)[-2000:])
        return float(found[1])


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url + "/health").close()
            return
        except urllib.error.URLError:  # not listening yet, or 503 while it loads
            time.sleep(0.1)
            if process.poll() is not None:
                sys.exit(f"llama-server ended with {process.returncode}")
