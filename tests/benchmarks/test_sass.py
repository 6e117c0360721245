"""Machine code is followed as a GPU would run it: loops, tables of branches, carries, and what is
not known.
"""

import ctypes

import pytest

from benchmarks.sass import Code, Given, Program


def listing(*lines: str, table: str = "") -> str:
    """As nvdisasm prints a kernel `k`; lines that begin with a dot are labels."""
    found = [f"\n.nv.constant2.k:\n        /*0000*/ \t.byte\t{table}\n" if table else "", "\nk:"]
    place = 0
    for line in lines:
        if line[0] == ".":
            found.append(line)
        else:
            found.append(f"        /*{place:04x}*/                   {line} ;")
            place += 16
    return "\n".join(found)


def counts(text: str, arguments: bytes = b"", memory: list | None = None) -> dict[str, int]:
    """What a program issues, by kind."""
    given = Given(arguments, 0x210, (2, 3, 1), memory or [])
    return dict(Program(Code.read(text, "k"), given, (0, 2, 0)).run())


def test_a_loop_runs_as_often_as_the_memory_of_its_launch_says() -> None:
    number = ctypes.c_int(5)
    place = ctypes.addressof(number)
    text = listing(
        "LDC.64 R2, c[0x0][0x210]",
        "LDG.E R4, desc[UR4][R2.64]",
        "MOV R0, RZ",
        ".L_x_0:",
        "VIADD R0, R0, 0x1",
        "FADD R9, R9, R8",
        "ISETP.GE.AND P0, PT, R0, R4, PT",
        "@!P0 BRA `(.L_x_0)",
        "EXIT",
    )
    found = counts(text, place.to_bytes(8, "little"), [(place, 4)])
    once = {"LDC": 1, "LDG": 1, "MOV": 1, "EXIT": 1}
    assert found == once | {"VIADD": 5, "FADD": 5, "ISETP": 5, "BRA": 5}


def test_a_loop_over_what_is_not_known_raises_and_a_rare_case_is_skipped() -> None:
    loop = [".L_x_0:", "FSETP.LT.AND P0, PT, R2, R3, PT", "@P0 BRA `(.L_x_0)", "EXIT"]
    with pytest.raises(RuntimeError, match="a loop depends on what is not known"):
        counts(listing(*loop))
    rare = ["FSETP.LT.AND P0, PT, R2, R3, PT", "@P0 BRA `(.L_x_0)", "NOP", ".L_x_0:", "EXIT"]
    assert counts(listing(*rare)) == {"FSETP": 1, "BRA": 1, "EXIT": 1}


def test_tables_of_branches_and_numbers_of_64_bits() -> None:
    """(2^32 - 1) + 2 carries, so that the second branch of the table is taken."""
    text = listing(
        "MOV R0, 0xffffffff",
        "IADD3 R1, P1, R0, 0x2, RZ",
        "IADD3.X R2, RZ, RZ, RZ, P1, !PT",
        "LEA R3, R2, RZ, 0x2",
        "LDC R4, c[0x2][R3]",
        "BRX R4 -0x60",
        "NOP",
        "EXIT",
        table="0x60, 0x00, 0x00, 0x00, 0x70, 0x00, 0x00, 0x00",
    )
    assert counts(text) == {"MOV": 1, "IADD3": 2, "LEA": 1, "LDC": 1, "BRX": 1, "EXIT": 1}


def test_a_division_by_a_number_that_is_known_late() -> None:
    """The number of the program, 2, times 21, over 6."""
    text = listing(
        "S2R R0, SR_CTAID.Y",
        "IMAD R0, R0, 0x15, RZ",
        "I2F.U32.RP R1, 0x6",
        "MUFU.RCP R1, R1",
        "VIADD R1, R1, 0xffffffe",
        "F2I.FTZ.U32.TRUNC.NTZ R1, R1",
        "IMAD R2, R1, -0x6, RZ",
        "IMAD.HI.U32 R1, R1, R2, R0",
        "IMAD.HI.U32 R3, R1, R0, RZ",
        "IMAD R4, R3, -0x6, R0",
        "ISETP.GE.U32.AND P0, PT, R4, 0x6, PT",
        "@P0 VIADD R3, R3, 0x1",
        ".L_x_0:",
        "VIADD R3, R3, 0xffffffff",
        "ISETP.NE.AND P1, PT, R3, RZ, PT",
        "@P1 BRA `(.L_x_0)",
        "EXIT",
    )
    assert counts(text)["BRA"] == 7
