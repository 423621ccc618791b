"""fuse_broadcasts on public ranking models, unedited, on one thread of a CPU or on a GPU: the gain
that the report says, and the measured one.

    export OMP_NUM_THREADS=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=68719476736
    python kernels/benchmarks/public_models.py --folder /tmp/models --mode eager compiled
    python kernels/benchmarks/public_models.py --device cuda --mode eager compiled graphs

The repositories are cloned into --folder from their public addresses, unless they are there. A
model that cannot be cloned, built or captured is a row with its error. FuxiCTR needs pandas. What
the models import for training alone is replaced by empty stand-ins where it is not installed.

"Left in": the rows of users are gathered for the candidates, then the model runs. Times are CPU
times of the thread, on a GPU wall times of synchronised calls: the least of --calls calls of both
in turn, with inputs that the example of the capture does not have. glibc gives memory of more than
32 MB back at each free; the environment above keeps it, as other allocators do. Otherwise page
faults are a large part of the time. --mode graphs replays a CUDA graph of the eager call. Constants
that a model makes on the host are copied to the device before, as a graph cannot copy them.
"""

import argparse
import importlib
import importlib.util
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # looks for installed packages, before there are stand-ins
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import jagged_modules as jm
from jagged_modules.transforms.capture import map_named

REPOSITORIES = {
    "FuxiCTR": "https://github.com/reczoo/FuxiCTR",
    "DeepCTR-Torch": "https://github.com/shenweichen/DeepCTR-Torch",
    "dlrm": "https://github.com/facebookresearch/dlrm",
    "transformer_user_action": "https://github.com/pinterest/transformer_user_action",
}
FOR_TRAINING = (
    "tensorflow tensorflow.python tensorflow.python.keras tensorflow.python.keras.callbacks sklearn"
    " sklearn.metrics sklearn.preprocessing h5py polars keras_preprocessing"
    " keras_preprocessing.sequence tensorboard torch.utils.tensorboard"
).split()
USERS, CANDIDATES, EVENTS, WIDTH, IDS = 16, 800, 100, 32, 1000
EXAMPLE_ROWS = 32
RANGES = (1, 64), (64, 4096)  # of users and candidates, for --ranges
EAGER, COMPILED, GRAPHS = "eager", "compiled", "graphs"
compiled = partial(torch.compile, dynamic=True)


@dataclass(frozen=True)
class Public:
    """A model, its inputs for numbers of users and candidates, and those that are of users."""

    model: nn.Module
    inputs: Callable[[int, int], dict[str, Any]]
    shared: list[str]


class StandIn(types.ModuleType):
    """An empty module: each name is a class without anything."""

    __path__ = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def add_stand_ins() -> None:
    for name in FOR_TRAINING:
        try:
            importlib.import_module(name)
        except Exception:  # not installed, or not for the installed numpy
            sys.modules[name] = StandIn(name)


def cloned(folder: Path, name: str) -> tuple[Path, str]:
    """The repository's folder, and its commit."""
    path = folder / name
    if not path.exists():
        address = REPOSITORIES[name]
        run = ["git", "clone", "--quiet", "--depth", "1", address, str(path)]
        subprocess.run(run, check=True, capture_output=True, text=True)
    head = ["git", "-C", str(path), "rev-parse", "--short=10", "HEAD"]
    return path, subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()


def module_of(path: Path) -> types.ModuleType:
    """The module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"public_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ids(rows: int, *shape: int, seed: int = 0) -> Tensor:
    """Random ids, 0 for padding left out."""
    generator = torch.Generator().manual_seed(seed * 1000 + rows)
    return torch.randint(1, IDS, (rows, *shape), generator=generator)


def histories(rows: int, seed: int = 0) -> Tensor:
    """Ids of 50 to 100 % of the events, then padding. The example and the timed batch have equally
    long ones."""
    lengths = EVENTS // 2 + (torch.arange(rows)[:, None] * 7 % 16) * EVENTS // 32
    return torch.where(torch.arange(EVENTS) < lengths, ids(rows, EVENTS, seed=seed), 0)


# -- models ----------------------------------------------------------------------------------------


def fuxi(name: str, root: Path, user_fields: int = 8, history: bool = True, **options) -> Public:
    """A model of FuxiCTR's zoo, of ids of the user, of the item, and of two histories."""
    sys.path.insert(0, str(root))
    fields: dict[str, dict[str, Any]] = {
        f"user{i}": dict(type="categorical", source="user") for i in range(user_fields)
    }
    fields |= {
        x: dict(type="categorical", source="item") for x in ("item_id", "cate_id", "seller_id")
    }
    targets = {"click_history": "item_id", "cate_history": "cate_id"} if history else {}
    for field, target in targets.items():
        own = dict(max_len=EVENTS, share_embedding=target, padding_idx=0)
        fields[field] = dict(type="sequence", source="user", **own)
    features = importlib.import_module("fuxictr.features").FeatureMap("public", str(root))
    features.features = {field: dict(x, vocab_size=IDS) for field, x in fields.items()}
    features.labels = ["click", "like"][: options.get("num_tasks", 1)]
    features.default_emb_dim, features.num_fields = WIDTH, features.get_num_fields()
    folder = root / "model_zoo" / ("multitask/" * ("num_tasks" in options)) / name / "src"
    fixed = dict(metrics=[], optimizer="adam", loss="binary_crossentropy", verbose=0)
    build = getattr(module_of(folder / f"{name}.py"), name)
    model = build(features, embedding_dim=WIDTH, model_root=str(root), **fixed, **options)

    def inputs(users: int, candidates: int) -> dict[str, Any]:
        given = {}
        for seed, (field, x) in enumerate(fields.items()):
            rows = users if x["source"] == "user" else candidates
            given[field] = (histories if field in targets else ids)(rows, seed=seed)
        return dict(inputs=given)

    shared = [f"inputs.{field}" for field, x in fields.items() if x["source"] == "user"]
    return Public(model, inputs, shared)


class OfColumns(nn.Module):
    """DeepCTR's models take one matrix with the columns of all features: here, those of the user
    and of the item are two inputs."""

    def __init__(self, model: nn.Module, user_fields: int):
        super().__init__()
        self.model, self.user_fields = model, user_fields

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        fields, history = user[:, : self.user_fields], user[:, self.user_fields :]
        return self.model(torch.cat([fields, item, history], 1))


def deepctr_din(root: Path, **options) -> Public:
    """Ids in floating point."""
    sys.path.insert(0, str(root))
    columns = importlib.import_module("deepctr_torch.inputs")
    build = importlib.import_module("deepctr_torch.models.din").DIN
    fields = [
        columns.SparseFeat(x, IDS, WIDTH) for x in (*(f"user{i}" for i in range(8)), "item", "cate")
    ]
    sequences = [
        columns.VarLenSparseFeat(
            columns.SparseFeat(f"hist_{x}", IDS, WIDTH, embedding_name=x),
            EVENTS,
            length_name="length",
        )
        for x in ("item", "cate")
    ]
    din = build([*fields, *sequences], ["item", "cate"], att_weight_normalization=True, **options)

    def inputs(users: int, candidates: int) -> dict[str, Any]:
        items, lengths = histories(users, 1), (histories(users, 1) > 0).sum(1, keepdim=True)
        user = torch.cat([ids(users, 8), items, lengths, histories(users, 2)], 1)
        return dict(user=user.float(), item=ids(candidates, 2, seed=3).float())

    return Public(OfColumns(din, 8), inputs, ["user"])


def dlrm(root: Path) -> Public:
    """Dense features of the user, eight ids of the candidate."""
    sys.path.insert(0, str(root))
    net = module_of(root / "dlrm_s_pytorch.py").DLRM_Net
    tables, bottom = np.array([IDS] * 8), np.array([64, 512, 256, WIDTH])
    top = np.array([WIDTH + 9 * 8 // 2, 256, 128, 1])
    model = net(WIDTH, tables, bottom, top, arch_interaction_op="dot", sigmoid_top=4)

    def inputs(users: int, candidates: int) -> dict[str, Any]:
        dense = torch.randn(users, 64, generator=torch.Generator().manual_seed(users))
        offsets = [torch.arange(candidates) for _ in tables]
        return dict(
            dense_x=dense, lS_o=offsets, lS_i=[ids(candidates, seed=i) for i in range(len(tables))]
        )

    return Public(model, inputs, ["dense_x"])


def transact(root: Path) -> Public:
    folder = root / "transact_code"
    sys.path.insert(0, str(folder))
    config = module_of(folder / "transact_config.py").TransActConfig
    model = module_of(folder / "transact.py").TransAct(config(seq_len=EVENTS))

    def inputs(users: int, candidates: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(users)
        return dict(
            action_type_seq=ids(users, EVENTS) % 20,
            item_embedding_seq=torch.randn(users, EVENTS, WIDTH, generator=generator),
            action_time_seq=ids(users, EVENTS, seed=1) % 20,
            request_time=500 + ids(users, seed=2) % 500,
            item_embedding=torch.randn(candidates, WIDTH, generator=generator),
        )

    users = ["action_type_seq", "item_embedding_seq", "action_time_seq", "request_time"]
    return Public(model, inputs, users)


TWO_TASKS = dict(task=["binary_classification"] * 2, num_tasks=2, history=False)
DEEP = dict(history=False, parallel_dnn_hidden_units=[512, 256])
# the name of a row → its repository, and what builds it from the repository's folder
MODELS: dict[str, tuple[str, Callable[[Path], Public]]] = {
    "DIN": ("FuxiCTR", partial(fuxi, "DIN")),
    "DIN, softmax, two layers": (
        "FuxiCTR",
        partial(fuxi, "DIN", din_use_softmax=True, attention_hidden_units=[64, 32]),
    ),
    "DIN ": ("DeepCTR-Torch", deepctr_din),
    "DIN, Dice": ("DeepCTR-Torch", partial(deepctr_din, att_activation="Dice")),
    "BST": ("FuxiCTR", partial(fuxi, "BST")),
    "TransAct": ("FuxiCTR", partial(fuxi, "TransAct")),
    "TransAct ": ("transformer_user_action", transact),
    "DCNv2": ("FuxiCTR", partial(fuxi, "DCNv2", **DEEP)),
    "DCNv2, 40 user fields": ("FuxiCTR", partial(fuxi, "DCNv2", user_fields=40, **DEEP)),
    "MMoE": ("FuxiCTR", partial(fuxi, "MMoE", **TWO_TASKS)),
    "MMoE, 40 user fields": ("FuxiCTR", partial(fuxi, "MMoE", user_fields=40, **TWO_TASKS)),
    "PLE, 40 user fields": ("FuxiCTR", partial(fuxi, "PLE", user_fields=40, **TWO_TASKS)),
    "DLRM": ("FuxiCTR", partial(fuxi, "DLRM", history=False)),
    "DLRM, dense features of users": ("dlrm", dlrm),
    "WuKong": ("FuxiCTR", partial(fuxi, "WuKong", history=False)),
    "WuKong, 40 user fields": ("FuxiCTR", partial(fuxi, "WuKong", user_fields=40, history=False)),
}


# -- measurements ----------------------------------------------------------------------------------


def least_times(
    functions: list[Callable[[], Any]], calls: int, device: torch.device
) -> list[float]:
    """ms of each function, called in turn: of CPU time, on a GPU of wall time."""
    times: list[list[float]] = [[] for _ in functions]
    on_gpu = device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    clock = time.perf_counter if on_gpu else time.thread_time
    with torch.no_grad():
        for function in functions * 2:
            function()
        for _ in range(calls):
            for own, function in zip(times, functions):
                wait()
                start = clock()
                function()
                wait()
                own.append(1e3 * (clock() - start))
    return [min(own) for own in times]


class NotCaptured(RuntimeError):
    """A call that no CUDA graph can hold."""


class HostConstants(TorchDispatchMode):
    """Keeps the copies to the device of tensors that a model makes on the host in each call, as a
    capture cannot make them. A copy is found by what it holds: a first call may make more of them.

    Attributes:
        copies: by contents.
        last: the operator that was called last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[tuple[Any, ...], Tensor] = {}
        self.last = "nothing"

    def copy(self, x: Tensor, make: Callable[[], Tensor], *options: Any) -> Tensor:
        numbers = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        key = (x.dtype, x.shape, numbers, *options)
        if key not in self.copies:
            self.copies[key] = make()
        return self.copies[key]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.last = str(function)
        if function is torch.ops.aten._to_copy.default:
            device = kwargs.get("device")
            if args[0].is_cpu and device is not None and device.type != "cpu":
                make = partial(function, *args, **kwargs)
                return self.copy(args[0], make, *kwargs.items())
        elif function is torch.ops.aten.index.Tensor and not args[0].is_cpu:
            x, indices = args
            own = (
                self.copy(i, partial(i.to, x.device)) if i is not None and i.is_cpu else i
                for i in indices
            )
            args = x, list(own)
        return function(*args, **kwargs)


@torch.no_grad()
def replayed(function: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of a call."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    constants = HostConstants()

    def call() -> None:
        with constants:
            function()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as error:
        raise NotCaptured(f"no CUDA graph: {constants.last} waits for the device") from error

    def replay(kept: Any = constants.copies) -> None:  # the graph reads them
        graph.replay()

    return replay


def graphs(module: Callable[..., Any]) -> Callable[..., None]:
    """What replays a CUDA graph of the first call. All calls must have the same arguments."""
    kept: list[Callable[[], None]] = []

    def call(*args: Any, **kwargs: Any) -> None:
        if not kept:
            kept.append(replayed(lambda: module(*args, **kwargs)))
        kept[0]()

    return call


THROUGH = {EAGER: None, COMPILED: compiled, GRAPHS: graphs}


def measured(
    public: Public, fused: nn.Module, mode: str, calls: int, device: torch.device
) -> tuple[float, float]:
    """ms of the model on gathered rows, and of the fused model."""
    given = tree_map(lambda x: x.to(device), public.inputs(USERS, CANDIDATES))
    index = torch.arange(CANDIDATES, device=device) * 7 % USERS

    def gathered(given: dict[str, Any], index: Tensor) -> Any:
        return public.model(**map_named(lambda x: x[index], given, public.shared))

    left_in, model = gathered, fused
    if mode == COMPILED:
        left_in, model = compiled(gathered), compiled(fused)
    calls_of_both = [lambda: left_in(given, index), lambda: model(**given, candidate_to_user=index)]
    if mode == GRAPHS:
        calls_of_both = [replayed(x) for x in calls_of_both]
    first, second = least_times(calls_of_both, calls, device)
    return first, second


def built(name: str, folder: Path, device: torch.device) -> tuple[Public, str]:
    """A model in eval mode, and its repository's name and commit."""
    repository, build = MODELS[name]
    path, commit = cloned(folder, repository)
    public = build(path)
    public.model.eval()
    for module in public.model.modules():  # some start at 1e-4, where results hardly differ
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            nn.init.normal_(module.weight, std=0.3)
        if isinstance(vars(module).get("device"), (str, torch.device)):  # to which they move inputs
            module.device = device
    public.model.to(device)
    return public, f"{repository} {commit}"


def fused_for(public: Public, max_batch: Any, device: torch.device, mode: str = EAGER) -> Any:
    through = THROUGH[mode]
    example = tree_map(lambda x: x.to(device), public.inputs(EXAMPLE_ROWS, EXAMPLE_ROWS))
    return jm.transforms.fuse_broadcasts(
        public.model, example, request_only=public.shared, max_batch=max_batch, through=through
    )


def reported_gain(report: Any, mode: str, device: torch.device) -> float:
    """Of calls in this mode. On a GPU, `report.gain` is never that of eager calls."""
    if mode != EAGER or device.type == "cpu" or report.runs_model:
        return report.gain
    return 1.0 if report.eager_calls_run_model else report.eager_times.gain


def timed_cells(name: str, options: argparse.Namespace) -> list[str]:
    """The cells of a model: reported and measured gains."""
    public, source = built(name, options.folder, options.device)
    cells, notes = [name.strip(), source], dict[str, None]()
    for mode in options.mode:
        torch.compiler.reset()
        fused = fused_for(public, (USERS, CANDIDATES), options.device, mode)
        report = fused.report
        if options.report:
            print(f"{name}, {mode}\n{report}\n")
        cells.append(f"{reported_gain(report, mode, options.device):.2f}")
        notes |= {"the model runs": None} if report.runs_model else {}
        torch.compiler.reset()
        try:
            before, after = measured(public, fused, mode, options.calls, options.device)
        except NotCaptured as error:
            cells, notes = [*cells, "–", "–"], {**notes, str(error): None}
        else:
            cells += [f"{before / after:.2f}", f"{before:.3g} → {after:.3g}"]
    return [*cells, "; ".join(notes)]


def ranges_cells(name: str, options: argparse.Namespace) -> list[str]:
    """The cells of a model: the numbers of its operators by the sizes that they have."""
    public, source = built(name, options.folder, options.device)
    report = fused_for(public, RANGES, options.device).report
    cells = [name.strip(), source]
    for own in filter(None, (report, report.other)):
        if options.report:
            print(f"{name}\n{own.ranges}\n")
        operators = own.ranges.operators
        sides = [{*x.sizes} & {"users", "candidates"} for x in operators]
        numbers = [sides.count(x) for x in ({"users"}, {"candidates"}, {"users", "candidates"})]
        cells.append(" / ".join(map(str, numbers)) + " (the model runs)" * own.runs_model)
    return [*cells, str(report.guard)] if report.guard else [*cells, "–", "–"]


def row(name: str, options: argparse.Namespace, columns: int) -> list[str]:
    """The cells of a model, or its error."""
    try:
        return (ranges_cells if options.ranges else timed_cells)(name, options)
    except Exception as error:
        what = getattr(error, "stderr", None) or error
        text = re.sub(r"\s+", " ", f"{type(error).__name__}: {what}").strip()
        return [name.strip(), MODELS[name][0], *["–"] * (columns - 3), text[:200]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("public_models"), help="of the repositories' clones"
    )
    parser.add_argument(
        "--only", type=re.compile, default=".", help="models whose name this expression finds"
    )
    parser.add_argument("--calls", type=int, default=9, help="of which the shortest counts")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--mode", choices=(EAGER, COMPILED, GRAPHS), nargs="+", default=[EAGER], help="modes"
    )
    parser.add_argument("--report", action="store_true", help="print each report")
    parser.add_argument(
        "--ranges", action="store_true", help="the sizes of operators, for ranges; no times"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    add_stand_ins()
    head = ["model", "repository"]
    for mode in options.mode:
        head += [f"reported gain, {mode}", "measured", "ms, left in → fused"]
    head += ["note"]
    sizes = f"{USERS} users, {CANDIDATES} candidates"
    if options.ranges:
        head = ["model", "repository", "operators of users / candidates / both"]
        head += ["the same, second placement", "guard"]
        sizes = "users {} to {}, candidates {} to {}".format(*RANGES[0], *RANGES[1])
    print(f"{sizes}, {EVENTS} events, torch {torch.__version__}\n")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for name, (repository, _) in MODELS.items():
        if re.search(options.only, f"{name.strip()} of {repository}"):
            cells = row(name, options, len(head))
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
