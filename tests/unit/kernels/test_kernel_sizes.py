"""The kernels' address arithmetic on tensors of 5 * 2^30 elements, in memory of which only a few pages are used."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

import kernel_cases  # noqa: E402
from kernel_cases import CHECK, DECOUPLED, DTYPE, F16, F32, NORM, Group, Parameter, Update  # noqa: E402
from kernel_library import KernelLibrary, build_kernels, kernel_text  # noqa: E402

COUNT = 5 * 2**30 + 5
UNIT = 8192  # elements of a block of the widening kernel, and of a unit and a chunk here
# Numbers of units: the first, those around 2^30 (bytes of floats: 2^32), 2^31 and 2^32 elements, the last.
UNITS = [
    0,
    *(2**i // UNIT + side for i in (30, 31, 32) for side in (-1, 0)),
    COUNT // UNIT - 1,
    COUNT // UNIT,
]
NO_RESERVE = 0x4000  # MAP_NORESERVE: pages that nobody touches take no memory


class Sparse:
    """COUNT elements, zero, in memory that is taken page by page as it is touched."""

    def __init__(self, dtype: type) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._memory = mmap.mmap(-1, COUNT * np.dtype(dtype).itemsize, flags=flags)
        self.array = np.frombuffer(self._memory, dtype)
        self.address = self.array.ctypes.data

    def unit(self, number: int) -> np.ndarray:
        return self.array[number * UNIT : (number + 1) * UNIT]


INSTRUCTIONS = pytest.param("instructions", marks=pytest.mark.sampled("kernels by NVIDIA's compilers"))


@pytest.fixture(scope="module", params=["text", INSTRUCTIONS])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    folder: Path = tmp_path_factory.mktemp("kernels")
    if request.param == "text":
        return KernelLibrary.of_text(folder, "plain")
    if build_kernels.find_nvcc() is None:
        pytest.skip("there is no nvcc")
    newest = build_kernels.targets(build_kernels.find_nvcc(), None)[-1][0]
    return KernelLibrary.of_ptx(folder, newest, counted=True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def widen(library: KernelLibrary, rng: np.random.Generator) -> None:
    source, target = Sparse(np.uint8), Sparse(np.float32)
    for number in UNITS:
        source.unit(number)[:] = rng.integers(1, 256, source.unit(number).size)
    table = library.buffer("table", np.array([0.5, 2.0], np.float32))
    argument = kernel_cases.Widen(
        table.address, source.address, target.address, COUNT, 1, 1, 255, True, True, 0, F32
    )
    blocks = COUNT // UNIT + 1
    for number in UNITS:
        assert library.launch("widen", argument, blocks, 64, rng, chosen=range(number, number + 1)) == []
    for number in UNITS:
        wanted = (source.unit(number).astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(2)
        assert (target.unit(number) == wanted).all(), number
    for number in {number + side for number in UNITS for side in (-1, 1)} - {*UNITS, -1, blocks}:
        assert not target.unit(number).any(), number


def update(library: KernelLibrary, rng: np.random.Generator, kind: int = F32) -> None:
    p, g, m, v = (Sparse(DTYPE[kind]) for _ in range(4))
    before = {}
    for number in UNITS:
        for array in (p, g):
            array.unit(number)[:] = rng.normal(size=array.unit(number).size)
        before[number] = p.unit(number).astype(float)
    step = library.buffer("step", np.zeros(1, np.float32))
    row = Parameter(
        p=p.address, g=g.address, m=m.address, v=v.address, step=step.address, count=COUNT, flags=DECOUPLED,
        kind=kind, grad_kind=kind, state_kind=kind,
    )  # fmt: skip
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.99, 1e-8, 0.1
    group = Group(lr, beta1, beta2, eps, decay, 0, 0, 0, 0, 0)
    units = np.array([(0, number) for number in UNITS], np.uint32).tobytes()
    table = library.buffer("table", np.frombuffer(bytes(16) + bytes(row) + bytes(group) + units, np.uint8))
    argument = Update(table.address, 0, 0, 1, 1, len(UNITS), UNIT, 0, 0)
    assert library.launch("update", argument, len(UNITS), 64, rng) == []
    precise = 1e-5 if kind == F32 else 5e-3
    for number in UNITS:
        grad = g.unit(number).astype(float)
        assert np.allclose(m.unit(number), (1 - beta1) * grad, rtol=precise, atol=1e-6), number
        moved = np.sign(grad) * (np.abs(grad) / (np.abs(grad) + eps))
        wanted = before[number] * (1 - lr * decay) - lr * moved
        assert np.allclose(p.unit(number), wanted, rtol=precise, atol=1e-5 if kind == F32 else 2e-3), number
    for number in {number + side for number in UNITS for side in (-1, 1)} - {*UNITS, -1, COUNT // UNIT + 1}:
        assert not m.unit(number).any() and not p.unit(number).any(), number


def cross_entropy(library: KernelLibrary, rng: np.random.Generator) -> None:
    """Rows of UNIT logits, of which the last ones are beyond 2^32."""
    logits = Sparse(np.float32)
    for number in UNITS[:-1]:
        logits.unit(number)[:] = rng.normal(size=UNIT)
    rows = COUNT // UNIT
    numbers = [np.zeros(rows, np.float32) for _ in range(2)]
    target, scale = np.zeros(rows, np.int64), np.ones(rows, np.float32)
    table = library.buffer("table", np.zeros(4, np.float32))
    argument = kernel_cases.CrossEntropy(
        table.address,
        logits.address,
        *(a.ctypes.data for a in (target, *numbers, scale)),
        UNIT,
        0,
        UNIT,
        3,
        F32,
    )
    for number in UNITS[:-1]:
        before = logits.unit(number).astype(float)
        assert (
            library.launch("cross_entropy", argument, rows, 64, rng, chosen=range(number, number + 1)) == []
        )
        wanted = np.exp(before - np.log(np.exp(before).sum()))
        wanted[0] -= 1
        assert np.allclose(logits.unit(number), wanted, atol=1e-5), number
    for number in {number + side for number in UNITS[:-1] for side in (-1, 1)} - {*UNITS, -1, rows}:
        assert not logits.unit(number).any(), number


def test_a_cross_entropy_reaches_every_element(library, rng):
    cross_entropy(library, rng)


def test_a_norm_reads_every_element(library, rng):
    values, bad = Sparse(np.float32), library.buffer("found_inf", np.zeros(1, np.float32))
    chunks, squares = [], 0.0
    for number in UNITS:
        unit = values.unit(number)
        unit[:] = rng.normal(size=unit.size)
        squares += float((unit.astype(float) ** 2).sum())
        chunks.append((unit.ctypes.data, unit.size))
    raw = b"".join(
        np.uint64(at).tobytes() + np.array([count, F32], np.uint32).tobytes() for at, count in chunks
    )
    table = library.buffer("table", np.frombuffer(bytes(16) + raw + bytes(8 * len(chunks)), np.uint8))
    results = [library.buffer(name, np.zeros(1, np.float32)) for name in ("norm", "clip", "factor")]
    norm, clip, factor = (result.address for result in results)
    argument = kernel_cases.Gradients(
        table.address, 0, bad.address, norm, 0, clip, factor, 3.0, len(chunks), CHECK | NORM
    )
    assert library.launch("gradients", argument, len(chunks), 64, rng) == []
    assert abs(float(results[0].array()[0]) / squares**0.5 - 1) < 1e-6 and bad.array()[0] == 0
    values.unit(UNITS[-1])[-1] = np.inf
    assert library.launch("gradients", argument, len(chunks), 64, rng) == []
    assert bad.array()[0] == 1


def test_widening_reaches_every_element(library, rng):
    widen(library, rng)


@pytest.mark.parametrize("kind", [F32, F16])
def test_an_update_reaches_every_element(library, rng, kind):
    update(library, rng, kind)


@pytest.mark.parametrize(
    "run, before, after",
    [
        (
            cross_entropy,
            "(unsigned long long)row * a->columns * size",
            "(unsigned)(row * a->columns * size)",
        ),
        (widen, "(unsigned long long)block * MO_WIDEN_UNIT", "(unsigned)(block * MO_WIDEN_UNIT)"),
        (
            update,
            "(unsigned long long)unit.index * launch.elements",
            "(unsigned)(unit.index * launch.elements)",
        ),
    ],
)
def test_an_index_of_32_bits_is_found(tmp_path, rng, run, before, after):
    text = kernel_text()
    assert text.count(before) == 1
    with pytest.raises(AssertionError):
        run(KernelLibrary.of_text(tmp_path, "plain", text.replace(before, after)), rng)
