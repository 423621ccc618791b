"""Compiles, on a machine without a GPU, the kernels that a first call of layers would compile.

    python -m jagged_modules.precompile --capability 8.0 9.0 --layers my_model.py:make \\
        --out kernels.zip
    python -m jagged_modules.precompile --capability 9.0 --configs layers.json --out kernels/

FUNCTION takes no arguments. It makes modules on the CPU and returns one entry, or a list or dict of
them. An entry is a layer of this package, in its dtype, or (callable, arguments): a tuple of
arguments, or a function of (users, events of each, candidates of each) that returns one.

The file of configurations is a list of objects such as

    {"layer": "HSTUStack", "dtypes": ["bfloat16", "float32"], "arguments": {"embedding_dim": 128,
     "num_heads": 2, "num_layers": 2, "config": {"scaling_seqlen": 512}}}

A LinearCompressEmbedding also has the "width" of its embeddings there.

Each entry is called with batches that reach every choice of kernels: in training mode with a
backward, and in evaluation mode without gradients. `jagged_modules.precompiled` and the
environment variable JAGGED_KERNELS read the output. Needs Triton 3.6 and a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import runpy
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import jagged_modules as jm

# users, events of each, candidates of each. Kernels are chosen by mean lengths and batch sizes.
BATCHES = [
    (1, 1, 300), (1, 1000, 300), (2, 2, 2), (2, 5000, 100), (7, 200, 40), (7, 2000, 300),
    (9, 7, 3), (64, 16, 16), (64, 1000, 10), (64, 2000, 40), (64, 2000, 100), (300, 30, 3),
    (330, 400, 20), (1024, 1, 40), (1024, 100, 12), (4096, 1, 12), (4096, 30, 1),
]  # fmt: skip

Arguments = tuple[Any, ...] | dict[str, Any]  # positional, or by name


def inputs_of(
    layer: nn.Module, users: int, events: int, candidates: int, width: int = 0
) -> Iterator[Arguments]:
    """Arguments of a layer of this package, in each form and index dtype. Rows are uninitialised.

    width: of a LinearCompressEmbedding's embeddings.

    Raises:
        TypeError: the layer needs arguments of its own.
    """
    parameter, of = next(layer.parameters()), users * candidates
    dtype, device = parameter.dtype, parameter.device
    dims: Iterator[Any] = (getattr(x, "embedding_dim", 0) for x in layer.modules())
    dim = next(filter(None, dims), 0) or getattr(layer, "dims", [0])[0]

    def rows(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device, requires_grad=True)

    for index in (torch.int64, torch.int32):
        starts = torch.arange(users + 1, dtype=index, device=device)
        history = jm.Jagged(rows(users * events, dim), starts * events)
        indices: list[dict[str, Any]] = [
            {"candidates": jm.CandidateIndex.from_offsets(starts * candidates)},
            {"candidates": starts[:-1].repeat(candidates)},
        ]
        match layer:
            case (
                jm.JaggedTargetAttention()
                | jm.JaggedSelfTargetAttention()
                | jm.JaggedDINAttention()
            ):
                targets = rows(of, 1, getattr(layer, "target_dim", dim))
                yield from (dict(targets=targets, history=history, **x) for x in indices)
            case jm.LinearCompressEmbedding() if width and len(layer.num_embeddings) == 2:
                shared, own = (
                    rows(n, depth, width) for n, depth in zip((users, of), layer.num_embeddings)
                )
                embeddings = dict(candidate_embeddings=own, user_embeddings=shared)
                yield from (embeddings | x for x in indices)
            case jm.HSTULayer() | jm.HSTUStack():
                length = events + candidates
                inputs, times = [jm.Jagged(rows(users * length, dim), starts * length)], None
                if layer.config.relative_time:
                    times = torch.arange(users * length, device=device)
                    # buckets are stored where the host knows the lengths
                    inputs.append(jm.Jagged(rows(users * length, dim), starts * length))
                    inputs[1].segmentation.host_lengths = torch.full((users,), length, device="cpu")
                counts = torch.full((users,), candidates, dtype=index, device=device)
                for x, count in itertools.product(inputs, (None, counts)):
                    yield dict(x=x, num_targets=count, timestamps=times)
            case (
                jm.JaggedMLP()
                | jm.JaggedGDPA()
                | jm.GDPABlock()
                | jm.JaggedEncoder()
                | jm.JaggedEncoderLayer()
                | jm.BlockDiagonalSelfAttention()
            ):
                yield dict(x=history)
            case _:
                raise TypeError(f"give the arguments of {type(layer).__name__} beside it")


def calls_of(entry: Any) -> Iterator[tuple[Callable[..., Any], Arguments]]:
    """A callable and its arguments, for each call of an entry of FUNCTION."""
    if isinstance(entry, nn.Module):
        entry = entry, functools.partial(inputs_of, entry)
    function, arguments = entry
    if not callable(arguments):
        yield function, arguments
        return
    for batch in BATCHES:
        found: Any = arguments(*batch)
        calls: list[Any] = [found] if isinstance(found, (tuple, dict)) else list(found)
        yield from ((function, each) for each in calls)


def run(function: Callable[..., Any], arguments: Arguments) -> None:
    """Call in training mode with a backward, and in evaluation mode without gradients."""
    options = arguments if isinstance(arguments, dict) else {}
    positional = () if options else arguments
    if isinstance(function, nn.Module):
        function.train()
    leaves = pytree.tree_leaves(function(*positional, **options))
    results = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    if results:
        # gradients as they come from another layer, and from a sum
        torch.autograd.backward(results, list(map(torch.empty_like, results)), retain_graph=True)
        torch.autograd.backward(results, [x.new_empty(()).expand(x.shape) for x in results])
    if isinstance(function, nn.Module):
        function.eval()
        function.zero_grad()
    with torch.no_grad():
        function(*positional, **options)


def entries_of(specification: str) -> list[Any]:
    """What FILE.py:FUNCTION returns.

    Raises:
        ValueError: there is no such file or function, or it returns no entry.
        TypeError: it returns something else.
    """
    file, _, function = specification.rpartition(":")
    sys.path.insert(0, str(Path(file).resolve().parent))
    make = runpy.run_path(file).get(function) if Path(file).is_file() else None
    if not callable(make):
        raise ValueError(f"--layers must be FILE.py:FUNCTION, both existing, got {specification}")
    found: Any = make()
    if isinstance(found, dict):
        found = list(cast(dict[str, Any], found).values())
    entries: list[Any] = [found]
    if isinstance(found, list):
        (entries,) = entries
    if not entries:
        raise ValueError(f"{specification} must return one entry or more, got none")
    for entry in entries:
        if not (isinstance(entry, nn.Module) or _is_call(entry)):
            raise TypeError(
                f"{specification} must return a layer, (callable, arguments), or a list or dict of"
                f" them, got {entry!r}"
            )
    return entries


def _is_call(entry: Any) -> bool:
    """Whether this is (callable, arguments)."""
    match entry:
        case (_, nn.Module()):  # two layers
            return False
        case (function, arguments):
            return callable(function) and (
                callable(arguments) or isinstance(arguments, (tuple, dict))
            )
        case _:
            return False


def configured(file: str) -> list[Any]:
    """The layers of a file of configurations."""
    entries: list[Any] = []
    for case in json.loads(Path(file).read_text()):
        layer_class, arguments = getattr(jm, case["layer"]), dict(case["arguments"])
        if "config" in arguments:
            kind = jm.HSTUConfig if case["layer"].startswith("HSTU") else jm.GDPAConfig
            arguments["config"] = kind(**arguments["config"])
        for dtype in case.get("dtypes", ["float32"]):
            layer = layer_class(**arguments).to(getattr(torch, dtype))
            entries.append((layer, functools.partial(inputs_of, layer, width=case.get("width", 0))))
    return entries


@contextlib.contextmanager
def _autocast(dtype: str | None) -> Generator[None, None, None]:
    """Autocast as on a GPU: torch does not enable that where there is none. torch's own operators
    run on host tensors."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.autocast("cpu", getattr(torch, dtype)):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", getattr(torch, dtype))
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


def _capability(text: str) -> tuple[int, int]:
    major, minor = map(int, text.split("."))
    if (major, minor) < (8, 0):  # argparse: an invalid value
        raise ValueError
    return major, minor


def main(argv: Iterable[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capability", nargs="+", required=True, type=_capability, help="of the GPUs: 9.0"
    )
    parser.add_argument("--layers", action="append", default=[], metavar="FILE.py:FUNCTION")
    parser.add_argument("--configs", action="append", default=[], metavar="FILE.json")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="call under autocast")
    parser.add_argument("--out", required=True, type=Path, help="a new folder, or a .zip file")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="processes (default: all cores)")
    options = parser.parse_args(argv if argv is None else list(argv))
    if not (options.layers or options.configs):
        parser.error("give --layers or --configs")
    if options.out.exists():
        parser.error(f"{options.out} exists")

    from jagged_kernels.precompile.build import build
    from jagged_kernels.precompile.recorder import recorded_launches

    launches: list[Any] = []
    for capability in options.capability:
        with recorded_launches(capability) as recorded, _autocast(options.autocast):
            entries = [x for layers in options.layers for x in entries_of(layers)]
            for entry in entries + [x for file in options.configs for x in configured(file)]:
                for function, arguments in calls_of(entry):
                    run(function, arguments)
        launches += recorded
    print(build(launches, options.out, options.jobs))


if __name__ == "__main__":
    main()
