"""nvcc's PTX as C, for the grid of simcuda/grid.h: a statement for each instruction, a function kernel_NAME for each
entry memopt_NAME. Registers are unsigned integers of their width, whatever is in them. An instruction that is not known
is an error, never a guess.

PTX: https://docs.nvidia.com/cuda/parallel-thread-execution/"""

from __future__ import annotations

import re

PRELUDE = """
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "simcuda/grid.h"

void kernel_touch(void *at, size_t size, int write, int is_volatile);

#define REINTERPRET(name, to, from) \\
    static inline to name(from x) { to y; memcpy(&y, &x, sizeof y); return y; }
REINTERPRET(as_f16, _Float16, uint16_t)
REINTERPRET(of_f16, uint16_t, _Float16)
REINTERPRET(as_f32, float, uint32_t)
REINTERPRET(of_f32, uint32_t, float)
REINTERPRET(as_f64, double, uint64_t)
REINTERPRET(of_f64, uint64_t, double)

static inline uint16_t of_bf16(float x)
{
    const uint32_t bits = of_f32(x);
    return isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
/* cvt.rzi to an unsigned type: towards zero, clamped; 0 of a NaN */
static inline uint64_t clamped(double x, uint64_t most)
{
    return !(x > 0) ? 0 : x >= (double)most ? most : (uint64_t)x;
}
/* prmt: a digit of `which` names a byte; its highest bit asks for the byte's sign in all bits */
static inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t which)
{
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t word = 0;
    for (int k = 0; k < 4; k++, which >>= 4) {
        const uint8_t byte = both >> (which & 7) * 8;
        word |= (uint32_t)(which & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * k;
    }
    return word;
}
/* .ftz: a subnormal number is a zero of its sign */
static inline float flushed(float x)
{
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x;
}
static inline uint64_t inserted(uint64_t a, uint64_t into, unsigned at, unsigned count)
{
    const uint64_t mask = count >= 64 ? ~0ull : (1ull << count) - 1;
    return (into & ~(mask << at)) | (a & mask) << at;
}
"""

# What a count of the work is kept in.
COUNTERS = """
uint64_t kernel_slots, kernel_bytes, kernel_vector_bytes;
static inline void count_bytes(unsigned size)
{
    kernel_bytes += size;
    kernel_vector_bytes += size == 16 ? size : 0;
}
"""
# Issue slots where they are not one an instruction: roughly those of SASS, in which moves of registers vanish.
SLOTS = {"div.rn.f32": 9, "sqrt.rn.f32": 8, "div.rn.f64": 30, "sqrt.rn.f64": 30}
SLOTS |= dict.fromkeys(("mov.b32", "mov.b64", "mov.u32", "mov.f32", "cvt.u64.u32", "cvt.u32.u64"), 0)

WIDTH = {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)} | {
    "f16": 16,
    "f32": 32,
    "f64": 64,
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
REAL = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "rcp": "1 / {0}",
    "neg": "-{0}",
    "sqrt": "sqrt{f}({0})",
    "abs": "fabs{f}({0})",
    "fma": "fma{f}({0}, {1}, {2})",
    "max": "fmax{f}({0}, {1})",
    "min": "fmin{f}({0}, {1})",
}
APPROXIMATE = {
    "ex2": "exp2f({0})",
    "rcp": "1 / {0}",
}  # of the special function unit
INTEGER = {
    "add": "({u}){0} + ({u}){1}",
    "sub": "({u}){0} - ({u}){1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "neg": "-({u}){0}",
    "min": "{0} < {1} ? {0} : {1}",
    "max": "{0} > {1} ? {0} : {1}",
    "div": "{0} / {1}",
    "rem": "{0} % {1}",
}
PREDICATE = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "!{0}"}
PLACES = {"tid": "thread", "ctaid": "block", "ntid": "block_size", "nctaid": "grid_size"}
SILENT = (".version", ".target", ".address_size", ".pragma", ".maxntid", ".minnctapersm", ".loc", ".file")


class UnknownInstruction(Exception):
    """An instruction, operand or line that has no translation."""


def slots_of(operation: str) -> int:
    name, *_, kind = operation.split(".") if "." in operation else (operation, "")
    return SLOTS.get(operation, 2 if kind[1:] == "64" and name not in ("ld", "st") else 1)


def c_type(kind: str) -> str:
    return f"{'int' if kind[0] == 's' else 'uint'}{WIDTH[kind]}_t"


class Entry:
    """One entry's body: names that are known in it, and its statements."""

    def __init__(self, name: str, counted: bool) -> None:
        self.name, self.counted = name, counted
        self.widths: dict[str, int] = {}  # of registers, by name or by the letters of a numbered kind
        self.shared: dict[str, int] = {}
        self.shared_size = 0
        self.text: list[str] = []

    # ---- operands ----------------------------------------------------------------------------------------------------

    def raw(self, operand: str) -> str:
        """The operand as an unsigned number."""
        operand = operand.strip()
        if place := re.fullmatch(r"%(tid|ctaid|ntid|nctaid)\.([xyz])", operand):
            return f"sim_here->{PLACES[place[1]]}.{place[2]}"
        if operand[0] == "%" or operand in self.widths:
            return operand.lstrip("%")
        if operand[:2] in ("0f", "0F"):
            return f"0x{operand[2:]}u"
        if operand[:2] in ("0d", "0D"):
            return f"0x{operand[2:]}ull"
        if operand in self.shared:
            return f"{self.shared[operand]}u"
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", operand):
            return f"(uint64_t){operand}ll" if operand[0] == "-" else f"{operand}ull"
        raise UnknownInstruction(f"operand {operand!r}")

    def value(self, operand: str, kind: str) -> str:
        if kind == "pred":
            return self.raw(operand)
        if kind in ("f32", "f64"):
            return f"as_{kind}((uint{WIDTH[kind]}_t){self.raw(operand)})"
        return f"({c_type(kind)}){self.raw(operand)}"

    def width_of(self, register: str) -> int:
        name = register.lstrip("%")
        return self.widths.get(name) or self.widths[re.match("[a-z]+", name)[0]]

    def assign(self, register: str, kind: str, expression: str) -> str:
        """register = a value of that kind; a signed one keeps its sign in a wider register."""
        if kind == "pred":
            return f"{self.raw(register)} = {expression};"
        if kind in ("f32", "f64"):
            return f"{self.raw(register)} = of_{kind}({expression});"
        wide = "int64_t" if kind[0] == "s" else "uint64_t"
        return (
            f"{self.raw(register)} = (uint{self.width_of(register)}_t)({wide})({c_type(kind)})({expression});"
        )

    def address(self, operand: str, space: str) -> str:
        found = re.fullmatch(r"\[\s*([%$\w.]+)\s*\+?(-?\d*)\s*\]", operand.strip())
        if found is None:
            raise UnknownInstruction(f"address {operand!r}")
        base, offset = found[1], found[2] or "0"
        if space == "param":
            return f"(argument + {offset})"
        if space == "shared":
            return f"(shared_{self.name} + (uint32_t)({self.raw(base)} + ({offset})))"
        return f"((char *){self.raw(base)} + ({offset}))"

    # ---- instructions ------------------------------------------------------------------------------------------------

    def statement(self, operation: str, operands: list[str], line: int) -> str:
        name, *modifiers = operation.split(".")
        if name == "bra":
            return f"goto {operands[0].lstrip('$')};"
        if operation == "ret":
            return "return;"
        if operation == "bar.sync":
            return f"sim_barrier({line}, 0);"
        if operation == "bar.warp.sync":
            return f"sim_warp_barrier({line});"
        if operation == "bar.red.or.pred":
            return f"{self.raw(operands[0])} = sim_barrier({line}, {self.raw(operands[2])}) != 0;"
        if operation == "membar.gl":
            return "sim_fence();"
        if operation == "atom.global.add.u32":
            counter = f"(unsigned *){self.address(operands[1], 'global')}"
            return f"{self.raw(operands[0])} = sim_atomic_add({counter}, (unsigned){self.raw(operands[2])});"
        made = getattr(self, f"_{name}", None)
        if made:
            return made(modifiers, operands, line)
        return self._arithmetic(name, modifiers, operands)

    def _shfl(self, modifiers: list[str], operands: list[str], line: int) -> str:
        if modifiers[0] != "sync" or modifiers[1] not in ("down", "bfly"):
            raise UnknownInstruction(f"shfl.{'.'.join(modifiers)}")
        register, _, inside = operands[0].partition("|")
        exclusive = int(modifiers[1] == "bfly")
        by = self.raw(operands[2])
        text = (
            f"{self.raw(register)} = (uint32_t)sim_shuffle({line}, (unsigned){self.raw(operands[4])}, "
            f"{self.raw(operands[1])}, (unsigned){by}, {exclusive});"
        )
        if inside:
            text += f" {self.raw(inside)} = {exclusive} || sim_here->thread.x % 32 + {by} < 32;"
        return text

    def _moved(self, stores: bool, modifiers: list[str], operands: list[str]) -> str:
        space = next((s for s in ("global", "shared", "param") if s in modifiers), None)
        if space is None:
            raise UnknownInstruction(f"a generic access: {operands}")
        kind, count = modifiers[-1], int(next((m[1] for m in modifiers if m in ("v2", "v4")), "1"))
        where, what = operands if stores else reversed(operands)
        width = WIDTH[kind]
        text = f"char *at = {self.address(where, space)}; "
        if space != "param":
            text += f"kernel_touch(at, {width // 8 * count}, {int(stores)}, {int('volatile' in modifiers)}); "
        if space == "global" and self.counted:
            text += f"count_bytes({width // 8 * count}); "
        for i, register in enumerate(what.strip("{} ").split(",")):
            place = f"at + {i * width // 8}, &x, sizeof x"
            if stores:
                text += f"{{ uint{width}_t x = (uint{width}_t){self.raw(register)}; memcpy({place}); }} "
            else:
                as_kind = ("s" if kind[0] == "s" else "b") + str(width)
                place = f"&x, at + {i * width // 8}, sizeof x"
                put = self.assign(register.strip(), as_kind, "x")
                text += f"{{ uint{width}_t x; memcpy({place}); {put} }} "
        return f"{{ {text}}}"

    def _ld(self, modifiers: list[str], operands: list[str], _line: int) -> str:
        return self._moved(False, modifiers, operands)

    def _st(self, modifiers: list[str], operands: list[str], _line: int) -> str:
        return self._moved(True, modifiers, operands)

    def _mov(self, modifiers: list[str], operands: list[str], _line: int) -> str:
        to, source = operands
        if to[0] == "{":
            registers, width = self._parts(to, modifiers[-1])
            return " ".join(
                self.assign(register, f"b{width}", f"(uint64_t){self.raw(source)} >> {i * width}")
                for i, register in enumerate(registers)
            )
        if source[0] == "{":
            registers, width = self._parts(source, modifiers[-1])
            parts = (
                f"(uint64_t)(uint{width}_t){self.raw(r)} << {i * width}" for i, r in enumerate(registers)
            )
            return self.assign(to, f"b{width * len(registers)}", " | ".join(parts))
        return f"{self.raw(to)} = {self.raw(source)};"

    @staticmethod
    def _parts(packed: str, kind: str) -> tuple[list[str], int]:
        """Registers in braces, and the width of each."""
        registers = [x.strip() for x in packed.strip("{} ").split(",")]
        return registers, WIDTH[kind] // len(registers)

    def _selp(self, _modifiers: list[str], operands: list[str], _line: int) -> str:
        to, yes, no, chooser = map(self.raw, operands)
        return f"{to} = {chooser} ? {yes} : {no};"

    def _setp(self, modifiers: list[str], operands: list[str], _line: int) -> str:
        if len(modifiers) != 2:
            raise UnknownInstruction(f"setp.{'.'.join(modifiers)}")
        how, kind = modifiers
        x, y = (self.value(operand, kind) for operand in operands[1:])
        unordered = f"isunordered({x}, {y})"
        if kind not in ("f32", "f64"):
            test = f"{x} {COMPARISONS[how]} {y}"
        elif how in ("nan", "num"):
            test = unordered if how == "nan" else f"!{unordered}"
        elif how in COMPARISONS:
            test = f"!{unordered} && {x} {COMPARISONS[how]} {y}"
        else:
            test = f"{unordered} || {x} {COMPARISONS[how.removesuffix('u')]} {y}"
        return f"{self.raw(operands[0])} = {test};"

    def _cvt(self, modifiers: list[str], operands: list[str], _line: int) -> str:
        *how, to, source = modifiers
        if how == ["rn"] and to in ("f16x2", "bf16x2") and source == "f32":
            put = "of_f16((_Float16){})" if to == "f16x2" else "of_bf16({})"
            high, low = (put.format(self.value(x, source)) for x in operands[1:])
            return f"{self.raw(operands[0])} = (uint32_t){high} << 16 | {low};"
        register, x = operands
        if (to, source) == ("bf16", "f32") and how == ["rn"]:
            return f"{self.raw(register)} = of_bf16({self.value(x, source)});"
        if (to, source) == ("f32", "f16"):
            return self.assign(register, to, f"(float)as_f16((uint16_t){self.raw(x)})")
        if (to, source) == ("f16", "f32") and how == ["rn"]:
            return f"{self.raw(register)} = of_f16((_Float16){self.value(x, source)});"
        if to in ("f32", "f64") and how in ([], ["rn"]):
            return self.assign(
                register, to, f"({'float' if to == 'f32' else 'double'}){self.value(x, source)}"
            )
        if how == ["rzi"] and to[0] == "u" and source == "f32":
            return self.assign(register, to, f"clamped({self.value(x, source)}, ({c_type(to)})-1)")
        if not how and to[0] in "us" and source[0] in "us":
            return self.assign(register, to, self.value(x, source))
        raise UnknownInstruction(f"cvt.{'.'.join(modifiers)}")

    def _arithmetic(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        *how, kind = modifiers
        register, *arguments = operands
        if kind not in WIDTH and kind != "pred":
            raise UnknownInstruction(f"{name}.{'.'.join(modifiers)}")
        x = [self.value(argument, kind) for argument in arguments]
        unknown = UnknownInstruction(f"{name}.{'.'.join(modifiers)}")
        if name in APPROXIMATE and [*how, kind] == ["approx", "ftz", "f32"]:
            found = APPROXIMATE[name].format(f"flushed({x[0]})")
            return self.assign(register, kind, f"flushed({found})")
        if kind in ("f32", "f64"):
            if how not in ([], ["rn"]) or name not in REAL:
                raise unknown
            return self.assign(register, kind, REAL[name].format(*x, f="f" if kind == "f32" else ""))
        if kind == "pred":
            if name not in PREDICATE:
                raise unknown
            return self.assign(register, kind, PREDICATE[name].format(*x))
        width = WIDTH[kind]
        unsigned = f"uint{width}_t"
        if name == "mul" and how == ["wide"]:
            double = kind[0] + str(2 * width)
            return self.assign(register, double, f"({c_type(double)}){x[0]} * ({c_type(double)}){x[1]}")
        if name in ("mul", "mad") and how == ["lo"]:
            product = f"({unsigned}){x[0]} * ({unsigned}){x[1]}"
            return self.assign(register, kind, product + (f" + ({unsigned}){x[2]}" if name == "mad" else ""))
        if how:
            raise unknown
        if name == "prmt":
            return self.assign(register, kind, f"permuted({x[0]}, {x[1]}, {x[2]})")
        if name == "bfi":
            at, count = (f"(unsigned){self.raw(argument)}" for argument in arguments[2:])
            return self.assign(register, kind, f"inserted({x[0]}, {x[1]}, {at}, {count})")
        if name == "bfe" and kind[0] == "u":
            at, count = (f"(unsigned){self.raw(argument)}" for argument in arguments[1:])
            return self.assign(register, kind, f"({x[0]} >> {at}) & ((1ull << {count}) - 1)")
        if name == "bfe" and kind == "s32":
            at, count = (f"(unsigned){self.raw(argument)}" for argument in arguments[1:])
            top = f"(int64_t)((uint64_t)(int64_t){x[0]} << (64 - {at} - {count}))"
            return self.assign(register, kind, f"{count} ? {top} >> (64 - {count}) : 0")
        if name in ("shl", "shr"):
            by = f"(uint32_t){self.raw(arguments[1])}"
            if kind[0] == "s":
                return self.assign(register, kind, f"{x[0]} >> ({by} >= {width} ? {width - 1} : {by})")
            shifted = f"({unsigned}){x[0]} {'<<' if name == 'shl' else '>>'} {by}"
            return self.assign(register, kind, f"{by} >= {width} ? 0 : {shifted}")
        if name not in INTEGER:
            raise unknown
        return self.assign(register, kind, INTEGER[name].format(*x, u=unsigned))

    # ---- lines -------------------------------------------------------------------------------------------------------

    def declare(self, line: str) -> bool:
        if found := re.match(r"\.reg \.(\w+)\s+%?(\w+?)(?:<(\d+)>)?;", line):
            kind, name, count = found.groups()
            width = 1 if kind == "pred" else WIDTH[kind]
            self.widths[name] = width
            c = "bool" if kind == "pred" else f"uint{width}_t"
            names = ", ".join(f"{name}{k} = 0" for k in range(int(count))) if count else name
            self.text.append(f"{c} {names};")
            return True
        if found := re.match(r"\.shared \.align (\d+) \.\w+ ([\w$]+)(?:\[(\d+)\])?;", line):
            alignment = int(found[1])
            self.shared[found[2]] = at = -(-self.shared_size // alignment) * alignment
            self.shared_size = at + int(found[3] or 1)
            return True
        return False

    def instruction(self, line: str, number: int) -> None:
        found = re.fullmatch(r"(?:@(!?)%(\w+)\s+)?([\w.]+)\s*(.*);", line)
        if found is None:
            raise UnknownInstruction(line)
        negated, predicate, operation, rest = found.groups()
        operands = [x.strip() for x in re.split(r",(?![^{]*\})", rest)] if rest else []
        made = self.statement(operation, operands, number)
        if self.counted and (slots := slots_of(operation)):
            self.text.append(f"kernel_slots += {slots};")
        self.text.append(f'#line {number} "kernels.ptx"')
        self.text.append(f"if ({negated}{predicate}) {{ {made} }}" if predicate else made)

    def function(self) -> str:
        short = self.name.removeprefix("memopt_")
        return "\n".join(
            [
                f"static char shared_{self.name}[{max(self.shared_size, 1)}] "
                '__attribute__((section("sim_shared"), aligned(16)));',
                f"void kernel_{short}(const void *given);",
                f"void kernel_{short}(const void *given)",
                "{",
                "char *const argument = (char *)given;",
                *self.text,
                "}",
            ]
        )


def to_c(ptx: str, counted: bool = False) -> str:
    """The C text of a PTX module. counted: it adds the issue slots that it takes, those of instructions whose predicate
    is false too, to kernel_slots, and bytes of global memory to kernel_bytes.

    Raises:
        UnknownInstruction: Something in it has no translation.
    """
    ptx = re.sub(r"//[^\n]*", "", ptx)
    # An asm statement's scope, on one line.
    ptx = re.sub(r"^\s*\{ (\.reg [^\n]*?;) ([^\n]*;) \}", r"{\n\1\n\2\n}", ptx, flags=re.M)
    functions: list[str] = []
    entry: Entry | None = None
    depth = 0
    lines = iter(enumerate(ptx.splitlines(), 1))
    for number, line in lines:
        line = line.strip()
        if not line or line.startswith(SILENT):
            continue
        if found := re.match(r"\.visible \.entry (\w+)\(", line):
            entry, depth = Entry(found[1], counted), 0
        elif entry and depth == 0 and (line.startswith(".param") or line == ")"):
            continue
        elif entry and line in "{}":
            depth += 1 if line == "{" else -1
            if depth == 0:
                functions.append(entry.function())
                entry = None
            elif (depth, line) != (1, "{"):
                entry.text.append(line)
        elif entry and entry.declare(line):
            continue
        elif entry and (label := re.fullmatch(r"\$(\w+):", line)):
            entry.text.append(f"{label[1]}:;")
        elif entry:
            while not line.endswith(";"):
                line += " " + next(lines)[1].strip()
            entry.instruction(line, number)
        else:
            raise UnknownInstruction(line)
    return PRELUDE + counted * COUNTERS + "\n".join(functions) + "\n"
