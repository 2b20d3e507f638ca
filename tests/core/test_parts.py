"""The parts by themselves: block pool, prefix cache, hashes, command line."""

from __future__ import annotations

import random

import numpy as np
import pytest

from protos.wire import pack_int32
from scheduler_svc.core.__main__ import main, parser
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.prefix_cache import NOTHING, PrefixCache
from scheduler_svc.core.prefix_run import is_there
from scheduler_svc.prefix_hash import HASH_BYTES, block_hashes, extend_hash, root_hash


def test_the_pool_keeps_its_balance_over_random_use() -> None:
    draw = random.Random(3)
    pool = BlockPool(50)
    cache = PrefixCache(pool, 1)
    held: list[list[int]] = []
    for i in range(3000):
        if draw.random() < 0.5 and pool.available:
            held.append(pool.allocate(draw.randrange(0, min(8, pool.available) + 1)))
        elif held:
            blocks = held.pop(draw.randrange(len(held)))
            for j, block in enumerate(blocks):
                if not pool.findable[block] and draw.random() < 0.5:
                    digest = i.to_bytes(8, "big") + j.to_bytes(8, "big")
                    cache.register([digest], None, "", pack_int32([i]), [block])
            if blocks and draw.random() < 0.3:
                pool.share(blocks)
                held.append(list(blocks))
            pool.release(blocks)
        assert pool.free + pool.cached + pool.owned == pool.total
        assert pool.owned == np.count_nonzero(pool.refs)
        free = pool.free_ids().tolist()
        assert len(set(free)) == len(free) == pool.free
    with pytest.raises(RuntimeError, match="asked for"):
        pool.allocate(pool.available + 1)


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="twice"):
        pool.release(blocks)


def chain(*blocks: list[int]) -> tuple[list[bytes], bytes]:
    tokens = pack_int32([token for block in blocks for token in block])
    hashes = block_hashes("f", "", np.frombuffer(tokens, "<i4"), 2)
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)], tokens


def found(cache: PrefixCache, hashes: list[bytes], tokens: bytes, salt: str, most: int) -> int:
    """How many blocks of it can be found; as a whole, and going on from each part of it."""
    whole = cache.extend(NOTHING, hashes, tokens, salt, most)
    for part in range(whole.count):
        again = cache.extend(whole.first(part), hashes, tokens, salt, most)
        assert (again.count, again.blocks) == (whole.count, whole.blocks)
    return whole.count


def test_tails_are_evicted_before_heads() -> None:
    pool = BlockPool(3)
    cache = PrefixCache(pool, 2)
    hashes, tokens = chain([1, 2], [3, 4], [5, 6])
    blocks = pool.allocate(3)
    cache.register(hashes, None, "", tokens, blocks)
    pool.release(blocks)
    for left in (2, 1, 0):
        assert pool.allocate(1) == [blocks[left]]
        assert found(cache, hashes, tokens, "", 3) == left


def test_a_hit_compares_tokens_salt_and_the_whole_chain() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2)
    hashes, tokens = chain([1, 2], [3, 4])
    first = cache.register(hashes[:1], None, "t", tokens[:8], pool.allocate(1))
    cache.register(hashes[1:], first, "t", tokens[8:], pool.allocate(1))
    assert found(cache, hashes, tokens, "t", 9) == 2
    assert found(cache, hashes, tokens, "t", 1) == 1
    assert found(cache, hashes, tokens, "other", 9) == 0
    assert found(cache, hashes, pack_int32([1, 9, 3, 4]), "t", 9) == 0
    assert found(cache, hashes, pack_int32([1, 2, 3, 9]), "t", 9) == 1
    swapped = hashes[1:] + hashes[1:]
    assert found(cache, swapped, pack_int32([3, 4, 3, 4]), "t", 9) == 0  # a second block is no first block


def test_the_same_content_keeps_the_first_block_and_other_content_replaces_it() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2)
    one, two, three = pool.allocate(3)
    place = cache.register([b"h" * 16], None, "", pack_int32([1, 2]), [one])
    assert cache.register([b"h" * 16], None, "", pack_int32([1, 2]), [two]) == place
    other = cache.register([b"h" * 16], None, "", pack_int32([8, 9]), [three])
    assert place is not None
    assert other is not None
    assert not is_there(place)
    assert is_there(other)
    assert not pool.findable[one]
    pool.release([one, two, three])
    assert (pool.free, pool.cached) == (7, 1)


@pytest.mark.parametrize("seed", range(4))
def test_runs_that_branch_and_shrink_are_found_exactly(seed: int) -> None:
    """Two token ids only, so that blocks of the same content stand behind different ones."""
    draw = random.Random(seed)
    pool = BlockPool(24)
    cache = PrefixCache(pool, 2)
    content: dict[int, bytes] = {}  # block -> all tokens up to its end, when it was registered
    for _ in range(3000):
        tokens = [draw.randrange(1, 3) for _ in range(2 * draw.randrange(1, 7))]
        hashes, raw = chain(*[tokens[at : at + 2] for at in range(0, len(tokens), 2)])
        prefix = cache.extend(NOTHING, hashes, raw, "", draw.randrange(len(hashes) + 1))
        for i, block in enumerate(prefix.blocks):
            assert content[block] == raw[: 8 * (i + 1)]
        pool.share(prefix.blocks)
        missing = len(hashes) - prefix.count
        if missing > pool.available:
            pool.release(prefix.blocks)
            continue
        blocks = prefix.blocks + pool.allocate(missing)
        for block in blocks[prefix.count :]:
            content[block] = b""
        place, at = prefix.end, prefix.count
        while at < len(hashes):  # in chunks, as a long prompt is
            end = draw.randrange(at, len(hashes)) + 1
            for i in range(at, end):
                content[blocks[i]] = raw[: 8 * (i + 1)]
            place = cache.register(hashes[at:end], place, "", raw[8 * at : 8 * end], blocks[at:end], blocks[at - 1])
            at = end
        whole = cache.extend(NOTHING, hashes, raw, "", len(hashes))
        assert whole.count == len(hashes)
        assert [content[block] for block in whole.blocks] == [raw[: 8 * (i + 1)] for i in range(len(hashes))]
        pool.release(blocks)
        findable = np.flatnonzero(pool.findable).tolist()
        assert sorted(block for run in cache.by_hash.values() for block in run.blocks) == findable
        assert cache.blocks == len(findable)
        assert pool.free + pool.cached + pool.owned == pool.total


def test_hashes_are_chained_and_their_fields_cannot_collide() -> None:
    tokens = np.arange(10, dtype=np.int32)
    hashes = block_hashes("f", "s", tokens, 4)
    assert len(hashes) == 2 * HASH_BYTES
    first = extend_hash(root_hash("f", "s", 4), pack_int32(tokens[:4]))
    assert hashes == first + extend_hash(first, pack_int32(tokens[4:8]))
    roots = {root_hash(*fields) for fields in [("fs", "", 4), ("f", "s", 4), ("", "fs", 4), ("f", "s", 8)]}
    assert len(roots) == 4
    assert root_hash("f", "s", 4) != extend_hash(b"", b"")


def test_the_command_line_covers_the_tests_options() -> None:
    line = "--front ipc:///x --depth 3 --no-prefix-cache --max-prefill-chunk 7 --kv-blocks-limit 9"
    options = parser().parse_args(line.split())
    assert (options.depth, options.no_prefix_cache, options.max_prefill_chunk) == (3, True, 7)
    assert options.kv_blocks_limit == 9


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--depth", "0"], "depth"),
        (["--inject", "melt@1"], "inject"),
        (["--listen", "tcp://0.0.0.0:0"], "link-secret-file"),
        (["--kv-blocks-limit", "-1"], "kv_blocks_limit"),
    ],
)
def test_bad_options_end_with_their_name(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.logs.configure", lambda *args, **more: None)
    assert main(["--front", "inproc://core-test", *arguments]) == 2
    assert word in capsys.readouterr().err


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="text_run_ahead"):
        CoreConfig(text_run_ahead=0)
