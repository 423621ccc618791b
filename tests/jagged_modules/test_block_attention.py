"""F.block_diagonal_attention and BlockDiagonalSelfAttention on the CPU, against a loop over segments and blocks."""

import copy
import functools
import pickle

import accuracy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagged_modules as jm
from jagged_modules import functional as F

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def turned(x, cos, sin):
    """Rows turned by complex multiplication, in fp32 at least and rounded once."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(x.to(dtype).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)[:, None]).flatten(-2).to(x.dtype)


def blockwise_attention(q, k, v, offsets, block_size=64, scale=None, rotary=None):
    """Dense softmax attention of every block by itself."""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5 if scale is None else scale
    outputs = [0 * q[:0]]
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        for first in range(start, end, block_size):
            rows = range(first, min(first + block_size, end))
            queries, keys, values = (x[rows.start : rows.stop] for x in (q, k, v))
            if rotary is not None:
                positions = [row - start if rotary.positions is None else int(rotary.positions[row]) for row in rows]
                tables = rotary.cos[positions], rotary.sin[positions]
                queries, keys = turned(queries, *tables), turned(keys, *tables)
                values = turned(values, *tables) if rotary.rotate == "qkv" else values
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            p = (torch.einsum("ihd,jhd->hij", queries, keys) * scale).softmax(-1)
            outputs.append(torch.einsum("hij,jhd->ihd", p, values))
    return torch.cat(outputs)


def make_qkv(rows, heads=2, kv_heads=None, dim=8, dtype=torch.float32):
    return [torch.randn(rows, h, dim).to(dtype) for h in (heads, kv_heads or heads, kv_heads or heads)]


def make_rotary(kind, dim, rows=0, max_seqlen=1000):
    """Rotary of "qk" or "qkv", with given positions in no order where it ends in "-given"; None without a kind."""
    if kind is None:
        return None
    rotary = jm.Rotary.from_frequencies(dim, max_seqlen, kind.removesuffix("-given"))
    return jm.Rotary(rotary.cos, rotary.sin, rotary.rotate, torch.randint(max_seqlen, (rows,))) if kind.endswith("given") else rotary


ROTARIES = [None, "qk", "qkv", "qk-given", "qkv-given"]
LENGTHS = {
    "below": [15, 31, 63, 127],
    "whole": [16, 32, 64, 128],
    "above": [17, 33, 65, 129],
    "one-row": [1, 1, 2],
    "empty": [0, 0, 40, 0, 0, 0, 70, 0],
    "all-empty": [0, 0],
    "long": [700, 3],
    "no-segments": [],
}


@pytest.fixture(params=["auto", "reference"])
def implementation(request):
    return request.param


def hold_to_bounds(q, k, v, offsets, implementation="auto", grad=None, **options):
    """Values and gradients to the accuracy rule; the reference rounds each of its operations to 16 bits, unless it rotates."""

    def bounds(*x):
        if implementation == "reference" and options.get("rotary") is None and q.dtype.itemsize == 2:
            return accuracy.definition(lambda *y: blockwise_attention(*y, offsets, **options), dict(zip("qkv", x)), x[-1])
        return accuracy.block_attention(*x, offsets, **options)

    def operator(*x):
        return F.block_diagonal_attention(*x, offsets, implementation=implementation, **options)

    accuracy.check(operator, bounds, dict(q=q, k=k, v=v), grad)


@pytest.fixture
def check(implementation):
    """q, k, v, offsets → `hold_to_bounds` of both implementations."""
    return functools.partial(hold_to_bounds, implementation=implementation)


# -- the function --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_segments(lengths, block_size, check, offsets_of):
    lengths = LENGTHS[lengths]
    check(*make_qkv(sum(lengths)), offsets_of(lengths), block_size=block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_one_row(dtype, implementation, assert_one_key):
    def attend(q, k, v, offsets, _):
        return F.block_diagonal_attention(q, k, v, offsets, implementation=implementation)

    assert_one_key(attend, [1, 1, 1], DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", ROTARIES)
def test_rotary_in_every_dtype(rotary, dtype, check, offsets_of):
    lengths = [33, 0, 16, 7, 50]
    tensors = make_qkv(sum(lengths), dtype=DTYPES[dtype])
    check(*tensors, offsets_of(lengths, torch.int32), block_size=16, rotary=make_rotary(rotary, 8, sum(lengths)))


@pytest.mark.parametrize("rotary", ["qk", "qkv"])
def test_rotation_is_rounded_with_the_result_alone(rotary, implementation, offsets_of):
    """The gradient of q is less than half as far off as where rotated q and k are rounded to bf16 first."""
    exact, offsets = [x.double().requires_grad_() for x in make_qkv(256, dim=64, dtype=torch.bfloat16)], offsets_of([256])
    tables, grad = make_rotary(rotary, 64, max_seqlen=256), torch.randn(256, 2, 64).bfloat16()
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in exact)
    turned = [F.apply_rotary(x, tables.cos, tables.sin) for x in ((q, k, v) if rotary == "qkv" else (q, k))]
    outs = [
        F.block_diagonal_attention(*exact, offsets, rotary=tables, implementation=implementation),
        F.block_diagonal_attention(q, k, v, offsets, rotary=tables, implementation=implementation),
        F.block_diagonal_attention(*turned, *(() if rotary == "qkv" else (v,)), offsets, implementation=implementation),
    ]
    expected, ours, rounded = (torch.autograd.grad(out, x, grad.to(out.dtype))[0].double() for out, x in zip(outs, (exact[0], q, q)))
    assert (ours - expected).norm() < 0.5 * (rounded - expected).norm()


@pytest.mark.parametrize("rotary", [None, "qkv"])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 2), (6, 2), (5, 1)])
def test_grouped_heads(heads, kv_heads, rotary, check, offsets_of):
    check(*make_qkv(60, heads, kv_heads), offsets_of([37, 23]), block_size=16, rotary=make_rotary(rotary, 8))


@pytest.mark.parametrize("dim, rotary", [(1, None), (17, None), (33, None), (256, None), (2, "qkv"), (6, "qk"), (72, "qkv"), (256, "qk")])
def test_head_dims(dim, rotary, check, offsets_of):
    check(*make_qkv(60, dim=dim), offsets_of([37, 0, 23]), block_size=16, rotary=make_rotary(rotary, dim))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1, 10.0])
def test_scale(scale, check, offsets_of):
    check(*make_qkv(60), offsets_of([37, 23]), block_size=16, scale=scale)


@pytest.mark.parametrize("rotary", [None, "qkv"])
@pytest.mark.parametrize("kind", ["contiguous", "expanded", "transposed", "sliced"])
def test_packed_views_and_gradients_of_any_stride(kind, rotary, check, offsets_of):
    grad = {
        "contiguous": torch.randn(60, 2, 8),
        "expanded": torch.ones(1).expand(60, 2, 8),
        "transposed": torch.randn(8, 2, 60).permute(2, 1, 0),
        "sliced": torch.randn(60, 3, 16)[:, 1:, ::2],
    }[kind]
    packed = torch.randn(60, 3, 2, 8)
    check(*packed.unbind(1), offsets_of([37, 23]), block_size=16, rotary=make_rotary(rotary, 8), grad=grad)
    check(*torch.randn(8, 3, 2, 60).permute(3, 1, 2, 0).unbind(1), offsets_of([37, 23]), rotary=make_rotary(rotary, 8), grad=grad)


@given(data=st.data())
def test_anything(data, offsets_of):
    lengths = data.draw(st.lists(st.integers(0, 80), max_size=6))
    kv_heads, group, pairs = (data.draw(st.integers(1, most)) for most in (3, 3, 10))
    options = dict(block_size=data.draw(st.sampled_from([16, 32, 64, 128])))
    options |= dict(rotary=make_rotary(data.draw(st.sampled_from(ROTARIES)), 2 * pairs, sum(lengths)))
    offsets = offsets_of(lengths, data.draw(st.sampled_from([torch.int32, torch.int64])))
    tensors = make_qkv(sum(lengths), kv_heads * group, kv_heads, 2 * pairs, data.draw(st.sampled_from([*DTYPES.values()])))
    hold_to_bounds(*tensors, offsets, **options)


@pytest.mark.parametrize("rotary", [None, "qk", "qkv-given"])
def test_gradcheck(rotary, implementation, offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(19, 2, 1, 2, torch.float64)]
    options = dict(block_size=16, rotary=make_rotary(rotary, 2, 19), implementation=implementation)
    assert torch.autograd.gradcheck(lambda *x: F.block_diagonal_attention(*x, offsets_of([2, 0, 17]), **options), inputs)


@pytest.mark.parametrize("row, block", [(0, (0, 16)), (15, (0, 16)), (16, (16, 20)), (20, (20, 36)), (38, (36, 39)), (39, (39, 40))])
def test_a_row_changes_its_own_block_alone(row, block, implementation, offsets_of):
    q, k, v = make_qkv(40)
    offsets, options = offsets_of([20, 0, 19, 1]), dict(block_size=16, rotary=make_rotary("qkv", 8), implementation=implementation)
    before = F.block_diagonal_attention(q, k, v, offsets, **options)
    for x in (q, k, v):
        x[row] += 1
    changed = (F.block_diagonal_attention(q, k, v, offsets, **options) != before).any(2).any(1)
    assert changed.nonzero().flatten().tolist() == list(range(*block))


def test_given_positions_equal_to_those_in_the_segments(offsets_of):
    tensors, offsets, rotary = make_qkv(30), offsets_of([20, 0, 10]), make_rotary("qk", 8)
    positions = torch.cat([torch.arange(20), torch.arange(10)]).int()
    given = jm.Rotary(rotary.cos, rotary.sin, "qk", positions)
    attended = [F.block_diagonal_attention(*tensors, offsets, block_size=16, rotary=x) for x in (rotary, given)]
    assert torch.equal(*attended)


def test_positions_count_relative_to_one_another_alone(offsets_of):
    tensors, offsets, rotary = make_qkv(30, dtype=torch.float64), offsets_of([20, 10]), make_rotary("qk", 8)
    positions = torch.cat([torch.arange(20) + 7, torch.arange(10) + 900])
    given = jm.Rotary(rotary.cos, rotary.sin, "qk", positions)
    attended = [F.block_diagonal_attention(*tensors, offsets, block_size=16, rotary=x) for x in (rotary, given)]
    torch.testing.assert_close(*attended, rtol=0, atol=1e-5)  # the tables are fp32


def test_no_large_tensor_is_made(tensor_sizes, one_thread, offsets_of):
    """Forward and backward make nothing larger than q, k and v together: far from a score for each pair of rows of a segment."""
    inputs = [x.requires_grad_() for x in make_qkv(4000, dim=16)]
    with tensor_sizes() as sizes:
        out = F.block_diagonal_attention(*inputs, offsets_of([4000]), block_size=16, rotary=make_rotary("qkv", 16, max_seqlen=4000))
        torch.autograd.grad(out.sum(), inputs)
    assert 0 < max(sizes.made) <= sum(x.numel() for x in inputs)


@pytest.mark.parametrize("rotary", [None, "qk", "qkv"])
def test_kept_for_the_backward_are_q_k_v_and_the_output(rotary, saved_tensors, offsets_of):
    """With rotary the turned ones; nothing else has as many elements."""
    tensors = [x.requires_grad_() for x in make_qkv(2000)]
    with saved_tensors() as saved:
        out = F.block_diagonal_attention(*tensors, offsets_of([1500, 0, 500]), rotary=make_rotary(rotary, 8, max_seqlen=1500))
    assert sorted(x for x in saved.storages.values() if x >= out.numel()) == [out.numel()] * 4
    unturned = tensors if rotary is None else tensors[2:] if rotary == "qk" else []
    assert saved.storages.keys() >= {x.data_ptr() for x in (*unturned, out)}


def test_autocast_computes_in_its_dtype(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.block_diagonal_attention(q, k.half(), v, offsets_of([20]), rotary=make_rotary("qk", 8))
    expected = F.block_diagonal_attention(*(x.bfloat16() for x in (q, k, v)), offsets_of([20]), rotary=make_rotary("qk", 8))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps * float(v.detach().abs().max()))
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == torch.float32


def test_second_derivatives(offsets_of):
    def gradients(**options):
        inputs = [x.requires_grad_() for x in make_qkv(3, 1, dim=2, dtype=torch.float64)]
        options |= dict(rotary=make_rotary("qkv", 2))
        return inputs, lambda *x: F.block_diagonal_attention(*x, offsets_of([1, 2]), **options)

    inputs, attend = gradients(implementation="reference")
    assert torch.autograd.gradgradcheck(attend, inputs)
    inputs, attend = gradients()
    grads = torch.autograd.grad(attend(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        sum(g.sum() for g in grads).backward()


# -- the layer -----------------------------------------------------------------------------------------------------------------


def make_layer(rotary="qk", **options):
    return jm.BlockDiagonalSelfAttention(12, 3, block_size=16, rotary=rotary, max_seqlen=100, **options)


@pytest.mark.parametrize("rotary", ["qk", "qkv", None])
def test_layer_equals_the_loop(rotary, offsets_of):
    layer, offsets, x = make_layer(rotary).double(), offsets_of([40, 0, 7, 16]), torch.randn(63, 12, dtype=torch.float64)

    def loop(x):
        q, k, v = (projected.unflatten(1, (3, 4)) for projected in layer.qkv_proj(x).chunk(3, dim=1))
        return layer.out_proj(blockwise_attention(q, k, v, offsets, 16, rotary=make_rotary(rotary, 4)).flatten(1))

    results, grad = [], torch.randn(63, 12, dtype=torch.float64)
    for run in (lambda x: layer((x, offsets))[0], loop):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        results.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], grad)])
    torch.testing.assert_close(*results)


def test_containers(container, offsets_of):
    layer, values, offsets = make_layer(), torch.randn(51, 12), offsets_of([40, 0, 11])
    x = container(values, offsets)
    out = layer(x)
    assert type(out) is type(x)
    assert torch.equal(jm.Jagged.wrap(out).values, layer((values, offsets))[0])
    assert torch.equal(jm.Jagged.wrap(out).offsets, offsets)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_rows(lengths, offsets_of):
    layer, x = make_layer(), torch.zeros(0, 12, requires_grad=True)
    values, _ = layer((x, offsets_of(lengths)))
    values.sum().backward()
    assert values.shape == x.grad.shape == (0, 12)


def test_embedding_collection_outputs():
    torchrec = pytest.importorskip("torchrec")
    table = torchrec.EmbeddingConfig(name="table", embedding_dim=12, num_embeddings=50, feature_names=["history"])
    collection = torchrec.EmbeddingCollection(tables=[table])
    ids = torchrec.KeyedJaggedTensor(["history"], torch.randint(50, (30,)), lengths=torch.tensor([20, 0, 10], dtype=torch.int32))
    out = make_layer()(collection(ids)["history"])
    assert isinstance(out, torchrec.JaggedTensor) and out.lengths().tolist() == [20, 0, 10]
    out.values().square().sum().backward()
    (weight,) = collection.parameters()
    assert weight.grad.abs().sum() > 0


def test_state_dict_round_trip_without_the_tables(offsets_of):
    layer, other, x = make_layer(), make_layer(), (torch.randn(30, 12), offsets_of([30]))
    assert list(layer.state_dict()) == [f"{name}_proj.{kind}" for name in ("qkv", "out") for kind in ("weight", "bias")]
    assert not torch.equal(layer(x)[0], other(x)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], other(x)[0])
    make_layer(None).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "pickle"])
def test_copies(clone, offsets_of):
    layer, x = make_layer(), (torch.randn(30, 12), offsets_of([30]))
    twin = clone(layer)
    assert torch.equal(twin(x)[0], layer(x)[0])
    twin(x)[0].sum().backward()
    assert layer.qkv_proj.weight.grad is None and twin.qkv_proj.weight.grad is not None


def assert_fresh(layer):
    """Tables are right and parameters those of a new layer, initialised by the same seed."""
    torch.manual_seed(5)
    expected = make_layer()
    for tensors in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(x, tensors)()) for x in (layer, expected))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_meta_tensors_are_materialised_by_reset_parameters():
    layer = make_layer(device="meta")
    assert all(x.is_meta for x in (*layer.parameters(), *layer.buffers()))
    layer.to_empty(device="cpu")
    for x in (*layer.parameters(), *layer.buffers()):
        torch.nn.init.constant_(x, float("nan"))
    torch.manual_seed(5)
    layer.reset_parameters()
    assert_fresh(layer)


def test_meta_tensors_are_materialised_by_torchrec():
    parallel = pytest.importorskip("torchrec.distributed.model_parallel").DistributedModelParallel
    layer, wrapper = make_layer(device="meta"), parallel.__new__(parallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.device = torch.device("cpu")
    torch.manual_seed(5)
    wrapper._init_parameters(layer)
    assert_fresh(layer)


def test_shapes_on_the_meta_device():
    x = torch.empty(50, 12, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    assert make_layer(device="meta")(x)[0].shape == (50, 12)


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "to", "fp32-again"])
def test_tables_stay_fp32(convert, offsets_of):
    layer, tables = make_layer(), [x.clone() for x in make_layer().buffers()]
    if convert == "to":
        layer = torch.nn.Sequential(layer).to("cpu", torch.bfloat16)[0]
    else:
        layer = layer.bfloat16().float() if convert == "fp32-again" else getattr(layer, convert)()
    assert len(tables) == 2
    assert all(x.dtype == torch.float32 and torch.equal(x, table) for x, table in zip(layer.buffers(), tables, strict=True))
    dtype = layer.out_proj.weight.dtype
    assert layer((torch.randn(30, 12, dtype=dtype), offsets_of([30])))[0].dtype == dtype


def test_autocast(offsets_of):
    layer, x = make_layer(), (torch.randn(30, 12), offsets_of([10, 20]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    expected, _ = layer(x)
    assert (out.float() - expected).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


@pytest.mark.parametrize("rotary", ["qk", "qkv", None])
def test_layer_keeps_x_q_k_v_and_what_they_attend_to(rotary, saved_tensors, tensor_sizes, one_thread, offsets_of):
    """For a backward, and nothing larger than q, k and v together is ever made: a step is linear in the rows of a segment."""
    layer = jm.BlockDiagonalSelfAttention(12, 3, block_size=16, rotary=rotary, max_seqlen=4000)
    x = torch.randn(4000, 12, requires_grad=True)
    with tensor_sizes() as sizes:
        with saved_tensors() as saved:
            out, _ = layer((x, offsets_of([4000])))
        out.sum().backward()
    kept = {None: [1, 1, 3], "qk": [1, 1, 1, 1, 3], "qkv": [1, 1, 1, 1, 1]}[rotary]  # in "qk", v stays a view of the packed projection
    assert sorted(size for size in saved.storages.values() if size >= x.numel()) == [number * x.numel() for number in kept]
    assert max(sizes.made) == 3 * x.numel()


@pytest.mark.parametrize("rotary", ["qk", "qkv", None])
def test_training_step_changes_every_parameter(rotary, offsets_of):
    layer = make_layer(rotary)
    before = copy.deepcopy(layer.state_dict())
    layer((torch.randn(30, 12), offsets_of([10, 20])))[0].square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert [name for name, x in layer.state_dict().items() if torch.equal(x, before[name])] == []


def test_traced_by_torchrec_as_a_leaf(offsets_of):
    tracer = pytest.importorskip("torchrec.fx").Tracer(leaf_modules=["BlockDiagonalSelfAttention"])
    model = torch.nn.Sequential(make_layer())
    traced, x = torch.fx.GraphModule(model, tracer.trace(model)), (torch.randn(30, 12), offsets_of([30]))
    assert torch.equal(traced(x)[0], model(x)[0])


def test_extra_repr():
    assert "embedding_dim=12, num_heads=3, block_size=16, rotary='qk', max_seqlen=100" in repr(make_layer())


# -- bad input -----------------------------------------------------------------------------------------------------------------


COS, SIN = (torch.randn(5, 4) for _ in range(2))
TABLES, NARROW = jm.Rotary(COS, SIN), jm.Rotary(COS[:, :3], SIN[:, :3])
ODD = dict(zip("qkv", make_qkv(6, dim=7)))
GOOD = dict(zip("qkv", make_qkv(6))) | dict(offsets=torch.tensor([0, 2, 6]))


def positions(*values):
    return dict(rotary=jm.Rotary(COS, SIN, positions=torch.tensor(values)))


BAD_CALLS = [
    (dict(q=None), TypeError, "q must be a torch.Tensor, got NoneType"),
    (dict(k=torch.ones(6, 2, 8, dtype=torch.int64)), TypeError, "k must be floating point, got torch.int64"),
    (dict(v=torch.ones(6, 16)), ValueError, r"v must have shape \[L, H, D\], got \[6, 16\]"),
    (dict(k=torch.ones(6, 2, 8, dtype=torch.float64)), ValueError, "k must have q's dtype, torch.float32, got torch.float64"),
    (dict(v=torch.ones(6, 2, 8, device="meta")), ValueError, "v must be on q's device, cpu, got meta"),
    (dict(k=torch.ones(6, 2, 4)), ValueError, "k must have q's head dim, 8, got 4"),
    (dict(v=torch.ones(6, 2, 4)), ValueError, r"k and v must be \[L, Hkv, D\] of q \[6, 2, 8\], got \[6, 2, 8\] and \[6, 2, 4\]"),
    (dict(v=torch.ones(5, 2, 8)), ValueError, r"v must have k's rows and heads, \[6, 2\], got \[5, 2\]"),
    (dict(k=torch.ones(5, 2, 8), v=torch.ones(5, 2, 8)), ValueError, r"k and v must be \[L, Hkv, D\] of q \[6, 2, 8\], got \[5, 2, 8\]"),
    (dict(q=torch.ones(6, 3, 8)), ValueError, "q's heads must be a multiple of k's, got 3 and 2"),
    (dict(zip("qkv", make_qkv(6, dim=257))), ValueError, "q's head dim must be 1 to 256, got 257"),
    (dict(zip("qkv", make_qkv(6, dim=0))), ValueError, "q's head dim must be 1 to 256, got 0"),
    (dict(offsets=None), TypeError, "offsets must be a torch.Tensor, got NoneType"),
    (dict(offsets="shared"), TypeError, "offsets must be a torch.Tensor, got str"),
    (dict(offsets=torch.tensor([0.0, 6.0])), TypeError, "offsets must be int32 or int64, got torch.float32"),
    (dict(offsets=torch.zeros(0, dtype=torch.int64)), ValueError, r"offsets must have shape \[B \+ 1\], got \[0\]"),
    (dict(offsets=torch.tensor([0, 2, 5])), ValueError, "^offsets must end at the number of rows, 6, got 5"),
    (dict(offsets=torch.tensor([1, 6])), ValueError, "^offsets must start at 0, got 1"),
    (dict(offsets=torch.tensor([0, 4, 2, 6])), ValueError, "^offsets must not decrease, got 4 then 2 at segment 1"),
    (dict(offsets=torch.tensor([0, 6], device="meta")), ValueError, "^offsets must be on q's device, cpu, or the host, got meta"),
    (dict(block_size=48), ValueError, r"block_size must be one of \(16, 32, 64, 128\), got 48"),
    (dict(block_size=0), ValueError, "block_size must be at least 1, got 0"),
    (dict(block_size=16.0), TypeError, "block_size must be an int, got float"),
    (dict(scale=torch.tensor(0.5)), TypeError, "scale must be a number, got Tensor"),
    (dict(schedule=3), TypeError, "schedule must be a TileSchedule, got int"),
    (dict(implementation="cuda"), ValueError, "implementation must be one of .*, got 'cuda'"),
    (dict(rotary="qk"), TypeError, "rotary must be a Rotary, got str"),
    (dict(rotary=NARROW), ValueError, r"must have shape \[P, D / 2\] of q \[6, 2, 8\] with D even, got \[5, 3\]"),
    (ODD | dict(rotary=NARROW), ValueError, r"must have shape \[P, D / 2\] of q \[6, 2, 7\] with D even, got \[5, 3\]"),
    (dict(rotary=jm.Rotary(COS, SIN.clone().requires_grad_())), ValueError, "rotary's cos and sin must not require gradients"),
    (dict(rotary=TABLES, offsets=torch.tensor([0, 6])), ValueError, "offsets has a segment of 6 rows, longer than max_seqlen = 5"),
    (positions(0, 1, 2), ValueError, "rotary's positions must have one entry per row of q, 6, got 3"),
    (positions(0, 1, 2, 3, 4, 5), ValueError, "rotary's positions must be 0 to 4, the rows of cos, got values 0 to 5"),
    (positions(0, 1, 2, 3, 4, -1), ValueError, "rotary's positions must be 0 to 4, the rows of cos, got values -1 to 4"),
]


@pytest.mark.parametrize("change, error, message", BAD_CALLS, ids=[message[:40] for _, _, message in BAD_CALLS])
def test_bad_input_of_the_function(change, error, message):
    with pytest.raises(error, match=message):
        F.block_diagonal_attention(**(GOOD | change))


def test_given_positions_let_a_segment_be_longer_than_the_tables():
    rotary = jm.Rotary(COS, SIN, positions=torch.tensor([0, 1, 2, 3, 4, 0]))
    assert F.block_diagonal_attention(**(GOOD | dict(offsets=torch.tensor([0, 6]), rotary=rotary))).shape == (6, 2, 8)


BAD_LAYERS = [
    (dict(embedding_dim=10, num_heads=4), ValueError, "embedding_dim must be a multiple of num_heads, got 10 and 4"),
    (dict(embedding_dim=8, num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
    (dict(embedding_dim=8.0, num_heads=1), TypeError, "embedding_dim must be an int, got float"),
    (dict(embedding_dim=1024, num_heads=2), ValueError, "embedding_dim / num_heads must be at most 256, got 512"),
    (dict(embedding_dim=10, num_heads=2), ValueError, "embedding_dim / num_heads must be even with rotary, got 10 and 2"),
    (dict(block_size=20), ValueError, r"block_size must be one of \(16, 32, 64, 128\), got 20"),
    (dict(block_size=None), TypeError, "block_size must be an int, got NoneType"),
    (dict(rotary="v"), ValueError, 'rotary must be "qk", "qkv" or None, got \'v\''),
    (dict(rotary=True), ValueError, 'rotary must be "qk", "qkv" or None, got True'),
    (dict(max_seqlen=0), ValueError, "max_seqlen must be at least 1, got 0"),
    (dict(max_seqlen=None), TypeError, "max_seqlen must be an int, got NoneType"),
]


@pytest.mark.parametrize("arguments, error, message", BAD_LAYERS, ids=[message[:40] for _, _, message in BAD_LAYERS])
def test_bad_constructor(arguments, error, message):
    with pytest.raises(error, match=message):
        jm.BlockDiagonalSelfAttention(**(dict(embedding_dim=12, num_heads=3) | arguments))


def test_odd_heads_without_rotary(offsets_of):
    assert jm.BlockDiagonalSelfAttention(10, 2, rotary=None)((torch.randn(7, 10), offsets_of([7])))[0].shape == (7, 10)


BAD_FORWARDS = [
    (torch.randn(5, 12), TypeError, "x must be a JaggedTensor.*got Tensor"),
    ((torch.randn(5, 12).double(), torch.tensor([0, 5])), ValueError, "x's values must have the layer's dtype, torch.float32, got"),
    ((torch.randn(5, 11), torch.tensor([0, 5])), ValueError, r"x's values must have shape \[L, 12\], got \[5, 11\]"),
    ((torch.randn(5, 1, 12), torch.tensor([0, 5])), ValueError, r"x's values must have shape \[L, 12\], got \[5, 1, 12\]"),
    ((torch.randn(5, 12), torch.tensor([0, 4])), ValueError, "offsets must end at the number of rows, 5, got 4"),
    ((torch.randn(101, 12), torch.tensor([0, 101])), ValueError, "offsets has a segment of 101 rows, longer than max_seqlen = 100"),
]


@pytest.mark.parametrize("x, error, message", BAD_FORWARDS, ids=[message[:40] for _, _, message in BAD_FORWARDS])
def test_bad_forward(x, error, message):
    with pytest.raises(error, match=message):
        make_layer()(x)


def test_without_rotary_no_segment_is_too_long(offsets_of):
    assert make_layer(None)((torch.randn(101, 12), offsets_of([101])))[0].shape == (101, 12)


@pytest.mark.parametrize(
    "qkv, error, message",
    [
        (None, TypeError, "qkv must be a torch.Tensor, got NoneType"),
        (torch.ones(5, 2, 8), ValueError, r"qkv must have shape \[L, 3, H, D\], got \[5, 2, 8\]"),
        (torch.ones(5, 2, 1, 8), ValueError, r"qkv must have shape \[L, 3, H, D\], got \[5, 2, 1, 8\]"),
    ],
    ids=["none", "dimensions", "two"],
)
def test_bad_packed_input(qkv, error, message, offsets_of):
    with pytest.raises(error, match=message):
        F.block_diagonal_attention_packed(qkv, offsets_of([5]))


def test_packed_is_what_three_are(offsets_of):
    qkv, offsets = torch.randn(60, 3, 2, 8), offsets_of([37, 23])
    assert torch.equal(F.block_diagonal_attention_packed(qkv, offsets), F.block_diagonal_attention(*qkv.unbind(1), offsets))
