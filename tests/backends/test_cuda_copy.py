"""The copy kernel's PTX, run by a small interpreter of it on ordinary memory."""

from __future__ import annotations

import ctypes
import re

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dispatchkit.backends.cuda.copy import CAPACITIES, MAX_PIECES, Work, kernel_text  # noqa: E402

BITS = {"b64": 64, "u64": 64, "s64": 64, "b32": 32, "u32": 32, "u16": 16, "u8": 8}
TYPES = {64: ctypes.c_uint64, 32: ctypes.c_uint32, 16: ctypes.c_uint16, 8: ctypes.c_uint8}


ROOM = 160  # bytes of each memory, and of the data


def parsed(capacity):
    """Return a kernel's instructions, and where its labels point."""
    body = kernel_text(capacity).split("{", 1)[1].rsplit("}", 1)[0]
    instructions, labels = [], {}
    for line in map(str.strip, body.split("\n")):
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith(".reg"):
            guard, text = re.fullmatch(r"(?:@(%\w+) )?(.+);", line).groups()
            name, _, operands = text.partition(" ")
            found = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[%\w.]+", operands)
            instructions.append((guard, name.split("."), found))
    return instructions, labels


KERNELS = {capacity: parsed(capacity) for capacity in (0, ROOM)}


def computed(name, values):
    """Return what an instruction computes."""
    a, b, c, *_ = values
    if name[0] == "setp":
        return int({"eq": a == b, "ne": a != b, "ge": a >= b}[name[1]])
    return {
        "mov": lambda: a,
        "cvt": lambda: a,
        "cvta": lambda: a,
        "add": lambda: a + b,
        "and": lambda: a & b,
        "or": lambda: a | b,
        "mul": lambda: a * b,
        "mad": lambda: a * b + c,
        "shl": lambda: a << b,
        "shr": lambda: a >> b,
    }[name[0]]()


def run_thread(work, data, special):
    """Run one thread; a step too many is a loop without end."""
    instructions, labels = KERNELS[len(data)]
    registers = dict(special)
    arguments = {"work": ctypes.addressof(work), "data": ctypes.addressof(data)}

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
            assert name[1] in ("global", "param") or len(data)
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
        result = computed(name, [*map(value, operands[1:]), 0, 0])
        registers[operands[0]] = result & (1 << (64 if "wide" in name else bits)) - 1
    raise AssertionError("a thread does not end")


def run_kernel(work, num_pieces, num_blocks, num_threads, data=b""):
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
    data = bytes(range(ROOM)) if has_data else b""
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


@pytest.mark.parametrize("data", [b"", bytes(ROOM)], ids=["no data", "data"])
def test_a_piece_that_is_there_already_is_not_copied(data):
    work, target = Work(), torch.arange(8)
    work.sources[0] = work.targets[0] = target.data_ptr()
    work.num_bytes[0], work.tail_bytes[0] = 32, 16
    work.fills[0] = 5
    run_kernel(work, 1, 1, 2, data)
    assert target.tolist() == [0, 1, 2, 3, 5, 5, 6, 7]


def test_the_argument_is_laid_out_as_the_kernel_reads_it():
    sizes = [getattr(Work, name).offset for name, _ in Work._fields_]
    assert sizes == [MAX_PIECES * many for many in (0, 8, 16, 24, 28)]
    assert ctypes.sizeof(Work) == 32 * MAX_PIECES
    assert f"work[{ctypes.sizeof(Work)}]" in kernel_text()
    for capacity in CAPACITIES[1:]:
        assert f"data[{capacity}]" in kernel_text(capacity)
        assert ctypes.sizeof(Work) + capacity <= 32_764  # what CUDA allows
