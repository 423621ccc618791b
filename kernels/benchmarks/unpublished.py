"""Tables of the record without published figures: this project's own operators and settings."""

import bench_attention
import bench_bias
import bench_din
import bench_everyday
import bench_layers
import bench_levels
import bench_linear_compress
import bench_user_blocks
import leaderboard
import stu
import torch
from bench_bias import NO_BIAS, POSITION, POSITION_AND_TIME, name_of
from bench_gdpa import FLEX
from headline import Column, Headline, Row
from names import DENSE_FLASH, FA2, INVARIANT, OURS, PORTABLE
from runner import Case

MS = "forward_ms/forward_backward_ms"
TFLOPS = "forward_tflops/backward_tflops"
ALL_PASSES = "forward_{0}/forward_backward_{0}/backward_{0}"
SOURCE = "this project"

PEAK = "forward_backward_peak_mb"
BOARD = leaderboard.make_cases("cuda", False)
WIDE, FREE = (
    [x for x in bench_everyday.make_cases("cuda", False) if x.table == table]
    for table in (bench_everyday.WIDE, bench_everyday.FREE)
)
LAYERS = (bench_layers.SELF, bench_layers.TARGET)


def board(key: str, table: str, caveat: str, columns: dict[str, str], peaks: dict[str, str]):
    """A table of the leaderboard. columns, peaks: heading -> implementation."""
    rows = [Row(case.name, case.name) for case in BOARD if case.table == table]
    return Headline(
        key=key,
        title=f"Leaderboard: {table}",
        source=SOURCE,
        published=(
            "ms, forward / forward + backward; MB, the peak of forward + backward. H=4, bf16,"
            " causal."
        ),
        caveat=caveat,
        op="leaderboard",
        table=table,
        columns=[
            *(Column(heading, MS, name) for heading, name in columns.items()),
            *(Column(f"MB, {heading}", PEAK, name) for heading, name in peaks.items()),
        ],
        rows=rows,
    )


def with_memory(heading: str, name: str) -> tuple[Column, Column]:
    """Columns of an implementation: its times, and the peak of forward + backward."""
    return Column(heading, MS, name), Column(f"MB, {heading}", PEAK, name)


def of_cases(cases: list[Case]) -> dict:
    """The first table and the rows of a benchmark's cases."""
    rows = [Row(case.name, case.name, table=case.table) for case in cases]
    return dict(table=cases[0].table, rows=rows)


TABLES = [
    board(
        "board_attention",
        leaderboard.ATTENTION,
        "FlashAttention and flex_attention compute softmax under the same mask, as they have no"
        " SiLU; Helion's example has no backward. NVIDIA's figures are read off its plots for an"
        " H100.",
        {
            "Meta": leaderboard.META,
            "Meta, TMA": leaderboard.META_TMA,
            "Helion": leaderboard.HELION,
            "NVIDIA, published": leaderboard.NVIDIA,
            "FA2, softmax": FA2,
            "FA4, softmax": "FlashAttention-4",
            "flex, softmax": FLEX,
            "this project": OURS,
        },
        {"Meta": leaderboard.META, "this project": OURS},
    ),
    board(
        "board_layer",
        leaderboard.LAYER,
        "Without dropout. Meta's layer keeps its rows in bf16, and runs without TMA, with which its"
        " gradients are NaN. The floor is the layer's GEMMs and attention alone.",
        {
            "Meta": stu.STU,
            "Meta, no recompute": f"{stu.STU}, no recompute",
            "a user's, compiled": bench_layers.USER,
            "floor": bench_layers.FLOOR,
            "this project": OURS,
            "compiled": bench_layers.COMPILED,
            "bf16 rows": bench_layers.BF16_ROWS,
        },
        {"Meta": stu.STU, "this project": OURS, "bf16 rows": bench_layers.BF16_ROWS},
    ),
    Headline(
        key="hstu",
        title="HSTU's attention: SiLU, causal, 20 targets per segment",
        source=SOURCE,
        published="ms, forward / forward + backward, B=128, H=4, lengths uniform to N, bf16.",
        caveat=(
            "flex_attention computes softmax under the same mask, as it has no SiLU. All masks but"
            " ours are made beforehand."
        ),
        op="gdpa",
        table="HSTU (silu, causal, 20 targets)",
        columns=[
            Column("padded plain SiLU", MS, "bmm + silu + bmm, padded + mask"),
            Column("flex_attention, softmax", MS, "flex_attention, softmax"),
            Column("this project, softmax", MS, f"{OURS}, softmax"),
            Column("portable", MS, PORTABLE),
            Column("this project", MS, OURS),
        ],
        rows=[
            *(Row(f"N={n} D=64", f"B128 N{n} D64") for n in (512, 1024, 2048)),
            *(
                Row(f"N={n} D=128", f"B128 N{n} D128", cells=["", "–", "–"])
                for n in (512, 1024, 2048)
            ),
        ],
    ),
    Headline(
        key="activations",
        title="Activations",
        source=SOURCE,
        published="TFLOP/s, forward / backward, q and kv jagged to 1024, B=288, H=4, D=128, bf16.",
        caveat="gelu_taylor runs on the portable kernels.",
        op="gdpa",
        table="activations, q and kv jagged L=1024 B=288",
        columns=[Column("this project", TFLOPS, OURS)],
        rows=[
            Row(name, name)
            for name in ("softmax", "identity", "relu", "silu", "gelu", "gelu_tanh", "gelu_taylor")
        ],
    ),
    Headline(
        key="shared_operands",
        title="Operands that all segments share",
        source=SOURCE,
        published=(
            "ms, forward / forward + backward, tanh-GELU, B=1152, lengths uniform to 512, H=4,"
            " D=128, bf16."
        ),
        caveat=(
            "The others copy the shared operand to each segment, or, for weights, are plain torch."
        ),
        op="gdpa",
        table="shared operands",
        columns=[
            Column("replicated", MS, f"replicate + {OURS}"),
            Column("plain torch", MS, "bmm + gelu_tanh + bmm"),
            Column("this project", MS, OURS),
        ],
        rows=[
            Row("32 seeds as queries (PMA)", "PMA, 32 seeds, B1152 N512", cells=["", "–"]),
            Row("128 rows of weights as keys (PFFN)", "PFFN, 128 rows of weights, B1152 N512"),
        ],
    ),
    Headline(
        key="one_launch",
        title="Self and target attention in one launch",
        source=SOURCE,
        published=(
            "ms, forward / forward + backward, 32 users, 512 candidates of 64 rows, H=2, D=128,"
            " histories uniform to N, bf16."
        ),
        caveat=(
            "Two launches also have to add two dk and two dv, which is in neither of their times."
        ),
        op="attention",
        table="self and target attention in one launch",
        columns=[
            Column("users' own rows alone", MS, f"{OURS}, own rows alone"),
            Column("candidates alone", MS, f"{OURS}, candidates alone"),
            Column("portable, one launch", MS, PORTABLE),
            Column("this project, one launch", MS, OURS),
        ],
        rows=[Row(f"N={n}", f"history 1..{n}, 512 candidates") for n in (512, 1024, 2048)],
    ),
    Headline(
        key="wide_heads",
        title="Head dims above 128",
        source=SOURCE,
        published=(
            "ms, forward / forward + backward, causal softmax, 64 full segments of 1,024 rows, H=4,"
            " bf16."
        ),
        caveat="The padded form has nothing to pad.",
        op="everyday",
        table=bench_everyday.WIDE,
        columns=[
            Column("padded", MS, bench_everyday.PADDED),
            Column("FA2", MS, FA2),
            Column("FA4", MS, "FlashAttention-4"),
            Column("portable", MS, PORTABLE),
            Column("this project", MS, OURS),
        ],
        rows=[Row(name.rpartition(" ")[2], name) for name in sorted(case.name for case in WIDE)],
    ),
    Headline(
        key="biases",
        title="Attention with relative biases",
        source=SOURCE,
        published="ms, forward / forward + backward with the tables' gradients, causal, H=4, bf16.",
        caveat=(
            "flex_attention gets the buckets of times and the block mask made beforehand, and has"
            " no SiLU. Ours keeps the buckets with the timestamps."
        ),
        op="bias",
        columns=[
            *(
                Column(f"{heading}, {' and '.join(tables) or 'no bias'}", MS, name_of(name, tables))
                for heading, name in (("flex", bench_bias.FLEX), ("this project", OURS))
                for tables in (NO_BIAS, POSITION, POSITION_AND_TIME)
                if tables or name == OURS
            )
        ],
        table="",
        rows=[
            Row(
                f"{case.table.partition(' ')[0].strip(',')}, {case.name}", case.name, "", case.table
            )
            for case in bench_bias.make_cases("cuda", False)
        ],
    ),
    Headline(
        key="din",
        title="DIN's attention",
        source=SOURCE,
        published="ms, forward / forward + backward, lognormal histories, bf16.",
        caveat="The GEMM has the forward's number of operations.",
        op="din",
        columns=[
            Column("a row for each pair", MS, bench_din.MATERIALIZED),
            Column("GEMM", "forward_ms", bench_din.GEMM),
            Column("this project", MS, OURS),
        ],
        **of_cases(bench_din.make_cases("cuda", False)),
    ),
    Headline(
        key="layers",
        title="Layers beside their floor",
        source=SOURCE,
        published="ms, forward / forward + backward; MB; bf16 autocast, fp32 rows.",
        caveat="The floor is the layer's GEMMs and attention alone.",
        op="layers",
        columns=[
            *with_memory("a user's, compiled", bench_layers.USER),
            Column("floor", MS, bench_layers.FLOOR),
            *with_memory("this project", OURS),
            *with_memory("compiled", bench_layers.COMPILED),
        ],
        **of_cases([x for x in bench_layers.make_cases("cuda", False) if x.table in LAYERS]),
    ),
    Headline(
        key="free_running",
        title="Free-running steps of a target attention layer",
        source=SOURCE,
        published="ms of a step, forward / forward + backward, host and device, bf16 autocast.",
        caveat="Padded inputs are padded beforehand.",
        op="everyday",
        columns=[
            Column("padded", MS, bench_everyday.PADDED_LAYER),
            Column("the same objects", MS, bench_everyday.SAME),
            Column("new offsets and map", MS, bench_everyday.LAYER),
            Column("on the host", MS, bench_everyday.ON_HOST),
            Column("by `jm.graphed`", MS, bench_everyday.GRAPHED),
        ],
        **of_cases(FREE),
    ),
    Headline(
        key="many_candidates",
        title="Target attention: 10,000 candidates and more",
        source=SOURCE,
        published=(
            "ms, forward / forward + backward, 1 to 1,000 users with histories of 128 rows, H=2,"
            " D=64, bf16."
        ),
        caveat=(
            '"Folded": a user\'s candidates are one query sequence. The replicated form adds the'
            " gradients of a user's copies in bf16, which is inaccurate for very many."
        ),
        op="attention",
        columns=[
            Column("replicated", MS, "replicate + SDPA cuDNN"),
            Column("FA2, folded", MS, f"{FA2}, folded"),
            Column("cuDNN, folded", MS, "SDPA cuDNN, folded"),
            Column("portable", MS, PORTABLE),
            Column("this project", MS, OURS),
        ],
        **of_cases(bench_attention.many_candidates("cuda", torch.bfloat16)),
    ),
    Headline(
        key="many_compressed",
        title="Linear compression: 10,000 candidates and more",
        source=SOURCE,
        published=(
            "ms, forward / forward + backward, 1 to 1,000 users, M=N=128, K = 256 + 128, fp16."
        ),
        caveat='"Two levels" splits the users\' part in two, of equal work in total.',
        op="linear_compress",
        columns=[
            Column("decomposed", MS, "decomposed"),
            Column("padded", MS, "padded"),
            Column("this project, two levels", MS, bench_linear_compress.THREE_LEVELS),
            Column("this project", MS, OURS),
        ],
        **of_cases(bench_linear_compress.many_cases("cuda", torch.float16)),
    ),
    Headline(
        key="levels",
        title="Target attention to histories of two levels",
        source=SOURCE,
        published="ms, forward / forward + backward, and MB, H=4, D=64, lognormal histories, bf16.",
        caveat="The others copy both histories for each item, in the measured call.",
        op="levels",
        columns=[
            *with_memory("padded flash", DENSE_FLASH),
            *with_memory("a copy for each item", bench_levels.COPIES),
            *with_memory("this project", OURS),
        ],
        **of_cases(bench_levels.make_cases("cuda", False)),
    ),
    Headline(
        key="user_blocks",
        title="Layers of histories and features",
        source=SOURCE,
        published=(
            "ms, forward / forward + backward, and MB: PFFN, seed pooling, two layers of"
            " InterFormer and of Kunlun, lognormal histories, bf16 autocast, fp32 rows."
        ),
        caveat="The padded forms have the same parameters; histories are padded beforehand.",
        op="user_blocks",
        columns=[
            *with_memory("padded, compiled", bench_user_blocks.PADDED),
            *with_memory("this project", OURS),
            *with_memory("compiled", bench_user_blocks.COMPILED),
        ],
        **of_cases(bench_user_blocks.make_cases("cuda", False)),
    ),
    Headline(
        key="batch_invariant",
        title="The cost of `jm.batch_invariant(True)`",
        source=SOURCE,
        published=(
            "ms, forward / forward + backward / backward; speed-up of the mode over the default."
        ),
        caveat=(
            "The first case of most tables, and a projection, which is torch's own matrix"
            " multiplication by default."
        ),
        op="batch_invariant",
        table="jagged self-attention",
        columns=[
            Column("default", ALL_PASSES.format("ms"), OURS),
            Column("batch_invariant", ALL_PASSES.format("ms"), INVARIANT),
            Column("speed-up", ALL_PASSES.format("speedup"), INVARIANT),
        ],
        rows=[
            Row("self-attention B128 N1024 H4 D64", "B128 N1024 H4 D64"),
            Row("target attention, history 512", "history 512", table="target attention"),
            Row("GDPA, q and kv full L=2048", "q and kv full L=2048", table="GDPA (gelu_tanh)"),
            Row("HSTU B128 N512 D64", "B128 N512 D64", table="HSTU (silu, causal, 20 targets)"),
            Row(
                "block attention, 704106 rows",
                "704106 rows",
                table="block attention, B=1152 H=4 D=128, blocks of 64",
            ),
            Row(
                "jagged_dense_bmm B1024 N≤100 D64 T64",
                "jagged_dense_bmm B1024 N≤100 D64 T64",
                table="operators",
            ),
            Row(
                "linear compression B=512, 70 candidates a user",
                "B=512",
                table="batch size, 70 candidates per user",
            ),
            Row(
                "projection of 65,536 rows, 256 to 768 columns",
                "L65536 D256 T768",
                table="projections",
            ),
        ],
    ),
]
