"""Device functions of DIN's attention: tuples of accumulators, one for each piece of a layer's
units (see mlp.py)."""

import triton
import triton.language as tl


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """An accumulator [ROWS, COLUMNS]."""
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def zero_vector(SIZE: tl.constexpr):
    """An accumulator [SIZE]."""
    return tl.zeros([SIZE], tl.float32)


@triton.jit
def zero_pieces(ROWS: tl.constexpr, LAYER: tl.constexpr, OPTIONS: tl.constexpr):
    """An accumulator [ROWS, n] for each piece of a layer."""
    pieces = ()
    for i in tl.static_range(len(OPTIONS.pieces[LAYER])):
        pieces = pieces + (zeros(ROWS, OPTIONS.pieces[LAYER][i][1]),)
    return pieces


@triton.jit
def zero_vectors(LAYER: tl.constexpr, OPTIONS: tl.constexpr):
    """An accumulator [n] for each piece of a layer."""
    pieces = ()
    for i in tl.static_range(len(OPTIONS.pieces[LAYER])):
        pieces = pieces + (zero_vector(OPTIONS.pieces[LAYER][i][1]),)
    return pieces


@triton.jit
def zero_sums(LAYER: tl.constexpr, OPTIONS: tl.constexpr):
    """An accumulator of `partial_sums` for each piece of a layer."""
    pieces = ()
    for i in tl.static_range(len(OPTIONS.pieces[LAYER])):
        pieces = pieces + (partial_sums(zeros(OPTIONS.block, OPTIONS.pieces[LAYER][i][1])),)
    return pieces


@triton.jit
def plus(x, y):
    """The sums of the items of two tuples."""
    out = ()
    for i in tl.static_range(len(x)):
        out = out + (x[i] + y[i],)
    return out


@triton.jit
def partial_sums(x):
    """Sums over the rows of x [16 m, n] that an MMA leaves to one thread, two of sixteen:
    [m, 8, n]. A loop adds them; sums over all rows, in each round, would wait for all threads."""
    return tl.sum(x.reshape([x.shape[0] // 16, 2, 8, x.shape[1]]), 1)


@triton.jit
def total_sums(sums):
    """The sums over all rows of each item, of `partial_sums`."""
    out = ()
    for i in tl.static_range(len(sums)):
        out = out + (tl.sum(tl.sum(sums[i], 1), 0),)
    return out


@triton.jit
def column_sums(x):
    """The `partial_sums` of each item."""
    out = ()
    for i in tl.static_range(len(x)):
        out = out + (partial_sums(x[i]),)
    return out


@triton.jit
def store_pieces(ptr, pieces, LAYER: tl.constexpr, OPTIONS: tl.constexpr):
    """Store a vector with an element for each unit of a layer."""
    for i in tl.static_range(len(pieces)):
        columns = OPTIONS.pieces[LAYER][i][0] + tl.arange(0, OPTIONS.pieces[LAYER][i][1])
        value = pieces[i].to(ptr.dtype.element_ty)
        tl.store(ptr + columns, value, mask=columns < OPTIONS.hidden[LAYER])


@triton.jit
def store_tile_pieces(
    ptr, pieces, num_rows, ROWS: tl.constexpr, LAYER: tl.constexpr, OPTIONS: tl.constexpr
):
    """Store the first num_rows rows of pieces [ROWS, n] to a contiguous matrix with a column for
    each unit of a layer."""
    for i in tl.static_range(len(pieces)):
        rows = tl.arange(0, ROWS)
        columns = OPTIONS.pieces[LAYER][i][0] + tl.arange(0, OPTIONS.pieces[LAYER][i][1])
        ptrs = ptr + rows[:, None] * OPTIONS.hidden[LAYER] + columns[None, :]
        mask = (rows < num_rows)[:, None] & (columns < OPTIONS.hidden[LAYER])[None, :]
        tl.store(ptrs, pieces[i].to(ptr.dtype.element_ty), mask=mask)
