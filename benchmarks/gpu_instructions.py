"""Warp instructions per training image of every kernel that a training batch launches, counted
without a GPU:

    python -m benchmarks.gpu_instructions [--architecture 90] [--results FOLDER]

Kernels are compiled ahead of time, and benchmarks/sass.py follows their machine code through
programs of one network with the arguments of the engine's own launches; those of the first, middle
and last image, or tile, stand for all. Networks are E10's: 8 channels, conv_light in three slots,
batches of 32, bfloat16. A process of its own, as Triton must not interpret here.
"""

import itertools
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs

from benchmarks import records
from benchmarks.compiled_kernels import SHARED, Launch, Pass, compiled_for, facts_of
from benchmarks.sass import Code, Given, Program
from esper_soa.nets.engines.gpu.tile_sizes import RESERVED

IMAGES = 32  # of a batch
# where arguments begin in constant bank 0
ARGUMENTS_AT = {80: 0x160, 86: 0x160, 90: 0x210}
REGISTERS = 65536  # of a multiprocessor
MOST_WARPS = 64
FORMATS = {"i1": "b", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I"}
FORMATS |= {"i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
POINTER = "*"


class Argument(NamedTuple):
    """What a kernel is given that is not known when it is compiled."""

    value: object
    kind: str

    @property
    def format(self) -> str:
        """For struct."""
        return "<" + ("Q" if self.kind[0] == POINTER else FORMATS[self.kind])

    @property
    def number(self) -> object:
        """An address or a number."""
        return self.value.data_ptr() if isinstance(self.value, Tensor) else self.value


def arguments_of(value: object, kind: object) -> Iterator[Argument]:
    """All within nested tuples."""
    if isinstance(kind, tuple | list) and isinstance(value, tuple | list):
        for inner, own in zip(value, kind, strict=True):
            yield from arguments_of(inner, own)
    elif isinstance(kind, str) and kind != "constexpr":
        yield Argument(value, kind)


def packed(arguments: list[Argument]) -> bytes:
    """As they lie in constant memory."""
    found = b""
    for one in arguments:
        found += b"\0" * (-len(found) % struct.calcsize(one.format))
        found += struct.pack(one.format, one.number)
    return found


def code_of(launch: Launch) -> Code:
    """Its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Code.read(text, launch.function.fn.__name__)


def issued(launch: Launch, architecture: int) -> Counter[str]:
    """Instructions of all warps of all programs of one network, by kind."""
    given = launch.arguments
    signature = launch.kernel.src.signature
    known = [one for name, kind in signature.items() for one in arguments_of(given[name], kind)]
    tensors = [one.value.untyped_storage() for one in known if isinstance(one.value, Tensor)]
    memory = [(one.data_ptr(), one.nbytes()) for one in tensors]
    nets, rows, columns = (*launch.grid, 1, 1)[:3]
    code = code_of(launch)
    grid = nets, rows, columns
    program = Given(packed(known), ARGUMENTS_AT[architecture], grid, memory)
    sample = sorted({0, rows // 2, rows - 1})
    total = Counter[str]()
    for row, column in itertools.product(sample, range(columns)):
        total += Program(code, program, (0, row, column)).run()
    share = rows / len(sample) * launch.kernel.metadata.num_warps
    return Counter({kind: round(count * share) for kind, count in total.items()})


def warps_of(launch: Launch, architecture: int) -> int:
    """Warps of a kernel that a multiprocessor holds at once."""
    facts = facts_of(launch.kernel)
    warps = int(facts["warps"])  # type: ignore[call-overload]
    registers = -(-int(facts["registers"]) // 8) * 8  # type: ignore[call-overload]
    room = REGISTERS // (registers * 32 * warps)
    shared = int(facts["shared"]) + RESERVED  # type: ignore[call-overload]
    room = min(room, (SHARED[architecture] + RESERVED) // shared)
    return min(MOST_WARPS, warps * room)


def table(architecture: int) -> list[dict[str, object]]:
    """By kernel, the most instructions first."""
    with compiled_for(architecture) as launches:
        passes = Pass("baseline", torch.bfloat16)
        del launches[:]  # births
        passes.train()
    found = dict[str, Counter[str]]()
    warps = dict[str, int]()
    for one in launches:
        name = one.function.fn.__name__
        found.setdefault(name, Counter()).update(issued(one, architecture))
        warps[name] = min(warps.get(name, MOST_WARPS), warps_of(one, architecture))
    order = sorted(found, key=lambda name: -found[name].total())
    return [
        {
            "kernel": name,
            "instructions": round(found[name].total() / IMAGES),
            "barriers": round(found[name]["BAR"] / IMAGES),
            "products": round((found[name]["HMMA"] + found[name]["HGMMA"]) / IMAGES),
            "loads": round((found[name]["LDG"] + found[name]["LDGSTS"]) / IMAGES),
            "warps": warps[name],
        }
        for name in order
    ]


def main() -> None:
    parser = records.command_line(__doc__)
    parser.add_argument("--architecture", type=int, default=90, choices=ARGUMENTS_AT)
    asked = parser.parse_args()
    records.check_folder(asked.results)
    rows = table(asked.architecture)
    total = sum(int(row["instructions"]) for row in rows)  # type: ignore[call-overload]
    for row in rows:
        print("{kernel:24} {instructions:9,} {barriers:7,} {products:7,} {warps:5}".format(**row))
    print(f"{'all':24} {total:9,} warp instructions per training image")
    if asked.results:
        record = records.origin("gpu_instructions", torch.device("cpu"))
        record |= {"architecture": asked.architecture, "total": total, "kernels": rows}
        records.keep(record, asked.results, "gpu_instructions")


if __name__ == "__main__":
    main()
