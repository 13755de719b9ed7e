"""sm_90 machine code as `cuobjdump -sass` prints it, parsed."""

import dataclasses
import re

import numpy as np

PIPES = {
    "alu": "LOP3 SHF ISETP FSETP IADD3 LEA SEL FSEL FMNMX PRMT VIADD VIMNMX VIMNMX3 I2FP PLOP3 P2R "
    "FCHK F2FP MOV CS2R",
    "fma": "FADD FMUL FFMA",
    "fmaheavy": "IMAD HFMA2 HADD2",
    "xu": "MUFU S2R S2UR",
    "shfl": "SHFL",
    "redux": "REDUX",
    "lsu": "LDG STG LDL STL",
    "ldc": "LDC",
    "uniform": "ULDC UMOV USHF R2UR ULOP3 UIADD3 UIMAD ULEA UISETP USEL UP2UR VOTEU",
    "control": "BRA BSSY BSYNC EXIT CALL RET NOP",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}
# Bytes that a lane reads or writes, by an opcode's suffix; 4 without one.
WIDTHS = {"U8": 1, "U16": 2, "64": 8, "128": 16}


@dataclasses.dataclass(frozen=True)
class Operand:
    """A register, predicate, number or place in memory.

    `kind` is R, P, UR or UP for registers (`index` -1: the one that is zero or true), "number" for
    a word, "constant", "global" or "local" for a place, "name" for what an opcode explains itself.
    """

    kind: str
    text: str
    index: int = -1
    number: int = 0  # the word, or a place's offset
    base: "Operand | None" = None  # the register that a place is relative to
    negative: bool = False
    inverted: bool = False
    magnitude: bool = False
    half: int = 0  # of a register with two 16-bit values: the one that is meant

    @property
    def predicate(self) -> bool:
        return self.kind in ("P", "UP")


@dataclasses.dataclass(frozen=True)
class Control:
    """What an instruction's upper bits tell the scheduler."""

    stall: int  # cycles until the warp's next instruction
    write: int  # the scoreboard that is released when the result is there; 7: none
    read: int  # the one that is released when the operands have been read; 7: none
    wait: int  # mask of the scoreboards to wait for


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    guard: Operand | None
    name: str  # the opcode without its suffixes
    suffixes: tuple[str, ...]
    operands: tuple[Operand, ...]
    control: Control

    @property
    def pipe(self) -> str:
        return PIPE_OF[self.name]

    @property
    def width(self) -> int:
        """Bytes that a lane of a load or a store reads or writes."""
        return next((WIDTHS[s] for s in self.suffixes if s in WIDTHS), 4)


Code = dict[int, Instruction]

SPECIAL = {"INF": 0x7F800000, "QNAN": 0x7FC00000}
BASE = r"(?:(R\d+|RZ|UR\d+)(?:\.64|\.U32)?)?"
PLACES = {
    "constant": rf"c\[0x0\]\[{BASE}\+?(-?0x[0-9a-f]+)?\]",
    "global": rf"desc\[UR\d+\]\[{BASE}\+?(-?0x[0-9a-f]+)?\]",
    "local": rf"\[{BASE}\+?(-?0x[0-9a-f]+)?\]",
}


def parse_operand(text: str) -> Operand:
    place_text = text.lstrip("-~!|").rstrip("|")
    signs = {
        "negative": text.startswith("-"),
        "inverted": text.lstrip("-")[0] in "~!",
        "magnitude": text.endswith("|"),
    }
    register = re.fullmatch(r"(UR|UP|R|P)(\d+|Z|T)(?:\.H([01])_H[01])?", place_text)
    if register:
        index = -1 if register[2] in "ZT" else int(register[2])
        return Operand(register[1], text, index, half=int(register[3] or 0), **signs)
    for kind, pattern in PLACES.items():
        place = re.fullmatch(pattern, place_text)
        if place:
            base = parse_operand(place[1]) if place[1] else None
            return Operand(kind, text, number=int(place[2] or "0", 16), base=base, **signs)
    special = SPECIAL.get(text.lstrip("+-"))
    if special is not None:
        return Operand("number", text, number=special | (text[0] == "-") << 31)
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        return Operand("number", text, number=int(text, 16) & 0xFFFFFFFF)
    if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text):
        return Operand("number", text, number=int(np.float32(text).view(np.uint32)))
    return Operand("name", text)


LINE = re.compile(
    r"/\*([0-9a-f]{4,5})\*/\s+(?:@(!?U?P\w+)\s+)?([^\s;]+)\s*([^;]*?)\s*;"
    r"\s+/\* 0x[0-9a-f]{16} \*/\s*\n\s*/\* (0x[0-9a-f]{16}) \*/"
)


def parse(text: str) -> Code:
    """The instructions of one function. Raises KeyError for an opcode whose pipe is not known."""
    code = {}
    for address, guard, opcode, operands, upper in LINE.findall(text):
        word = int(upper, 16)
        name, *suffixes = opcode.split(".")
        if name not in PIPE_OF:
            raise KeyError(
                f"{opcode} at {address}: no kernel had it; add it here and to opcodes.py"
            )
        parts = [p.strip() for p in operands.replace(".reuse", "").split(",")] if operands else []
        code[int(address, 16)] = Instruction(
            int(address, 16),
            parse_operand(guard) if guard else None,
            name,
            tuple(suffixes),
            tuple(map(parse_operand, parts)),
            Control(word >> 41 & 15, word >> 46 & 7, word >> 49 & 7, word >> 52 & 63),
        )
    return code


def functions(dump: str) -> dict[str, str]:
    """The text of every function of a dump, by its mangled name."""
    parts = dump.split("Function : ")[1:]
    return {name.strip(): text for name, text in (p.split("\n", 1) for p in parts)}
