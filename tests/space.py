"""The supported space: dtypes, sizes and options of every public function."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from forms import all_forms, is_on_host
from jagged_kernels.common.configs import padded_dim
from jagged_kernels.din.configs import has_kernels

from jagged_modules.activations import POINTWISE

FLOATS, HALVES = ("float64", "float32"), ("float16", "bfloat16")
KERNEL_DTYPES = dict(
    cpu=(*FLOATS, *HALVES), interpreter=("float32", "float16"), cuda=("float32", *HALVES)
)
# functions of torch operators, which have no kernels
TORCH_DTYPES = dict(cpu=(*FLOATS, *HALVES), cuda=(*FLOATS, *HALVES))

MASKS = {  # fields of AttentionMask; num_targets: the most in a segment
    "causal": dict(causal=True),
    "window": dict(window=(20, 9)),
    "causal-window": dict(causal=True, window=(33, None)),
    "targets": dict(causal=True, num_targets=40),
    "grouped-targets": dict(causal=True, num_targets=90, target_group_size=7),
    "hstu": dict(
        causal=True, num_targets=30, contextual_seqlen=5, max_attn_len=50, min_full_attn_seqlen=11
    ),
    "long-context": dict(causal=True, contextual_seqlen=70, max_attn_len=100),
    "band": dict(max_attn_len=40),
    "open-targets": dict(
        num_targets=20, contextual_seqlen=3, max_attn_len=30, min_full_attn_seqlen=4
    ),
    "semi-local": dict(causal=True, num_targets=25, window=(45, None), global_prefix=21),
    "truncated": dict(
        causal=True,
        num_targets=30,
        target_group_size=3,
        contextual_seqlen=5,
        max_attn_len=60,
        recent_history=45,
    ),
    "open-truncated": dict(window=(70, 33), global_prefix=37, recent_history=60),
}


@dataclasses.dataclass(frozen=True)
class Range:
    """A size class."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """A size, as often a multiple of 16, 8, 4 or 2 as any: kernels load those differently."""
        step = rng.choice([1, 2, 4, 8, 16])
        multiples = range(-(-self.low // step) * step, self.high + 1, step)
        return rng.choice(multiples) if multiples else rng.randint(self.low, self.high)


HEAD_DIMS = (
    Range(1, 8),
    Range(9, 16),
    Range(17, 32),
    Range(33, 64),
    Range(65, 128),
    Range(129, 256),
)
WIDTHS = (Range(1, 8), Range(9, 64), Range(65, 128), Range(129, 300))


def mostly(first, *others) -> tuple:
    """An axis on which every second draw is `first`."""
    return (first,) * max(1, len(others)) + others


LAYOUTS = mostly(
    "contiguous",
    "packed",
    "odd rows",
    "transposed",
    "misaligned",
    "columns",
    "any stride of size 1",
)
GRADS = mostly(
    "contiguous",
    "one number",
    "one row",
    "transposed",
    "every other column",
    "odd rows",
    "any stride of size 1",
)
COMMON = dict(layout=LAYOUTS, grad=GRADS)
DATA = dict(
    values=mostly("normal", "large", "zeros", "equal rows"),
    requires=mostly("all", "first", "last", "all but first"),
)
MAX_SEQLEN = dict(max_seqlen=(False, True))
IMPLEMENTATIONS = dict(
    cpu=mostly("auto", "reference"), interpreter=("triton",), cuda=mostly("auto", "triton")
)
POISONS = (None, None, None, "nan", "inf")

# Forms of every tensor of indices, drawn independently; `forms.py` has the words.
INDICES = all_forms()
ON_THE_OPERANDS_DEVICE = all_forms(places=("",))
TIMES = all_forms(dtypes=("",), places=("",))  # int64, on the operands' device
OF_A_PLAN = all_forms(places=("", "pinned", "read-only"))  # on the host
FACTORS = all_forms(dtypes=("",))  # floating-point numbers, one for each segment
# torch's defaults during a call. "meta" shows a factory that is called without a device.
DEFAULTS = dict(
    default_device=mostly(None, "the operands'", "meta"),
    default_dtype=mostly(None, "float64", "bfloat16", "float16"),
)
BEHIND = mostly(0, 1, 70)  # rows behind the last segment, where only the device knows the lengths

ATTENTION = dict(
    activation=("softmax",) * 5 + tuple(POINTWISE),
    mask=mostly(None, *MASKS),
    heads=((1, 1), (2, 2), (2, 1), (4, 2), (6, 2), (3, 3), (8, 1)),
    head_dim=HEAD_DIMS,
    v_dim=mostly(None, *HEAD_DIMS),  # None: head_dim
    output_scale=mostly(1, 0.125, "tensor", "tensor with gradient"),
)
DROPOUT = dict(dropout_p=(0,) * 7 + (0.1, 0.5, 0.999))
STORAGES = dict(storage=mostly("own", "k is v", "one"))  # one: q, k and v are views of one tensor
ATTENTION_DATA = dict(scale=mostly(None, 0.3, -0.5, 0.0), schedule=(False, True)) | MAX_SEQLEN
ATTENTION_IMPLEMENTATIONS = IMPLEMENTATIONS | dict(cuda=mostly("auto", "triton", "hopper"))
# tables of a RelativeBias
BIASES = {"position": ("position",), "time": ("time",), "both": ("position", "time")}
BIAS = dict(
    bias=mostly(None, *BIASES),
    tables=("shared", "per head", "in the operands' dtype"),
    buckets=(7, 0, 1, 128, 300),
    query_times=(False, True),
    query_shift=(False, True),
)
BIAS_DATA = dict(
    timestamps=("sorted", "unsorted", "equal", "huge", "far apart"),
    boundaries=mostly("default", "explicit", "duplicates"),
    # rows that the position table serves, in longest segments
    positions=("longest", "more", "fewer"),
)
BLOCK_ATTENTION = dict(
    head_dim=HEAD_DIMS,
    block_size=(64, 16, 32, 128),
    rotary=(None, "qk", "qkv"),
    angles=("linear", "any", "positions"),
    precise=(False, True),
)


@dataclasses.dataclass(frozen=True)
class Operator:
    """The space of one public function.

    Attributes:
        dtypes, implementations: by device: "cpu", "interpreter" (Triton's, on the CPU) or "cuda".
        axes: values of each option that decides which kernel is compiled; the first is the
            simplest. A `Range` stands for its sizes.
        data_axes: values of the other options.
        weight: relative frequency of random cases of this function.
        num_lists: options → number of lists of segment lengths.
        work: (options, lengths) → approximate number of multiplications.
        parts: (options, lengths, whether Triton's interpreter runs) → number of parts that model or
            interpreter computes one by one.
        fix: (dtype, options): changes options that are not compatible.
        indices: name of each argument that is a tensor of indices, or has one value for each
            segment → its forms.
        behind: whether operands may have rows behind the last segment.
    """

    axes: dict[str, tuple]
    data_axes: dict[str, tuple] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: KERNEL_DTYPES)
    implementations: dict[str, tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: IMPLEMENTATIONS
    )
    weight: int = 1
    num_lists: Callable[[dict], int] = lambda o: 1
    work: Callable[[dict, list], int] = lambda o, lengths: 0
    parts: Callable[[dict, list, bool], int] = lambda o, lengths, interpreted: len(lengths[0])
    fix: Callable[[str, dict], None] = lambda dtype, o: None
    indices: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    behind: bool = False

    def __post_init__(self) -> None:
        forms = {
            form_of(name): mostly(*(x for x in forms if "int32" not in x))
            for name, forms in self.indices.items()
        }
        dtypes = {
            dtype_of(name): ("int64", "int32")
            for name, forms in self.indices.items()
            if "int32" in forms
        }
        object.__setattr__(self, "axes", self.axes | dtypes)
        object.__setattr__(
            self,
            "data_axes",
            self.data_axes | DEFAULTS | forms | (dict(behind=BEHIND) if self.behind else {}),
        )

    def fix_rows_behind(self, o: dict) -> None:
        """Where the host knows the lengths, rows behind the last segment are an error."""
        if any(is_on_host(o[form_of(name)]) for name in self.indices if "offsets" in name):
            o["behind"] = 0

    def axis(self, name: str, device: str) -> tuple:
        """Values of an option on a device, without sizes that take Triton's interpreter too
        long."""
        if name == "implementation":
            return self.implementations[device]
        if name == "behind" and device != "cuda":
            return (0,)
        limit = LIMITS[device].size
        values = (self.axes | self.data_axes)[name]
        return tuple(x for x in values if not isinstance(x, Range) or x.low <= limit)

    def names(self) -> dict[str, bool]:
        """All options: name → whether it decides which kernel is compiled."""
        names = dict.fromkeys(self.axes, True) | dict.fromkeys(self.data_axes, False)
        return names | (dict(implementation=True) if self.implementations else {})


def form_of(argument: str) -> str:
    """The option with the form of a tensor of indices, without its dtype."""
    return f"form of {argument}"


def dtype_of(argument: str) -> str:
    """The option with the dtype of a tensor of indices. Kernels are compiled for it."""
    return f"dtype of {argument}"


def index_options(argument: str, form: str) -> dict[str, str]:
    """The options that give a tensor of indices a form."""
    words = " ".join(word for word in form.split() if word != "int32")
    return {form_of(argument): words} | ({dtype_of(argument): "int32"} if words != form else {})


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest cases on a device. rows: of one list of segments; size: of one dimension; work,
    parts: as in `Operator`."""

    rows: int
    segments: int
    size: int
    work: int
    parts: int


LIMITS = dict(
    cpu=Limits(rows=700, segments=40, size=300, work=2 * 10**7, parts=40),
    interpreter=Limits(rows=150, segments=8, size=130, work=10**6, parts=8),
    cuda=Limits(rows=2500, segments=60, size=500, work=10**9, parts=40),
)


# -- options that cannot go together ---------------------------------------------------------------


def _fix_attention(dtype: str, o: dict) -> None:
    if o["activation"] == "softmax":
        o["output_scale"] = 1
    operands = o.get("operands", "self")
    in_groups = operands.endswith("groups") or "query_tensors" in o
    if operands == "kv shared" or in_groups and "num_targets" in MASKS.get(o["mask"], {}):
        o["mask"] = None
    if operands == "kv shared" or operands == "q shared" or operands.endswith("groups"):
        o["schedule"] = False  # callers cannot build schedules for these operands
    if o.get("query_tensors") == "one tensor" or "query_tensors" in o and o["dropout_p"]:
        # dropout counts rows of the output: candidates' follow those behind the users' end
        o["behind"] = 0
    if o["behind"] and "schedule" in o:
        o["schedule"] = False  # its host lengths say where the last segment ends
    if o.get("storage", "own") != "own" and (o["v_dim"] or o["head_dim"]) != o["head_dim"]:
        o["v_dim"] = None
    if "bias" in o:
        _fix_bias(o, operands)
    if o["implementation"] == "hopper":
        shares_keys = operands == "kv shared" or in_groups
        if (
            dtype not in HALVES
            or dtype == "float16"
            and shares_keys
            and str(o["output_scale"]).startswith("tensor")
        ):
            o["implementation"] = "triton"
            return
        o["head_dim"] = min(_hopper_dim(o["head_dim"]), 128 if o.get("bias") else 256)
        v_dim = o["head_dim"] if o["v_dim"] is None else _hopper_dim(o["v_dim"])
        o["v_dim"] = None if padded_dim(v_dim) != padded_dim(o["head_dim"]) else v_dim
        _align(o)


def _fix_bias(o: dict, operands: str) -> None:
    """Shared rows have no position. Options of a table that there is not have their simplest
    values."""
    if operands in ("q shared", "kv shared"):
        o["bias"] = None
    tables = BIASES.get(o["bias"], ())
    unused = set() if "time" in tables else {"buckets", "query_times", "timestamps", "boundaries"}
    unused |= set() if "position" in tables else {"positions"}
    unused |= set() if tables else {"tables", "query_shift"}
    o |= {name: (BIAS | BIAS_DATA)[name][0] for name in unused}


def _hopper_dim(dim: int) -> int:
    return min(max(-(-dim // 8) * 8, 40), 256)


def _align(o: dict) -> None:
    """Rows at 16-byte boundaries."""
    if o["layout"] in ("odd rows", "misaligned"):
        o["layout"] = "contiguous"


def _fix_block_attention(dtype: str, o: dict) -> None:
    if o["implementation"] == "hopper":
        if dtype not in HALVES or o["dropout_p"]:
            o["implementation"] = "triton"
        else:
            o["head_dim"] = min(-(-o["head_dim"] // 8) * 8, 128)
            o["heads"] = [o["heads"][0]] * 2
            _align(o)
    if o["rotary"] is None:
        o["angles"], o["precise"] = "linear", False
    else:
        o["head_dim"] += o["head_dim"] % 2


def _fix_packed(dtype: str, o: dict) -> None:
    o["heads"] = [o["heads"][0]] * 2
    _fix_block_attention(dtype, o)


def _fix_linear_compress(dtype: str, o: dict) -> None:
    if o["implementation"] == "hopper":
        if dtype not in HALVES:
            o["implementation"] = "triton"
        else:
            o["columns"] = -(-o["columns"] // 8) * 8
            _align(o)
            o["layout"] = "contiguous" if o["layout"] in ("transposed", "columns") else o["layout"]


def _fix_din(dtype: str, o: dict) -> None:
    if o["implementation"] == "reference":
        o["behind"] = 0  # it counts rows on the host
        return
    hidden, itemsize = tuple(o["hidden"]), 4 if dtype == "float32" else 2
    while not has_kernels(o["width"], o["v_width"] or 1, hidden, itemsize):
        o["width"] //= 2


def _even_dim(dtype: str, o: dict) -> None:
    o["head_dim"] += o["head_dim"] % 2


def _shared_linear(dtype: str, o: dict) -> None:
    if o["weights"] == "shared":
        o["implementation"] = "auto"  # torch's own matrix multiplication
        o["behind"] = 0  # it computes all rows


# -- the table -------------------------------------------------------------------------------------


def _pairs(o: dict, lengths: list[list[int]]) -> int:
    """Number of pairs of a query row and a key row."""
    *queries, keys = lengths if len(lengths) > 1 else lengths * 2
    return sum(n * m for side in queries for n, m in zip(side, keys))


def _attention_work(o: dict, lengths: list[list[int]]) -> int:
    pairs = _pairs(o, lengths)
    if "shared" in o.get("operands", ""):
        pairs = sum(lengths[0]) * o["shared_rows"]
    return (
        pairs
        * o["heads"][0]
        * (o["head_dim"] + (o.get("v_dim") or o["head_dim"]))
        * o.get("rows", 1)
    )


def _din_work(o: dict, lengths: list[list[int]]) -> int:
    sizes = [len(o["features"]) * o["width"], *o["hidden"], 1]
    return _pairs(o, lengths) * max(1, o["rows"]) * sum(n * m for n, m in zip(sizes, sizes[1:]))


def _din_parts(o: dict, lengths: list[list[int]], interpreted: bool) -> int:
    if not interpreted:
        # the model runs the definition 33 times, and draws errors of the features of each pair
        return _din_work(o | dict(hidden=[40]), lengths) // 2**16
    rows = max(1, o["rows"])
    return sum(-(-n * rows // 16) * (1 + m // 16) for n, m in zip(*lengths))


def _block_work(o: dict, lengths: list[list[int]]) -> int:
    return 2 * sum(lengths[0]) * o["block_size"] * o["heads"][0] * o["head_dim"]


def _attention_parts(o: dict, lengths: list[list[int]], interpreted: bool) -> int:
    tiles = sum(1 + n // 64 for side in lengths for n in side) * o["heads"][0]
    return tiles if interpreted else len(lengths[0])


def _blocks(o: dict, lengths: list[list[int]], interpreted: bool) -> int:
    return sum(-(-n // o["block_size"]) for n in lengths[0]) * (o["heads"][0] if interpreted else 1)


def _dense_parts(o: dict, lengths: list[list[int]], interpreted: bool) -> int:
    return len(lengths[0]) * (
        _tiles(o.get("depth", 1)) * _tiles(o["columns"]) if interpreted else 1
    )


def _compress_parts(o: dict, lengths: list[list[int]], interpreted: bool) -> int:
    return (
        (sum(lengths[0]) + len(lengths[0])) * _tiles(o["compressed"]) * _tiles(o["columns"])
        if interpreted
        else 0
    )


def _tiles(size: int) -> int:
    return -(-size // 64)


def _dense_work(o: dict, lengths: list[list[int]]) -> int:
    return (sum(lengths[0]) + len(lengths[0])) * o["depth"] * o["columns"]


def _compress_work(o: dict, lengths: list[list[int]]) -> int:
    return (
        (sum(lengths[0]) + len(lengths[0]))
        * o["compressed"]
        * max(o["depths"][: o["levels"]])
        * o["columns"]
    )


def _outer_work(o: dict, lengths: list[list[int]]) -> int:
    return _pairs(o, lengths) * o.get("depth", 1)


_product = COMMON | dict(depth=WIDTHS, columns=WIDTHS)
_jagged_data = DATA | MAX_SEQLEN
_offsets = dict(behind=True, indices=dict(offsets=INDICES))
_sums = dict(data_axes=_jagged_data, parts=_dense_parts, **_offsets)
_plan = dict(indices=dict(x_offsets=OF_A_PLAN, y_offsets=OF_A_PLAN))
_plan |= dict(data_axes=DATA, work=_outer_work)
_of_segments = dict(num_targets=INDICES, output_scale=FACTORS)
_of_bias = dict.fromkeys(("timestamps", "query_timestamps", "boundaries"), TIMES)
_of_bias |= dict(query_shift=ON_THE_OPERANDS_DEVICE)
_rows = dict(dtypes=TORCH_DTYPES, implementations={}, data_axes=DATA)

OPERATORS = {
    "jagged_attention": Operator(
        weight=4,
        axes=COMMON
        | ATTENTION
        | dict(operands=mostly("self", "cross", "q shared", "kv shared", "2 groups", "3 groups"))
        | dict(shared_rows=(Range(1, 20), Range(50, 140)))
        | STORAGES
        | DROPOUT
        | BIAS,
        data_axes=DATA | ATTENTION_DATA | BIAS_DATA,
        indices=dict(q_offsets=INDICES, kv_offsets=INDICES) | _of_segments | _of_bias,
        behind=True,
        implementations=ATTENTION_IMPLEMENTATIONS,
        num_lists=lambda o: {"cross": 2, "2 groups": 3, "3 groups": 4}.get(o["operands"], 1),
        work=_attention_work,
        parts=_attention_parts,
        fix=_fix_attention,
    ),
    "target_attention": Operator(
        weight=2,
        axes=COMMON
        | ATTENTION
        | STORAGES
        | DROPOUT
        | dict(index=("counts", "map", "offsets", "shuffled map"), rows=(1, 2, 3, 8)),
        data_axes=DATA | ATTENTION_DATA,
        indices=dict(candidates=INDICES, kv_offsets=INDICES) | _of_segments,
        behind=True,
        implementations=ATTENTION_IMPLEMENTATIONS,
        num_lists=lambda o: 2,
        work=_attention_work,
        parts=_attention_parts,
        fix=_fix_attention,
    ),
    "din_attention": Operator(
        weight=2,
        axes=COMMON
        | dict(
            activation=("sigmoid", "silu", "relu", "identity", "prelu", "dice", "dice-eval"),
            normalize=mostly(None, "softmax"),
            features=(("q", "k", "q-k", "q*k"), ("q*k",), ("k", "q"), ("k-q", "q*k", "k")),
            width=(Range(1, 8), Range(9, 64), Range(65, 256)),
            v_width=mostly(None, Range(1, 8), Range(9, 64), Range(65, 256)),  # None: v is k
            hidden=((8,), (1,), (7, 4), (33, 16), (100,), (80, 40)),
            rows=(0, 1, 3),  # of q for each candidate; 0: q has two dimensions
            mask=mostly(None, *MASKS),
            index=("counts", "map", "offsets", "shuffled map"),
        ),
        # equal rows have equal roundings, which the model takes for independent
        data_axes=DATA | dict(values=mostly("normal", "large", "zeros")),
        indices=dict(candidates=INDICES, kv_offsets=INDICES, num_targets=INDICES),
        behind=True,
        num_lists=lambda o: 2,
        work=_din_work,
        parts=_din_parts,
        fix=_fix_din,
    ),
    "self_target_attention": Operator(
        weight=2,
        axes=COMMON
        | {
            name: ATTENTION[name]
            for name in ("activation", "heads", "head_dim", "v_dim", "output_scale")
        }
        | dict(mask=mostly(None, *(x for x, mask in MASKS.items() if "num_targets" not in mask)))
        | DROPOUT
        | BIAS
        | dict(query_tensors=("two tensors", "one tensor")),
        data_axes=DATA | dict(scale=ATTENTION_DATA["scale"]) | BIAS_DATA,
        indices=dict(offsets=INDICES, candidate_offsets=INDICES, output_scale=FACTORS) | _of_bias,
        behind=True,
        implementations=ATTENTION_IMPLEMENTATIONS,
        num_lists=lambda o: 2,
        work=lambda o, lengths: _attention_work(o, [*lengths, lengths[0]]),
        parts=_attention_parts,
        fix=_fix_attention,
    ),
    "block_diagonal_attention": Operator(
        weight=3,
        axes=COMMON | BLOCK_ATTENTION | STORAGES | DROPOUT | dict(heads=ATTENTION["heads"]),
        data_axes=DATA | dict(scale=ATTENTION_DATA["scale"]),
        indices=dict(offsets=INDICES, positions=INDICES),
        behind=True,
        implementations=ATTENTION_IMPLEMENTATIONS,
        work=_block_work,
        parts=_blocks,
        fix=_fix_block_attention,
    ),
    "block_diagonal_attention_packed": Operator(
        axes=COMMON | BLOCK_ATTENTION | DROPOUT | dict(heads=((1, 1), (2, 2), (3, 3), (8, 8))),
        data_axes=dict(values=DATA["values"]),
        indices=dict(offsets=INDICES, positions=INDICES),
        behind=True,
        implementations=ATTENTION_IMPLEMENTATIONS,
        work=_block_work,
        parts=_blocks,
        fix=_fix_packed,
    ),
    "linear_compress": Operator(
        weight=3,
        axes=COMMON
        | dict(
            levels=(1, 2, 3),
            compressed=(Range(1, 8), Range(9, 64), Range(65, 128), Range(129, 450)),
            depths=(
                (8, 8, 8),
                (1, 1, 1),
                (3, 5, 2),
                (20, 33, 7),
                (64, 40, 100),
                (65, 100, 1),
                (170, 99, 130),
            ),
            columns=WIDTHS,
            index=("map", "counts", "shuffled map"),
        ),
        data_axes=DATA,
        indices={"indices[0]": INDICES, "indices[1]": INDICES},
        implementations=dict(
            cpu=mostly("auto", "reference"),
            interpreter=("triton",),
            cuda=("auto", "triton", "hopper"),
        ),
        work=_compress_work,
        parts=_compress_parts,
        fix=_fix_linear_compress,
    ),
    "apply_rotary": Operator(
        axes=COMMON | dict(heads=((1, 1), (2, 2), (5, 5)), head_dim=HEAD_DIMS),
        fix=_even_dim,
        **_rows,
    ),
    **dict.fromkeys(
        ("jagged_dense_bmm", "jagged_jagged_bmm"),
        Operator(axes=_product, work=_dense_work, **_sums),
    ),
    **dict.fromkeys(
        ("jagged_sum", "jagged_mean"), Operator(axes=COMMON | dict(columns=WIDTHS), **_sums)
    ),
    "jagged_softmax": Operator(axes=COMMON | dict(columns=WIDTHS), **_sums),
    "jagged2_softmax": Operator(axes=COMMON | dict(dim=(-1, -2)), num_lists=lambda o: 2, **_plan),
    "jagged_jagged_bmm_jagged_out": Operator(
        axes=COMMON | dict(operands=("two", "itself"), depth=WIDTHS),
        num_lists=lambda o: 2 if o["operands"] == "two" else 1,
        **_plan,
    ),
    "array_jagged_bmm_jagged_out": Operator(
        axes=COMMON | dict(transposed=(False, True), depth=WIDTHS), num_lists=lambda o: 2, **_plan
    ),
    "jagged_linear": Operator(
        axes=_product
        | dict(
            weights=mostly("per segment", "shared"),
            bias=(True, False),
            activation=mostly(None, *POINTWISE),
        ),
        work=_dense_work,
        fix=_shared_linear,
        **_sums,
    ),
    "jagged_dense_add": Operator(
        axes=COMMON | dict(columns=WIDTHS, extra=(0, 1, 9)), **_offsets, **_rows
    ),
    "jagged_dense_mul": Operator(
        axes=COMMON | dict(columns=WIDTHS, extra=(0, 1, 9)), **_offsets, **_rows
    ),
    "jagged_layer_norm": Operator(
        axes=COMMON | dict(columns=WIDTHS, affine=("both", "weight", "none")),
        **_rows | dict(data_axes=DATA | dict(eps=(1e-6, 1e-3))),
    ),
    "jagged_concat": Operator(
        axes=COMMON | dict(parts=(2, 1, 3), columns=WIDTHS),
        num_lists=lambda o: o["parts"],
        indices={f"offsets[{i}]": INDICES for i in range(3)},
        **_rows,
    ),
    "jagged_split": Operator(
        axes=COMMON | dict(first=("lengths", "number"), columns=WIDTHS),
        num_lists=lambda o: 2,
        indices=dict(offsets=INDICES, first_lengths=INDICES),
        **_rows,
    ),
    "jagged_max": Operator(
        axes=COMMON | dict(columns=WIDTHS, empty=(0.0, -2.5)), **_offsets, **_rows
    ),
    **dict.fromkeys(
        ("jagged_first", "jagged_last"),
        Operator(
            axes=COMMON | dict(columns=WIDTHS, k=(1, 0, 3, 50, "lengths")),
            indices=dict(offsets=INDICES, k=INDICES),
            **_rows,
        ),
    ),
    "jagged_between": Operator(
        axes=COMMON | dict(columns=WIDTHS, start=("each", None, 5), end=("each", None, 15)),
        indices=dict(offsets=INDICES, times=INDICES, start=INDICES, end=INDICES),
        **_rows,
    ),
    "jagged_select": Operator(
        axes=COMMON | dict(columns=WIDTHS), indices=dict(offsets=INDICES, index=INDICES), **_rows
    ),
    "jagged_to_padded": Operator(
        axes=COMMON
        | dict(
            columns=WIDTHS,
            extra=(0, 1, 9),
            padding=(0.0, -2.5),
            side=("right", "left"),
            truncate=(None, "newest", "oldest"),
        ),
        **_offsets,
        **_rows,
    ),
    "padded_to_jagged": Operator(
        axes=COMMON | dict(columns=WIDTHS, extra=(0, 1, 9)), **_offsets, **_rows
    ),
}


def leave_out_hopper() -> None:
    """Remove "hopper", for GPUs of another compute capability than 9.0."""
    for operator in OPERATORS.values():
        if "cuda" in operator.implementations:
            operator.implementations["cuda"] = tuple(
                x for x in operator.implementations["cuda"] if x != "hopper"
            )
