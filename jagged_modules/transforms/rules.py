"""The table of rules for arithmetic: how the rows' dimension moves through an operator, and why
f(x[m]) = f(x)[m].

An operator without a rule, or whose rule returns None, gets gathered operands. So a missing rule
costs time and is never wrong. There is none for random operators, batch norm in training, in-place
operators (capture removes them), and operators with data-dependent shapes.
"""

from __future__ import annotations

from . import runtime
from .calls import Call, Moved, flat, row_by_row, rule
from .lineage import common

UNARY = """abs acos acosh alias asin asinh atan atanh bitwise_not ceil celu clamp clone cos cosh
deg2rad detach elu erf erfc erfinv exp exp2 expm1 floor frac gelu hardsigmoid hardswish
hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid
logical_not logit mish nan_to_num neg rad2deg reciprocal relu relu6 round rsqrt selu sgn
sigmoid sign signbit silu sin sinc sinh softplus sqrt square tan tanh trunc _to_copy""".split()
LIKE = "zeros_like ones_like full_like".split()
BINARY = """add sub mul div remainder fmod eq ne lt le gt ge bitwise_and bitwise_or
bitwise_xor""".split()
SCALAR = [*BINARY, "rsub"]
OTHERS = """maximum.default minimum.default fmax.default fmin.default atan2.default hypot.default
logaddexp.default __and__.Tensor __or__.Tensor __xor__.Tensor logical_and.default
logical_or.default logical_xor.default where.self where.ScalarOther where.ScalarSelf where.Scalar
masked_fill.Scalar masked_fill.Tensor clamp.Tensor clamp_min.default clamp_min.Tensor
clamp_max.default clamp_max.Tensor lerp.Tensor lerp.Scalar addcmul.default addcdiv.default
threshold.default pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar div.Tensor_mode div.Scalar_mode
copysign.Tensor xlogy.Tensor heaviside.default floor_divide.default""".split()


@rule(
    *(f"{name}.default" for name in UNARY + LIKE),
    *(f"{name}.Scalar" for name in SCALAR),
    *(f"{name}.Tensor" for name in BINARY),
    *OTHERS,
)
def pointwise(call: Call) -> Moved | None:
    """Each element of the result depends on the elements at the same place of the broadcast
    operands."""
    lineage = call.broadcast([x for argument in call.arguments.values() for x in flat(argument)])
    return lineage and Moved(lineage, broadcasts=True)


@rule("type_as.default")
def type_as(call: Call) -> Moved | None:
    """Converts each element. The second operand tells the dtype and the device, by any of its rows
    and in any shape."""
    lineage, other = call.lineage(call["self"]), call.lineage(call["other"])
    return Moved(lineage) if lineage and (other is None or other.maps == lineage.maps) else None


@rule(
    "softmax.int log_softmax.int _softmax.default _log_softmax.default cumsum.default"
    " cumprod.default logcumsumexp.default cummax.default cummin.default flip.default glu.default"
    " sort.default argsort.default topk.default roll.default"
)
def along_dim(call: Call) -> Moved | None:
    """Works along one other dimension, for each row by itself: softmax, cumsum, sort, topk, flip,
    glu. The dimensions stay in place."""
    lineage, ndim = call.lineage(call["self"]), len(call.shape(call["self"]))
    names = [name for name in ("dim", "dims") if name in call.arguments]
    dims = [d % max(ndim, 1) for name in names for d in flat(call[name])]
    if lineage is None or not dims or lineage.dim in dims:
        return None
    return Moved(lineage)


@rule(
    "mean.dim var.dim std.dim max.dim min.dim all.dim any.dim median.dim all.dims any.dims"
    " var.correction std.correction var_mean.correction std_mean.correction amax.default"
    " amin.default logsumexp.default argmax.default argmin.default linalg_vector_norm.default"
    " mode.default nansum.default sum.dim_IntList prod.dim_int norm.ScalarOpt_dim"
)
def reduction(call: Call) -> Moved | None:
    """Reduces other dimensions, for each row by itself. Without keepdim, the dimensions behind the
    reduced ones move forward."""
    x = call["self"]
    lineage, ndim = call.lineage(x), len(call.shape(x))
    dims = call.arguments.get("dim")
    if lineage is None or dims is None or dims == []:
        return None
    dims = {d % ndim for d in flat(dims)}
    if lineage.dim in dims:
        return None
    removed = 0 if call.arguments.get("keepdim") else sum(d < lineage.dim for d in dims)
    return Moved(lineage.at(lineage.dim - removed))


row_by_row(
    [
        (  # the last dimensions
            "layer_norm.default rms_norm.default",
            lambda call, dim, ndim: dim < ndim - len(call["normalized_shape"]),
        ),
        # groups of channels of each sample
        ("group_norm.default", lambda call, dim, ndim: dim == 0),
        # with running statistics, an affine function of each element that depends on its channel
        ("_native_batch_norm_legit_no_training.default", lambda call, dim, ndim: dim != 1),
        # contracts the last dimension
        ("linear.default", lambda call, dim, ndim: dim != ndim - 1),
        (  # each sample; without a dimension of samples, the first one is that of the channels
            "conv1d.default conv1d.padding conv2d.default conv2d.padding",
            lambda call, dim, ndim: dim == 0 and ndim == len(call.shape(call["weight"])),
        ),
    ],
    of="input",
)
# compare each element with a tensor that is the same for all
row_by_row([("isin.Tensor_Tensor", lambda call, dim, ndim: True)], of="elements")
row_by_row(
    [
        ("bucketize.Tensor", lambda call, dim, ndim: True),
        # one weight for each index of dimension 1
        ("prelu.default", lambda call, dim, ndim: dim != 1),
        (  # pool the last dimensions, for each channel of each sample
            "max_pool1d.default avg_pool1d.default adaptive_avg_pool1d.default"
            " adaptive_max_pool1d.default max_pool1d_with_indices.default",
            lambda call, dim, ndim: dim < ndim - 1,
        ),
        (
            "max_pool2d.default avg_pool2d.default adaptive_avg_pool2d.default"
            " adaptive_max_pool2d.default max_pool2d_with_indices.default",
            lambda call, dim, ndim: dim < ndim - 2,
        ),
    ]
)


@rule("matmul.default", "bmm.default", "mm.default", "baddbmm.default", "addmm.default")
def matmul(call: Call) -> Moved | None:
    """Rows of the left operand, columns of the right one, or matrices of a batch are computed by
    themselves."""
    # addmm, baddbmm, mm and bmm, matmul
    names = ("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"), ("self", "other")
    left, right = next((call[x], call[y]) for x, y in names if {x, y} <= call.arguments.keys())
    bias = [call["self"]] if left is not call["self"] else []
    ndim, left_dims, right_dims = len(call.shape()), len(call.shape(left)), len(call.shape(right))
    moved = call.lineage(left), call.lineage(right)
    if left_dims < 2 or right_dims < 2:  # of a vector on the left, the dimension is contracted
        rows = moved[0]
        return Moved(rows) if rows and not moved[1] and rows.dim != left_dims - 1 else None
    dims = [x and x.dim + ndim - own_dims for x, own_dims in zip(moved, (left_dims, right_dims))]
    row, column = ndim - 2, ndim - 1
    if dims[0] == column or dims[1] == row:  # the contracted dimension
        return None
    operands, skip = [left, right], 2  # along a batch dimension
    if dims[0] == row or dims[1] == column:
        if all(moved):
            return None
        operands, skip = [left if moved[0] else right], 0
    lineage = call.broadcast([*operands, *bias], skip)
    return lineage and Moved(lineage)


@rule("einsum.default")
def einsum(call: Call) -> Moved | None:
    """A letter of the result that labels the rows of all operands that have it is a batch, row or
    column index of a sum of products."""
    if "..." in call["equation"] or "->" not in call["equation"]:
        return None
    inputs, output = call["equation"].replace(" ", "").split("->")
    terms, operands = inputs.split(","), call["tensors"]
    moved = [(term, call.lineage(x)) for term, x in zip(terms, operands) if call.lineage(x)]
    letters = {term[lineage.dim] for term, lineage in moved if lineage}
    if len(letters) != 1 or output.count(letter := letters.pop()) != 1:
        return None
    if any(term.count(letter) > 1 for term in terms):
        return None
    if any(letter in term and call.lineage(x) is None for term, x in zip(terms, operands)):
        return None
    lineage = common([lineage.at(output.index(letter)) for _, lineage in moved if lineage])
    return lineage and Moved(lineage)


@rule("scaled_dot_product_attention.default")
def attention(call: Call) -> Moved | None:
    """Query rows and batches are computed by themselves. Active dropout has no rule."""
    if call["dropout_p"] != 0 or (
        call.shape(call["query"])[:-2] != call.shape(call["key"])[:-2] and not call["enable_gqa"]
    ):
        return None
    names = ("query", "key", "value")
    if any(call.lineage(call[name]) is None for name in names):
        return None
    skip = 3 if call["enable_gqa"] else 2
    lineage = call.broadcast([call[name] for name in (*names, "attn_mask")], skip)
    return lineage and Moved(lineage)


@rule("cosine_similarity.default", "pairwise_distance.default")
def similarity(call: Call) -> Moved | None:
    """Reduces one other dimension of two broadcast operands of the same number of dimensions."""
    operands = [call.arguments.get(name) for name in ("x1", "x2")]
    lineages = [call.lineage(x) for x in operands]
    ndim = len(call.shape(operands[0]))
    dim = call.arguments.get("dim", -1) % ndim
    if not all(lineages) or ndim != len(call.shape(operands[1])):
        return None
    lineage = common([x for x in lineages if x])
    if lineage is None or lineage.dim == dim:
        return None
    return Moved(
        lineage.at(lineage.dim - (lineage.dim > dim and not call.arguments.get("keepdim")))
    )


@rule("bilinear.default")
def bilinear(call: Call) -> Moved | None:
    """Each row of the result depends on the same row of both inputs, whose last dimensions are
    contracted."""
    lineage = call.broadcast([call["input1"], call["input2"]], skip=1)
    return lineage and Moved(lineage) if call.only("input1", "input2") else None


@rule("gru.input", "lstm.input")
def recurrence(call: Call) -> Moved | None:
    """Each sequence is computed by itself, from its own first state. Active dropout has no rule."""
    states, batch = flat(call["hx"]), 0 if call["batch_first"] else 1
    lineages = [x for operand in (call["input"], *states) if (x := call.lineage(operand))]
    # of the input's and the states' rows, and of the result's and its states'
    dims = (batch, *[1] * len(states))
    if call["train"] or len(call.shape(call["input"])) != 3 or not call.only("input", "hx"):
        return None
    if [x.dim for x in lineages] != [*dims]:
        return None
    lineage = common([x.at(batch) for x in lineages])
    return lineage and Moved(lineage, target=runtime.recurrence, dims=dims)
