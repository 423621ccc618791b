"""docs/compatibility.md: what works with which layer. One test for each feature runs over all layers; another holds the page to this list.

    python -m tests.compatibility.table docs/compatibility.md       # in the repository's root
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ..marks import SLOW
from .cases import CASES, Case


class Feature(NamedTuple):
    file: str  # that holds its test
    checks: str  # what the test checks, of every layer


class Note(NamedTuple):
    """What differs for some layers. With an `error`, the feature does not work: the test must raise exactly this."""

    text: str
    error: type[Exception] | None = None
    message: str = ""


MODULES, GRAPHS, TRAINING, PARALLEL, TORCHREC = (
    f"test_{name}.py" for name in ("modules", "graphs", "training", "parallel", "torchrec")
)  # fmt: skip
EQUAL = "Results and gradients equal those without it."
FEATURES = {
    "train, eval": Feature(MODULES, "Dropout applies in training only. Nothing else differs."),
    "state_dict": Feature(MODULES, "A new layer with the `state_dict`, saved and loaded with `weights_only=True`, is the same layer."),
    "pickle": Feature(MODULES, "A copy through pickle and through `torch.save` gives the same results."),
    "deepcopy": Feature(MODULES, "So does a copy by `copy.copy` and `copy.deepcopy`."),
    "meta device": Feature(MODULES, "A layer built on meta, then reset as DistributedModelParallel, FSDP or `to_empty` do, equals a direct build."),
    "functional_call": Feature(MODULES, f"`torch.func.functional_call` with other parameters. {EQUAL}"),
    "nested tensors": Feature(MODULES, f"A nested tensor of jagged layout in and out. {EQUAL}"),
    "LoRA": Feature(MODULES, "Each Linear may be wrapped. The addition learns, and `reset_parameters` reaches the wrapped Linear."),
    "quantize_dynamic": Feature(MODULES, "Of a layer, and of each Linear by itself. Results stay within 10 %."),
    "torch.compile, dynamic": Feature(GRAPHS, f"`fullgraph=True, dynamic=True`: one graph for all sizes. {EQUAL}"),
    "torch.compile, static": Feature(GRAPHS, f"`fullgraph=True, dynamic=False`: a graph for each size. {EQUAL}"),
    "torch.export": Feature(GRAPHS, "Numbers of users, rows and candidates are dynamic. The saved and loaded program gives the same results."),
    "AOTInductor": Feature(GRAPHS, "The exported program, compiled to a package and loaded, gives the same results for all sizes."),
    "torch.fx": Feature(GRAPHS, "`symbolic_trace` records the layer as one call. The graph gives the same results."),
    "TorchRec's tracer": Feature(GRAPHS, "`torchrec.fx.symbolic_trace` of an EmbeddingCollection and the layer gives the same results."),
    "CUDA graphs": Feature(GRAPHS, "A training step is captured once and replayed with other values and lengths, for a fixed number of rows."),
    "activation checkpointing": Feature(TRAINING, f"`torch.utils.checkpoint`, reentrant and not, also with dropout. {EQUAL}"),
    "autocast": Feature(TRAINING, "bf16 and fp16: the result has the lower dtype, parameters and their gradients fp32. Close to fp32."),
    "GradScaler": Feature(TRAINING, "Scaled fp16 gradients, once unscaled, are those of fp32. A step with an overflow is skipped."),
    "fused optimizers": Feature(TRAINING, "`fused=True` and `foreach=True` of SGD, Adam and AdamW give the same parameters as the plain loops."),
    "in-backward optimizers": Feature(TRAINING, "`apply_optimizer_in_backward` and `register_post_accumulate_grad_hook` give the same parameters."),
    "DDP": Feature(PARALLEL, "Two processes. Gradients are the mean of both."),
    "FSDP2": Feature(PARALLEL, "`fully_shard` of the layer and the model in two processes. Gradients are the mean of both."),
    "distributed checkpoint": Feature(PARALLEL, "`torch.distributed.checkpoint` of an FSDP2 model in two processes, loaded by one."),
    **{
        f"DMP, {plan}": Feature(TORCHREC, f"DistributedModelParallel in two processes, tables sharded {plan}: results and parameters equal one process's.")
        for plan in ("data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard")
    },
    **{
        pipeline: Feature(TORCHREC, "The sharded model in two processes. Results and parameters equal those of plain steps.")
        for pipeline in ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite")
    },
    **{
        pipeline: Feature(TORCHREC, "As above, in one process on a GPU.")
        for pipeline in ("TrainPipelineFusedSparseDist", "TrainPipelineSemiSync", "PrefetchTrainPipelineSparseDist", "StagedTrainPipeline")
    },
    "TorchRec quantisation": Feature(TORCHREC, "`quantize_embeddings` of a model with the layer, to int8. Results stay within 10 %."),
}  # fmt: skip
ONLY_BAGS = Note(
    "TorchRec's EmbeddingCollection has no such plan, whatever follows it. Use row_wise or column_wise.",
    Exception,
    "",
)
NOTES = {
    ("nested tensors", "LinearCompressEmbedding"): Note(
        "Takes dense embeddings: each candidate has the same number. Unbind or stack them.", TypeError, "candidate_embeddings must be"
    ),
    ("LoRA", "LinearCompressEmbedding"): Note(
        "Has no Linear to wrap. Add the low-rank term with `torch.nn.utils.parametrize` to `layer.weights`."
    ),
    ("quantize_dynamic", "LinearCompressEmbedding"): Note("Has no Linear, so nothing is quantised. Cast the layer to bfloat16 instead."),
}


def feature(name: str, fast: int = len(CASES), gpu: bool = False) -> Callable:
    """Decorator: the test of a feature, which runs for all cases. Where the table says that it does not work, it must raise that error.

    fast: number of cases that are not slow.
    """

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def checked(case: Case, **fixtures):
            note = NOTES.get((name, case.column))
            with refused(note) if note and note.error else contextlib.nullcontext():
                test(case, **fixtures)

        cases = [pytest.param(case, id=id, marks=[SLOW] * (i >= fast)) for i, (id, case) in enumerate(CASES.items())]
        checked = pytest.mark.parametrize("case", cases)(checked)
        return pytest.mark.gpu(checked) if gpu else checked

    return decorate


def refused(note: Note):
    return pytest.raises(note.error, match=re.escape(note.message))
