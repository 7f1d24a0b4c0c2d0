"""The kernel that brings inputs in, as PTX text; see ``cuda_copy``.

Source: PTX ISA 7.0; for data in parameters 8.1, which allows more than 4096 bytes of them and has
``cvta.param``.
"""

from __future__ import annotations

#: Pieces of one node at most.
MAX_PIECES = 16

_KINDS = {16: "v4.u32", 8: "u64", 4: "u32", 2: "u16", 1: "u8"}
_VALUES = {16: "{%w0, %w1, %w2, %w3}", 8: "%long"}


def _loop(name: str, width: int, num_bytes: str, end: str, body: str) -> str:
    """Return a loop over words of a width; it is left out where the mask is no multiple of it."""
    return f"""
    and.b64 %low, %mask, {width - 1};
    setp.ne.u64 %done, %low, 0;
    @%done bra NOT_{name}_{width};
    mul.lo.u32 %at, %first, {width};
    mul.lo.u32 %step, %all, {width};
{name}_{width}:
    setp.ge.u32 %done, %at, {num_bytes};
    @%done bra {end};
    cvt.u64.u32 %offset, %at;{body}
    add.u32 %at, %at, %step;
    bra {name}_{width};
NOT_{name}_{width}:"""


def _copy_loop(width: int, load: str) -> str:
    kind, value = _KINDS[width], _VALUES.get(width, "%word")
    body = f"""
    add.s64 %source, %from, %offset;
    add.s64 %target, %to, %offset;
    {load}.{kind} {value}, [%source];
    st.global.{kind} [%target], {value};"""
    return _loop("COPY", width, "%bytes", "TAIL", body)


def _fill_loop(width: int) -> str:
    kind, value = _KINDS[width], _VALUES.get(width, "%word")
    narrow = "" if width == 8 else "\n    cvt.u32.u64 %word, %long;"
    body = f"""
    add.s64 %target, %to, %offset;
    and.b32 %word, %at, 7;
    shl.b32 %word, %word, 3;
    shr.u64 %long, %fill, %word;{narrow}
    st.global.{kind} [%target], {value};"""
    return _loop("FILL", width, "%tail", "END", body)


# A source is an address of global memory. With data it may lie in the parameters as well, so that
# it is a generic address then; that of global memory is the same number.
_GIVEN = """
    cvta.to.global.u64 %from, %from;
    cvta.to.global.u64 %to, %to;
    setp.eq.u64 %done, %from, %to;
    @%done bra TAIL;"""
_GIVEN_OR_DATA = """
    cvta.to.global.u64 %to, %to;
    setp.eq.u64 %done, %from, %to;
    @%done bra TAIL;
    setp.ge.u64 %done, %from, {};
    @%done bra GIVEN;
    mov.b64 %data, data;
    cvta.param.u64 %data, %data;
    add.s64 %from, %data, %from;
GIVEN:"""


def kernel_text(capacity: int = 0) -> str:
    """Return the kernel in PTX; its argument is a ``Work``.

    Args:
        capacity: Bytes of a second argument, the data: a source below this number is an offset
            into it. None with 0.
    """
    version, data, load, registers, where = "7.0", "", "ld.global", "", _GIVEN
    if capacity:
        version, data, load = "8.1", f",\n    .param .align 16 .b8 data[{capacity}]", "ld"
        registers, where = "\n    .reg .b64 %data;", _GIVEN_OR_DATA.format(capacity)
    return f""".version {version}
.target sm_70
.address_size 64

.visible .entry dispatchkit_copy(.param .align 8 .b8 work[{32 * MAX_PIECES}]{data})
{{
    .reg .pred %done;
    .reg .b32 %at, %step, %first, %all, %bytes, %tail, %piece;
    .reg .b32 %blocks, %threads, %block, %thread, %word, %w0, %w1, %w2, %w3;
    .reg .b64 %base, %of_8, %of_4, %offset, %from, %to, %fill, %mask, %low;
    .reg .b64 %source, %target, %long;{registers}

    mov.b64 %base, work;
    mov.u32 %piece, %ctaid.y;
    mul.wide.u32 %offset, %piece, 8;
    add.s64 %of_8, %base, %offset;
    mul.wide.u32 %offset, %piece, 4;
    add.s64 %of_4, %base, %offset;
    ld.param.u64 %from, [%of_8];
    ld.param.u64 %to, [%of_8+{8 * MAX_PIECES}];
    ld.param.u64 %fill, [%of_8+{16 * MAX_PIECES}];
    ld.param.u32 %bytes, [%of_4+{24 * MAX_PIECES}];
    ld.param.u32 %tail, [%of_4+{28 * MAX_PIECES}];
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mad.lo.u32 %first, %block, %threads, %thread;
    mul.lo.u32 %all, %blocks, %threads;{where}
    cvt.u64.u32 %mask, %bytes;
    or.b64 %mask, %mask, %from;
    or.b64 %mask, %mask, %to;
{"".join(_copy_loop(width, load) for width in (16, 8, 4, 2, 1))}
TAIL:
    cvt.u64.u32 %offset, %bytes;
    add.s64 %to, %to, %offset;
    cvt.u64.u32 %mask, %tail;
    or.b64 %mask, %mask, %to;
{"".join(map(_fill_loop, (8, 4, 2, 1)))}
END:
    ret;
}}
"""
