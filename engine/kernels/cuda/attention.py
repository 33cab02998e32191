"""Attention of a tile of queries to keys and values in blocks of the KV cache.

A tile is some adjacent tokens of one row, with all query heads that share a KV head; the heads of
each token in turn are the rows of one matrix product. The softmax is computed online (Milakov and
Gimelshein, arXiv 1805.02867), in float32 and powers of two. If few tiles would leave
multiprocessors idle, the keys of a tile are split among programs, and `merge_splits` joins the
parts.
"""

import triton
import triton.language as tl

_NO_SCORE = tl.constexpr(float("-inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST_POWER = tl.constexpr(100.0)
"""Exponent of two beyond which adding one has no effect in float32."""

_UNSPECIALIZED = ["table_width", "num_splits", "window", "max_tokens", "token_stride"]
"""Arguments whose values do not specialize the kernel, so that it is not recompiled in service."""


@triton.jit
def _own_keys(
    first_position: tl.tensor,
    count: tl.tensor,
    split: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the range of keys of a split of a tile."""
    first = 0
    end = first_position + count
    if HAS_WINDOW:
        # Aligned, so that key offsets within a step do not depend on the tile's start.
        first = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    if IS_SPLIT:
        span = tl.cdiv(tl.cdiv(end - first, num_splits), KEYS) * KEYS
        first = first + split * span
        end = tl.minimum(end, first + span)
    return first, end


@triton.jit
def _seen_scores(
    scores: tl.tensor,
    keys: tl.tensor,
    end: tl.tensor,
    positions: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """Return base-2 scores [queries, keys], with masked ones at minus infinity."""
    if HAS_CAP:
        raised = tl.exp2(tl.minimum(scores * (2.0 * _LOG2_E / softcap), _LARGEST_POWER))
        scores = softcap * _LOG2_E * (1.0 - 2.0 / (raised + 1.0))
    is_seen = (keys < end)[None, :] & (keys[None, :] <= positions[:, None])
    if HAS_WINDOW:
        is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
    return tl.where(is_seen, scores, _NO_SCORE)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attend_tiles(
    queries: tl.tensor,
    cache: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_sums: tl.tensor,
    tiles: tl.tensor,
    tables: tl.tensor,
    table_width: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    max_tokens: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Attend from one tile, KV head and split per program.

    Args:
        queries: [tokens, heads, DIM], `token_stride` values from one token to the next
        cache: [blocks, BLOCK_SIZE, 2, KV_HEADS, DIM]
        sinks: [heads] float32, if HAS_SINKS
        out: [tokens, heads, DIM]; not written if keys are split
        parts: [tiles, max_tokens, heads, num_splits, DIM] float32: averages over splits of keys
        part_sums: [tiles, max_tokens, heads, num_splits] float32: base-2 logarithms of sums
        tiles: [tiles, 4] int32: row of the tables, first token, its position, number of tokens
        tables: [rows, table_width] int32
        window: number of tokens that each attends to, including itself
        scale: of scores, times log2(e) unless they are capped
        softcap: caps scores s to softcap * tanh(s / softcap), if HAS_CAP
        WIDTH: DIM or the next power of two
        QUERIES: at least a tile's tokens times heads; not less than GROUP
        KEYS: keys processed at once
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(tiles + 4 * tile).to(tl.int64)
    first_token = tl.load(tiles + 4 * tile + 1).to(tl.int64)
    first_position = tl.load(tiles + 4 * tile + 2)
    count = tl.load(tiles + 4 * tile + 3)

    query = tl.arange(0, QUERIES)
    token, member = query // GROUP, query % GROUP
    dims = tl.arange(0, WIDTH)
    is_query = token < count
    in_head = dims < DIM
    positions = first_position + token
    own = queries + (first_token + token) * token_stride + (head * GROUP + member) * DIM
    q = tl.load(own[:, None] + dims[None, :], mask=is_query[:, None] & in_head[None, :], other=0.0)

    first, end = _own_keys(
        first_position, count, split, num_splits, window, KEYS, HAS_WINDOW, IS_SPLIT
    )
    largest = tl.full([QUERIES], _NO_SCORE, tl.float32)
    sums = tl.zeros([QUERIES], tl.float32)
    if HAS_SINKS:
        if split == 0:
            largest = tl.load(sinks + head * GROUP + member) * _LOG2_E
            sums += 1.0
    averages = tl.zeros([QUERIES, WIDTH], tl.float32)
    own_table = tables + row * table_width
    for start in range(first, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        block = tl.load(own_table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + keys % BLOCK_SIZE
        held = cache + slot * (2 * KV_HEADS * DIM) + head * DIM
        k = tl.load(
            held[None, :] + dims[:, None], mask=is_key[None, :] & in_head[:, None], other=0.0
        )
        scores = _seen_scores(
            tl.dot(q, k) * scale, keys, end, positions, window, softcap, HAS_CAP, HAS_WINDOW
        )
        larger = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(larger == _NO_SCORE, 0.0, larger)
        weights = tl.exp2(scores - shift[:, None])
        faded = tl.exp2(largest - shift)
        sums = sums * faded + tl.sum(weights, 1)
        v = tl.load(
            held[:, None] + KV_HEADS * DIM + dims[None, :],
            mask=is_key[:, None] & in_head[None, :],
            other=0.0,
        )
        averages = tl.dot(weights.to(v.dtype), v, averages * faded[:, None])
        largest = larger

    sums = tl.where(sums == 0.0, 1.0, sums)  # splits without visible keys
    averages = averages / sums[:, None]
    heads = KV_HEADS * GROUP
    of_head = head * GROUP + member
    if IS_SPLIT:
        place = ((tile * max_tokens + token) * heads + of_head) * num_splits + split
        tl.store(part_sums + place, largest + tl.log2(sums), mask=is_query)
        target = parts + place.to(tl.int64)[:, None] * DIM + dims[None, :]
    else:
        target = out + ((first_token + token) * heads + of_head)[:, None] * DIM + dims[None, :]
    tl.store(
        target,
        averages.to(target.dtype.element_ty),
        mask=is_query[:, None] & in_head[None, :],
    )


@triton.jit(do_not_specialize=["num_splits", "max_tokens"])
def merge_splits(
    parts: tl.tensor,
    part_sums: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    num_splits: tl.tensor,
    max_tokens: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Join the splits of `attend_tiles`; one program per token of a tile and head.

    Args:
        SPLITS: maximum of `num_splits`
    """
    tile, token = tl.program_id(0) // max_tokens, tl.program_id(0) % max_tokens
    head = tl.program_id(1)
    if token < tl.load(tiles + 4 * tile + 3):
        split, dims = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
        is_split, in_head = split < num_splits, dims < DIM
        place = (tl.program_id(0) * HEADS + head).to(tl.int64) * num_splits + split
        sums = tl.load(part_sums + place, mask=is_split, other=_NO_SCORE)
        weights = tl.exp2(sums - tl.max(sums, 0))
        made = tl.load(
            parts + place[:, None] * DIM + dims[None, :],
            mask=is_split[:, None] & in_head[None, :],
            other=0.0,
        )
        merged = tl.sum(made * weights[:, None], 0) / tl.sum(weights, 0)
        number = tl.load(tiles + 4 * tile + 1).to(tl.int64) + token
        target = out + (number * HEADS + head) * DIM + dims
        tl.store(target, merged.to(out.dtype.element_ty), mask=in_head)
