"""Our declarations of the CUDA types and functions are NVIDIA's.

The project declares what it uses of CUDA itself (csrc/driver/cuda_types.h, csrc/simcuda/cudart_types.h), so that it
builds without NVIDIA's headers. Here those headers are fetched, 3 MB, from the runtime wheels of both CUDA majors, and:

* every source that implements a CUDA function compiles against NVIDIA's prototypes;
* one program, written from our own declarations, prints every constant, size and offset: the same compiled with ours
  and with NVIDIA's."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / "build" / "nvidia-headers"
# The headers that torch 2.10's CUDA and torch 2.13's were built with or newer: constants are added within a major,
# none changes. The crt headers (compiler attributes) are split off into a wheel of their own since CUDA 13.
CRT = "nvidia-cuda-crt==13.0.88"
HEADERS = {
    "12.9": (12, ["nvidia-cuda-runtime-cu12==12.9.79", CRT]),
    "13.0": (13, ["nvidia-cuda-runtime==13.0.96", CRT]),
    "13.5": (13, ["nvidia-cuda-runtime==13.5.37", CRT]),
}
SOURCES = sorted(
    path
    for pattern in ("driver_*.c", "runtime_*.c", "device_*.c", "nvml.c")
    for path in (ROOT / "csrc" / "simcuda").glob(pattern)
)
COMMON = ["gcc", "-std=c11", "-D_GNU_SOURCE", f"-I{ROOT}", f"-I{ROOT / 'csrc'}"]


def fetched(package: str) -> Path:
    """The folder that has the package's headers, fetched once. A failure is an error: this test is never skipped."""
    folder = CACHE / package
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        command += ["--platform", "manylinux2014_x86_64", "--dest", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.fail(f"NVIDIA's headers cannot be fetched: pip download {package}:\n{done.stderr}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if "/include/" in name and name.endswith((".h", ".hpp")):
                    target = folder / name.partition("/include/")[2]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
        wheel.unlink()
        (folder / "complete").touch()
    return folder


@pytest.fixture(params=HEADERS)
def nvidia(request) -> tuple[int, list[str]]:
    """The CUDA major, and the compiler flags that find its headers."""
    major, packages = HEADERS[request.param]
    flags = [f"-DSIM_CUDA_MAJOR={major}", "-DSIM_NVIDIA_HEADERS"]
    return major, flags + [flag for package in packages for flag in ("-isystem", str(fetched(package)))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_a_source_compiles_against_nvidias_prototypes(nvidia, source):
    _, flags = nvidia
    command = [*COMMON, *flags, "-DSIM_NOT_SUPPORTED=801", "-fsyntax-only", "-w", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_constant_size_and_offset_is_nvidias(nvidia, tmp_path):
    major, flags = nvidia
    declarations = parse(own_declarations(major))
    assert len(declarations.constants) > 200 and len(declarations.structs) > 10, "the reader found too little"
    program = tmp_path / "table.c"
    program.write_text(table_program(declarations))
    ours = table(program, tmp_path / "ours", [f"-DSIM_CUDA_MAJOR={major}"])
    theirs = table(program, tmp_path / "theirs", flags)
    different = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs.get(name)}
    assert different == {}
    assert len(ours) > 400


def test_a_wrong_declaration_would_be_seen(tmp_path):
    """The reader and the table find a constant, a field and a size that differ."""
    mine = "typedef struct pair { int first; char second[4]; } pair; enum kind { KIND_A = 1, KIND_B };"
    other = "typedef struct pair { long first; char second[4]; } pair; enum kind { KIND_A = 1, KIND_B = 3 };"
    program = table_program(parse(mine)).replace('#include "simcuda/cudart_types.h"', '#include "declared.h"')
    tables = []
    for name, text in (("mine", mine), ("other", other)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "declared.h").write_text(text)
        (folder / "table.c").write_text(program)
        tables.append(table(folder / "table.c", folder / "table", [f"-I{folder}"]))
    assert {name for name in tables[0] if tables[0][name] != tables[1][name]} == {
        "sizeof pair",
        "pair.second at",
        "pair.first size",
        "KIND_B",
    }


class Declarations:
    """The printable parts: enumerators, and fields by the C name of their type."""

    def __init__(self) -> None:
        self.constants: list[str] = []
        self.structs: dict[str, list[str]] = {}


def own_declarations(major: int) -> str:
    """Our headers, preprocessed, without what they include of the C library."""
    command = [*COMMON, f"-DSIM_CUDA_MAJOR={major}", "-E", "-x", "c", "-"]
    source = '#include "simcuda/cudart_types.h"\n'
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    kept, ours = [], False
    for line in text.splitlines():
        if marker := re.match(r'# \d+ "([^"]*)"', line):
            ours = marker[1].startswith(str(ROOT))
        elif ours:
            kept.append(line)
    return "\n".join(kept)


TOKEN = re.compile(r"[A-Za-z_]\w*|\d\w*|\.\.\.|<<|>>|\S")


def parse(text: str) -> Declarations:
    """A reader of exactly what our headers hold: structs, unions and enums, typedefs of them, functions passed over."""
    found = Declarations()
    tokens = TOKEN.findall(text)
    at = 0
    while at < len(tokens):
        typedef = tokens[at] == "typedef"
        at += typedef
        if tokens[at] in ("struct", "union", "enum"):
            kind, at = tokens[at], at + 1
            tag = ""
            if tokens[at] not in "{;":
                tag, at = tokens[at], at + 1
            if tokens[at] == "{":
                end = closing(tokens, at)
                body = tokens[at + 1 : end]
                at = end + 1
                name = tokens[at] if typedef and tokens[at] != "*" else f"{kind} {tag}"
                if kind == "enum":
                    found.constants += enumerators(body)
                elif name.strip() != kind:
                    found.structs[name] = fields(body)
        while tokens[at] != ";":
            at = closing(tokens, at) if tokens[at] == "{" else at
            at += 1
        at += 1
    return found


def closing(tokens: list[str], at: int) -> int:
    depth = 0
    while True:
        depth += (tokens[at] == "{") - (tokens[at] == "}")
        if depth == 0:
            return at
        at += 1


def enumerators(body: list[str]) -> list[str]:
    names, fresh = [], True
    for token in body:
        if fresh and re.match(r"[A-Za-z_]", token):
            names.append(token)
        fresh = token == ","
    return names


def fields(body: list[str], prefix: str = "") -> list[str]:
    """Names of the members, those of structs and unions written in place by their path."""
    names: list[str] = []
    statement: list[str] = []
    at = 0
    while at < len(body):
        if body[at] == "{":
            end = closing(body, at)
            inner, at = body[at + 1 : end], end + 1
            member = ""
            if body[at] != ";":
                member, at = body[at], at + 1
                names.append(prefix + member)
            while body[at] != ";":
                at += 1
            names += fields(inner, prefix + (f"{member}." if member else ""))
            statement = []
        elif body[at] == ";":
            names += [prefix + name for name in declarators(statement)]
            statement = []
        else:
            statement.append(body[at])
        at += 1
    return names


def declarators(statement: list[str]) -> list[str]:
    """The names a member declaration declares: the last identifier before each comma or array bound."""
    text = " ".join(statement)
    if pointer := re.search(r"\(\s*\*\s*(\w+)\s*\)", text):
        return [pointer[1]]
    if ":" in statement:
        return []  # a bit field has no offset
    parts = re.sub(r"\[[^\]]*\]", "", text).split(",")
    return [part.split()[-1].lstrip("*") for part in parts if part.split()]


def table_program(declarations: Declarations) -> str:
    lines = [
        '#include "simcuda/cudart_types.h"',
        "#include <stddef.h>",
        "#include <stdio.h>",
        "int main(void) {",
    ]
    for name in declarations.constants:
        lines.append(f'printf("{name}\\t%lld\\n", (long long){name});')
    for name, members in declarations.structs.items():
        lines.append(f'printf("sizeof {name}\\t%zu\\n", sizeof({name}));')
        for member in members:
            # Fillers, ours and NVIDIA's (which new members are cut from): sizeof says whether they fill right.
            if member.endswith("_as_nvidia") or member.startswith("reserved"):
                continue
            lines.append(f'printf("{name}.{member} at\\t%zu\\n", offsetof({name}, {member}));')
            lines.append(f'printf("{name}.{member} size\\t%zu\\n", sizeof((({name} *)0)->{member}));')
    return "\n".join([*lines, "return 0;", "}"]) + "\n"


def table(program: Path, binary: Path, flags: list[str]) -> dict[str, str]:
    done = subprocess.run([*COMMON, *flags, "-w", "-o", binary, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([binary], capture_output=True, text=True, check=True).stdout
    return dict(line.split("\t") for line in printed.splitlines())
