"""docs/compatibility.md: what works with which layer. One test for each feature runs over all
layers; another holds the page to this list.

`python -m tests.compatibility.table docs/compatibility.md`, run in the repository's root, writes
the page.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ..kernels_used import table
from ..marks import SLOW
from .cases import CASES, Case, Compressed


class Feature(NamedTuple):
    """A row of the table."""

    name: str
    checks: str  # what its test checks, of every layer
    gpu: bool = False  # the test needs one, and is marked so


class Note(NamedTuple):
    """What differs for some layers. With an `error`, the feature does not work: the test must raise
    exactly this."""

    text: str
    error: type[Exception] | None = None
    message: str = ""


SAME = "Same results and gradients."
STEPS = "Three steps in two processes equal those of the unsharded model on both batches."
FEATURES = {  # by the file of their tests
    "test_modules.py": (
        Feature("train, eval", "Dropout applies in training only. Nothing else differs."),
        Feature(
            "state_dict", f"Saved, and loaded with `weights_only=True` into a new layer. {SAME}"
        ),
        Feature("pickle", f"Copies through pickle and through `torch.save`. {SAME}"),
        Feature("deepcopy", "So do copies by `copy.copy` and `copy.deepcopy`."),
        Feature(
            "meta device",
            "A layer built on meta, then reset as DistributedModelParallel, FSDP and `to_empty` do,"
            " equals a direct build.",
        ),
        Feature("dtype", "A layer built with `dtype=` equals one that is converted."),
        Feature(
            "functional_call",
            "`torch.func.functional_call` with another layer's parameters equals that layer.",
        ),
        Feature(
            "nested tensors",
            "A nested tensor of jagged layout goes in and comes out. Results equal those of"
            " `(values, offsets)`.",
        ),
        Feature(
            "LoRA",
            "Each Linear may be wrapped. The addition learns, and `reset_parameters` reaches the"
            " wrapped Linear.",
        ),
        Feature(
            "quantize_dynamic",
            "The layer, or any one of its Linears, in int8. Results differ by less than 10 %.",
        ),
    ),
    "test_graphs.py": (
        Feature(
            "torch.compile, dynamic",
            f"`fullgraph=True, dynamic=True`: no compilation after the first batch. {SAME}",
        ),
        Feature(
            "torch.compile, static",
            f"`fullgraph=True, dynamic=False`: a graph for each size. {SAME}",
        ),
        Feature(
            "torch.compile, reduce-overhead",
            "Inductor's CUDA graphs replay training steps with other values and lengths of the same"
            f" totals. {SAME}",
            gpu=True,
        ),
        Feature(
            "torch.export",
            "With dynamic numbers of users, rows and candidates, saved and loaded. Same results.",
        ),
        Feature("AOTInductor", "The exported program as a package, for all sizes. Same results."),
        Feature("torch.fx", f"`symbolic_trace` records the layer as one call. {SAME}"),
        Feature(
            "CUDA graphs",
            "A captured training step is replayed with other values and lengths of the same total.",
            gpu=True,
        ),
        Feature(
            "jm.graphed",
            f"Batches of changing sizes and lengths, of which some share graphs. {SAME}",
            gpu=True,
        ),
    ),
    "test_training.py": (
        Feature(
            "activation checkpointing",
            f"`torch.utils.checkpoint`, reentrant or not, with dropout. {SAME}",
        ),
        Feature(
            "autocast",
            "In bf16 and fp16, the result has the lower dtype, and gradients are fp32. They differ"
            " from fp32 by less than 5 %.",
        ),
        Feature(
            "GradScaler",
            "Unscaled fp16 gradients differ from fp32 by less than 5 %. A step with an overflow is"
            " skipped.",
        ),
        Feature(
            "fused optimizers",
            "SGD, Adam and AdamW, also with `foreach=True`, give the same parameters.",
        ),
        Feature(
            "in-backward optimizers",
            "`apply_optimizer_in_backward` and `register_post_accumulate_grad_hook` give the same"
            " parameters.",
        ),
    ),
    "test_parallel.py": (
        Feature("DDP", "Two processes with batches of different sizes. Gradients are the mean."),
        Feature(
            "DDP, unused parameters",
            "`find_unused_parameters=True`, the model's result in a `jm.Jagged`, and"
            " `static_graph=True`, in a JaggedTensor. With the former DDP does not look into"
            " TorchRec's containers (a variable is marked ready twice): return"
            " `jm.Jagged.wrap(out)`.",
        ),
        Feature("FSDP2", "`fully_shard` of the layer and of the model. Gradients are the mean."),
        Feature(
            "tensor parallel",
            "`parallelize_module` shards each Linear's weight:"
            " `ColwiseParallel(output_layouts=Replicate())`, and for each `out_proj`"
            f" `RowwiseParallel(input_layouts=Replicate())`. {SAME} Columns that are not gathered"
            " are an error.",
        ),
        Feature(
            "torch.distributed.checkpoint",
            "A checkpoint of an FSDP2 model in two processes is loaded by one.",
        ),
    ),
    "test_torchrec.py": (
        Feature(
            "TorchRec's tracer",
            "`torchrec.fx.symbolic_trace` of collections and layer. Same results.",
        ),
        Feature("DMP, data_parallel", f"DistributedModelParallel with this plan. {STEPS}"),
        *(
            Feature(f"DMP, {plan}", "The same with this plan.")
            for plan in ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard")
        ),
        Feature(
            "DMPCollection",
            "The same with two replicas of row-wise tables, after `sync`. Not run yet.",
            gpu=True,
        ),
        *(
            Feature(name, "The same with row-wise tables and this pipeline.")
            for name in (
                "TrainPipelineBase",
                "TrainPipelineSparseDist",
                "TrainPipelineSparseDistLite",
                "TrainPipelineSparseDistT",
                "TrainEvalHybridPipelineBase",
            )
        ),
        Feature(
            "EvalPipelineSparseDist",
            "Row-wise tables in two processes. Results equal those of the unsharded model.",
        ),
        *(
            Feature(name, "The same with this pipeline, in one process.", gpu=True)
            for name in (
                "TrainPipelineFusedSparseDist",
                "TrainPipelineSemiSync",
                "PrefetchTrainPipelineSparseDist",
                "StagedTrainPipeline",
            )
        ),
        Feature("permuted features", f"By FBGEMM's `permute_2D_sparse_data`. {SAME}"),
        Feature(
            "MPZCH, evaluation",
            "`HashZchManagedCollisionModule` maps ids to rows. Results equal those of these rows.",
        ),
        Feature(
            "MPZCH, training",
            "The same of three steps, in which it enters the ids. Not run yet.",
            gpu=True,
        ),
        Feature(
            "TorchRec quantisation",
            "`quantize_inference_model` puts the collections' tables into int8. Results differ by"
            " less than 10 %.",
        ),
    ),
}
RESIDUAL = Note("The result has the dtype of the rows, to which it is added.")
ONLY_BAGS = Note(
    "TorchRec's EmbeddingCollection has no such plan. Use row_wise or column_wise.",
    ValueError,
    "Sharding not supported",
)
DENSE_POOLS = Note(
    "On the CPU, FBGEMM's dense lookup pools the rows of an EmbeddingCollection. Leave the"
    " collection out of the plan there."
)
ON_SEQUENCES = [case.layer for case in CASES.values() if case.model is not Compressed]
NOTES = {
    ("nested tensors", "LinearCompressEmbedding"): Note(
        "Takes dense tensors.", ValueError, "candidate_embeddings must be"
    ),
    ("LoRA", "LinearCompressEmbedding"): Note(
        "The layer has no Linear to wrap. `torch.nn.utils.parametrize` adds the low-rank term to"
        " `layer.weights`."
    ),
    ("quantize_dynamic", "LinearCompressEmbedding"): Note(
        "The layer has no Linear. Cast it to bfloat16 instead."
    ),
    **{
        (name, "JaggedDINAttention"): Note(
            "The layer computes from the weights of its linears, and does not call them.",
            TypeError,
            "the layer computes from the weights of its linears",
        )
        for name in ("LoRA", "quantize_dynamic", "tensor parallel")
    },
    **{("autocast", layer): RESIDUAL for layer in ("GDPABlock", "HSTULayer", "HSTUStack")},
    **{("DMP, data_parallel", layer): DENSE_POOLS for layer in ON_SEQUENCES},
    **{
        (f"DMP, {plan}", layer): ONLY_BAGS
        for plan in ("table_row_wise", "grid_shard")
        for layer in ON_SEQUENCES
    },
    ("tensor parallel", "LinearCompressEmbedding"): Note(
        "The layer has no Linear to shard. Shard its batch instead."
    ),
}


def feature(name: str, fast: int = len(CASES)) -> Callable:
    """Decorator: the test of a feature, which runs for all cases. Where the table says that it does
    not work, it must raise that error.

    fast: number of cases that are not slow.
    """
    assert name in {row.name for rows in FEATURES.values() for row in rows}

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def checked(case: Case, **fixtures):
            note = NOTES.get((name, case.layer))
            refused = (
                pytest.raises(note.error, match=re.escape(note.message))
                if note and note.error
                else contextlib.nullcontext()
            )
            with refused:
                test(case, **fixtures)

        cases = [
            pytest.param(case, id=case.name, marks=[SLOW] * (i >= fast))
            for i, case in enumerate(CASES.values())
        ]
        return pytest.mark.parametrize("case", cases)(checked)

    return decorate


def document() -> str:
    """The page."""
    layers = list(dict.fromkeys(case.layer for case in CASES.values()))
    notes = list(dict.fromkeys(NOTES.values()))

    def cell(row: Feature, layer: str) -> str:
        note = NOTES.get((row.name, layer))
        word = "no" if note and note.error else "GPU" if row.gpu else "yes"
        return f"{word} ({notes.index(note) + 1})" if note else word

    def cells(row: Feature) -> str:
        """That of most layers, then those of the others."""
        (most, _), *others = Counter(cell(row, layer) for layer in layers).most_common()
        return ", ".join(
            [
                most,
                *(
                    f"`{layer}`: {cell(row, layer)}"
                    for layer in layers
                    if cell(row, layer) in dict(others)
                ),
            ]
        )

    names: dict[tuple[str, str, str], list[str]] = {}  # of features that differ in nothing else
    for file, rows in FEATURES.items():
        for row in rows:
            names.setdefault((file, cells(row), row.checks), []).append(row.name)
    lines = [
        [f"[{'; '.join(features)}](../tests/compatibility/{file})", works, checks]
        for (file, works, checks), features in names.items()
    ]
    numbered = "\n".join(
        f"{number}. {note.text}{_error(note)}" for number, note in enumerate(notes, 1)
    )
    return f"""# Compatibility

What works with the [layers](api/layers.md). The linked file tests each row for all of them. "GPU": it works, and needs one. "no": the test checks the error.

{table(["feature", "works", "what the test checks"], lines)}

## Notes

{numbered}
"""  # noqa: E501


def _error(note: Note) -> str:
    return f' {note.error.__name__}: "{note.message} …".' if note.error else ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document())
