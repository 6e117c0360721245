"""Follows the machine code of an NVIDIA kernel through one program, to count what a warp issues
where there is no GPU: loops run as often as the kernel's arguments say.

Only integers, predicates and addresses are computed, for thread 0; loads are read from the memory
that the launch was given. Whatever else gives a number leaves it unknown. A branch forwards on an
unknown one is taken, as what it skips is the rare case of a root or a quotient; one backwards
raises. Numbers are 32 bits without a sign.
"""

import ctypes
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

MASK = 0xFFFFFFFF
WIDE_MASK = MASK << 32 | MASK
MOST_STEPS = 5_000_000
STACK_AT = 0x28  # in constant bank 0
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*([^;]*);")
Value = int | None


class Instruction(NamedTuple):
    """One line of machine code."""

    place: int  # bytes from the kernel's start
    guard: str  # a predicate, "" for none
    name: str  # with its modifiers
    operands: list[str]

    @property
    def kind(self) -> str:
        """Its name without modifiers."""
        return self.name.split(".")[0]


@dataclass
class Code:
    """Machine code of a kernel as nvdisasm prints it."""

    instructions: list[Instruction]
    labels: dict[str, int]  # numbers of instructions
    places: dict[int, int]
    constants: bytes  # of bank 2: tables of branches

    @classmethod
    def read(cls, text: str, name: str) -> "Code":
        """Of the kernel `name`."""
        body = text[text.index(f"\n{name}:") :]
        body = body.split("//---------------------")[0]
        found = list[Instruction]()
        labels = dict[str, int]()
        for line in body.splitlines():
            if label := re.match(r"^(\.L_x_\d+):", line):
                labels[label[1]] = len(found)
            elif match := LINE.match(line):
                operands = [one.strip() for one in match[4].split(",")] if match[4] else []
                found.append(Instruction(int(match[1], 16), match[2] or "", match[3], operands))
        places = {one.place: number for number, one in enumerate(found)}
        table = re.search(rf"\n\.nv\.constant2\.{name}:\n((?:\s+/\*.*\n)+)", text)
        numbers = re.findall(r"0x([0-9a-f]{2})\b", table[1]) if table else []
        return cls(found, labels, places, bytes(int(one, 16) for one in numbers))


class Given(NamedTuple):
    """What a program is given."""

    arguments: bytes
    arguments_at: int  # where they begin in constant bank 0
    grid: tuple[int, int, int]
    memory: list[tuple[int, int]]  # (first byte, bytes) that may be read


@dataclass
class Program:
    """A program that runs; `counts` has what thread 0's warp issued, by kind."""

    code: Code
    given: Given
    number: tuple[int, int, int]  # in the grid
    registers: dict[str, Value] = field(default_factory=dict)
    stack: dict[int, Value] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> Counter[str]:
        """Up to its end."""
        at: int | None = 0
        while at is not None:
            one = self.code.instructions[at]
            self.counts[one.kind] += 1
            at = self.step(one, at)
            if self.counts.total() > MOST_STEPS:
                raise RuntimeError(f"{self.number} does not end: at {one}")
        return self.counts

    def step(self, one: Instruction, at: int) -> int | None:
        """Number of the instruction that follows; None: the program ends."""
        guard = self.predicate(one.guard) if one.guard else 1
        if one.kind in BRANCHES:
            return self.branch(one, at, guard)
        if guard is None:
            self.forget(one)
        elif guard:
            operation = OPERATIONS.get(one.kind)
            if operation is None:
                self.forget(one)
            else:
                operation(self, one)
        return at + 1

    def branch(self, one: Instruction, at: int, guard: Value) -> int | None:
        """The same of what may go elsewhere."""
        if one.name.startswith(("BRA.DIV", "WARPSYNC")):
            return at + 1
        for extra in one.operands[:-1] if one.kind == "BRA" else []:
            value = self.predicate(extra)
            guard = None if None in (guard, value) else int(guard and value)  # type: ignore[arg-type]
        if guard == 0:
            return at + 1
        if one.kind == "EXIT":
            return None
        if one.kind in ("BRX", "RET"):
            place = self.value(one.operands[0].split()[0])
            if place is None:
                raise RuntimeError(f"it goes to what is not known: {one}")
            return self.code.places[place]
        label = re.search(r"\.L_x_\d+", one.operands[-1])
        if label is None:
            raise RuntimeError(f"no place to go: {one}")
        target = self.code.labels[label[0]]
        if guard is None and target <= at:
            raise RuntimeError(f"a loop depends on what is not known: {one}")
        return target

    def forget(self, one: Instruction) -> None:
        """What an instruction gives is not known."""
        if one.kind in NO_RESULT:
            return
        for name in one.operands[:2]:
            if re.fullmatch(r"U?P\d", name):
                self.registers[name] = None
        for name in one.operands[: 1 + bool(re.fullmatch(r"U?P[\dT]", one.operands[0]))]:
            if name.startswith(("R", "UR")) and name[-1].isdigit():
                for place in range(4 if ".128" in one.name else 2 if is_wide(one) else 1):
                    self.registers[following(name, place)] = None

    def predicate(self, name: str) -> Value:
        """0 or 1."""
        value = 1 if name.strip("!") in ("PT", "UPT") else self.registers.get(name.strip("!"))
        return value if value is None or name[0] != "!" else 1 - value

    def value(self, text: str) -> Value:
        """Of an operand of 32 bits."""
        name = text.removesuffix(".reuse")
        if name[0] in "-~|":
            inner = self.value(name[1:].rstrip("|"))
            if inner is None:
                return None
            if name[0] == "|":
                return inner & 0x7FFFFFFF
            return (-inner if name[0] == "-" else ~inner) & MASK
        if name.startswith(("RZ", "URZ", "SRZ")):
            return 0
        if name[0] in "RU":
            return self.registers.get(name.split(".")[0])
        if name.startswith("c["):
            return self.constant(name)
        return number_of(name)

    def constant(self, name: str, size: int = 4) -> Value:
        """From a constant bank."""
        inner = re.match(r"c\[(\w+)\]\[(?:(U?R\w+)\+?)?(-?\w+)?\]", name)
        if inner is None:
            return None
        base = self.value(inner[2]) if inner[2] else 0
        if base is None:
            return None
        place = base + (int(inner[3], 16) if inner[3] else 0)
        if inner[1] == "0x2":
            return int.from_bytes(self.code.constants[place : place + size], "little")
        if place == STACK_AT:
            return 0
        if 0xC <= place < 0x18:
            return self.given.grid[(place - 0xC) // 4]
        place -= self.given.arguments_at
        held = self.given.arguments[place : place + size] if place >= 0 else b""
        return int.from_bytes(held, "little") if len(held) == size else None

    def wide(self, text: str) -> Value:
        """Of an operand of 64 bits."""
        if text.startswith("c["):
            return self.constant(text, 8)
        if text[0] in "-~":
            inner = self.wide(text[1:])
            return None if inner is None else (-inner if text[0] == "-" else ~inner) & WIDE_MASK
        if text.startswith(("RZ", "URZ")):
            return 0
        if text[0] in "RU":
            name = text.removesuffix(".reuse").split(".")[0]
            low, high = (self.registers.get(following(name, place)) for place in (0, 1))
            return None if low is None or high is None else high << 32 | low
        return number_of(text)

    def put(self, name: str, value: Value) -> None:
        """To a register or predicate."""
        if name.strip("!") not in ("RZ", "URZ", "PT", "UPT"):
            self.registers[name] = value if value is None else value & MASK

    def put_wide(self, name: str, value: Value) -> None:
        """To two registers."""
        if name in ("RZ", "URZ"):
            return
        self.put(name, value)
        self.put(following(name, 1), None if value is None else value >> 32)


BRANCHES = {"BRA", "BRX", "EXIT", "CALL", "RET", "WARPSYNC"}
NO_RESULT = {"BSSY", "BSYNC", "BREAK", "NOP", "BAR", "DEPBAR", "LDGDEPBAR", "FENCE", "MEMBAR"}
NO_RESULT |= {"WARPGROUP", "STG", "STS", "STSM", "LDGSTS", "RED", "HGMMA"}


def following(name: str, places: int) -> str:
    """Name of the register so many places on."""
    if name in ("RZ", "URZ"):
        return name
    found = re.match(r"(U?R)(\d+)", name)
    if found is None:
        raise ValueError(f"no register: {name}")
    return f"{found[1]}{int(found[2]) + places}"


def is_wide(one: Instruction) -> bool:
    """Whether it gives 64 bits."""
    return bool(re.search(r"\.64|\.WIDE|\.F64|\.U64", one.name)) or one.kind in (
        "DADD",
        "DMUL",
        "DFMA",
        "CS2R",
    )


def number_of(text: str) -> Value:
    """Bits of a number in the code."""
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        return int(text, 16) & WIDE_MASK
    try:
        return struct.unpack("<I", struct.pack("<f", float(text)))[0]
    except (ValueError, OverflowError):
        return None


def signed(value: int) -> int:
    """The number with a sign whose bits they are."""
    return value - (1 << 32) if value >> 31 else value


def float_of(bits: int) -> float:
    """The float32 whose bits they are."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(value: float) -> int:
    """Of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def split_predicates(one: Instruction) -> tuple[list[str], str, list[str]]:
    """(predicates that are written, register that is, what is read)."""
    at = 0
    operands = one.operands
    target = operands[0]
    written = list[str]()
    at = 1
    while at < len(operands) and re.fullmatch(r"U?P[\dT]", operands[at]):
        written.append(operands[at])
        at += 1
    return written, target, operands[at:]


def move(program: Program, one: Instruction) -> None:
    """MOV, and what reads a constant."""
    source = one.operands[-1]
    if one.kind in ("LDC", "ULDC"):
        if ".64" in one.name:
            program.put_wide(one.operands[0], program.constant(source, 8))
        else:
            size = 1 if "8" in one.name else 2 if "16" in one.name else 4
            program.put(one.operands[0], program.constant(source, size))
    elif one.kind == "CS2R":
        (program.put if ".32" in one.name else program.put_wide)(
            one.operands[0], 0 if source == "SRZ" else None
        )
    else:
        program.put(one.operands[0], program.value(one.operands[1]))


def special(program: Program, one: Instruction) -> None:
    """A register of the machine: the program's number, and thread 0."""
    name = one.operands[1]
    axis = re.match(r"SR_CTAID\.([XYZ])", name)
    program.put(
        one.operands[0],
        program.number["XYZ".index(axis[1])]
        if axis
        else 0
        if "TID" in name or "LANEID" in name
        else None,
    )


def add(program: Program, one: Instruction) -> None:
    """IADD3, VIADD: sums with carries."""
    written, target, given = split_predicates(one)
    values = [program.value(name) for name in given[:3]]
    carries = [program.predicate(name) for name in given[3:]] if ".X" in one.name else []
    if None in values or None in carries:
        total = None
    else:
        total = sum(values) + sum(carries)  # type: ignore[arg-type]
        # -x is ~x + 1, which carries where x is 0
        total += sum(
            1 << 32
            for name, value in zip(given, values, strict=False)
            if name[0] == "-" and value == 0
        )
    program.put(target, total)
    for place, name in enumerate(written):
        program.put(name, None if total is None else int(total >> 32 > place))


def multiply(program: Program, one: Instruction) -> None:
    """IMAD in all its forms."""
    written, target, given = split_predicates(one)
    if ".MOV" in one.name:
        program.put(target, program.value(given[2]))
        return
    unsigned = ".U32" in one.name
    factors = [program.value(name) for name in given[:2]]
    wide = ".WIDE" in one.name or ".HI" in one.name
    third = program.wide(given[2]) if wide else program.value(given[2])
    carry = program.predicate(given[3]) if ".X" in one.name else 0
    if None in (*factors, third, carry):
        total = None
    else:
        one_factor, other = factors if unsigned or not wide else map(signed, factors)  # type: ignore[arg-type]
        total = one_factor * other + third + carry  # type: ignore[operator]
    if ".WIDE" in one.name:
        for name in written:
            program.put(name, None if total is None else int(total >> 64 > 0))
        program.put_wide(target, total)
    else:
        program.put(target, total >> 32 if ".HI" in one.name and total is not None else total)


def lea(program: Program, one: Instruction) -> None:
    """(a << shift) + b, or its upper half."""
    written, target, given = split_predicates(one)
    values = [program.value(name) for name in given if not re.fullmatch(r"!?U?P[\dT]", name)]
    carry = program.predicate(given[-1]) if ".X" in one.name else 0
    if None in values or carry is None:
        total = None
    elif ".HI" not in one.name:
        total = ((values[0] << values[2]) & MASK) + values[1]  # type: ignore[operator]
    elif ".SX32" in one.name:
        whole = signed(values[0]) << values[2]  # type: ignore[operator,arg-type]
        total = (whole >> 32 & MASK) + values[1] + carry  # type: ignore[operator]
    else:
        whole = (values[2] << 32 | values[0]) << values[3]  # type: ignore[operator]
        total = (whole >> 32 & MASK) + values[1] + carry  # type: ignore[operator]
    program.put(target, total)
    for name in written:
        program.put(name, None if total is None else int(total >> 32 > 0))


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def combine(name: str, one: Value, other: Value) -> Value:
    """AND, OR or XOR of predicates, of which one may be unknown."""
    if name == "AND":
        return 0 if 0 in (one, other) else None if None in (one, other) else 1
    if name == "OR":
        return 1 if 1 in (one, other) else None if None in (one, other) else 0
    return None if one is None or other is None else one ^ other


def compare(program: Program, one: Instruction) -> None:
    """ISETP: two predicates."""
    parts = one.name.split(".")
    first, second, left, right, *more = one.operands
    a, b = program.value(left), program.value(right)
    result: Value = None
    if a is not None and b is not None:
        if "U32" not in parts:
            a, b = signed(a), signed(b)
        result = int(COMPARISONS[parts[1]](a, b))
        if "EX" in parts:
            low = program.predicate(more[1])
            if parts[1] in ("EQ", "NE"):
                result = combine("AND" if parts[1] == "EQ" else "OR", result, low)
            elif a == b:
                result = low
    how = next(part for part in parts if part in ("AND", "OR", "XOR"))
    beside = program.predicate(more[0])
    program.put(first, combine(how, result, beside))
    program.put(second, combine(how, None if result is None else 1 - result, beside))


def lookup(program: Program, one: Instruction) -> None:
    """LOP3: any function of three bits."""
    operands = one.operands
    written = operands[0] if re.fullmatch(r"U?P[\dT]", operands[0]) else ""
    target, *given = operands[1:] if written else operands
    values = [program.value(name) for name in given[:3]]
    table = number_of(given[3]) or 0
    result: Value = 0
    if None in values:
        masks = values[:3] if table == 0x80 else values[:2] if table == 0xC0 else []
        result = 0 if 0 in masks else None
    else:
        for index in range(8):
            if table >> index & 1:
                term = MASK
                for value, bit in zip(values, (4, 2, 1), strict=True):
                    term &= value if index & bit else ~value  # type: ignore[operator]
                result |= term  # type: ignore[operator]
    program.put(target, result)
    if written:
        program.put(written, None if result is None else int(result != 0))


def lookup_predicates(program: Program, one: Instruction) -> None:
    """PLOP3: the same of predicates."""
    first, second, *given = one.operands
    values = [program.predicate(name) for name in given[:3]]
    for target, text in ((first, given[3]), (second, given[4])):
        table = number_of(text) or 0
        found = {
            table >> (a << 2 | b << 1 | c) & 1
            for a in ([values[0]] if values[0] is not None else [0, 1])
            for b in ([values[1]] if values[1] is not None else [0, 1])
            for c in ([values[2]] if values[2] is not None else [0, 1])
        }
        program.put(target, found.pop() if len(found) == 1 else None)


def shift(program: Program, one: Instruction) -> None:
    """SHF: of two registers as 64 bits."""
    target, low_name, by_name, high_name = one.operands
    low, by, high = map(program.value, (low_name, by_name, high_name))
    if by is None or (low is None and high is None):
        program.put(target, None)
        return
    upper = ".HI" in one.name
    if ".R" in one.name:
        if upper:
            source = None if high is None else signed(high) if ".S" in one.name else high
            program.put(target, None if source is None else source >> min(by, 63))
        elif low is None or high is None:
            program.put(target, None)
        else:
            program.put(target, (high << 32 | low) >> min(by, 63))
    elif low is None:
        program.put(target, None)
    else:
        total = ((high or 0) << 32 | low) << min(by, 63)
        program.put(target, total >> 32 if upper else low << min(by, 63))


def select(program: Program, one: Instruction) -> None:
    """SEL."""
    target, first, second, which = one.operands
    known = program.predicate(which)
    program.put(target, None if known is None else program.value(first if known else second))


def least(program: Program, one: Instruction) -> None:
    """VIMNMX, and VIADDMNMX of a sum."""
    target, *given, which = one.operands
    values = [program.value(name) for name in given]
    if one.kind == "VIADDMNMX" and None not in values:
        values = [(values[0] + values[1]) & MASK, values[2]]  # type: ignore[operator]
    smaller = program.predicate(which)
    if None in values or smaller is None:
        program.put(target, None)
    else:
        order = (lambda value: value) if ".U32" in one.name else signed
        program.put(target, (min if smaller else max)(values, key=order))  # type: ignore[type-var,arg-type]


def load(program: Program, one: Instruction) -> None:
    """LDG, from the memory of the launch."""
    target, source = one.operands[-2:]
    inner = re.search(r"\[(?:(U?R\d+)(?:\.64)?)?(?:\+?(UR\d+))?\+?(-?0x[0-9a-f]+)?\]$", source)
    base = program.wide(inner[1]) if inner and inner[1] else None
    more = program.wide(inner[2]) if inner and inner[2] else 0
    program.forget(one)
    if inner is None or base is None or more is None:
        return
    place = base + more + (int(inner[3], 16) if inner[3] else 0)
    size = next(
        (bits // 8 for bits in (128, 64, 16, 8) if re.search(rf"\.[US]?{bits}\b", one.name)), 4
    )
    if not any(
        first <= place and place + size <= first + count for first, count in program.given.memory
    ):
        return
    held = ctypes.string_at(place, size)
    for word in range(0, size, 4):
        signs = f".S{8 * size}" in one.name
        value = int.from_bytes(held[word : word + 4], "little", signed=signs)
        program.put(following(target, word // 4), value)


def spill(program: Program, one: Instruction) -> None:
    """STL and LDL: a thread's own memory, which takes what finds no register."""
    text = one.operands[0 if one.kind == "STL" else 1]
    inner = re.match(r"\[(R\d+)\+?(-?0x[0-9a-f]+)?\]", text)
    base = program.registers.get(inner[1]) if inner else None
    words = 4 if ".128" in one.name else 2 if ".64" in one.name else 1
    if one.kind == "LDL":
        program.forget(one)
    if inner is None or base is None:
        return
    place = base + (int(inner[2], 16) if inner[2] else 0)
    for word in range(words):
        if one.kind == "STL":
            value = program.value(following(one.operands[1].removesuffix(".reuse"), word))
            program.stack[place + 4 * word] = value
        else:
            program.put(following(one.operands[0], word), program.stack.get(place + 4 * word))


def permute(program: Program, one: Instruction) -> None:
    """PRMT: bytes of two registers."""
    target, *names = one.operands
    low, which, high = map(program.value, names)
    if low is None or which is None or high is None:
        program.put(target, None)
        return
    held = (high << 32 | low).to_bytes(8, "little")
    result = 0
    for place in range(4):
        nibble = which >> 4 * place & 15
        value = held[nibble & 7]
        result |= (0xFF * (value >> 7) if nibble & 8 else value) << 8 * place
    program.put(target, result)


def convert(program: Program, one: Instruction) -> None:
    """I2F, F2I and the reciprocal, of 32 bits: what a division of integers takes."""
    target, source = one.operands[:2]
    value = program.value(source)
    if value is None or is_wide(one) or "64" in one.name:
        program.forget(one)
    elif one.kind == "F2I":
        program.put(target, int(float_of(value)))
    elif one.kind == "MUFU":
        known = ".RCP" in one.name and "64" not in one.name and float_of(value) != 0
        program.put(target, bits_of(1.0 / float_of(value)) if known else None)
    else:
        exact = (
            value
            if ".U32" in one.name or "U16" in one.name or one.name == "I2F.RP"
            else signed(value)
        )
        bits = bits_of(float(exact))
        program.put(target, bits + (".RP" in one.name and float_of(bits) < exact))


def absolute(program: Program, one: Instruction) -> None:
    """IABS."""
    value = program.value(one.operands[1])
    program.put(one.operands[0], None if value is None else abs(signed(value)))


def extend(program: Program, one: Instruction) -> None:
    """SGXT: the lowest bits, with a sign or without."""
    value, bits = map(program.value, one.operands[1:3])
    if value is None or bits is None:
        program.put(one.operands[0], None)
        return
    lowest = value & ((1 << bits) - 1)
    negative = ".U32" not in one.name and lowest >> (bits - 1) & 1
    program.put(one.operands[0], lowest - (1 << bits) if negative else lowest)


def pack(program: Program, one: Instruction) -> None:
    """P2R: predicates as bits."""
    target, _, beside, mask_name = one.operands
    base, mask = program.value(beside), program.value(mask_name) or 0
    bits = [program.predicate(f"P{place}") if mask >> place & 1 else 0 for place in range(7)]
    if base is None or None in bits:
        program.put(target, None)
    else:
        own = sum(bit << place for place, bit in enumerate(bits) if bit is not None)
        program.put(target, base & ~mask | own)


def unpack(program: Program, one: Instruction) -> None:
    """R2P: bits as predicates."""
    value, mask = map(program.value, one.operands[1:3])
    for place in range(7):
        if mask is not None and mask >> place & 1:
            program.put(f"P{place}", None if value is None else value >> place & 1)


def vote(program: Program, one: Instruction) -> None:
    """Of a warp whose threads agree."""
    program.forget(one)
    known = program.predicate(one.operands[-1])
    for name in one.operands[:-1]:
        if re.fullmatch(r"U?P\d", name):
            program.put(name, known)


OPERATIONS: dict[str, Callable[[Program, Instruction], None]] = {
    **dict.fromkeys(["MOV", "UMOV", "R2UR", "LDC", "ULDC", "CS2R"], move),
    **dict.fromkeys(["S2R", "S2UR"], special),
    **dict.fromkeys(["IADD3", "UIADD3", "VIADD"], add),
    **dict.fromkeys(["IMAD", "UIMAD"], multiply),
    **dict.fromkeys(["LEA", "ULEA"], lea),
    **dict.fromkeys(["ISETP", "UISETP"], compare),
    **dict.fromkeys(["LOP3", "ULOP3"], lookup),
    **dict.fromkeys(["PLOP3", "UPLOP3"], lookup_predicates),
    **dict.fromkeys(["SHF", "USHF"], shift),
    **dict.fromkeys(["SEL", "USEL"], select),
    **dict.fromkeys(["VIMNMX", "VIADDMNMX", "IMNMX", "UIMNMX"], least),
    **dict.fromkeys(["PRMT", "UPRMT"], permute),
    **dict.fromkeys(["I2F", "I2FP", "F2I", "MUFU"], convert),
    **dict.fromkeys(["SGXT", "USGXT"], extend),
    **dict.fromkeys(["VOTE", "VOTEU"], vote),
    **dict.fromkeys(["STL", "LDL"], spill),
    "LDG": load,
    "IABS": absolute,
    "P2R": pack,
    "R2P": unpack,
}
