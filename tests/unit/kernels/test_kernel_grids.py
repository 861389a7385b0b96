"""memopt's kernels, whole, on random grids, against NumPy's double: the text of the .cu files as gcc reads it,
and nvcc's own PTX, both with every access watched for races, bounds and alignment; and that each fault of a line is
found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

np = pytest.importorskip("numpy")

from kernel_cases import CASES, faults_of  # noqa: E402
from kernel_library import KernelLibrary, build_kernels, kernel_text  # noqa: E402

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
needs_nvcc = pytest.mark.skipif(build_kernels.find_nvcc() is None, reason="there is no nvcc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def architectures() -> list[str]:
    """Those whose PTX is built, the oldest first."""
    return [a for a, _, ptx in build_kernels.targets(build_kernels.find_nvcc(), None) if ptx]


@pytest.fixture(scope="module", params=["plain", "watched"])
def of_text(request: pytest.FixtureRequest, folder: Path) -> KernelLibrary:
    return KernelLibrary.of_text(folder, request.param)


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_right_in_any_order_of_blocks_and_threads(of_text: KernelLibrary, name: str) -> None:
    assert faults_of(of_text, name, 2000 if SOAK else 60, SEED) == []


@needs_nvcc
@pytest.mark.sampled("kernels by NVIDIA's compilers")
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_nvccs_instructions_are_right_in_any_order_of_blocks_and_threads(folder: Path, which: str) -> None:
    library = KernelLibrary.of_ptx(folder, architectures()[0 if which == "oldest" else -1])
    for name in CASES:
        assert faults_of(library, name, 1000 if SOAK else 30, SEED) == []


# ---- mutants --------------------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """A fault of one line: what is there, what the fault has instead, and after which line it is looked for."""

    kernel: str
    fault: str
    old: str
    new: str
    after: str = ""


BARRIER = "    __syncthreads();\n"
MUTANTS = [
    Mutant(
        "cross_entropy",
        "no barrier after warps[] is written",
        BARRIER,
        "",
        after="warps[2][warp] = seen.values;\n    }\n",
    ),
    Mutant(
        "cross_entropy",
        "no barrier before lse is read",
        "        __syncthreads();\n",
        "",
        after="seen, target);\n",
    ),
    Mutant(
        "cross_entropy",
        "the target's logit after it is overwritten",
        "if (threadIdx.x == 0 && row.column < launch.columns)",
        "mo_cross_entropy_subtract(&launch, &row, threadIdx.x, blockDim.x);\nif (threadIdx.x == 0)",
    ),
    Mutant(
        "cross_entropy",
        "sums of sixteen warps whatever the block",
        "i < blockDim.x / 32;",
        "i < 16;",
        after="warps[2][warp]",
    ),
    Mutant(
        "cross_entropy",
        "a sum keeps its old maximum",
        "seen->powers = seen->powers * mo_exponential(seen->top - top)",
        "seen->powers = seen->powers",
    ),
    Mutant("cross_entropy", "the target of the whole where a block is", "target - a->first", "target"),
    Mutant(
        "cross_entropy",
        "single elements begin one too early",
        "a->columns - split.tail +",
        "a->columns - split.tail - 1 +",
    ),
    Mutant(
        "cross_entropy",
        "the vector's own first element",
        "row->split.head + i * count, count",
        "i * count, count",
    ),
    Mutant("gradients", "no barrier after warps[] is written", BARRIER, "", after="warps[warp] = sum;\n"),
    Mutant(
        "gradients",
        "a warp's sum of half its lanes",
        "apart = 16;",
        "apart = 8;",
        after="gradients_block_sum",
    ),
    Mutant(
        "gradients",
        "no fence before the count",
        "            __threadfence();\n",
        "",
        after="partials[blockIdx.x] = sum;\n",
    ),
    Mutant(
        "gradients",
        "no fence after the count",
        "            __threadfence();",
        "            ",
        after="blocks_done, 1)",
    ),
    Mutant(
        "gradients",
        "no barrier before last is read",
        "        __syncthreads();\n",
        "",
        after="blocks_done, 1)",
    ),
    Mutant("gradients", "blocks_done is not put back", "                head->blocks_done = 0;\n", ""),
    Mutant(
        "gradients",
        "the last block but one adds up",
        "gridDim.x - 1;",
        "gridDim.x - 2;",
        after="&head->blocks_done",
    ),
    Mutant(
        "gradients",
        "sums of eight warps whatever the block",
        "i < blockDim.x / 32;",
        "i < 8;",
        after="double warps[",
    ),
    Mutant(
        "gradients",
        "a barrier for one thread",
        "            partials[blockIdx.x] =",
        "__syncthreads(); partials[blockIdx.x] =",
    ),
    Mutant(
        "gradients",
        "found_inf by one thread's elements",
        "__syncthreads_or(seen.not_finite != 0)",
        "seen.not_finite != 0",
    ),
    Mutant(
        "gradients",
        "every other partial sum is left out",
        "i += blockDim.x",
        "i += 2 * blockDim.x",
        after="if (last)",
    ),
    Mutant(
        "gradients",
        "found_inf as a plain store of many blocks",
        "*(volatile float *)mo_global(launch.found_inf)",
        "*(float *)mo_global(launch.found_inf)",
    ),
    Mutant(
        "update", "no barrier after the work is prepared", "        __syncthreads();\n", "", after="&work);\n"
    ),
    Mutant("update", "the largest of half a warp", "apart = 8;", "apart = 4;", after="update_warp_largest"),
    Mutant(
        "update",
        "half a byte that is no element's is read",
        "        codes.word[0] &= (1u << 4 * few.left) - 1;\n",
        "        ;\n",
    ),
    Mutant(
        "update",
        "two codes of a byte are exchanged",
        "mo_code_gathered(code, 2, 0) | mo_code_gathered(code + 1, 2, 0) << 4",
        "mo_code_gathered(code + 1, 2, 0) | mo_code_gathered(code, 2, 0) << 4",
    ),
    Mutant("update", "a second moment vanishes", "code > least ? code : least", "code"),
    Mutant(
        "update",
        "both states by the scale of one",
        "upper ? per : other",
        "upper ? other : per",
        after="mo_update_codes_put(w",
    ),
    Mutant("update", "scales are written while others read them", "        __syncwarp();", "        "),
    Mutant(
        "update",
        "a buffer of codes has Adam's second moment",
        "if (work.a.code_bits && work.a.flags & MO_UPDATE_SGD)",
        "if (0)",
    ),
    Mutant("update", "warps take each other's blocks", "block += warps)", "block += 1)"),
    Mutant(
        "update",
        "every thread counts the block",
        "    if (threadIdx.x == 0) {\n        __threadfence();",
        "    {\n        __threadfence();",
        after="memopt_update(",
    ),
    Mutant(
        "update",
        "no fence before the count",
        "        __threadfence(); /* this block",
        "        /* this block",
        after="memopt_update(",
    ),
    Mutant(
        "update",
        "no fence after the count",
        "        __threadfence(); /* and the",
        "        /* and all",
        after="memopt_update(",
    ),
    Mutant(
        "update",
        "no barrier before last is read",
        BARRIER,
        "",
        after="theirs, where it is the last */\n    }\n",
    ),
    Mutant(
        "update",
        "each block advances the steps",
        "    if (last) {\n        for (unsigned i = threadIdx.x; i < launch.parameters",
        "    {\n        for (unsigned i = threadIdx.x; i < launch.parameters",
    ),
    Mutant("update", "blocks_done is not put back", "mo_update_head_of(launch)->blocks_done = 0;", ";"),
    Mutant(
        "widen", "a channel more is not carried", "        place->channel++;\n", "", after="mo_widen_advance"
    ),
    Mutant("widen", "four of two channels as of one", "place.within >= 4", "place.within >= 3"),
    Mutant("widen", "a four of two channels goes on", "place.within < 4 ? 1", "place.within < 3 ? 1"),
    Mutant(
        "widen",
        "a run of fours beyond its channel",
        "(a->inner - place.within) / 4;",
        "(a->inner - place.within) / 4 + 1;",
    ),
    Mutant("widen", "a thread's second four from the first's place", "source + i * source_step", "source"),
    Mutant(
        "update",
        "the second four of eight from the first",
        "= both.word[2];",
        "= both.word[0];",
        after="mo_update_load(",
    ),
    Mutant(
        "widen",
        "the grid's y for its x",
        "&launch, blockIdx.x,",
        "&launch, blockIdx.y,",
        after="memopt_widen(",
    ),
    Mutant(
        "widen",
        "one element past the end",
        "i < count; i += threads)\n        mo_widen_single",
        "i <= count; i += threads)\n        mo_widen_single",
    ),
]
MUTANTS += [
    Mutant("factored", fault, old, new, after="memopt_factored(" if after is None else after)
    for fault, old, new, after in (
        ("a warp's tiles twice", "k += blockDim.x / 32", "k += 1", None),
        ("every thread counts the block", "    if (threadIdx.x == 0) {", "    {", None),
        ("no fence before the count", "        __threadfence(); /* this", "        /* this", None),
        ("no fence after the count", "        __threadfence(); /* and the", "        /* and the", None),
        ("no barrier before last is read", BARRIER, "", "others' before they are read */\n    }\n"),
        ("blocks_done is not put back", "            a->blocks_done = 0;", "            ;", None),
        ("a column of the second half as of the first", "k % 4 + k / 4 * 128", "k % 4 + k / 4 * 124", ""),
        ("the first rows of tiles alone", "row_sums[k] += row_sums[k + apart]", "row_sums[k] += 0", ""),
        ("the sum of half a row", "apart < 32; apart *= 2", "apart < 16; apart *= 2", ""),
        ("a square that is not finite", "return x <= MO_FACTORED_MOST ? x : 0;", "return x;", ""),
    )
]
MUTANTS += [
    Mutant("update", "an element behind its row's end", "at + k - columns : at + k", "at + k : at + k"),
    Mutant("update", "the next row from this one's average", "behind ? scale[1]", "behind ? scale[0]"),
]
# The C compiler makes two accesses of eight bytes of one of sixteen, and has no instruction for a pair.
OF_INSTRUCTIONS = [
    Mutant(
        "update",
        "the elements of a pair are exchanged",
        'asm("cvt.rn.bf16x2.f32 %0, %1, %2;"',
        'asm("cvt.rn.bf16x2.f32 %0, %2, %1;"',
    ),
    Mutant(
        "update", "16-byte accesses on a grid of 8 bytes", "size < 16 ? size : 16;", "size < 16 ? size : 8;"
    ),
    Mutant("update", "8-byte accesses on any grid", "*address % width == 0 ? array : 0", "array"),
]


def with_fault(text: str, mutant: Mutant) -> str:
    begin = text.index(mutant.after) + len(mutant.after)
    at = text.index(mutant.old, begin)
    assert mutant.after or text.count(mutant.old) == 1, "the place is not told apart"
    return text[:at] + mutant.new + text[at + len(mutant.old) :]


def test_each_fault_has_its_place_in_the_kernels() -> None:
    for mutant in MUTANTS:
        with_fault(kernel_text(), mutant)
    for mutant in OF_INSTRUCTIONS:
        with_fault(build_kernels.flatten(), mutant)


@pytest.mark.sampled(5)  # each takes a build of the kernels
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.kernel}-{m.fault.replace(' ', '_')}")
def test_a_fault_of_a_line_is_found_in_the_text(folder: Path, mutant: Mutant) -> None:
    library = KernelLibrary.of_text(folder, "watched", with_fault(kernel_text(), mutant))
    assert faults_of(library, mutant.kernel, 400, SEED, stop_at_first=True)


@needs_nvcc
@pytest.mark.sampled("kernels by NVIDIA's compilers")
@pytest.mark.parametrize("mutant", OF_INSTRUCTIONS, ids=lambda m: f"{m.kernel}-{m.fault.replace(' ', '_')}")
def test_a_fault_of_a_line_is_found_in_the_instructions(folder: Path, mutant: Mutant) -> None:
    library = KernelLibrary.of_ptx(folder, architectures()[-1], with_fault(build_kernels.flatten(), mutant))
    assert faults_of(library, mutant.kernel, 400, SEED, stop_at_first=True)


def test_an_instruction_that_is_not_known_is_an_error() -> None:
    import ptx_to_c

    entry = ".visible .entry memopt_x(\n.param .u64 p\n)\n{\n.reg .b32 %r<2>;\n{};\nret;\n}}\n"
    assert "kernel_x" in ptx_to_c.to_c(entry.replace("{};", "mov.u32 %r1, %tid.x;").replace("}}", "}"))
    with pytest.raises(ptx_to_c.UnknownInstruction, match="dp4a"):
        ptx_to_c.to_c(entry.replace("{};", "dp4a.u32.u32 %r1, %r0, %r0, %r0;").replace("}}", "}"))
