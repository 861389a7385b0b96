"""Random grids of memopt's kernels, each checked against the formula in NumPy's double: shapes, types, misalignments,
sizes of blocks."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_double, c_float, c_ubyte, c_uint, c_uint64, c_ushort

import numpy as np
from kernel_library import Buffer, KernelLibrary

F32, F16, BF16, F64 = range(4)
SIZE = {F32: 4, F16: 2, BF16: 2, F64: 8}
DTYPE = {F32: np.float32, F16: np.float16, BF16: np.uint16, F64: np.float64}
CHECK, STORE, NORM, MAXIMUM = 1, 2, 4, 8
SGD, DECOUPLED, MAXIMIZE, STOCHASTIC = 0x100, 0x200, 0x400, 0x800
AMSGRAD = 2  # of Adam's rule; 1 is L2, for both
SGD_MOMENTUM, SGD_FIRST, SGD_NESTEROV = 2, 4, 8


def structure(name: str, **fields: object) -> type[ctypes.Structure]:
    """A structure of kernels/*.cuh: fields by their type, names apart by spaces."""
    listed = [(field, kind) for names, kind in fields.items() for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": listed})


Gradients = structure(
    "Gradients",
    **{
        "table inv_scale found_inf norm norm64 clip factor": c_uint64,
        "max_norm": c_double,
        "chunks passes": c_uint,
    },
)
Update = structure(
    "Update",
    **{
        "table factor found_inf": c_uint64,
        "parameters groups units elements store_gradients first_index first_unit": c_uint,
    },
)
Parameter = structure(
    "Parameter",
    **{
        "p g master m v vmax m_scale v_scale step count row column sums inverse": c_uint64,
        "columns blocks blocks_done unused flags group": c_uint,
        "kind grad_kind state_kind code_bits": c_ushort,
    },
)
Group = structure(
    "Group",
    **{
        "lr beta1 beta2 eps weight_decay momentum dampening": c_double,
        "lr_address": c_uint64,
        "lr_kind unused": c_uint,
    },
)
Widen = structure(
    "Widen",
    **{
        "table source target count": c_uint64,
        "inner channels": c_uint,
        "scale": c_float,
        "divide aligned source_kind target_kind": c_ubyte,
    },
)
CrossEntropy = structure(
    "CrossEntropy",
    **{
        "table logits target lse loss scale classes first": c_uint64,
        "columns": c_uint,
        "passes kind": c_ubyte,
    },
)


def bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(np.asarray(x, np.float32)), np.uint16(0x7FC0), rounded)


def stored(kind: int, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if kind == BF16:
            return bf16(x)
        return np.asarray(x, np.float64 if kind == F64 else np.float32).astype(DTYPE[kind])


def wide(kind: int, a: np.ndarray) -> np.ndarray:
    if kind == BF16:
        a = (a.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return a.astype(np.float64)


def same(kind: int, got: np.ndarray, wanted: np.ndarray) -> bool:
    both_nan = np.isnan(wide(kind, got)) & np.isnan(wide(kind, wanted))
    return bool(((got == wanted) | both_nan).all())


def near(got: float, wanted: float, relative: float) -> bool:
    if math.isnan(wanted) or math.isinf(wanted):
        return math.isnan(got) if math.isnan(wanted) else got == wanted
    return abs(got - wanted) <= relative * abs(wanted) + 1e-44


class Case:
    """One grid of random input: built, launched, checked. What was wrong is in `faults`."""

    def __init__(self, library: KernelLibrary, rng: np.random.Generator) -> None:
        self.library, self.rng = library, rng
        self.faults: list[str] = []
        self.small = library.watched
        self.run()

    def run(self) -> None:
        raise NotImplementedError

    def check(self, right: object, fault: str) -> None:
        if not right:
            self.faults.append(fault)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, *among: object) -> object:
        return among[int(self.rng.integers(len(among)))]

    def offset(self, size: int) -> int:
        return size * int(self.rng.integers(0, 16 // size))

    def one(self, name: str, value: float, read_only: bool = False) -> Buffer:
        kind = np.float64 if name.endswith("64") else np.float32
        return self.library.buffer(name, np.array([value], kind), read_only=read_only)

    def launch(self, name: str, argument: ctypes.Structure, blocks: int) -> None:
        threads = self.pick(32, 64) if self.small else self.pick(32, 96, 128, 256)
        threads = 32 if blocks > 32 and self.small else threads
        self.faults += self.library.launch(name, argument, blocks, threads, self.rng)


class GradientsCase(Case):
    """The check for inf and NaN, the scaling and the norm."""

    def tensor(self, name: str) -> tuple[int, Buffer, np.ndarray]:
        rng, kind = self.rng, int(self.rng.integers(0, 4))
        x = rng.normal(size=int(rng.integers(1, 400 if self.small else 6000)))
        x *= 10.0 ** (rng.integers(-280, 250) if kind == F64 and self.chance(0.5) else rng.integers(-3, 3))
        if self.chance(0.25):
            x[rng.integers(x.size)] = self.pick(np.inf, -np.inf, np.nan)
        values = stored(kind, x)
        return kind, self.library.buffer(name, values, self.offset(SIZE[kind])), values

    def chunks_of(self, kind: int, tensor: Buffer) -> list[tuple[int, int, int]]:
        """Cut on a grid of 64 to 4096 bytes, as the host cuts on one of its own; watched, into at most 15."""
        least = max(6, math.ceil(math.log2(tensor.nbytes / 14))) if self.small else 9
        size = 1 << (least if self.fine else int(self.rng.integers(least, 13)))
        found, at, end = [], tensor.address, tensor.address + tensor.nbytes
        while at < end:
            cut = min((at // size + 1) * size, end)
            found.append((at, (cut - at) // SIZE[kind], kind))
            at = cut
        return found

    def run(self) -> None:
        norms = (NORM, CHECK | NORM, STORE | NORM, CHECK | STORE | NORM)
        passes = int(self.pick(CHECK, STORE, CHECK | STORE, *norms, *(n | MAXIMUM for n in norms)))
        self.fine = self.chance(0.3)  # more blocks than a block has threads
        count = 4 if self.fine else int(self.rng.integers(0, 5))
        tensors = [self.tensor(f"gradient {i}") for i in range(count)]
        chunks = [chunk for kind, tensor, _ in tensors for chunk in self.chunks_of(kind, tensor)]
        if not chunks and not passes & NORM:
            return
        blocks = max(1, len(chunks))
        raw = bytes(16) + b"".join(
            np.uint64(at).tobytes() + np.array([count, kind], np.uint32).tobytes()
            for at, count, kind in chunks
        )
        room = b"\xa5" * (8 * blocks if passes & NORM else 0)  # not initialised
        table = self.library.buffer("table", np.frombuffer(raw + room, np.uint8))
        given = self.chance(0.8)
        scale = np.float32(self.pick(1.0, 0.5, 1 / 3, 2.0**-16) if given else 1)
        inv_scale = self.one("inv_scale", scale, read_only=True)
        results = {
            name: self.one(name, start)
            for name, start in (("found_inf", 0), ("norm", -1), ("norm64", -1), ("clip", -1), ("factor", -1))
        }
        addresses = [result.address for result in results.values()]
        argument = Gradients(
            table.address, inv_scale.address if given else 0, *addresses, 3.0, len(chunks), passes
        )
        self.launch("gradients", argument, blocks)
        with np.errstate(all="ignore"):
            self.compare(passes, scale, tensors, {name: float(b.array()[0]) for name, b in results.items()})
        self.check(table.array()[: len(raw)].tobytes() == raw, "the table is not as it was")

    def compare(self, passes: int, scale: np.float32, tensors: list, got: dict[str, float]) -> None:
        values, finite = [np.zeros(1)], True
        for kind, tensor, before in tensors:
            x = wide(kind, before)
            finite &= bool(np.isfinite(x).all())
            scaled = x * float(scale) if kind == F64 else x.astype(np.float32) * scale
            wanted = stored(kind, scaled) if passes & STORE and scale != 1 else before
            self.check(same(kind, tensor.array(), wanted), f"a gradient of kind {kind} is wrong")
            values.append(wide(kind, wanted))
        if passes & CHECK:
            self.check(got["found_inf"] == (not finite), "found_inf is wrong")
        if passes & NORM:
            y = np.abs(np.concatenate(values))
            top = float(y.max())
            whole = math.isfinite(top) and top > 0
            norm = float(top * np.sqrt(((y / top) ** 2).sum())) if whole and not passes & MAXIMUM else top
            norm = float(np.float32(norm if passes & STORE else norm * float(scale)))
            clip = min(1.0, 3.0 / (norm + 1e-6)) if not math.isnan(norm) else math.nan
            self.check(near(got["norm"], norm, 1e-6), f"the norm is {got['norm']}, not {norm}")
            rounded = float(np.float32(got["norm64"]))
            self.check(
                rounded == got["norm"] or math.isnan(rounded), "norm64 is not what norm is rounded from"
            )
            self.check(near(got["clip"], clip, 2e-6), f"clip is {got['clip']}, not {clip}")
            self.check(near(got["factor"], clip * float(scale), 2e-6), "the factor is wrong")


def decode(bits: int, second: bool, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Moments of 8 or 4 bits (kernels/adam_codes.cuh): floats below 1 of a few mantissa bits, less the smallest, over
    the largest; the first moment's after a sign."""
    sign = 0 if second else 1 << (bits - 1)
    mantissa = 4 if bits == 8 else 0 if second else 1
    octaves = (1 << (bits if second else bits - 1)) >> mantissa
    codes = codes.astype(int)
    size = codes & ~sign
    y = 2.0 ** ((size >> mantissa) - octaves) * (1 + (size & (1 << mantissa) - 1) / 2**mantissa)
    least, most = 2.0**-octaves, 1 - 2.0 ** -(mantissa + 1)
    return np.where(codes & sign, -1, 1) * (y - least) / (most - least) * scale


def unpacked(bits: int, raw: np.ndarray, n: int) -> np.ndarray:
    return raw if bits == 8 else np.stack([raw & 15, raw >> 4], 1).reshape(-1)[:n]


class UpdateCase(Case):
    """A step of Adam, AdamW or SGD with states of every type over several parameters."""

    RATES = (1e-2, 3e-3)

    def run(self) -> None:
        rng = self.rng
        self.store = self.chance(0.3)
        self.factor = float(np.float32(self.pick(1.0, 0.5, 1 / 3)))
        skipped, elements = self.chance(0.15), 1024 * int(rng.integers(1, 3))
        lr = self.library.buffer("lr", np.array([self.RATES[1]]), read_only=True)
        self.groups = [
            Group(self.RATES[0], 0.9, 0.999, 1e-8, 0.1, 0.9, 0.1, 0, 0, 0),
            Group(0, 0.8, 0.99, 1e-6, 0.0, 0.5, 0.0, lr.address, F64, 0),
        ]
        made = [self.parameter(str(i)) for i in range(int(rng.integers(1, 4)))]
        units = [(i, u) for i, one in enumerate(made) for u in range(-(-one["n"] // elements))]
        rng.shuffle(units)
        raw = bytes(16) + b"".join(bytes(one["row"]) for one in made) + b"".join(map(bytes, self.groups))
        raw += np.array(units, np.uint32).tobytes()
        table = self.library.buffer("table", np.frombuffer(raw, np.uint8))
        found_inf = self.one("found_inf", float(skipped), read_only=True)
        factor = self.one("factor", self.factor, read_only=True)
        argument = Update(
            table.address,
            factor.address,
            found_inf.address,
            len(made),
            2,
            len(units),
            elements,
            int(self.store),
            0,
        )
        self.launch("update", argument, max(1, len(units)))
        for one in made:
            self.check(one["step"].array()[0] == one["steps"] + (not skipped), "the step is not counted once")
            if skipped:
                untouched = one["p"].array(np.uint8).tobytes() == one["bytes"]
                self.check(untouched, "a step that is skipped changes a parameter")
            else:
                self.compare(**one)
        self.check(table.array().tobytes() == raw, "the table is not as it was")

    def values(self, name: str, kind: int, x: np.ndarray, read_only: bool = False) -> Buffer:
        return self.library.buffer(name, stored(kind, x), self.offset(SIZE[kind]), read_only)

    def parameter(self, i: str) -> dict:
        rng, n = self.rng, int(self.rng.integers(1, 700 if self.small else 5000))
        kind = int(self.pick(F32, F32, F16, BF16, F64))
        grad_kind = int(self.pick(kind, F32))
        codes = int(self.pick(8, 4)) if kind != F64 and self.chance(0.5) else 0
        sgd = codes != 4 and self.chance(0.3)
        state_kind = F64 if kind == F64 else int(self.pick(F32, kind))
        columns = int(rng.integers(8, 300)) if kind != F64 and not sgd and self.chance(0.4) else 0
        n = max(1, n // columns) * columns if columns else n
        p = self.values("p" + i, kind, rng.normal(size=n))
        g = self.values("g" + i, grad_kind, rng.normal(size=n), read_only=not self.store)
        halves = kind in (F16, BF16)
        master = self.values("master" + i, F32, rng.normal(size=n)) if halves and self.chance(0.5) else None
        step = self.one("step" + i, float(rng.integers(0, 50)))
        row = Parameter(
            p=p.address,
            g=g.address,
            step=step.address,
            count=n,
            group=int(rng.integers(0, 2)),
            kind=kind,
            grad_kind=grad_kind,
            state_kind=state_kind,
            master=master.address if master else 0,
        )
        old = {
            "p": master.array().astype(float) if master else wide(kind, p.array()),
            "g": wide(grad_kind, g.array()),
        }
        states: dict[str, Buffer] = {}
        if codes:
            row.flags, row.code_bits = DECOUPLED, codes
            if sgd:
                row.flags = SGD | SGD_MOMENTUM | int(self.pick(0, 1, SGD_NESTEROV, SGD_FIRST))
            blocks, of = -(-n // 256), np.arange(n) // 256
            for name in "m" if sgd or columns else "mv":
                raw = rng.integers(0, 256, -(-n * codes // 8)).astype(np.uint8)
                states[name] = self.library.buffer(name + i, raw, int(rng.integers(0, 8)))
                scale = self.library.buffer(name + "_scale" + i, rng.random(blocks).astype(np.float32))
                states[name + "_scale"] = scale
                old[name] = decode(
                    codes, name == "v", unpacked(codes, raw, n), scale.array()[of].astype(float)
                )
        else:
            names = ["m", "v"]
            if sgd:
                row.flags = SGD | int(
                    self.pick(
                        0,
                        1,
                        SGD_MOMENTUM,
                        SGD_MOMENTUM | 1,
                        SGD_MOMENTUM | SGD_NESTEROV,
                        SGD_MOMENTUM | SGD_FIRST,
                    )
                )
                names = ["m"] if row.flags & SGD_MOMENTUM else []
            else:
                row.flags = DECOUPLED if self.chance(0.5) else 1
                if columns:
                    names = ["m"]
                elif self.chance(0.3):
                    row.flags |= AMSGRAD
                    names.append("vmax")
            for name in names:
                x = rng.normal(size=n) if name == "m" else rng.random(n) + 0.01
                states[name] = self.values(name + i, state_kind, x)
                old[name] = wide(state_kind, states[name].array())
        for name, state in states.items():
            setattr(row, name, state.address)
        if columns:
            of_rows, of_columns = (
                (rng.random(count) + 0.01).astype(np.float32) for count in (n // columns, columns)
            )
            inverse = self.one("inverse" + i, 1 / of_rows.mean(), read_only=True)
            row.row = self.library.buffer("row" + i, of_rows, read_only=True).address
            row.column = self.library.buffer("column" + i, of_columns, read_only=True).address
            row.inverse, row.columns = inverse.address, columns
            old["factored"] = np.outer(of_rows, of_columns).reshape(-1) / of_rows.astype(float).mean()
        row.flags |= MAXIMIZE if self.chance(0.2) else 0
        row.flags |= STOCHASTIC if halves and not master and self.chance(0.3) else 0
        return {
            "row": row,
            "p": p,
            "g": g,
            "master": master,
            "step": step,
            "steps": float(step.array()[0]),
            "n": n,
            "old": old,
            "states": states,
            "bytes": p.array(np.uint8).tobytes(),
        }

    def stepped(self, row: ctypes.Structure, old: dict, steps: float) -> dict[str, np.ndarray]:
        """The formula in double."""
        group, rate, t = self.groups[row.group], self.RATES[row.group], steps + 1
        x, p = old["g"] * self.factor * (-1 if row.flags & MAXIMIZE else 1), old["p"]
        x = x + group.weight_decay * p if row.flags & 0xFF & 1 else x
        if row.flags & SGD:
            m = old.get("m")
            if row.flags & SGD_MOMENTUM:
                m = x if row.flags & SGD_FIRST else group.momentum * m + (1 - group.dampening) * x
                damped = (1 - group.dampening) * x
                x = damped + group.momentum * m if row.flags & SGD_NESTEROV else m
            return {"p": p - rate * x, "m": m}
        m = group.beta1 * old["m"] + (1 - group.beta1) * x
        v = old["factored"] if row.columns else group.beta2 * old["v"] + (1 - group.beta2) * x * x
        root = np.sqrt(np.maximum(old["vmax"], v) if row.flags & AMSGRAD else v) / math.sqrt(
            1 - group.beta2**t
        )
        p = p * (1 - rate * group.weight_decay if row.flags & DECOUPLED else 1)
        return {"p": p - rate / (1 - group.beta1**t) * m / (root + group.eps), "m": m, "v": v}

    def compare(self, row, p, g, master, step, steps, n, old, states, bytes) -> None:
        halves, rounded = {F16: 2e-3, BF16: 1.6e-2}, self.store and self.factor != 1
        if rounded:
            wanted = wide(row.grad_kind, stored(row.grad_kind, old["g"] * self.factor))
            got = wide(row.grad_kind, g.array())
            self.check(
                np.allclose(got, wanted, rtol=halves.get(row.grad_kind, 1e-6)), "a stored gradient is wrong"
            )
        new = self.stepped(row, old, steps)
        exact = 1e-9 if row.grad_kind == F64 or not rounded else 1e-6
        bound = {F32: 2e-5, F64: exact, **halves}[F32 if master else row.kind]
        got = master.array().astype(float) if master else wide(row.kind, p.array())
        fault = f"p of kind {row.kind}, flags {row.flags:#x}, is wrong"
        self.check((np.abs(got - new["p"]) <= bound * (np.abs(new["p"]) + 0.05)).all(), fault)
        if master:
            near_master = np.allclose(wide(row.kind, p.array()), got, rtol=halves[row.kind], atol=1e-4)
            self.check(near_master, "a parameter is not its master rounded")
        if row.code_bits:
            self.compare_codes(row.code_bits, n, states, new)
            return
        bound = {F32: 1e-5, F64: 1e-6, **halves}[row.state_kind]
        for name, least in (("m", 0.05), ("v", 1e-3)):
            if name in states:
                got = wide(row.state_kind, states[name].array())
                right = np.abs(got - new[name]) <= bound * (np.abs(new[name]) + least)
                self.check(right.all(), f"{name} of kind {row.state_kind} is wrong")

    def compare_codes(self, bits: int, n: int, states: dict[str, Buffer], new: dict[str, np.ndarray]) -> None:
        of = np.arange(n) // 256
        bounds = {8: ((1 / 247, 1 / 31), (1 / 63487, 1 / 15.5)), 4: ((1 / 11, 0.51), (1 / 32767, 1.01))}
        if "v" not in states:  # SGD's m is dithered
            bounds[8] = ((1 / 247, 1 / 15.5), bounds[8][1])
        for name, (least, relative) in zip("mv", bounds[bits], strict=True):
            if name not in states:
                continue
            wanted, scale = new[name], states[name + "_scale"].array()
            largest = np.array([np.abs(wanted[at : at + 256]).max() for at in range(0, n, 256)])
            self.check(
                np.allclose(scale, largest, rtol=1e-5), f"a scale of {name} is not its block's largest"
            )
            scale = scale[of].astype(float)
            raw = states[name].array()
            codes = unpacked(bits, raw, n)
            self.check(name == "m" or codes[wanted > 0].all(), "a second moment has become 0")
            off = np.abs(decode(bits, name == "v", codes, scale) - wanted)
            if bits == 4 and n % 2:
                self.check(raw[-1] < 16, f"half a byte of {name} that is no element's is not 0")
            self.check(
                (off <= (np.abs(wanted) + scale * least) * relative).all(), f"codes of {name} are wrong"
            )


class FactoredCase(Case):
    """The averages of rows and columns of several matrices' squared gradients."""

    def run(self) -> None:
        rng = self.rng
        self.group = Group(1e-2, 0.9, 0.99, 1e-8, 0.1, 0, 0, 0, 0, 0)
        self.factor, skipped = float(np.float32(self.pick(1.0, -0.5, 1 / 3))), self.chance(0.15)
        made = [self.matrix(str(i)) for i in range(int(rng.integers(1, 4)))]
        others = [(0, 0)] * int(rng.integers(0, 3))  # units of the update kernel
        units = [(i, k) for i, one in enumerate(made) for k in range(one["row"].blocks)]
        rng.shuffle(units)
        raw = bytes(16) + b"".join(bytes(one["row"]) for one in made) + bytes(self.group)
        raw += np.array(others + [tuple(unit) for unit in units], np.uint32).tobytes()
        table = self.library.buffer("table", np.frombuffer(raw, np.uint8))
        found_inf = self.one("found_inf", float(skipped), read_only=True)
        factor = self.one("factor", self.factor, read_only=True)
        argument = Update(
            table.address,
            factor.address,
            found_inf.address,
            len(made),
            1,
            len(others),
            1024,
            0,
            0,
            len(others),
        )
        self.launch("factored", argument, len(units))
        for one in made:
            self.compare(skipped, **one)
        self.check(table.array().tobytes() == raw, "the table is not as it was")

    def matrix(self, i: str) -> dict:
        rng, library = self.rng, self.library
        columns, kind = int(rng.integers(8, 60 if self.chance(0.5) else 600)), int(self.pick(F32, F16, BF16))
        rows = int(rng.integers(1, 4 if self.small else 20 if columns > 60 else 900))
        rows, columns = (columns, max(8, rows)) if self.small and self.chance(0.5) else (rows, columns)
        if self.chance(0.2):
            rows, columns = 1, int(rng.integers(2100, 2600))  # two blocks
        x = rng.normal(size=(rows, columns)) * rng.random((rows, 1))
        if self.chance(0.3):
            x[rng.integers(rows), rng.integers(columns)] = self.pick(np.inf, np.nan, 1e30)
        g = stored(kind, x)
        p_kind = int(self.pick(kind, F32))
        decays, master = self.chance(0.3), p_kind != F32 and self.chance(0.5)
        p = stored(F32 if master else p_kind, rng.normal(size=(rows, columns)))
        tiles = -(-rows // 256), -(-columns // 256)
        vectors = [rng.random(count).astype(np.float32) for count in (rows, columns)]
        of_rows, of_columns = (
            library.buffer(f"vector {k} of {i}", vector) for k, vector in enumerate(vectors)
        )
        sums = np.full(rows * tiles[1] + columns * tiles[0], np.nan, np.float32)  # not initialised
        of_p = library.buffer("p" + i, p, self.offset(p.itemsize), read_only=True).address if decays else 0
        inverse = self.one("inverse" + i, -1)
        row = Parameter(
            p=0 if master else of_p,
            g=library.buffer("g" + i, g, self.offset(SIZE[kind]), read_only=True).address,
            master=of_p if master else 0,
            count=rows * columns,
            row=of_rows.address,
            column=of_columns.address,
            sums=library.buffer("sums" + i, sums).address,
            inverse=inverse.address,
            columns=columns,
            blocks=-(-tiles[0] * tiles[1] // 8),
            flags=int(decays) | (MAXIMIZE if self.chance(0.3) else 0),
            kind=p_kind,
            grad_kind=kind,
        )
        old = {"g": wide(kind, g), "p": wide(F32 if master else p_kind, p), "vectors": vectors}
        return {"row": row, "new": (of_rows, of_columns), "inverse": inverse, "old": old}

    def compare(self, skipped: bool, row, new, inverse, old) -> None:
        with np.errstate(all="ignore"):
            x = old["g"] * self.factor * (-1 if row.flags & MAXIMIZE else 1)
            x = (x + self.group.weight_decay * old["p"] if row.flags & 1 else x).astype(np.float32)
            square = np.where(np.isfinite(x * x), x.astype(float) ** 2, 0).reshape(-1, row.columns)
        got = [one.array() for one in new]
        for axis, before, after in zip((1, 0), old["vectors"], got, strict=True):
            wanted = before if skipped else 0.99 * before.astype(float) + (1 - 0.99) * square.mean(axis)
            self.check(np.allclose(after, wanted, rtol=1e-6, atol=0), f"averages along {axis} are wrong")
        wanted = -1 if skipped else 1 / got[0].astype(float).mean()
        self.check(near(float(inverse.array()[0]), wanted, 2e-7), "1 / the mean of rows is wrong")


class WidenCase(Case):
    """Numbers of few bits made floating point, scaled and normalised by channel."""

    KINDS = (np.uint8, np.int8, np.uint16, np.int16, np.float16, None, np.float32)  # None: bf16

    def run(self) -> None:
        rng, source_kind, kind = self.rng, int(self.rng.integers(0, 7)), int(self.pick(F32, F16, BF16))
        sizes = (
            ((1, 900) if self.chance(0.8) else (8193, 9000)) if self.small else (1, 30000)
        )  # a block has 8192
        n, channels = int(rng.integers(*sizes)), int(rng.integers(1, 5))
        inner = int(self.pick(1, 3, int(rng.integers(1, 900))))
        dtype = self.KINDS[source_kind]
        if dtype is None:
            x = bf16(rng.normal(size=n))
        elif np.issubdtype(dtype, np.floating):
            x = rng.normal(size=n).astype(dtype)
        else:
            x = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, n).astype(dtype)
        aligned = self.chance(0.4)
        offsets = [0 if aligned else size * int(rng.integers(0, 4)) for size in (x.itemsize, SIZE[kind])]
        source = self.library.buffer("source", x, offsets[0], read_only=True)
        target = self.library.buffer("target", np.zeros(n, DTYPE[kind]), offsets[1])
        mean, deviation = rng.normal(size=channels), rng.random(channels) + 0.1
        mean, deviation = mean.astype(np.float32), deviation.astype(np.float32)
        table = self.library.buffer("table", np.concatenate([mean, deviation]), read_only=True)
        fits = source.address % (4 * x.itemsize) == 0 and target.address % (4 * SIZE[kind]) == 0
        scale, divide = np.float32(255), self.chance(0.5)
        argument = Widen(
            table.address,
            source.address,
            target.address,
            n,
            inner,
            channels,
            scale,
            divide,
            fits,
            source_kind,
            kind,
        )
        self.launch("widen", argument, -(-n // 8192))
        channel = np.arange(n) // inner % channels
        single = (wide(BF16, x) if dtype is None else x).astype(np.float32)
        with np.errstate(all="ignore"):
            scaled = single / scale if divide else single * scale
            wanted = stored(kind, (scaled - mean[channel]) / deviation[channel])
        self.check(same(kind, target.array(), wanted), f"kind {source_kind} is made {kind} wrongly")


class CrossEntropyCase(Case):
    """Loss and gradient of rows of logits, whole or a block of their classes."""

    FIND, SUBTRACT = 1, 2

    def run(self) -> None:
        rng, kind = self.rng, int(self.pick(F32, F16, BF16))
        rows, columns = int(rng.integers(1, 5)), int(rng.integers(1, 500 if self.small else 5000))
        passes = int(self.pick(self.FIND, self.SUBTRACT, self.FIND | self.SUBTRACT))
        first = 0 if passes & self.FIND else int(rng.integers(0, 50))
        classes = columns if passes & self.FIND else first + columns + int(rng.integers(0, 50))
        smoothing, cap = float(np.float32(self.pick(0, 0.1))), float(self.pick(0, 0, 5))
        x = stored(kind, rng.normal(size=(rows, columns)) * self.pick(1, 10) + self.pick(0, 30))
        if self.chance(0.2):
            x[rng.integers(rows), rng.integers(columns)] = stored(kind, np.array(-np.inf))
        logits = self.library.buffer(
            "logits", x, self.offset(SIZE[kind]), read_only=not passes & self.SUBTRACT
        )
        target = rng.integers(0, classes, rows)
        z, slope = self.capped(wide(kind, x), cap)
        top = z.max(1, keepdims=True)
        lse = (top + np.log(np.exp(z - top).sum(1, keepdims=True)))[:, 0]
        given = np.zeros(rows) if passes & self.FIND else lse
        scale = rng.normal(size=rows).astype(np.float32)
        options = np.array([smoothing, smoothing / classes, cap, 1 / cap if cap else 0], np.float32)
        table = self.library.buffer("table", options, read_only=True)
        made = {
            "target": self.library.buffer("target", target, read_only=True),
            "lse": self.library.buffer("lse", given.astype(np.float32), read_only=not passes & self.FIND),
            "scale": self.library.buffer("scale", scale, read_only=True),
            "loss": self.library.buffer("loss", np.full(rows, -1, np.float32)),
        }
        addresses = {name: one.address for name, one in made.items()}
        argument = CrossEntropy(
            table=table.address, logits=logits.address, classes=classes, first=first, columns=columns,
            passes=passes, kind=kind, **addresses,
        )  # fmt: skip
        self.launch("cross_entropy", argument, rows)
        here, at = (target >= first) & (target < first + columns), np.arange(rows)
        column = np.where(here, target - first, 0)
        if passes & self.FIND:
            with np.errstate(invalid="ignore"):
                loss = lse - (1 - smoothing) * z[at, column] - (smoothing * z.mean(1) if smoothing else 0)
            self.compare("lse", made["lse"].array(), lse, 2e-6 * (1 + np.abs(lse)))
            self.compare("loss", made["loss"].array(), loss, 4e-6 * (1 + np.abs(lse)))
        else:
            self.check((made["loss"].array() == -1).all(), "a loss is written without being found")
        if passes & self.SUBTRACT:
            p = np.exp(z - lse[:, None]) - smoothing / classes
            p[at[here], column[here]] -= 1 - smoothing
            wanted = scale[:, None] * p * slope
            units = {F32: 1e-5, F16: 6e-4, BF16: 4.5e-3}[kind]
            got = wide(kind, logits.array()).reshape(rows, columns)
            self.compare("gradient", got, wanted, units * np.abs(wanted) + 1e-5)

    @staticmethod
    def capped(x: np.ndarray, cap: float) -> tuple[np.ndarray, np.ndarray]:
        """z, and dz/dx."""
        return (cap * np.tanh(x / cap), 1 - np.tanh(x / cap) ** 2) if cap else (x, np.ones_like(x))

    def compare(self, name: str, got: np.ndarray, wanted: np.ndarray, bound: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):
            right = (np.abs(got - wanted) <= bound) | (got == wanted) | (np.isnan(got) & np.isnan(wanted))
        self.check(right.all(), f"a {name} is wrong")


CASES = {
    "cross_entropy": CrossEntropyCase,
    "factored": FactoredCase,
    "gradients": GradientsCase,
    "update": UpdateCase,
    "widen": WidenCase,
}


def faults_of(
    library: KernelLibrary, name: str, rounds: int, seed: int, stop_at_first: bool = False
) -> list[str]:
    """The faults that random grids of a kernel show, each line with the round that made it."""
    found: list[str] = []
    for round_number in range(rounds):
        case = CASES[name](library, np.random.default_rng([seed, round_number]))
        found += [f"{name}, seed {seed}, round {round_number}: {fault}" for fault in case.faults]
        if found and stop_at_first:
            break
    return found
