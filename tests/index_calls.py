"""A call of every public function and layer with tensors of indices, to be compared in every form
of each of them.

Functions are cases of `calls`: every tensor of indices that a function takes is in one of
FUNCTIONS. Layers, which have no model, are compared with the plain form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from calls import build, check, check_call, evaluate
from cases import Case, legal, simplest_case
from forms import defaults as torch_defaults
from forms import few_forms, in_form, is_on_host, unchanged
from space import (
    DEFAULTS,
    INDICES,
    OF_A_PLAN,
    ON_THE_OPERANDS_DEVICE,
    OPERATORS,
    TIMES,
    index_options,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves

import jagged_modules as jm
from jagged_modules import functional as F

KEYS, QUERIES = [5, 0, 19, 3, 17], [2, 1, 0, 4, 3]  # rows of each segment
SELF = dict(head_dim=16, heads=[2, 1])
BIASED = dict(
    bias="both", query_times=True, query_shift=True, boundaries="explicit", tables="per head"
)
COMPRESS = dict(compressed=9, columns=24, depths=[3, 5, 2])
FUNCTIONS = {  # name of the case → (function, lengths, options)
    "jagged_attention": ("jagged_attention", [KEYS], SELF | dict(mask="causal")),
    "jagged_attention-cross": (
        "jagged_attention",
        [QUERIES, KEYS],
        SELF
        | BIASED
        | dict(operands="cross", activation="silu", mask="targets", output_scale="tensor"),
    ),
    "jagged_attention-groups": (
        "jagged_attention",
        [QUERIES, QUERIES[::-1], KEYS],
        SELF | dict(operands="2 groups"),
    ),
    "jagged_attention-shared-q": (
        "jagged_attention",
        [KEYS],
        SELF | dict(operands="q shared", shared_rows=3),
    ),
    "jagged_attention-shared-kv": (
        "jagged_attention",
        [KEYS],
        SELF | dict(operands="kv shared", shared_rows=3),
    ),
    "target_attention-map": (
        "target_attention",
        [QUERIES, KEYS],
        SELF | dict(index="shuffled map", rows=2),
    ),
    "target_attention-offsets": (
        "target_attention",
        [QUERIES, KEYS],
        SELF | dict(index="offsets", rows=1, mask="targets"),
    ),
    "target_attention-counts": (
        "target_attention",
        [QUERIES, KEYS],
        SELF | dict(index="counts", rows=3),
    ),
    "self_target_attention": (
        "self_target_attention",
        [KEYS, QUERIES],
        SELF | dict(activation="silu", output_scale="tensor"),
    ),
    "block_diagonal_attention": (
        "block_diagonal_attention",
        [KEYS],
        SELF | dict(block_size=16, rotary="qk", angles="positions"),
    ),
    "block_diagonal_attention_packed": (
        "block_diagonal_attention_packed",
        [KEYS],
        dict(head_dim=16, heads=[2, 2], block_size=16),
    ),
    "linear_compress-maps": (
        "linear_compress",
        [QUERIES],
        COMPRESS | dict(levels=3, index="shuffled map"),
    ),
    "linear_compress-counts": (
        "linear_compress",
        [QUERIES],
        COMPRESS | dict(levels=2, index="counts"),
    ),
    "jagged_dense_bmm": ("jagged_dense_bmm", [KEYS], dict(depth=12, columns=9)),
    "jagged_jagged_bmm": ("jagged_jagged_bmm", [KEYS], dict(depth=12, columns=9)),
    "jagged_softmax": ("jagged_softmax", [KEYS], dict(columns=9)),
    "jagged2_softmax": ("jagged2_softmax", [QUERIES, KEYS], {}),
    "jagged_jagged_bmm_jagged_out": (
        "jagged_jagged_bmm_jagged_out",
        [QUERIES, KEYS],
        dict(depth=12),
    ),
    "array_jagged_bmm_jagged_out": ("array_jagged_bmm_jagged_out", [QUERIES, KEYS], dict(depth=12)),
    "jagged_linear": (
        "jagged_linear",
        [KEYS],
        dict(depth=12, columns=9, activation="silu", weights="per segment"),
    ),
    "jagged_dense_add": ("jagged_dense_add", [KEYS], dict(columns=9)),
    "jagged_dense_mul": ("jagged_dense_mul", [KEYS], dict(columns=9)),
    "jagged_concat": ("jagged_concat", [KEYS, QUERIES], dict(parts=2, columns=9)),
    "jagged_split": ("jagged_split", [QUERIES, KEYS], dict(columns=9)),
    "jagged_sum": ("jagged_sum", [KEYS], dict(columns=9)),
    "jagged_mean": ("jagged_mean", [KEYS], dict(columns=9)),
    "jagged_max": ("jagged_max", [KEYS], dict(columns=9)),
    "jagged_first": ("jagged_first", [KEYS], dict(columns=9, k="lengths")),
    "jagged_last": ("jagged_last", [KEYS], dict(columns=9, k="lengths")),
    "jagged_between": ("jagged_between", [KEYS], dict(columns=9, start="each", end="each")),
    "jagged_select": ("jagged_select", [KEYS], dict(columns=9)),
    "jagged_to_padded": ("jagged_to_padded", [KEYS], dict(columns=9)),
    "padded_to_jagged": ("padded_to_jagged", [KEYS], dict(columns=9)),
}
JOINT = (  # forms of the first, second, third, ... argument in one call; afterwards the first again
    ("int32 column", "every other", "int32 view"),
    ("view", "int32", "column"),
    ("int32 every other", "int32 view", ""),
)
# Functions → arguments whose forms other cases compare one by one, with kernels without a bias,
# which compile in a third of the time.
ELSEWHERE = {"jagged_attention-cross": ("q_offsets", "kv_offsets", "num_targets", "output_scale")}


def function_case(name: str, device: str, dtype: str = "", **forms: str) -> Case:
    """The case of FUNCTIONS, with tensors of indices in the given forms and in the plain form. On a
    GPU in bfloat16, for which the portable kernels compile in half the time."""
    function, lengths, options = FUNCTIONS[name]
    implementation = (
        dict(implementation="triton")
        if device != "cpu" and OPERATORS[function].implementations
        else {}
    )
    options = options | implementation
    for argument, form in forms.items():
        options |= index_options(argument, form)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    case = dataclasses.replace(simplest_case(function, device, dtype, **options), lengths=lengths)
    assert legal(case).options == case.options  # lengths may be beyond the limits of random cases
    return case


def arguments_of(name: str) -> dict[str, tuple[str, ...]]:
    """The tensors of indices that a case of FUNCTIONS takes → the forms of each."""
    options = function_case(name, "cpu").options
    unused = {
        "num_targets": options.get("mask") != "targets",
        "output_scale": options.get("output_scale") != "tensor",
        "q_offsets": options.get("operands") == "q shared",
        "kv_offsets": options.get("operands", "") in ("self", "kv shared"),
        "positions": options.get("angles") != "positions",
        "indices[1]": options.get("levels") == 2,
        "offsets[2]": options.get("parts") == 2,
    } | dict.fromkeys(
        ("timestamps", "query_timestamps", "boundaries", "query_shift"), options.get("bias") is None
    )
    indices = OPERATORS[FUNCTIONS[name][0]].indices
    return {
        argument: forms for argument, forms in indices.items() if not unused.get(argument, False)
    }


def forms_on(device: str, forms: tuple[str, ...], of_a_layer: bool = False) -> tuple[str, ...]:
    """The forms that a table of one argument has: on a GPU all that differ from the plain one in
    few ways; on the host fewer, and in the interpreter, which is slow, those that a kernel could
    read wrongly and that differ there: JOINT has columns and views too. Kernels are compiled for
    int32 and for views, which are not aligned. JOINT has these too, so on a GPU the table has one
    view of a function's, and none of them of a layer's."""
    few = few_forms(forms)
    if device == "cuda":
        left_out = {"int32", "view"} if of_a_layer else set()
        return tuple(x for x in few if x != "int32 view" and left_out.isdisjoint(x.split()))
    if device == "interpreter":
        return tuple(x for x in few if x in ("int32", "int32 every other", "expanded", "read-only"))
    return tuple(x for x in few if not is_on_host(x) or len(x.split()) == 1)


@functools.lru_cache(maxsize=4)  # tests of a function's arguments follow one another
def _plain_results(name: str, device: str, on_host: str | None) -> dict[str, Tensor]:
    """Checked results of a call whose tensors of indices are plain, but one whose lengths the host
    may know."""
    case = function_case(name, device, **({on_host: "host"} if on_host else {}))
    check(case)
    return evaluate(build(case), case)[2]


def check_function(name: str, argument: str, device: str) -> None:
    """Check the results and gradients of every form against the model and, bit for bit, against the
    plain form on the same device."""

    def check_form(form: str) -> None:
        case = function_case(name, device, **{argument: form})
        if "expanded" in form:  # which has other values
            check(case)
            return
        # lengths that the host knows may select another kernel
        host = is_on_host(form) and argument not in ("x_offsets", "y_offsets")
        plain = _plain_results(name, device, argument if host else None)
        assert_same(evaluate(build(case), case)[2], plain)

    _check_all(check_form, forms_on(device, arguments_of(name)[argument]))


def _check_all(check_form: Callable[[str], None], forms: tuple[str, ...]) -> None:
    """AssertionError with every form that fails."""
    failures = {}
    for form in forms:
        try:
            check_form(form)
        except Exception as error:
            failures[form] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    assert not failures, "\n".join(
        f"{form or 'plain'}: {failure}" for form, failure in failures.items()
    )


def check_function_with_defaults(name: str, device: str) -> None:
    """Check the call under each default device and dtype of torch."""
    case = function_case(name, device)
    for option, values in DEFAULTS.items():
        for value in dict.fromkeys(values):
            check(dataclasses.replace(case, options=case.options | {option: value}))


def check_joint_forms(name: str, device: str, mode: str, combinations: tuple) -> None:
    """Check calls in which each tensor of indices has another form. mode: "eager", "compile" or
    "graph"."""
    for combination in combinations:
        arguments = arguments_of(name)
        forms = {}
        for i, (argument, allowed) in enumerate(arguments.items()):
            form = combination[i % len(combination)]
            forms[argument] = form if form in allowed else form.removeprefix("int32").strip()
            assert forms[argument] in allowed
        case = function_case(name, device, **forms)
        call = build(case)
        if mode == "compile":
            torch._dynamo.reset()
            call = dataclasses.replace(
                call, function=torch.compile(call.function, fullgraph=True, backend="aot_eager")
            )
        check_call(call, case, in_graph=mode == "graph")


def assert_same(actual: dict, expected: dict) -> None:
    """AssertionError unless results are equal bit for bit. Integer results may have another
    dtype."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        same = (
            torch.equal(x, expected[name])
            if x.is_floating_point()
            else torch.equal(x.long().cpu(), expected[name].long().cpu())
        )
        assert same, f"{name} differs from that of the plain form"


# -- layers ----------------------------------------------------------------------------------------

WIDTH, ROWS, CANDIDATES = 32, sum(KEYS), sum(QUERIES)
USERS = [3, 0, 4, 2, 2, 0, 4, 3, 4, 1]
HOST = OF_A_PLAN  # host lengths are on the host, whatever the device of the values


def _offsets(lengths: list[int]) -> list[int]:
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def _times(rows: int) -> list[int]:
    return [10**9 + 777 * i**2 for i in range(rows)]


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """A call of a layer.

    Attributes:
        make: makes the layer.
        indices: each tensor of indices → (its values, its forms).
        call: (layer, rows `[ROWS, WIDTH]`, candidates `[CANDIDATES, WIDTH]`, tensors of indices) →
            results.
        compiles: whether the call is one graph under torch.compile.
        elsewhere: as in ELSEWHERE.
    """

    make: Callable[[], torch.nn.Module]
    indices: dict[str, tuple[list[int], tuple[str, ...]]]
    call: Callable[..., object]
    compiles: bool = True
    elsewhere: tuple[str, ...] = ()


_HISTORY, _TARGETS = (_offsets(KEYS), INDICES), (_offsets(QUERIES), INDICES)
_NUM_TARGETS = ([1, 0, 2, 3, 1], INDICES)
_TIMED = jm.HSTUConfig(scaling_seqlen=50, relative_position=50, relative_time=9)


def _score_cached(layer, x, t, i):
    cache = layer.cache((x, i["history"]), i["timestamps"])
    cache = cache.select(i["segments"])
    return layer.score((t, i["targets"]), cache, timestamps=i["target_timestamps"])


def _gdpa(layer, x, t, i):
    bias = jm.RelativeBias(
        torch.linspace(-1, 1, 99, device=x.device, dtype=x.dtype),
        torch.linspace(1, 2, 4, device=x.device, dtype=x.dtype),
        i["timestamps"],
        i["boundaries"],
        i["query_timestamps"],
        i["query_shift"],
    )
    return layer((t, i["x"]), (x, i["context"]), i["num_targets"], bias)


def _prepared(layer, x, t, i):
    jagged = jm.Jagged(x, i["offsets"], host_lengths=i["host_lengths"])
    return layer(jagged.prepare(num_heads=2, head_dim=16, dtype=x.dtype)).values


def _paged(layer, x, t, i):
    """Attention to keys in pages of 128 rows, one for each segment; two segments share one."""
    pages = jm.Pages(i["table"], 128, ROWS)
    storage = x.detach().repeat(30, 1)[: 10 * 128].unflatten(1, (2, 16))
    with torch.no_grad():
        return F.jagged_attention(
            t.detach().unflatten(1, (2, 16)),
            storage,
            storage,
            i["q_offsets"],
            i["kv_offsets"],
            pages=pages,
        )


LAYERS = {
    "JaggedTargetAttention": LayerCall(
        lambda: jm.JaggedTargetAttention(WIDTH, 2),
        dict(history=_HISTORY, candidates=(USERS, INDICES)),
        lambda layer, x, t, i: layer(t.unsqueeze(1), (x, i["history"]), i["candidates"]),
    ),
    "JaggedTargetAttention-jagged": LayerCall(
        lambda: jm.JaggedTargetAttention(WIDTH, 2),
        dict(history=_HISTORY, targets=_TARGETS),
        lambda layer, x, t, i: layer((t, i["targets"]), (x, i["history"])),
    ),
    "JaggedSelfTargetAttention": LayerCall(
        lambda: jm.JaggedSelfTargetAttention(WIDTH, 2),
        dict(history=_HISTORY, targets=_TARGETS),
        lambda layer, x, t, i: layer((x, i["history"]), (t, i["targets"])),
    ),
    "JaggedSelfTargetAttention-map": LayerCall(
        lambda: jm.JaggedSelfTargetAttention(WIDTH, 2),
        dict(history=_HISTORY, candidates=(USERS, INDICES)),
        lambda layer, x, t, i: layer((x, i["history"]), t.unsqueeze(1), i["candidates"]),
    ),
    "JaggedGDPA": LayerCall(
        lambda: jm.JaggedGDPA(WIDTH, 2),
        dict(x=_TARGETS, context=_HISTORY, num_targets=([0, 0, 2, 3, 1], INDICES)),
        lambda layer, x, t, i: layer((t, i["x"]), (x, i["context"]), i["num_targets"]),
    ),
    "JaggedGDPA-bias": LayerCall(
        lambda: jm.JaggedGDPA(WIDTH, 2),
        dict(
            x=_TARGETS,
            context=_HISTORY,
            num_targets=([0, 0, 2, 3, 1], INDICES),
            timestamps=(_times(ROWS), TIMES),
            boundaries=([1000, 10**5, 10**6], TIMES),
            query_timestamps=(_times(CANDIDATES), TIMES),
            query_shift=([0, 1, 2, 0, 5], ON_THE_OPERANDS_DEVICE),
        ),
        _gdpa,
        elsewhere=("x", "context", "num_targets"),
    ),
    "JaggedGDPA-prepared": LayerCall(
        lambda: jm.JaggedGDPA(WIDTH, 2),
        dict(offsets=_HISTORY, host_lengths=(KEYS, HOST)),
        _prepared,
        compiles=False,
    ),
    "GDPABlock": LayerCall(
        lambda: jm.GDPABlock(WIDTH, 2),
        dict(x=_HISTORY, num_targets=_NUM_TARGETS),
        lambda layer, x, t, i: layer((x, i["x"]), None, i["num_targets"]),
    ),
    "HSTULayer": LayerCall(
        lambda: jm.HSTULayer(WIDTH, 2, _TIMED),
        dict(
            x=_HISTORY,
            num_targets=([1, 0, 2, 3, 1], INDICES),
            timestamps=(_times(ROWS), TIMES),
            query_timestamps=([t + 50 for t in _times(ROWS)], TIMES),
        ),
        lambda layer, x, t, i: layer(
            (x, i["x"]),
            i["num_targets"],
            timestamps=i["timestamps"],
            query_timestamps=i["query_timestamps"],
        ),
        elsewhere=("x", "num_targets"),  # in HSTUStack
    ),
    "HSTULayer-cache": LayerCall(
        lambda: jm.HSTULayer(WIDTH, 2, _TIMED),
        dict(
            history=_HISTORY,
            timestamps=(_times(ROWS), TIMES),
            query_timestamps=([t + 50 for t in _times(ROWS)], TIMES),
            cache_rows=([3, 0, 7, 7, 30], INDICES),
        ),
        lambda layer, x, t, i: layer.cache(
            (x, i["history"]),
            i["cache_rows"],
            timestamps=i["timestamps"],
            query_timestamps=i["query_timestamps"],
        ),
    ),
    "HSTUStack": LayerCall(
        lambda: jm.HSTUStack(WIDTH, 2, 2, jm.HSTUConfig(scaling_seqlen=50)),
        dict(x=_HISTORY, num_targets=_NUM_TARGETS),
        lambda layer, x, t, i: layer((x, i["x"]), i["num_targets"]),
    ),
    "HSTUStack-cached": LayerCall(
        lambda: jm.HSTUStack(WIDTH, 2, 2, _TIMED),
        dict(
            history=_HISTORY,
            timestamps=(_times(ROWS), TIMES),
            segments=([2, 0, 0, 4, 3], INDICES),
            targets=_TARGETS,
            target_timestamps=([10**9 + 10**6] * CANDIDATES, TIMES),
        ),
        _score_cached,
        compiles=False,
    ),
    "BlockDiagonalSelfAttention": LayerCall(
        lambda: jm.BlockDiagonalSelfAttention(WIDTH, 2, block_size=16, max_seqlen=50),
        dict(x=_HISTORY),
        lambda layer, x, t, i: layer((x, i["x"])),
    ),
    "LinearCompressEmbedding": LayerCall(
        lambda: jm.LinearCompressEmbedding(2, 9, 2),
        dict(candidates=(USERS, INDICES)),
        lambda layer, x, t, i: layer(
            t.unflatten(1, (2, 16)), x[:10].reshape(10, 2, 16)[:5], i["candidates"]
        ),
    ),
    "JaggedEncoderLayer": LayerCall(
        lambda: jm.JaggedEncoderLayer(WIDTH, 2, 24),
        dict(x=_HISTORY),
        lambda layer, x, t, i: layer((x, i["x"])),
    ),
    "JaggedMLP": LayerCall(
        lambda: jm.JaggedMLP([WIDTH, 8], "gelu"),
        dict(x=_HISTORY),
        lambda layer, x, t, i: layer((x, i["x"])),
    ),
    "pages": LayerCall(
        lambda: jm.JaggedGDPA(WIDTH, 2),
        dict(
            q_offsets=_TARGETS,
            kv_offsets=_HISTORY,
            table=([7, 3, 3, 9, 1], tuple(x for x in INDICES if "int32" in x)),
        ),
        _paged,
    ),
}


class LayerRun:
    """A layer and its inputs on a device."""

    def __init__(self, name: str, device: str):
        torch.manual_seed(3)
        self.spec, self.device = LAYERS[name], device
        self.layer = self.spec.make().to(device)
        self.inputs = [
            torch.randn(n, WIDTH).to(device).requires_grad_() for n in (ROWS, CANDIDATES)
        ]

    def results(
        self,
        compiled: bool = False,
        in_graph: bool = False,
        defaults: dict | None = None,
        **forms: str,
    ) -> dict[str, Tensor]:
        """Results, and gradients of the inputs and parameters, with tensors of indices in the given
        forms and in the plain form."""
        indices = {}
        for name, (values, allowed) in self.spec.indices.items():
            form = forms.get(name, next(iter(allowed)))
            indices[name] = in_form(
                torch.tensor(values), form, "cpu" if allowed is HOST else self.device
            )
        call = (
            torch.compile(self.spec.call, fullgraph=True, backend="aot_eager")
            if compiled
            else self.spec.call
        )
        with unchanged(*indices.values()):
            with torch_defaults(**defaults or {}):
                results = self._step(call, indices)
            if in_graph:
                del results  # their graph has nodes of the default stream, also for the parameters
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    results = self._step(call, indices)
                graph.replay()
                torch.cuda.synchronize()
        return results

    def _step(self, call: Callable, indices: dict[str, Tensor]) -> dict[str, Tensor]:
        found = [
            x
            for x in tree_leaves(call(self.layer, *self.inputs, indices))
            if isinstance(x, Tensor) and x.is_floating_point()
        ]
        results = {str(i): x for i, x in enumerate(found)}
        leaves = [*self.inputs, *self.layer.parameters()]
        if any(x.requires_grad for x in found):
            weights = [
                torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).view(x.shape)
                for x in found
            ]
            total = sum((x * w).sum() for x, w in zip(found, weights))
            results |= {
                f"d{i}": x
                for i, x in enumerate(torch.autograd.grad(total, leaves, materialize_grads=True))
            }
        return {name: x.detach() for name, x in results.items()}


def check_layer(name: str, argument: str, device: str) -> None:
    """Check the results and gradients of every form, bit for bit, against those of the plain form
    on the same device."""
    run = LayerRun(name, device)
    _, allowed = LAYERS[name].indices[argument]

    @functools.cache
    def plain(host: bool) -> dict[str, Tensor]:
        return run.results(**{argument: f"{allowed[0]} host".strip() if host else allowed[0]})

    def check_form(form: str) -> None:
        assert_same(
            run.results(**{argument: form}), plain(is_on_host(form) and allowed is not HOST)
        )

    _check_all(check_form, forms_on(device, allowed, of_a_layer=True))


def check_layer_with_defaults(name: str, device: str) -> None:
    """Check the call under each default device and dtype of torch."""
    run = LayerRun(name, device)
    expected = run.results()
    for option, values in DEFAULTS.items():
        for value in filter(None, values):
            given = {option.removeprefix("default_"): device if value == "the operands'" else value}
            assert_same(run.results(defaults=given), expected)


def check_layer_in_mode(name: str, device: str, mode: str, combinations: tuple) -> None:
    """Check calls in which each tensor of indices has another form. mode: "eager", "compile" or
    "graph"; compared with the plain form."""
    run, spec = LayerRun(name, device), LAYERS[name]
    options = dict(compiled=mode == "compile", in_graph=mode == "graph")
    if mode == "compile":
        torch._dynamo.reset()
    expected = run.results(**options)
    for combination in combinations:
        forms = {}
        for i, (argument, (_, allowed)) in enumerate(spec.indices.items()):
            form = combination[i % len(combination)]
            candidates = (form, form.removeprefix("int32").strip(), f"int32 {form}".strip())
            forms[argument] = next(x for x in candidates if x in allowed)
        assert_same(run.results(**options, **forms), expected)
