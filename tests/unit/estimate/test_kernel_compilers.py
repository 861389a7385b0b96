"""Requests of torch.compile's compilers under an estimate."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memopt._estimate.script_process import compiler_environment, prepare
from memopt._memory.recording.user_code import is_user_file


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "sim_cuda.so").write_text("the driver")
    return tmp_path


def test_the_driver_is_found_by_its_name_and_caches_are_apart(clean):
    for _ in range(2):
        found = compiler_environment(clean / "sim_cuda.so", clean)
    assert (Path(found["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1").read_text() == "the driver"
    assert found["TRITON_CACHE_DIR"] == str(clean / "cache/memopt/simulated/triton")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(clean / "cache/memopt/simulated/inductor")


def test_the_compiler_has_no_workers_when_torch_is_imported(monkeypatch):
    seen = []
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "TORCH_CPP_LOG_LEVEL", "MEMOPT_ESTIMATE"):
        monkeypatch.setenv(name, "8")  # and what is set in its place is taken off again
    monkeypatch.setattr(
        "memopt.sim._activation.load", lambda: seen.append(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
    )
    prepare()
    assert seen == ["1"]


def test_where_no_cache_can_be_the_run_has_its_own(clean, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(clean / "sim_cuda.so"))  # no folder
    found = compiler_environment(clean / "sim_cuda.so", clean)
    assert found["TRITON_CACHE_DIR"] == str(clean / "compiled/triton")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(clean / "compiled/inductor")


def test_what_a_compiler_wrote_is_not_the_users_code():
    name = "cuznpyvggexcpgfex73couzre3zc5ouzmbu4kjkb5rqquum3wyhs.py"
    assert not is_user_file(f"/tmp/torchinductor_me/uz/{name}")
    assert is_user_file("/home/me/char_rnn.py") and is_user_file(f"/home/me/x{name}")
