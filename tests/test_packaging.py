"""The wheel holds every file of the tree that a program needs, and the changelog knows its version."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import minserve
from minserve.cli import main

ROOT = Path(__file__).parent.parent
SHIPPED = {".py", ".cu", ".cuh", ".html", ".css", ".js", ".svg", ".md", ".typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing of an earlier build in the tree gets into it. Needs no network."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("minserve", "models", "kernels_cuda"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    [path] = out.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_tree(wheel: Path) -> None:
    expected = set()
    for folder, name in (
        ("minserve", "minserve"),
        ("models", "minserve/models"),
        ("kernels_cuda", "minserve/kernels_cuda"),
    ):
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            linked = folder == "minserve" and inside.parts[0] in ("models", "kernels_cuda")
            if path.is_file() and path.suffix in SHIPPED and not linked:
                expected.add(f"{name}/{inside.as_posix()}")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.startswith("minserve-")}
    assert found == expected


@pytest.mark.slow
def test_the_wheel_works_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.resources as r, minserve.models, minserve.weights.checkpoint as c, pathlib; "
        "print(minserve.models.__file__, c.load_checkpoint(pathlib.Path('dummy')).file_format, "
        "any(f.name.endswith('.md') for f in r.files('minserve.models').iterdir()))"
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    where, kind, readme = result.stdout.split()
    assert Path(where).is_relative_to(tmp_path / "site")
    assert (kind, readme) == ("dummy", "True")


def test_changelog_and_package_agree_on_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "(.+)"$', pyproject, re.MULTILINE)
    assert declared is not None
    assert versions[0] == minserve.__version__ == declared[1]
    assert versions == sorted(versions, key=lambda v: [int(part) for part in v.split(".")], reverse=True)


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(main.commands) if f"minserve {name}" not in readme] == []
    assert "scripts/serve" in readme
