"""Builds memopt: one C extension for every Python >= 3.11 and every torch >= 2.10, the kernels it carries, and the
libraries of the simulated CUDA device. Needs a C compiler and Python.h; neither torch nor CUDA. Where nvcc is found the
kernels are compiled now, else on the user's machine at first use.

Environment: CC; MEMOPT_CUDA=0|1|auto (without nvcc: never look, fail, go on); MEMOPT_LEVEL=0..3 (assertions: none,
O(1), one structure, whole heap); MEMOPT_WERROR=1 (warnings are errors)."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "csrc" / "simcuda")]
import build_kernels  # noqa: E402
import build_libraries  # noqa: E402

LAYERS = (
    "base",
    "driver",
    "alloc",
    "scaler",
    "optim",
    "loss",
    "checkpoint",
    "transfer",
    "data",
    "confine",
    "python",
)
SOURCES = sorted(
    str(path.relative_to(ROOT)) for layer in LAYERS for path in (ROOT / "csrc" / layer).glob("*.c")
)

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        f"memopt: {sys.executable} is a free-threaded Python, which has no limited API: use one with the GIL"
    )

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

# The same tree gives the same bytes, whichever folder it is in and wherever Python is.
PATHS = [f"-ffile-prefix-map={folder}={name}" for folder, name in
         ((ROOT, "."), (sysconfig.get_path("include"), "python"))]  # fmt: skip

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes"]
FLAGS = [
    "-std=c11",
    "-O2",
    "-g1",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    *PATHS,
    *WARNINGS,
]

# Only these files are left by a C++ exception (torch.OutOfMemoryError, a copy of a std::function, torch's allocator).
FLAGS_OF = {
    "torch_hooks.c": ["-fexceptions"],
    "torch_throw.c": ["-fexceptions"],
    "stream_filter.c": ["-fexceptions"],
    "torch_cpu.c": ["-fexceptions"],
}

# Small functions that call each other on the way of every request: linked as one they take a sixth less time.
HOT_LAYERS = ("base", "alloc")
LINKED_AS_ONE = ("-flto=auto", "-flto")  # gcc's, on all cores; clang's

# Loops over elements, a file an instruction set.
ARITHMETIC = ("_generic", "_avx2", "_avx512")


def noted(command: list[str]) -> str:
    """The same in every copy of the tree, with the limited API of whichever Python."""
    kept = (argument for argument in command if not argument.startswith(("-I/", PATHS[1])))
    return " ".join(kept).replace(str(ROOT), ".")


def is_current(obj: str, command: list[str], embedded: list[str]) -> bool:
    """Return whether it was compiled in the same way from the same files: those that the compiler listed beside it, and
    those that the assembler put in, which it does not list."""
    path = Path(obj)
    listed, said = path.with_suffix(".d"), path.with_suffix(".command")
    if not (path.exists() and listed.exists() and said.exists()) or said.read_text() != noted(command):
        return False
    files = listed.read_text().partition(":")[2].replace("\\\n", " ").split()
    built = path.stat().st_mtime
    return all(os.path.exists(file) and os.path.getmtime(file) <= built for file in [*files, *embedded])


def compilers() -> list[str]:
    """The commands that will be asked for: setuptools takes the one that built Python, the simulated device gcc."""
    named = os.environ.get("CC")
    return [named] if named else [sysconfig.get_config_var("CC") or "gcc", "gcc"]


def preprocesses(compiler: str, header: str) -> bool:
    folders = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    command = [*shlex.split(compiler), *(f"-I{folder}" for folder in folders), "-E", "-x", "c", "-"]
    try:
        return not subprocess.run(
            command, input=f"#include <{header}>\n".encode(), capture_output=True
        ).returncode
    except OSError:
        return False


def lacking() -> list[str]:
    """A line for each thing that the build needs and this machine lacks."""
    lines = []
    missing = [compiler for compiler in compilers() if not preprocesses(compiler, "stdio.h")]
    if missing:
        lines.append(
            f"memopt: there is no C compiler that works by the name of {missing[0]!r}: install it (Debian, Ubuntu: "
            "apt install gcc libc6-dev; Fedora: dnf install gcc), or name another by the environment variable CC"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists() if missing else not preprocesses(compilers()[0], "Python.h"):
        lines.append(
            f"memopt: there is no Python.h for {sys.executable} in {header.parent}: install it "
            "(Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
        )
    return lines


class BuildExtension(build_ext):
    """build_ext with flags by file, the kernels, and the simulated device's libraries."""

    def links_as_one(self, option: str) -> bool:
        """Return whether this compiler and its linker do: clang does with some linkers only."""
        folder = Path(self.build_temp).resolve() / "links_as_one"
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "probe.c"
        source.write_text("int probe(void);\nint probe(void)\n{\n    return 0;\n}\n")
        done = subprocess.run(
            [
                *self.compiler.linker_so,
                "-O2",
                "-fPIC",
                option,
                str(source),
                "-o",
                str(folder / "probe.so"),
            ],
            capture_output=True,
        )
        return done.returncode == 0

    def build_extensions(self) -> None:
        if "-Werror" not in FLAGS and os.environ.get("MEMOPT_WERROR") == "1":
            FLAGS.append("-Werror")
        extension = self.extensions[0]
        extension.extra_compile_args = FLAGS
        kernel_macros = build_kernels.define_macros(Path(self.build_temp).resolve().parent / "kernels")
        kernel_files = [value.strip('"') for name, value in kernel_macros if name.endswith("_PATH")]
        extension.define_macros += kernel_macros
        # Nothing of Python's is linked, so the folder of its libraries, which distributors note, has no use here.
        linker = [
            word for word in self.compiler.linker_so if not word.startswith(("-Wl,-rpath", "-Wl,-R", "-L"))
        ]
        self.compiler.set_executable("linker_so", linker)
        compile_one = self.compiler._compile
        link = self.compiler.link_shared_object
        as_one = next(([option] for option in LINKED_AS_ONE if self.links_as_one(option)), [])
        extension.extra_link_args += ["-O2", *as_one, *PATHS]

        def with_own_flags(obj, src, ext, cc_args, extra, pp_opts):
            own = FLAGS_OF.get(Path(src).name, [])
            if Path(src).stem.endswith(ARITHMETIC):
                own = [*own, "-O3"]
            if Path(src).parent.name in HOT_LAYERS:
                own = [*own, *as_one]
            embedded = kernel_files if Path(src).name == "kernel_image.c" else []
            if not is_current(obj, command := [*cc_args, *extra, *own, *pp_opts], embedded):
                compiled.append(
                    pool.submit(compile_and_note, obj, src, ext, cc_args, [*extra, *own], pp_opts, command)
                )

        def compile_and_note(obj, src, ext, cc_args, extra, pp_opts, command):
            compile_one(obj, src, ext, cc_args, [*extra, "-MMD"], pp_opts)
            Path(obj).with_suffix(".command").write_text(noted(command))

        def link_when_compiled(*arguments, **named):
            for one in compiled:
                one.result()
            link(*arguments, **named)

        compiled: list[Future[None]] = []
        self.compiler._compile = with_own_flags
        self.compiler.link_shared_object = link_when_compiled
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            super().build_extensions()

    def run(self) -> None:
        if lines := lacking():
            raise SystemExit("\n".join(lines))
        try:
            super().run()
            self.build_simulated_device(ROOT / "memopt" if self.inplace else Path(self.build_lib) / "memopt")
        except (build_kernels.KernelBuildError, build_libraries.BuildError) as error:
            raise SystemExit(f"memopt: {error}") from None

    def build_simulated_device(self, package: Path) -> None:
        """A wheel without these libraries is an error, so whatever fails here fails the build."""
        built = build_libraries.build(ROOT / "build" / "simcuda", shlex.split(os.environ.get("CC", "gcc")))
        for library in built:
            target = package / "sim" / library.parent.name / library.name
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new file under the old name: a process that has the old one mapped keeps it.
            fresh = target.with_suffix(".new")
            shutil.copy2(library, fresh)
            fresh.replace(target)


setup(
    ext_modules=[
        Extension(
            "memopt._C",
            sources=SOURCES,
            include_dirs=["csrc"],
            define_macros=[
                ("_GNU_SOURCE", None),
                ("Py_LIMITED_API", "0x030B0000"),
                ("MEMOPT_VERSION", f'"{VERSION}"'),
                ("MO_LEVEL", os.environ.get("MEMOPT_LEVEL", "0")),
            ],
            depends=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*/*.h"))
            + sorted(str(p.relative_to(ROOT)) for p in (ROOT / "kernels").glob("*.cu*"))
            + ["setup.py"],
            extra_link_args=["-pthread"],
            libraries=["dl"],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
