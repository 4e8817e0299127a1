"""How kernels become shared libraries: what is rewritten, what is refused, and the cache."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.simt import build
from tests.simt.build import plain_kernels, rewrite_shared

pytestmark = pytest.mark.simt


class TestSources:
    def test_shared_declarations_become_macros(self) -> None:
        assert rewrite_shared("__shared__ float x[4][kN];") == "SIMT_SHARED(SIMT_TYPE(float [4][kN]), x);"
        dynamic = "extern __shared__ __align__(16) unsigned char x[];"
        assert rewrite_shared(dynamic) == "SIMT_DYNAMIC_SHARED(unsigned char, x);"
        with pytest.raises(ValueError, match="one __shared__ variable per statement"):
            rewrite_shared("__shared__ float x[4], y[4];")

    def test_kernels_that_are_no_templates_need_no_name_expression(self) -> None:
        source = "template <int N> __global__ void a() {} // __global__ void b()\n"
        source += "__global__ void __launch_bounds__(8) c() {}"
        assert plain_kernels(source) == ["c"]


class TestCache:
    def test_a_library_is_compiled_once_and_pruned_when_unused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MINSERVE_SIMT_CACHE", str(tmp_path))
        code = "__global__ void f() {}"
        first = build.compile_library(code, (), ["f"])
        made = first.stat().st_ino
        assert build.compile_library(code, (), ["f"]).stat().st_ino == made
        long_ago = time.time() - (build.UNUSED_DAYS + 1) * 86400
        os.utime(first, (long_ago, long_ago))
        second = build.compile_library(code + "\n", (), ["f"])
        assert second.exists()
        assert not first.exists()
        assert {path.suffix for path in tmp_path.iterdir()} == {".so", ".lock"}

    def test_it_lies_outside_the_tree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MINSERVE_SIMT_CACHE", raising=False)
        monkeypatch.delenv("MINSERVE_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert build.cache_folder() == Path("/somewhere/minserve/simt")
        monkeypatch.setenv("MINSERVE_CACHE", "/elsewhere")
        assert build.cache_folder() == Path("/elsewhere/simt")


class TestWhereItCannotRun:
    def test_a_missing_compiler_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "CXX", "no-such-g++")
        assert "no-such-g++, which is not installed" in (build.missing() or "")

    def test_so_is_a_system_it_does_not_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        assert "darwin" in (build.missing() or "")
