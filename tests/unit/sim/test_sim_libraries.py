"""The simulated CUDA libraries as files: names, exports, needs and size; and that unactivated they are no device."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from memopt.sim import _elf, coverage

ROOT = Path(__file__).resolve().parents[3]
SIM = ROOT / "memopt" / "sim"
SETS = ["cu12", "cu13"]
LIMIT = 1_000_000

_spec = importlib.util.spec_from_file_location(
    "build_libraries", ROOT / "csrc" / "simcuda" / "build_libraries.py"
)
assert _spec and _spec.loader
build_libraries = sys.modules["build_libraries"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_libraries)
symbols = build_libraries.symbols

LIBRARIES = [(name, library.file) for name in SETS for library in build_libraries.LIBRARIES]


def listed(set_name: str, soname: str) -> dict[str, str]:
    """name -> version node, from the symbol list."""
    exports = symbols.named(soname).of[build_libraries.SETS[set_name]]
    return dict.fromkeys(exports.names, exports.node)


@pytest.mark.parametrize("set_name", SETS)
def test_a_set_is_smaller_than_a_megabyte(set_name):
    files = list((SIM / set_name).glob("*.so"))
    assert len(files) == len(build_libraries.LIBRARIES)
    assert sum(file.stat().st_size for file in files) < LIMIT


@pytest.mark.parametrize("set_name", SETS)
def test_every_list_has_its_library_and_the_other_way_round(set_name):
    sonames = {_elf.read(path).soname for path in (SIM / set_name).glob("*.so")}
    major = build_libraries.SETS[set_name]
    lists = {symbols.load(path.stem).of[major].soname for path in symbols.FOLDER.glob("*.txt")}
    assert sonames == lists


@pytest.mark.parametrize(("set_name", "file"), LIBRARIES)
def test_a_library_has_nvidias_soname_and_a_file_name_of_our_own(set_name, file):
    library = _elf.read(SIM / set_name / file)
    assert library.soname.startswith("lib" + file.removeprefix("sim_").removesuffix(".so") + ".so.")


@pytest.mark.parametrize(("set_name", "file"), LIBRARIES)
def test_every_listed_function_is_exported_with_its_version(set_name, file):
    library = _elf.read(SIM / set_name / file)
    exported = {symbol.name: symbol.version for symbol in library.exports if symbol.is_function}
    wanted = listed(set_name, library.soname)
    missing = {name: node for name, node in wanted.items() if exported.get(name) != node}
    assert missing == {}
    others = [name for name in exported if name not in wanted and not name.startswith(("simcuda_", "sim_"))]
    assert others == []


@pytest.mark.parametrize(("set_name", "file"), LIBRARIES)
def test_a_library_needs_libc_and_the_simulated_device_alone(set_name, file):
    system = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
    assert set(_elf.read(SIM / set_name / file).needed) <= system | {"libcuda.so.1"}


UNACTIVATED = """
import ctypes, pathlib, sys
folder = pathlib.Path(sys.argv[1])
device = ctypes.CDLL(str(folder / "sim_cuda.so"), ctypes.RTLD_GLOBAL)
runtime = ctypes.CDLL(str(folder / "sim_cudart.so"))
count = ctypes.c_int(-1)
handle = ctypes.c_void_p()
print(device.cuInit(0), runtime.cudaGetDeviceCount(ctypes.byref(count)))
assert count.value == 0
print(runtime.cudaMalloc(ctypes.byref(handle), ctypes.c_size_t(1024)))
print(ctypes.CDLL(str(folder / "sim_cublas.so")).cublasCreate_v2(ctypes.byref(handle)))
print(ctypes.CDLL(str(folder / "sim_cudnn.so")).cudnnCreate(ctypes.byref(handle)))
print(ctypes.CDLL(str(folder / "sim_cusolver.so")).cusolverDnCreate(ctypes.byref(handle)))
"""


@pytest.mark.parametrize("set_name", SETS)
def test_unactivated_libraries_are_a_machine_without_a_gpu(set_name):
    done = subprocess.run(
        [sys.executable, "-c", UNACTIVATED, str(SIM / set_name)], capture_output=True, text=True, timeout=600
    )
    # CUDA_ERROR_NO_DEVICE, cudaErrorNoDevice twice, then each library's NOT_INITIALIZED.
    assert done.stdout.split() == ["100", "100", "100", "1", "1001", "1"], done.stderr


def test_a_stub_answers_its_librarys_status_and_is_remembered_by_name():
    code = (
        "import ctypes, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "device = ctypes.CDLL(str(folder / 'sim_cuda.so'), ctypes.RTLD_GLOBAL)\n"
        "sparse = ctypes.CDLL(str(folder / 'sim_cusparse.so'))\n"
        "blas = ctypes.CDLL(str(folder / 'sim_cublas.so'))\n"
        "print(sparse.cusparseCreateCsc(), sparse.cusparseCreateCsc(), blas.cublasGetBackdoor())\n"
        "text = ctypes.create_string_buffer(1000)\n"
        "print(device.simcuda_missing(text, 1000) == len(text.value) + 1)\n"
        "print(text.value.decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(SIM / "cu13")], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == [
        "10",
        "10",
        "15",
        "True",
        "cusparseCreateCsc",
        "2",
        "cublasGetBackdoor",
        "1",
    ], done.stderr


def test_an_unchanged_tree_is_not_built_again(tmp_path):
    if not (SIM / "cu13" / "sim_cuda.so").exists():
        raise AssertionError("memopt/sim holds no libraries: run make")
    before = {path: path.stat().st_mtime_ns for path in SIM.glob("cu*/*.so")}
    build_libraries.build(SIM, ["/nonexistent/compiler"])
    assert before == {path: path.stat().st_mtime_ns for path in SIM.glob("cu*/*.so")}


def test_a_missing_compiler_is_named(tmp_path):
    with pytest.raises(build_libraries.BuildError, match=r"/nonexistent/compiler.*install gcc"):
        build_libraries.build(tmp_path, ["/nonexistent/compiler"])


def test_a_compiler_that_fails_is_quoted(tmp_path):
    with pytest.raises(build_libraries.BuildError, match=r"sim_cuda\.so"):
        build_libraries.build(tmp_path, ["false"])


def test_the_reader_agrees_with_the_linker_on_a_real_library():
    """Python's own executable or library: what it exports can be looked up by name, what it does not cannot."""
    library = next(SIM.glob("cu13/sim_nccl.so"))
    ctypes.CDLL(str(SIM / "cu13" / "sim_cuda.so"), ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library))
    exported = [symbol.name for symbol in _elf.read(library).exports]
    assert len(exported) > 150
    assert all(hasattr(loaded, name) for name in exported)


@pytest.mark.parametrize("content", [b"", b"not an ELF file at all", b"\x7fELF\x01\x01\x01" + bytes(100)])
def test_a_file_that_is_no_elf_library_is_refused_by_name(tmp_path, content):
    file = tmp_path / "odd.so"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"odd\.so"):
        _elf.read(file)


@pytest.mark.parametrize("length", [64, 500, 4000])
def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path, length):
    file = tmp_path / "cut.so"
    file.write_bytes((SIM / "cu13" / "sim_nccl.so").read_bytes()[:length])
    with pytest.raises(ValueError, match=r"cut\.so"):
        _elf.read(file)


@pytest.mark.parametrize("length", [0, 64, 500, 4000])
def test_coverage_names_the_library_of_torchs_that_is_cut_short_and_the_mend(tmp_path, length):
    whole = (SIM / "cu13" / "sim_nccl.so").read_bytes()
    (tmp_path / "libc10_cuda.so").write_bytes(whole[:length])
    with pytest.raises(RuntimeError, match=r"libc10_cuda\.so.*reinstall torch: pip install"):
        coverage(tmp_path)
