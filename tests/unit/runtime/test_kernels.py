"""The kernels as they are built: the source compiles for every architecture, the fatbin has code for each,
and the build obeys its environment variables. What they compute is tested on the simulated device
(sim/test_kernels.py)."""

from __future__ import annotations

import ctypes
import os
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvrtc_wheel import nvrtc

from memopt import _C
from memopt._runtime import kernels

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "kernels"))
import build_kernels  # noqa: E402

KERNELS = {"memopt_cross_entropy", "memopt_factored", "memopt_gradients", "memopt_update", "memopt_widen"}


# ---- NVRTC -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def compiler() -> ctypes.CDLL:
    return ctypes.CDLL(str(nvrtc()))


def architectures(compiler: ctypes.CDLL) -> list[int]:
    count = ctypes.c_int()
    assert compiler.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    found = (ctypes.c_int * count.value)()
    assert compiler.nvrtcGetSupportedArchs(found) == 0
    return list(found)


def compiled(compiler: ctypes.CDLL, target: str) -> tuple[bytes, str]:
    """The image that NVRTC makes of the embedded source, and all that it says."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = _C.kernel_source().encode()
    assert compiler.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={target}".encode(), b"-std=c++17")
    result = compiler.nvrtcCompileProgram(program, 2, options)
    assert compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert compiler.nvrtcGetProgramLog(program, log) == 0
    assert result == 0, log.value.decode()
    kind = "CUBIN" if target.startswith("sm_") else "PTX"
    assert getattr(compiler, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
    image = ctypes.create_string_buffer(size.value)
    assert getattr(compiler, f"nvrtcGet{kind}")(program, image) == 0
    assert compiler.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return image.raw, log.value.decode()


def functions(cubin: bytes) -> set[str]:
    """The names of an ELF image's sections .text.NAME, which is where a kernel's machine code is."""
    assert cubin[:4] == b"\x7fELF"
    sections, count, names = (
        struct.unpack_from("<Q", cubin, 40)[0],
        struct.unpack_from("<H", cubin, 60)[0],
        struct.unpack_from("<H", cubin, 62)[0],
    )
    strings = struct.unpack_from("<Q", cubin, sections + 64 * names + 24)[0]
    found = set()
    for i in range(count):
        at = strings + struct.unpack_from("<I", cubin, sections + 64 * i)[0]
        name = cubin[at : cubin.index(b"\0", at)].decode()
        if name.startswith(".text."):
            found.add(name.removeprefix(".text."))
    return found


@pytest.mark.sampled("kernels by NVIDIA's compilers")
def test_nvrtc_compiles_every_kernel_for_every_architecture_without_a_word(compiler: ctypes.CDLL) -> None:
    """For one that is drawn; in the long form for all."""
    known = sorted(architectures(compiler))
    assert known[0] <= 75 and known[-1] >= 120
    drawn = [random.Random(os.environ["MEMOPT_SEED"]).choice(known)]
    for architecture in known if os.environ.get("MEMOPT_SOAK") == "1" else drawn:
        began = time.perf_counter()
        image, log = compiled(compiler, f"sm_{architecture}")
        print(f"sm_{architecture}: {len(image)} bytes in {time.perf_counter() - began:.3f} s")
        assert functions(image) == KERNELS, architecture
        assert log == "", architecture


@pytest.mark.sampled("kernels by NVIDIA's compilers")
def test_ptx_has_every_kernel_and_moves_vectors_by_16_bytes_in_global_memory(compiler: ctypes.CDLL) -> None:
    text = compiled(compiler, "compute_80")[0].decode()
    assert set(re.findall(r"\.entry (\w+)", text)) == KERNELS
    for name in KERNELS:
        body = text.split(f".entry {name}")[1].split(".visible .entry")[0]
        assert re.search(r"ld\.global\.v2\.(u|b)64|ld\.global\.v4\.(u|b)32", body), name
        # The factored kernel stores only sums.
        assert name == "memopt_factored" or re.search(
            r"st\.global\.v2\.(u|b)64|st\.global\.v4\.(u|b)32", body
        ), name
        assert not re.search(r"\b(ld|st)\.(v[24]\.)?[ubf](16|32|64)", body), f"{name}: generic memory access"
        # Probabilities below 2^-126 may be 0; a gradient, a parameter or a logit may not.
        rest = re.sub(r"(ex2|rcp)\.approx\.ftz\.f32", "", body)
        assert ".ftz" not in rest and "local" not in body, name


# ---- the fatbin --------------------------------------------------------------------------------------------
def members(fatbin: bytes) -> list[tuple[str, int]]:
    """(kind, architecture) of each image in a fatbin, by NVIDIA's format as nvcc writes it: a header of 16
    bytes (magic, version, header size, size of the rest), then members, each with a header of its own
    size."""
    magic, _, header, size = struct.unpack_from("<IHHQ", fatbin)
    assert magic == 0xBA55ED50 and header == 16 and header + size == len(fatbin)
    found, at = [], header
    while at < len(fatbin):
        kind, _, header, size = struct.unpack_from("<HHIQ", fatbin, at)
        found.append(({1: "ptx", 2: "elf"}[kind], struct.unpack_from("<I", fatbin, at + 28)[0]))
        at += header + size
    assert at == len(fatbin)
    return found


@pytest.fixture(scope="module")
def nvcc() -> Path:
    found = build_kernels.find_nvcc()
    if found is None:
        pytest.skip("needs nvcc (CUDA_HOME, PATH or /usr/local/cuda)")
    return found


def test_the_fatbin_has_machine_code_for_every_architecture_of_nvcc_and_ptx_of_both_ends(
    nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the extension: where it is there, nothing is built."""
    for name in ("TORCH_CUDA_ARCH_LIST", "MEMOPT_CUDA"):
        monkeypatch.delenv(name, raising=False)
    began = time.perf_counter()
    fatbin = build_kernels.build(ROOT / "build" / "kernels")
    assert fatbin is not None
    found = members(fatbin.read_bytes())
    code = [architecture for kind, architecture in found if kind == "elf"]
    print(f"{fatbin.stat().st_size} bytes in {time.perf_counter() - began:.1f} s: {found}")
    known = [a for a in build_kernels.listed_architectures(nvcc) if a >= build_kernels.OLDEST]
    for architecture in known:
        assert any(c // 10 == architecture // 10 and c <= architecture for c in code), architecture
    assert sorted(a for kind, a in found if kind == "ptx") == [min(code), max(code)]
    # The update has a loop for each type and alignment, with states of 8 and of 4 bits too, Adam's with a branch for
    # factored second moments; cross entropy two for each type, with and without a cap.
    assert fatbin.stat().st_size < 950_000


@pytest.mark.sampled("kernels by NVIDIA's compilers")
@pytest.mark.parametrize(
    ("wanted", "expected"), [("8.0", [("elf", 80)]), ("7.5+PTX", [("elf", 75), ("ptx", 75)])]
)
def test_the_fatbin_has_what_torchs_list_asks_for(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, expected: list[tuple[str, int]]
) -> None:
    monkeypatch.delenv("MEMOPT_CUDA", raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    fatbin = build_kernels.build(tmp_path)
    assert fatbin is not None and sorted(members(fatbin.read_bytes())) == expected


# ---- the build, with a compiler that only writes its arguments down ----------------------------------------
@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--list-gpu-code) echo sm_52; echo sm_75; echo sm_80; echo sm_86; echo sm_90; echo sm_90a ;;\n"
        "--version) echo fake ;;\n"
        "--help) echo nothing ;;\n"
        '*) for a; do [ "$last" = -o ] && out=$a; last=$a; done; for a; do echo "$a"; done >"$out" ;;\n'
        "esac\n"
    )
    script.chmod(0o755)
    for name in ("TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "MEMOPT_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEMOPT_NVCC", str(script))
    return script


def arguments(fatbin: Path | None) -> list[str]:
    assert fatbin is not None
    return fatbin.read_text().splitlines()


def test_a_second_build_does_nothing_and_a_changed_environment_builds_anew(
    fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    fatbin = build_kernels.build(out)
    assert fatbin is not None and "arch=compute_80,code=[sm_80]" in arguments(fatbin)
    before = fatbin.stat().st_mtime_ns
    assert build_kernels.build(out) == fatbin and fatbin.stat().st_mtime_ns == before
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5+PTX")
    assert "arch=compute_75,code=[sm_75,compute_75]" in arguments(build_kernels.build(out))


def test_by_default_the_first_architecture_of_each_major_from_turing_on_is_built(
    fake_nvcc: Path, tmp_path: Path
) -> None:
    asked = [a for a in arguments(build_kernels.build(tmp_path / "out")) if a.startswith("arch=")]
    assert asked == [
        "arch=compute_75,code=[sm_75,compute_75]",
        "arch=compute_80,code=[sm_80]",
        "arch=compute_90,code=[sm_90,compute_90]",
    ]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("8.0;9.0+PTX", ["arch=compute_80,code=[sm_80]", "arch=compute_90,code=[sm_90,compute_90]"]),
        ("7.5 9.0a", ["arch=compute_75,code=[sm_75]", "arch=compute_90a,code=[sm_90a]"]),
        ("Ampere", ["arch=compute_80,code=[sm_80]", "arch=compute_86,code=[sm_86]"]),
        ("Turing+PTX", ["arch=compute_75,code=[sm_75,compute_75]"]),
    ],
)
def test_torchs_list_of_architectures_is_obeyed(
    fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, expected: list[str]
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    assert [a for a in arguments(build_kernels.build(tmp_path / "out")) if a.startswith("arch=")] == expected


@pytest.mark.parametrize(("wanted", "named"), [("8.0;fast", "'fast'"), ("3.5", "3.5"), ("8", "'8'")])
def test_a_wrong_list_of_architectures_is_an_error_that_names_it(
    fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, named: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    with pytest.raises(build_kernels.KernelBuildError, match=f"TORCH_CUDA_ARCH_LIST.*{re.escape(named)}"):
        build_kernels.build(tmp_path / "out")


def test_max_jobs_is_obeyed(fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    asked = arguments(build_kernels.build(tmp_path / "out"))
    assert asked[asked.index("--threads") + 1] == "3"
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(build_kernels.KernelBuildError, match="MAX_JOBS=many"):
        build_kernels.build(tmp_path / "out")


def test_without_nvcc_there_is_one_line_and_no_fatbin(
    fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert build_kernels.build(out)
    monkeypatch.setattr(build_kernels, "find_nvcc", lambda: None)
    assert build_kernels.build(out) is None
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in out.iterdir()) == ["kernels.cu"]  # the old fatbin is gone
    assert [name for name, _ in build_kernels.define_macros(out)] == ["MEMOPT_KERNEL_SOURCE_PATH"]
    monkeypatch.setenv("MEMOPT_CUDA", "1")
    with pytest.raises(build_kernels.KernelBuildError, match="MEMOPT_CUDA=1, but there is no nvcc"):
        build_kernels.build(out)


def test_memopt_cuda_0_does_not_look_for_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMOPT_CUDA", "0")
    monkeypatch.setenv("MEMOPT_NVCC", "/nowhere/nvcc")
    assert build_kernels.build(tmp_path) is None
    monkeypatch.setenv("MEMOPT_CUDA", "yes")
    with pytest.raises(build_kernels.KernelBuildError, match="MEMOPT_CUDA=yes"):
        build_kernels.build(tmp_path)


def test_a_compiler_that_is_named_and_missing_or_that_fails_is_an_error(
    fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_NVCC", "/nowhere/nvcc")
    with pytest.raises(build_kernels.KernelBuildError, match="MEMOPT_NVCC=/nowhere/nvcc"):
        build_kernels.build(tmp_path / "out")
    fake_nvcc.write_text(fake_nvcc.read_text().replace("*) for", "*) echo made-up >&2; exit 3; for", 1))
    monkeypatch.setenv("MEMOPT_NVCC", str(fake_nvcc))
    with pytest.raises(build_kernels.KernelBuildError, match="made-up"):
        build_kernels.build(tmp_path / "out")
    assert not (tmp_path / "out" / "kernels.fatbin").exists()


def test_the_flattened_source_has_each_file_once_and_no_include_of_ours() -> None:
    text = build_kernels.flatten()
    for path in (ROOT / "kernels").glob("*.cu*"):
        assert text.count(f'#line 1 "{path.name}"\n') == 1
    assert '#include "' not in text
    assert text == _C.kernel_source(), "the extension carries older kernels: run `make`"


def test_the_script_prints_the_macros_of_the_c_build(fake_nvcc: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "kernels" / "build_kernels.py"), "--macros", str(tmp_path / "out")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
    assert printed.count("-DMEMOPT_KERNEL_SOURCE_PATH=") == 1 and printed.count("-DMEMOPT_FATBIN_PATH=") == 1


# ---- where things are looked for ---------------------------------------------------------------------------
def test_the_cache_is_where_the_xdg_specification_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/somebody")
    assert kernels.cache_directory() == "/var/cache/somebody/memopt/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert kernels.cache_directory() == "/home/somebody/.cache/memopt/kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kernels.cache_directory() == "/home/somebody/.cache/memopt/kernels"


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    assert kernels.cache_directory() is None
    assert "None" not in kernels.finding().text


def test_nvrtc_is_looked_for_in_nvidias_wheels_and_memopt_nvrtc_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"):
        (tmp_path / part).parent.mkdir(parents=True)
        (tmp_path / part).touch()
    monkeypatch.delenv("MEMOPT_NVRTC", raising=False)
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\nfrom memopt._runtime import kernels\n"
    script += "print(*kernels.nvrtc_candidates())"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert [path.removeprefix(str(tmp_path)) for path in found if path.startswith(str(tmp_path))] == [
        "/nvidia/cu13/lib/libnvrtc.so.13",
        "/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    ]
    assert found[-2:] == ["libnvrtc.so.13", "libnvrtc.so.12"]
    monkeypatch.setenv("MEMOPT_NVRTC", "/somewhere/libnvrtc.so")
    assert kernels.nvrtc_candidates() == ("/somewhere/libnvrtc.so",)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 8"):
        _C.kernels_configure(("a",) * 9, None)
    with pytest.raises(TypeError):
        _C.kernels_configure(["a"], None)
