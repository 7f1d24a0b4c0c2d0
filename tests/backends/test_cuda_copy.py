"""The copy kernel: its source matches its PTX, which a small interpreter runs on host memory."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dispatchkit.backends.cuda import copy as module  # noqa: E402
from dispatchkit.backends.cuda.copy import CAPACITIES, MAX_REGIONS, Work, kernel_text  # noqa: E402

BITS = {"b64": 64, "u64": 64, "s64": 64, "b32": 32, "u32": 32, "s32": 32, "u16": 16, "u8": 8}
BITS["pred"] = 1
TYPES = {64: ctypes.c_uint64, 32: ctypes.c_uint32, 16: ctypes.c_uint16, 8: ctypes.c_uint8}


ROOM = 160  # bytes of each memory and of the data


def parsed(text):
    """Return a kernel's instructions and the positions of its labels."""
    body = text.split("{", 1)[1].rsplit("}", 1)[0]
    instructions, labels = [], {}
    for line in map(str.strip, body.split("\n")):
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith((".reg", ".pragma")):
            guard, opcode = re.fullmatch(r"(?:@(%\w+)\s+)?(.+);", line).groups()
            name, _, operands = opcode.partition(" ")
            found = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[%$\w.]+", operands)
            instructions.append((guard, name.split("."), found))
    return instructions, labels


KERNEL = parsed(kernel_text(ROOM))
COMPARED = {"eq": int.__eq__, "ne": int.__ne__, "ge": int.__ge__, "lt": int.__lt__}


def computed(name, values):
    """Return the result of an instruction."""
    a, b, c, *_ = values
    if name[0] == "setp":
        return int(COMPARED[name[1]](a, b))
    return {
        "mov": lambda: a,
        "cvt": lambda: a,
        "cvta": lambda: a,
        "add": lambda: a + b,
        "and": lambda: a & b,
        "or": lambda: a | b,
        "xor": lambda: a ^ b,
        "not": lambda: ~a,
        "selp": lambda: a if c else b,
        "mul": lambda: a * b,
        "mad": lambda: a * b + c,
        "shl": lambda: a << b,
        "shr": lambda: a >> b,
    }[name[0]]()


def run_thread(work, data, special):
    """Run one thread; a step limit detects endless loops."""
    instructions, labels = KERNEL
    registers = dict(special)
    arguments = {
        f"dispatchkit_copy_param_{number}": ctypes.addressof(one)
        for number, one in enumerate((work, data))
    }

    def value(operand):
        if operand in arguments:
            return arguments[operand]
        return registers[operand] if operand.startswith("%") else int(operand)

    def place(operand):
        inside = operand.strip("[]")
        name, _, more = inside.partition("+")
        return value(name) + int(more or 0)

    at = 0
    for _ in range(5000):
        guard, name, operands = instructions[at]
        at += 1
        if guard and not registers[guard]:
            continue
        if name[0] == "ret":
            return
        if name[0] == "bra":
            at = labels[operands[0]]
            continue
        if name[0] in ("ld", "st"):
            bits = BITS[name[-1]]
            assert place(operands[name[0] == "ld"]) % (bits // 8 * (4 if "v4" in name else 1)) == 0
            memory = place(operands[name[0] == "ld"])
            names = operands[name[0] == "st"].strip("{}").split(", ")
            for number, register in enumerate(names):
                cell = TYPES[bits].from_address(memory + number * bits // 8)
                if name[0] == "ld":
                    registers[register] = cell.value
                else:
                    cell.value = registers[register] & (1 << bits) - 1
            continue
        bits = BITS[name[1] if name[0] == "cvt" else name[-1]]
        if name[0] == "setp":
            bits = 1
        result = computed(name, [*map(value, operands[1:]), 0, 0])
        registers[operands[0]] = result & (1 << (64 if "wide" in name else bits)) - 1
    raise AssertionError("a thread does not end")


def run_kernel(work, num_pieces, num_blocks, num_threads, data=bytes(ROOM)):
    memory = (ctypes.c_ubyte * (len(data) + 16))()  # data begins at a multiple of 16
    start = -ctypes.addressof(memory) % 16
    memory[start : start + len(data)] = list(data)
    data = (ctypes.c_ubyte * len(data)).from_buffer(memory, start)
    for piece in range(num_pieces):
        for block in range(num_blocks):
            for thread in range(num_threads):
                special = {"%ctaid.y": piece, "%ctaid.x": block, "%nctaid.x": num_blocks}
                run_thread(work, data, {**special, "%tid.x": thread, "%ntid.x": num_threads})


PIECES = st.tuples(
    st.integers(0, 17),  # how far the source is from a multiple of 16
    st.sampled_from([0, 1, 2, 4, 8, 16]),  # the same of the target
    st.integers(0, 60),  # elements copied, and of fill
    st.integers(0, 30),
    st.sampled_from([1, 2, 4, 8]),  # bytes of one
    st.booleans(),  # whether it is in the data
)


@settings(max_examples=15)
@given(
    st.lists(PIECES, min_size=1, max_size=3), st.integers(1, 2), st.integers(1, 3), st.booleans()
)
def test_rows_are_copied_and_those_behind_filled_and_nothing_else(
    pieces, num_blocks, num_threads, has_data
):
    work, kept, wanted = Work(), [], []
    data = bytes(range(ROOM))
    for index, (off_source, off_target, rows, tail, size, is_data) in enumerate(pieces):
        off_target -= off_target % size
        rows, tail = min(rows, 64 // size), min(tail, 64 // size)
        source = torch.arange(ROOM, dtype=torch.int64).add(index * 50).to(torch.uint8)
        target = torch.full((ROOM,), 99, dtype=torch.uint8)
        start = -target.data_ptr() % 16 + off_target
        begin = -source.data_ptr() % 16 + off_source
        element = [7 + number for number in range(size)]
        if is_data and has_data:
            source, begin = torch.arange(ROOM, dtype=torch.uint8), off_source
        work.sources[index] = begin + (0 if is_data and has_data else source.data_ptr())
        work.targets[index] = target.data_ptr() + start
        work.fills[index] = int.from_bytes(bytes(element * (8 // size)), "little")
        work.num_bytes[index], work.tail_bytes[index] = rows * size, tail * size
        want = target.clone()
        want[start : start + rows * size] = source[begin : begin + rows * size]
        behind = start + rows * size
        want[behind : behind + tail * size] = torch.tensor(element * tail, dtype=torch.uint8)
        kept += [source]
        wanted.append((target, want))
    run_kernel(work, len(pieces), num_blocks, num_threads, data)
    for target, want in wanted:
        assert torch.equal(target, want)


def test_an_input_that_is_there_already_is_not_copied():
    work, target = Work(), torch.arange(8)
    work.sources[0] = work.targets[0] = target.data_ptr()
    work.num_bytes[0], work.tail_bytes[0] = 32, 16
    work.fills[0] = 5
    run_kernel(work, 1, 1, 2)
    assert target.tolist() == [0, 1, 2, 3, 5, 5, 6, 7]


def test_a_node_that_was_never_set_does_nothing():
    run_kernel(Work(), MAX_REGIONS, 1, 2)  # a write would access address 0


def test_the_arguments_are_laid_out_as_the_kernel_reads_them():
    sizes = [getattr(Work, name).offset for name, _ in Work._fields_]
    assert sizes == [MAX_REGIONS * many for many in (0, 8, 16, 24, 28)]
    assert ctypes.sizeof(Work) == 32 * MAX_REGIONS
    for capacity in CAPACITIES:
        text = kernel_text(capacity)
        assert f"param_0[{ctypes.sizeof(Work)}]" in text
        assert f"param_1[{capacity}]" in text
        parameters = ctypes.sizeof(Work) + capacity
        assert f".version {'8.1' if parameters > 4096 else '7.7'}" in text
        assert parameters <= 32_764  # limit of CUDA


SOURCE = Path(module.__file__).with_name("copy.cu")


def test_the_ptx_is_made_of_the_source_as_it_is():
    """After a change of copy.cu, run scripts/copy_kernel.py."""
    assert hashlib.sha256(SOURCE.read_bytes()).hexdigest() in kernel_text(CAPACITIES[0])
    source = SOURCE.read_text()
    assert f"#define MAX_REGIONS {MAX_REGIONS}\n" in source
    assert f"#define CAPACITY {CAPACITIES[-1]} " in source


@pytest.mark.slow
def test_nvcc_makes_the_same_ptx():
    nvcc = shutil.which("nvcc")
    wanted = "release 13.0"
    if nvcc is None or wanted not in subprocess.check_output([nvcc, "--version"], text=True):
        pytest.skip(f"there is no nvcc of {wanted}")
    script = Path(__file__).resolve().parents[2] / "scripts" / "copy_kernel.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True)
