"""Every check of the interpreter finds its bug, in hand-made kernels, and leaves the right version alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.handmade import make_kernel, run_module
from tests.kernels.ptx.errors import PtxError
from tests.kernels.ptx.stats import Stats

TILE = ".shared .align 16 .b8 tile[1024];"
START = """
.loc 1 7 1
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
ld.param.u64 %rd1, [out];
mov.u32 %r10, tile;
mad.lo.u32 %r11, %r1, 4, %r10;
xor.b32 %r3, %r1, 1;
mad.lo.u32 %r12, %r3, 4, %r10;
xor.b32 %r3, %r1, 32;
mad.lo.u32 %r13, %r3, 4, %r10;
mad.wide.u32 %rd2, %r1, 4, %rd1;
"""


def _run(
    body: str, block: int = 32, grid: int = 1, out: np.ndarray | None = None, constant: tuple[int, ...] = ()
) -> None:
    array = np.zeros(256, np.uint32) if out is None else out
    run_module(make_kernel(START + body, ["out"], shared=TILE), [array], block=block, grid=grid, constant=constant)


def _fails(message: str, body: str, **options: object) -> None:
    with pytest.raises(PtxError, match=message):
        _run(body, **options)  # type: ignore[arg-type]


def test_exchange_within_a_warp_needs_a_warp_barrier() -> None:
    write, read = "st.shared.u32 [%r11], %r1;\n", ".loc 1 9 1\nld.shared.u32 %r4, [%r12];\nst.global.u32 [%rd2], %r4;"
    _fails(r"data race in shared memory.*thread 1: block 0 thread 0: hand.cu:9 ld", write + read)
    _run(write + "bar.warp.sync -1;\n" + read)
    _fails("data race", write + "shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;\n" + read)  # a shuffle orders no memory


def test_exchange_between_warps_needs_a_block_barrier() -> None:
    write, read = "st.shared.u32 [%r11], %r1;\n", "ld.shared.u32 %r4, [%r13];\nst.global.u32 [%rd2], %r4;"
    _fails("data race|before it is written", write + "bar.warp.sync -1;\n" + read, block=64)
    _run(write + "bar.sync 0;\n" + read, block=64)


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.warp.sync -1;"])
def test_write_after_read(barrier: str) -> None:
    start = f"st.shared.u32 [%r11], %r1;\n{barrier}\nld.shared.u32 %r4, [%r12];\nst.global.u32 [%rd2], %r4;\n"
    _fails("data race in shared", start + "st.shared.u32 [%r11], %r4;")
    _run(start + f"{barrier}\nst.shared.u32 [%r11], %r4;")


def test_write_after_a_read_by_all() -> None:
    """Everybody reads one word; then one thread writes it. Which of the readers is remembered must not matter."""
    start = "setp.eq.u32 %p1, %r1, 0;\n@%p1 st.shared.u32 [%r10], 5;\nbar.sync 0;\nld.shared.u32 %r4, [%r10];\n"
    for writer in (0, 5, 31, 63):
        write = f"setp.eq.u32 %p1, %r1, {writer};\n@%p1 st.shared.u32 [%r10], 6;"
        _fails("data race", start + write, block=64)
        _fails("data race", start + "bar.warp.sync -1;\n" + write, block=64)
        _run(start + "bar.sync 0;\n" + write, block=64)


def test_two_threads_write_one_address() -> None:
    _fails("data race in shared", "st.shared.u32 [%r10], %r1;")
    _fails("data race in global", "st.global.u32 [%rd1], %r1;")
    _run("red.global.add.u32 [%rd1], %r1;")


def test_blocks_share_nothing_but_atomics() -> None:
    one = "setp.eq.u32 %p1, %r1, 0;\n"
    _fails("data race in global", one + "@%p1 st.global.u32 [%rd1], %r2;", grid=2)
    _fails("data race in global", one + "@%p1 ld.global.u32 %r4, [%rd1];\n@%p1 st.global.u32 [%rd1], %r2;", grid=2)
    _fails("data race in global", one + "@%p1 red.global.add.u32 [%rd1], 1;\n@%p1 ld.global.u32 %r4, [%rd1];", grid=2)
    out = np.zeros(1, np.uint32)
    _run("red.global.add.u32 [%rd1], 1;", grid=3, out=out)
    assert out[0] == 96


def test_bounds() -> None:
    _fails("global access out of bounds: block 0 thread 8", "st.global.u32 [%rd2], %r1;", out=np.zeros(8, np.uint32))
    _fails("global access out of bounds: block 0 thread 0", "ld.global.u32 %r4, [%rd2+-4];")
    _fails("shared access out of bounds: block 0 thread 31", "st.shared.u32 [%r11+900], %r1;")
    _fails("global access out of bounds", "mov.u64 %rd5, 64;\nld.global.u32 %r4, [%rd5];")


def test_alignment() -> None:
    _fails("misaligned global access: block 0 thread 1", "ld.global.v2.u32 {%r4, %r5}, [%rd2];")
    _fails("misaligned shared access", "st.shared.v4.u32 [%r11], {%r1, %r1, %r1, %r1};")
    offset = np.zeros(260, np.uint8)[2:258].view(np.uint32)  # a tensor that begins off its alignment
    _fails("misaligned global access", "ld.global.u32 %r4, [%rd2];", out=offset)


def test_const() -> None:
    _run("ld.global.u32 %r4, [%rd2];", constant=(0,))
    _fails("write through a const pointer", "st.global.u32 [%rd2], %r1;", constant=(0,))


def test_uninitialised_shared_memory() -> None:
    most = "setp.ne.u32 %p1, %r1, 5;\n@%p1 st.shared.u32 [%r11], %r1;\nbar.sync 0;\n"
    _fails("read before it is written: block 0 thread 4", most + "ld.shared.u32 %r4, [%r12];")
    _fails("read before it is written", "red.shared.add.u32 [%r10], 1;")


def test_barriers() -> None:
    half = "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L_skip;\nbar.sync 0;\n$L_skip:\n"
    _run(half, block=64)  # the others have ended: the barrier counts the living
    _fails("not all threads of the block reach the barrier", half + "bar.sync 0;", block=64)
    lanes = "setp.lt.u32 %p1, %r1, 3;\n@%p1 bra $L_skip;\n{}\n$L_skip:\nst.global.u32 [%rd2], %r1;"
    _fails("not all lanes of a warp", lanes.format("bar.warp.sync -1;"))
    _fails("not those of the member mask", lanes.format("shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1;"))
    _run(lanes.format("shfl.sync.idx.b32 %r4, %r1, 9, 31, 0xFFFFFFF8;"))
    _fails("reads a lane that takes no part", lanes.format("shfl.sync.idx.b32 %r4, %r1, 0, 31, 0xFFFFFFF8;"))


COPY = """
mad.lo.u32 %r14, %r1, 16, %r10;
and.b32 %r15, %r1, 7;
mad.wide.u32 %rd3, %r15, 16, %rd1;
cp.async.cg.shared.global [%r14], [%rd3], 16, 16;
"""


def test_asynchronous_copies() -> None:
    commit, wait = "cp.async.commit_group;\n", "cp.async.wait_group 0;\n"
    own, other = "ld.shared.u32 %r4, [%r14];\n", "xor.b32 %r16, %r14, 16;\nld.shared.u32 %r4, [%r16];\n"
    _run(COPY + commit + wait + own)
    _fails("before it is written", COPY + commit + own + wait)
    _fails("before it is written", COPY + commit + "cp.async.wait_group 1;\n" + own)
    _fails("before it is written", COPY + wait + own)  # never committed
    _fails("data race", COPY + commit + wait + other)
    _run(COPY + commit + wait + "bar.warp.sync -1;\n" + other)
    _fails("a thread ends before its copy has landed", COPY + commit)
    _fails("data race", "st.shared.u32 [%r11], 1;\n" + COPY + commit + wait)  # writes what others wrote
    _run("st.shared.u32 [%r11], 1;\nbar.sync 0;\n" + COPY + commit + wait)


def test_asynchronous_copies_by_lane() -> None:
    """Lanes number their groups for themselves: half of them issue one copy more."""
    text = (
        COPY
        + """
cp.async.commit_group;
setp.lt.u32 %p1, %r1, 16;
@%p1 bra $L_skip;
cp.async.cg.shared.global [%r14+512], [%rd3], 16, 0;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.u32 %r4, [%r14];
bra $L_end;
$L_skip:
cp.async.wait_group 0;
ld.shared.u32 %r4, [%r14];
$L_end:
cp.async.wait_group 0;
st.global.u32 [%rd2+512], %r4;
"""
    )
    out = np.arange(256, dtype=np.uint32)
    _run(text, out=out)
    assert out[128:160].tolist() == [4 * (lane % 8) for lane in range(32)]


def test_copies_of_nothing_write_zeros() -> None:
    text = """
mad.lo.u32 %r14, %r1, 16, %r10;
mov.u64 %rd3, 0;
cp.async.cg.shared.global [%r14], [%rd3], 16, 0;
cp.async.commit_group;
cp.async.wait_group 0;
ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r14];
or.b32 %r4, %r4, %r7;
st.global.u32 [%rd2], %r4;
"""
    out = np.full(256, 7, np.uint32)
    _run(text, out=out)
    assert (out[:32] == 0).all()


def _count(body: str, space: str) -> tuple[int, int]:
    stats = Stats()
    text = make_kernel(START + body, ["out"], shared=TILE)
    run_module(text, [np.zeros(2048, np.uint32)], stats=stats)
    access = next(a for a in stats.accesses.values() if a.space == space)
    return access.transfers, access.ideal


def test_sectors() -> None:
    assert _count("ld.global.u32 %r4, [%rd2];", "global") == (4, 4)
    assert _count("mad.wide.u32 %rd2, %r1, 64, %rd1;\nld.global.u32 %r4, [%rd2];", "global") == (32, 4)
    assert _count("ld.global.u32 %r4, [%rd1];", "global") == (1, 4)
    assert _count("mad.wide.u32 %rd2, %r1, 16, %rd1;\nld.global.v4.u32 {%r4,%r5,%r6,%r7}, [%rd2];", "global") == (
        16,
        16,
    )


def test_bank_conflicts() -> None:
    store = "mad.lo.u32 %r11, %r1, {}, %r10;\nst.shared.u32 [%r11], %r1;"
    assert _count(store.format(4), "shared") == (1, 1)
    assert _count(store.format(8), "shared") == (2, 1)
    assert _count(store.format(32), "shared") == (8, 1)
    assert _count("setp.eq.u32 %p1, %r1, 0;\n@%p1 st.shared.u32 [%r10], 1;", "shared") == (1, 1)
    wide = "mad.lo.u32 %r11, %r1, {}, %r10;\nst.shared.v4.u32 [%r11], {{%r1,%r1,%r1,%r1}};"
    assert _count(wide.format(16), "shared") == (4, 4)
    assert _count(wide.format(32), "shared") == (8, 4)
