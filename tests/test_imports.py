"""Who may import whom. The table is the architecture: a new module needs a line in it, or fits under one."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Room:
    """layer: may import every lower one, unless `rooms` names what it may import instead. Its own modules always."""

    layer: int
    packages: frozenset[str] = frozenset()
    rooms: frozenset[str] | None = None


def room(layer: int, packages: str = "", rooms: str | None = None) -> Room:
    return Room(layer, frozenset(packages.split()), None if rooms is None else frozenset(rooms.split()))


ROOMS = {
    "config": room(0, "msgspec", rooms=""),
    "config_rules": room(0, rooms="config origin"),
    "profiles": room(0, rooms="config"),
    "origin": room(0, rooms=""),
    "file_lock": room(0, rooms=""),
    "threads": room(0, rooms=""),
    "request": room(0, rooms=""),
    "policy": room(1, rooms="request"),
    "blocks": room(1, rooms="request"),
    "prefix": room(1, rooms="request blocks"),
    "cache": room(2, rooms="request blocks prefix"),
    "waiting": room(2, rooms="request policy"),
    "views": room(2, rooms="request policy cache waiting"),
    "events": room(2, rooms="request"),
    "scheduler": room(2),
    "batch": room(2, "numpy"),
    "batch_build": room(2, "numpy", rooms="request batch"),
    "backend": room(3, "numpy", rooms="config request batch"),
    "backend.numba_backend": room(3, "numpy numba llvmlite", rooms="backend config request batch"),
    "backend.cuda_backend": room(3, "numpy cupy cupy_backends cuda", rooms="backend config request batch kernels_cuda"),
    "models": room(3, "numpy", rooms="backend.base backend.tensor"),
    "runner": room(4, "numpy"),
    "weights": room(4, "numpy gguf safetensors huggingface_hub"),
    "text": room(4, "tokenizers jinja2", rooms="request backend.base weights.vocabulary"),
    "transcript": room(5),
    "step": room(5),
    "engine": room(5),
    "stream": room(5),
    "queue_times": room(5),
    "status": room(5, rooms="request"),
    "worker": room(5),
    "async_engine": room(5),
    "economics": room(6, "msgspec", rooms="config file_lock origin request threads"),
    "observe": room(6, "msgspec prometheus_client structlog", rooms="config request"),
    "assemble": room(7),
    "settings": room(7, "msgspec"),
    "server": room(7, "aiohttp msgspec structlog numpy"),
    "bench": room(7, "aiohttp msgspec numpy rich"),
    "terminal": room(7, "rich"),
    "commands": room(7, "click rich msgspec aiohttp"),
    "cli": room(7, "click"),
    "__main__": room(7),
}
ONE_MODULE = {  # each third-party reader is known to one module only
    "tokenizers": "text.tokenizer",
    "jinja2": "text.sandbox",
    "huggingface_hub": "weights.repository",
    "safetensors": "weights.safetensors_file",
    "gguf": "weights.gguf_file",
}


def sources() -> Iterator[tuple[str, Path]]:
    """(module name without "minserve.", file) of every module; the links in the package are not followed."""
    for folder, prefix in ((ROOT / "minserve", ""), (ROOT / "models", "models.")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] not in ("models", "kernels_cuda"):
                name = prefix + ".".join(parts)
                yield name.removesuffix("__init__").rstrip("."), path


def imports(path: Path) -> Iterator[str]:
    """Every absolute name that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = dict(sources())


def room_of(module: str) -> str:
    """The longest row of the table that the module is, or is below."""
    rows = [row for row in ROOMS if module == row or module.startswith(row + ".")]
    assert rows, f"minserve.{module} has no place in the table of {__file__}"
    return max(rows, key=len)


def allowed(module: str, imported: str) -> bool:
    own = room_of(module)
    if imported == own or imported.startswith(own + "."):
        return True
    rooms = ROOMS[own].rooms
    if rooms is None:
        return ROOMS[room_of(imported)].layer <= ROOMS[own].layer
    return any(imported == row or imported.startswith(row + ".") for row in rooms)


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    packages = ROOMS[room_of(module)].packages
    for name in imports(MODULES[module]):
        top, _, rest = name.partition(".")
        if top == "minserve":
            if rest and rest in MODULES:
                assert allowed(module, rest), f"minserve.{module} may not import minserve.{rest}"
        else:
            assert top in sys.stdlib_module_names or top in packages, f"minserve.{module} may not import {top}"


def test_every_row_of_the_table_has_a_module() -> None:
    assert {row for row in ROOMS if row not in {room_of(module) for module in MODULES if module}} == set()


@pytest.mark.parametrize("package", sorted(ONE_MODULE))
def test_a_third_party_reader_is_known_to_one_module(package: str) -> None:
    users = {name for name, path in MODULES.items() if package in {name.partition(".")[0] for name in imports(path)}}
    assert users == {ONE_MODULE[package]}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("minserve", "numpy cupy numba aiohttp msgspec tokenizers huggingface_hub"),
        ("minserve.engine", "cupy numba aiohttp huggingface_hub click rich"),
        ("minserve.weights.hub", "cupy numba aiohttp huggingface_hub tokenizers"),
        ("tests.gpu.main", "msgspec pytest ml_dtypes numba cupy aiohttp"),  # runs on NumPy and CuPy alone
    ],
)
def test_importing_is_cheap(module: str, heavy: str) -> None:
    code = f"import sys, {module}; print(*(set({heavy.split()}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
