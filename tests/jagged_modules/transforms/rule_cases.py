"""Calls of each operator that has a rule, on x [C, 4, 6] = G[map], and calls that must keep their
gather."""

import torch

from jagged_modules.transforms import rules

aten = torch.ops.aten
WEIGHT = torch.randn(5, 6).double()
SQUARE = torch.randn(6, 6).double()
VECTOR = torch.randn(6).double()
TABLE, PICK = torch.randn(9, 3).double(), torch.tensor([2, 0, 2])
KERNEL, BILINEAR = torch.randn(5, 4, 3).double(), torch.randn(5, 6, 6).double()
# Parameters of a recurrence of width 3 in both directions over x [C, 4, 6], by the number of its
# gates
GATES = {
    gates: [
        torch.randn(3 * gates, *width).double() for _ in range(2) for width in ((6,), (3,), (), ())
    ]
    for gates in (3, 4)
}

# Arguments behind x. Where x must be something else, the entry is a function of x.
SPECIAL = {
    "acosh": lambda x: aten.acosh(x.abs() + 1),
    "bitwise_not": lambda x: aten.bitwise_not(x > 0),
    "hardtanh": lambda x: aten.hardtanh(x),
    "celu": lambda x: aten.celu(x),
    "clamp": lambda x: aten.clamp(x, -1, 1),
    "lgamma": lambda x: aten.lgamma(x.abs() + 1),
    "logical_not": lambda x: aten.logical_not(x > 0),
    "_to_copy": lambda x: aten._to_copy(x, dtype=torch.float32),
    "full_like": lambda x: aten.full_like(x, 3.0) * x,
    "zeros_like": lambda x: aten.zeros_like(x) + x,
    "ones_like": lambda x: aten.ones_like(x) * x,
}


def _binary(name):
    def call(x, y):
        function = getattr(aten, name).Tensor
        return function(*((x > 0, y > 0) if name.startswith("bitwise") else (x, y)))

    return call


def _scalar(name):
    def call(x, y):
        function = getattr(aten, name).Scalar
        return function(x > 0, True) if name.startswith("bitwise") else function(x, 2)

    return call


def _unary(name):
    return lambda x, y: SPECIAL[name](x) if name in SPECIAL else getattr(aten, name).default(x)


# name of the operator → f(x, y): x [C, 4, 6] and y [C, 4, 6] have the same map.
CASES = {f"{name}.default": _unary(name) for name in rules.UNARY + rules.LIKE}
CASES |= {f"{name}.Tensor": _binary(name) for name in rules.BINARY}
CASES |= {f"{name}.Scalar": _scalar(name) for name in rules.SCALAR}
CASES |= {
    f"{name}.default": lambda x, y, name=name: getattr(aten, name).default(x, y)
    for name in "maximum minimum fmax fmin atan2 hypot logaddexp".split()
}
CASES |= {
    f"{name}.default": lambda x, y, name=name: getattr(aten, name).default(x > 0, y > 0)
    for name in "logical_and logical_or logical_xor".split()
}
CASES |= {
    f"{name}.Tensor": lambda x, y, name=name: getattr(aten, name).Tensor(x > 0, y > 0)
    for name in "__and__ __or__ __xor__".split()
}
CASES |= {
    "where.self": lambda x, y: aten.where.self(x > 0, x, y),
    "where.ScalarOther": lambda x, y: aten.where.ScalarOther(x > 0, x, 1.0),
    "where.ScalarSelf": lambda x, y: aten.where.ScalarSelf(x > 0, 1.0, x),
    "where.Scalar": lambda x, y: aten.where.Scalar(x > 0, 1.0, 2.0),
    "masked_fill.Scalar": lambda x, y: aten.masked_fill.Scalar(x, y > 0, 2.0),
    "masked_fill.Tensor": lambda x, y: aten.masked_fill.Tensor(
        x, y > 0, torch.tensor(2.0).double()
    ),
    "clamp.Tensor": lambda x, y: aten.clamp.Tensor(x, y, y + 1),
    "clamp_min.default": lambda x, y: aten.clamp_min(x, 0),
    "clamp_min.Tensor": lambda x, y: aten.clamp_min.Tensor(x, y),
    "clamp_max.default": lambda x, y: aten.clamp_max(x, 0),
    "clamp_max.Tensor": lambda x, y: aten.clamp_max.Tensor(x, y),
    "lerp.Tensor": lambda x, y: aten.lerp.Tensor(x, y, x),
    "lerp.Scalar": lambda x, y: aten.lerp.Scalar(x, y, 0.3),
    "addcmul.default": lambda x, y: aten.addcmul(x, y, y),
    "addcdiv.default": lambda x, y: aten.addcdiv(x, y, y),
    "threshold.default": lambda x, y: aten.threshold(x, 0.1, 2),
    "pow.Tensor_Scalar": lambda x, y: aten.pow.Tensor_Scalar(x, 2),
    "pow.Tensor_Tensor": lambda x, y: aten.pow.Tensor_Tensor(x.abs(), y),
    "pow.Scalar": lambda x, y: aten.pow.Scalar(2, x),
    "div.Tensor_mode": lambda x, y: aten.div.Tensor_mode(x, y, rounding_mode="floor"),
    "div.Scalar_mode": lambda x, y: aten.div.Scalar_mode(x, 2, rounding_mode="floor"),
    "type_as.default": lambda x, y: (
        aten.type_as(x, (y > 0)),
        aten.type_as(x, y[:, :1, 0]),
        aten.type_as(x, VECTOR),
    ),
    "copysign.Tensor": lambda x, y: aten.copysign.Tensor(x, y),
    "xlogy.Tensor": lambda x, y: aten.xlogy.Tensor(x, y.abs()),
    "heaviside.default": lambda x, y: aten.heaviside(x, y),
    "softmax.int": lambda x, y: aten.softmax.int(x, -1),
    "log_softmax.int": lambda x, y: aten.log_softmax.int(x, 1),
    "_softmax.default": lambda x, y: aten._softmax(x, -1, False),
    "_log_softmax.default": lambda x, y: aten._log_softmax(x, 1, False),
    "logcumsumexp.default": lambda x, y: aten.logcumsumexp(x, 1),
    "cumsum.default": lambda x, y: aten.cumsum(x, 1),
    "cumprod.default": lambda x, y: aten.cumprod(x, -1),
    "cummax.default": lambda x, y: aten.cummax(x, -1),
    "cummin.default": lambda x, y: aten.cummin(x, 1)[0],
    "topk.default": lambda x, y: aten.topk(x, 2, 1),
    "sort.default": lambda x, y: aten.sort.default(x, 1)[0],
    "argsort.default": lambda x, y: aten.argsort.default(x, 1),
    "flip.default": lambda x, y: aten.flip(x, [1, 2]),
    "roll.default": lambda x, y: aten.roll(x, [1], [1]),
    "glu.default": lambda x, y: aten.glu(x, 1),
    "sum.dim_IntList": lambda x, y: (
        aten.sum.dim_IntList(x, [1]),
        aten.sum.dim_IntList(x.transpose(0, 1), [0, 2], True),
    ),
    "nansum.default": lambda x, y: aten.nansum(x, [1]),
    "mean.dim": lambda x, y: (aten.mean.dim(x, [-1]), aten.mean.dim(x.transpose(0, 2), [0])),
    "floor_divide.default": lambda x, y: aten.floor_divide(x, y),
    "var.dim": lambda x, y: aten.var.dim(x, [1]),
    "std.dim": lambda x, y: aten.std.dim(x, [1]),
    "var.correction": lambda x, y: aten.var.correction(x, [1], correction=0),
    "std.correction": lambda x, y: aten.std.correction(x, [1], correction=0),
    "var_mean.correction": lambda x, y: aten.var_mean.correction(x, [1], correction=0),
    "std_mean.correction": lambda x, y: aten.std_mean.correction(x, [1], correction=0),
    "max.dim": lambda x, y: aten.max.dim(x, 1),
    "min.dim": lambda x, y: aten.min.dim(x, 2, True),
    "median.dim": lambda x, y: aten.median.dim(x, 2),
    "mode.default": lambda x, y: aten.mode(x.sign(), 2)[0],
    "all.dim": lambda x, y: aten.all.dim(x > -1, 1),
    "any.dim": lambda x, y: aten.any.dim(x > 1, 1),
    "all.dims": lambda x, y: aten.all.dims(x > -1, [1, 2]),
    "any.dims": lambda x, y: aten.any.dims(x > 1, [1]),
    "amax.default": lambda x, y: aten.amax(x, [1]),
    "amin.default": lambda x, y: aten.amin(x, [1]),
    "logsumexp.default": lambda x, y: aten.logsumexp(x, [1]),
    "argmax.default": lambda x, y: aten.argmax(x, 1),
    "argmin.default": lambda x, y: aten.argmin(x, 2),
    "linalg_vector_norm.default": lambda x, y: aten.linalg_vector_norm(x, 2, [2]),
    "prod.dim_int": lambda x, y: aten.prod.dim_int(x, 1),
    "norm.ScalarOpt_dim": lambda x, y: aten.norm.ScalarOpt_dim(x, 2, [1]),
    "layer_norm.default": lambda x, y: aten.layer_norm(x, [6], VECTOR, VECTOR),
    "rms_norm.default": lambda x, y: aten.rms_norm(x, [4, 6]),
    "group_norm.default": lambda x, y: aten.group_norm(x, 2),
    "_native_batch_norm_legit_no_training.default": lambda x, y: torch.nn.functional.batch_norm(
        x, VECTOR[:4], VECTOR[:4].abs()
    ),
    "prelu.default": lambda x, y: aten.prelu(x, VECTOR[:4]),
    "linear.default": lambda x, y: aten.linear(x, WEIGHT),
    "matmul.default": lambda x, y: (
        aten.matmul(x, SQUARE),
        aten.matmul(x, y.mT),
        aten.matmul(WEIGHT, x.mT),
        aten.matmul(x, VECTOR),
        aten.matmul(x[:, 0], SQUARE),
        aten.matmul(SQUARE, x[:, 0].transpose(0, 1)),
        aten.matmul(x[:, 0].transpose(0, 1).transpose(0, 1), SQUARE),
    ),
    "mm.default": lambda x, y: aten.mm(x[:, 0], SQUARE),
    "bmm.default": lambda x, y: (
        aten.bmm(x, y.mT),
        aten.bmm(x.transpose(0, 1), WEIGHT[:4, None].expand(4, 6, 6)),
    ),
    "addmm.default": lambda x, y: (
        aten.addmm(VECTOR, x[:, 0], SQUARE),
        aten.addmm(y[:, 1], x[:, 0], SQUARE),
    ),
    "baddbmm.default": lambda x, y: (
        aten.baddbmm(x[:, :, :4], x, y.mT),
        aten.baddbmm(VECTOR[:4], x, y.mT),
    ),
    "einsum.default": lambda x, y: (
        aten.einsum("bij,bkj->ibk", [x, y]),
        aten.einsum("bij,jk->bik", [x, SQUARE]),
    ),
    "scaled_dot_product_attention.default": lambda x, y: (
        aten.scaled_dot_product_attention(x, y, y),
        aten.scaled_dot_product_attention(x, y, y, y[:, :, :4]),
    ),
    "cosine_similarity.default": lambda x, y: aten.cosine_similarity(x, y, -1),
    "pairwise_distance.default": lambda x, y: aten.pairwise_distance(x, y),
    "view.default": lambda x, y: (
        aten.view(x, [-1, 24]),
        aten.view(aten.view(x, [-1, 2, 3]), [x.shape[0], 4, 6]),
        aten.view(x, [-1]) * 2,
        x.transpose(0, 1).reshape(-1, 6).exp(),
    ),
    "_unsafe_view.default": lambda x, y: aten._unsafe_view(x, [x.shape[0], 2, 12]),
    "unsqueeze.default": lambda x, y: (aten.unsqueeze(x, 0), aten.unsqueeze(x, -1)),
    "squeeze.dim": lambda x, y: aten.squeeze.dim(x[:, :1], 1),
    "squeeze.dims": lambda x, y: aten.squeeze.dims(x[:, :1, :1], [1, 2]),
    "transpose.int": lambda x, y: aten.transpose.int(x, 0, 2),
    "permute.default": lambda x, y: aten.permute(x, [2, 0, 1]),
    "t.default": lambda x, y: aten.t(x[:, 0]),
    "expand.default": lambda x, y: (
        aten.expand(x[:, :1], [x.shape[0], 4, 6]),
        aten.expand(x, [2, -1, 4, 6]),
    ),
    "repeat.default": lambda x, y: aten.repeat(x, [2, 1, 3, 1]),
    "slice.Tensor": lambda x, y: (aten.slice(x, 1, 1, 3), aten.slice(x, 0, 0, 2**63 - 1)),
    "select.int": lambda x, y: (aten.select(x, 1, 0), aten.select(x.transpose(0, 1), 0, 1)),
    "split.Tensor": lambda x, y: aten.split.Tensor(x, 3, 2),
    "unsafe_split.Tensor": lambda x, y: aten.unsafe_split(x, 3, 2)[1],
    "split_with_sizes.default": lambda x, y: aten.split_with_sizes(x, [1, 5], 2)[1],
    "unbind.int": lambda x, y: aten.unbind(x.transpose(0, 1), 0)[1],
    "cat.default": lambda x, y: (
        aten.cat([x, y], 1),
        aten.cat([WEIGHT[:4, None].expand(4, x.shape[0], 6), x.transpose(0, 1)], 2),
    ),
    "stack.default": lambda x, y: aten.stack([x, y], 0),
    "pad.default": lambda x, y: aten.pad(x, [1, 2]),
    "constant_pad_nd.default": lambda x, y: aten.constant_pad_nd(x, [1, 2, 0, 1], 3.0),
    "tril.default": lambda x, y: aten.tril(x),
    "triu.default": lambda x, y: aten.triu(x, 1),
    "diagonal.default": lambda x, y: aten.diagonal(x, 0, 1, 2),
    "index_select.default": lambda x, y: aten.index_select(x, 1, PICK),
    "index.Tensor": lambda x, y: (
        x[:, PICK],
        x[:, PICK, PICK],
        x[:, :, PICK],
        x.transpose(0, 1)[PICK, :, PICK],
        VECTOR[x[:, 0, 0].sign().long() + 1],
    ),
    "embedding.default": lambda x, y: aten.embedding(TABLE, x.sign().long() + 1),
    "one_hot.default": lambda x, y: aten.one_hot(x.sign().long() + 1, 3),
    "gather.default": lambda x, y: aten.gather(x, 1, y.sign().long() + 1),
    "scatter.value": lambda x, y: aten.scatter.value(x, 2, y.sign().long() + 1, 3.0),
    "scatter.src": lambda x, y: aten.scatter.src(x, 2, (y[:, :, :1] > 0).long(), y),
    "scatter_add.default": lambda x, y: (
        aten.scatter_add(x, 2, y.sign().long() + 1, y),
        aten.scatter_add(torch.zeros(x.shape[0], 4, 3).double(), 2, y.sign().long() + 1, x),
    ),
    "copy.default": lambda x, y: (
        aten.copy(x, y[:, :1]),
        aten.copy(x[:, 0], VECTOR),
        aten.copy(torch.zeros(x.shape[0], 4, 6).double(), x),
    ),
    "select_scatter.default": lambda x, y: (
        aten.select_scatter(x, y[:, 0], 1, -1),
        aten.select_scatter(x.transpose(0, 1), y[:, 1], 0, 2),
        aten.select_scatter(x, torch.zeros(x.shape[0], 4).double(), 2, 1),
    ),
    "slice_scatter.default": lambda x, y: aten.slice_scatter(x, y[:, :2], 1, 1, 3),
    "index_put.default": lambda x, y: (
        aten.index_put(x, [y > 0], torch.tensor(2.0).double()),
        aten.index_put(x, [y[:, 0, 0] > 0], torch.tensor(2.0).double()),
        aten.index_put(x, [None, VECTOR[:4] > 0], torch.tensor(2.0).double()),
    ),
    "bilinear.default": lambda x, y: aten.bilinear(x, y, BILINEAR, VECTOR[:5]),
    "bucketize.Tensor": lambda x, y: aten.bucketize.Tensor(x, VECTOR.sort()[0]),
    "isin.Tensor_Tensor": lambda x, y: aten.isin(x.sign(), VECTOR.sign()),
    "conv1d.default": lambda x, y: (
        aten.conv1d(x, KERNEL, VECTOR[:5], padding=[1]),
        aten.conv1d(x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1), KERNEL),
    ),
    "conv1d.padding": lambda x, y: aten.conv1d.padding(x, KERNEL, None, [1], "same"),
    "conv2d.default": lambda x, y: aten.conv2d(x[:, :, None], KERNEL[:, :, None]),
    "conv2d.padding": lambda x, y: aten.conv2d.padding(
        x[:, :, None], KERNEL[:, :, None], None, [1, 1], "same"
    ),
    "max_pool1d.default": lambda x, y: aten.max_pool1d(x, [2]),
    "max_pool2d.default": lambda x, y: aten.max_pool2d(x, [2, 2]),
    "avg_pool1d.default": lambda x, y: (
        aten.avg_pool1d(x, [2]),
        aten.avg_pool1d(x.transpose(0, 1), [2]),
    ),
    "avg_pool2d.default": lambda x, y: aten.avg_pool2d(x, [2, 2]),
    "adaptive_avg_pool1d.default": lambda x, y: aten.adaptive_avg_pool1d(x, [2]),
    "adaptive_avg_pool2d.default": lambda x, y: aten.adaptive_avg_pool2d(x, [2, 2]),
    "adaptive_max_pool1d.default": lambda x, y: aten.adaptive_max_pool1d(x, [2]),
    "adaptive_max_pool2d.default": lambda x, y: aten.adaptive_max_pool2d(x, [2, 2]),
    "max_pool1d_with_indices.default": lambda x, y: aten.max_pool1d_with_indices(x, [2]),
    "max_pool2d_with_indices.default": lambda x, y: aten.max_pool2d_with_indices(x, [2, 2]),
    "gru.input": lambda x, y: (
        aten.gru.input(
            x, torch.zeros(2, x.shape[0], 3).double(), GATES[3], True, 1, 0.0, False, True, True
        ),
        aten.gru.input(
            x.transpose(0, 1),
            y[:, :2, :3].transpose(0, 1),
            GATES[3],
            True,
            1,
            0.0,
            False,
            True,
            False,
        ),
    ),
    "lstm.input": lambda x, y: (
        aten.lstm.input(
            x,
            [torch.zeros(2, x.shape[0], 3).double()] * 2,
            GATES[4],
            True,
            1,
            0.0,
            False,
            True,
            True,
        ),
        aten.lstm.input(
            x, [y[:, :2, :3].transpose(0, 1)] * 2, GATES[4], True, 1, 0.0, False, True, True
        )[1],
    ),
}

# f(x, other [C, 4, 6], map): one of its operators mixes rows, draws random numbers, or has an
# operand of another lineage.
KEPT = {
    "sum over rows": lambda x, other, m: x.sum(0),
    "sum of all": lambda x, other, m: x.sum(),
    "mean over rows": lambda x, other, m: x.mean((0, 1)),
    "softmax over rows": lambda x, other, m: x.softmax(0),
    "cumsum over rows": lambda x, other, m: x.cumsum(0),
    "sort of rows": lambda x, other, m: x.sort(0)[0],
    "topk of rows": lambda x, other, m: x.topk(1, 0)[0],
    "flip of rows": lambda x, other, m: x.flip(0),
    "roll of rows": lambda x, other, m: x.roll(1, 0),
    "all dimensions of size 1": lambda x, other, m: x[:, :1].squeeze(),
    "part of the rows": lambda x, other, m: x[1:],
    "a row": lambda x, other, m: x[0],
    "a value per candidate": lambda x, other, m: x + other,
    "a column per candidate": lambda x, other, m: x * other[:, :1, :1],
    "rows contracted": lambda x, other, m: x[:, 0].T @ other[:, 0],
    "matrices per candidate": lambda x, other, m: x @ other.mT,
    "batch norm in training": lambda x, other, m: torch.nn.functional.batch_norm(
        x, None, None, training=True
    ),
    "rows and width merged": lambda x, other, m: x.transpose(0, 1).reshape(-1).view(4, -1).sum(1),
    "layer norm over rows": lambda x, other, m: (
        torch.nn.functional.layer_norm(x.permute(1, 2, 0)[..., :1], (1,)) + x.sum(0)[..., None]
    ),
    "another map": lambda x, other, m: x[:, 0] @ SQUARE[:, :4] + x.flip(0)[:, :, 0],
    "two dimensions": lambda x, other, m: x[:, None, :, 0] + x[None, :, :, 0],
    "concatenated with a value per candidate": lambda x, other, m: torch.cat([x, other], 1),
    "concatenated along rows": lambda x, other, m: torch.cat([x, x], 0),
    "indices along rows": lambda x, other, m: x.gather(0, torch.zeros_like(other).long()),
    "a constant converted": lambda x, other, m: torch.ones(1).type_as(x) * other[:, 0],
    "first states per candidate": lambda x, other, m: aten.gru.input(
        x, other[:, :2, :3].transpose(0, 1), GATES[3], True, 1, 0.0, False, True, True
    )[1],
    "pooled rows": lambda x, other, m: aten.avg_pool1d(x.permute(1, 2, 0), [1]),
    "scattered to rows": lambda x, other, m: aten.scatter_add(x, 0, torch.zeros_like(x).long(), x),
    "written to rows": lambda x, other, m: aten.select_scatter(x, other[0], 0, 0),
    "written from values per candidate": lambda x, other, m: aten.slice_scatter(
        x, other[:, :2], 1, 0, 2
    ),
    "copied from values per candidate": lambda x, other, m: aten.copy(x, other),
    "put where a candidate's mask is": lambda x, other, m: aten.index_put(
        x, [other > 0], torch.tensor(2.0).double()
    ),
    "put several numbers": lambda x, other, m: aten.index_put(
        x, [x.cumsum(0)[:, :, 0] > 0], VECTOR
    ),
    "added where a mask is": lambda x, other, m: aten.index_put(
        x, [x > 0], torch.tensor(2.0).double(), True
    ),
    "masked rows": lambda x, other, m: torch.where(other > 0, x, 0),
    "einsum with a value per candidate": lambda x, other, m: aten.einsum(
        "bij,bkj->bik", [x, other]
    ),
    "einsum over rows": lambda x, other, m: aten.einsum("bij,bkj->ik", [x, x]),
    "einsum with rows in two dimensions": lambda x, other, m: aten.einsum(
        "bi,ci->bc", [x[:, 0], x[:, 1]]
    ),
    "einsum of a diagonal of rows": lambda x, other, m: aten.einsum(
        "bb->b", [x[:, 0] @ other[:, 0].T]
    ),
}
