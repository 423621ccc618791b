"""The published figures, and the measured rows beside them: the tables of the record.

Sources: the PyTorch blog posts on In-Kernel Broadcast Optimization (IKBO) and Generalized
Dot-Product Attention (GDPA), the blog post on TLX Block Attention, and the paper on Jagged Feature
Interaction. "Earlier": figures of peers measured on an H200 in an earlier run than the record's.
"""

from headline import Column, Headline, Row, rows_of
from names import (
    DENSE,
    DENSE_FLASH,
    FA2_BLOCKS,
    INPUT_REPLICATED,
    OURS,
    PADDED,
    PORTABLE,
    PRECISE,
    UNFUSED,
)

BATCH_SIZES = "batch size, 70 candidates per user"
FORK = "needs a forked compiler"
JAGGED, NO_PEERS = "target attention, jagged histories, odd groups", ["", "", "", "", "–", "–"]
NO_FLOPS = [*[""] * 7, "–"]  # FLOPs are counted for GEMMs only
NO_CUDA = ["", "", "–"]  # of FBGEMM
FLOORS = "forward_floor_percent/backward_floor_percent"
MS, BOTH_MS = "forward_ms/forward_backward_ms", "forward_ms/backward_ms"
TFLOPS = "forward_tflops/backward_tflops"

HEADLINES = [
    Headline(
        key="lce_ladder",
        title="Linear compression: the ladder of four stages",
        source=(
            "In-Kernel Broadcast Optimization (PyTorch blog), sections 2.1 to 2.4, K = 1178 + 866,"
            " M = 433, N = 256, fp16, 1024 candidates, 70 a user"
        ),
        published=(
            "ms, forward. The figures of FBGEMM's Triton kernel and of Meta's TLX kernel on an H200"
            " are of another, earlier run."
        ),
        caveat=(
            "The baseline's input is already replicated. The published figures do not include the"
            " copies (0.7 ms on an H200); the row below it does. The fused published kernel rounds"
            " twice, its fourth stage needs a forked compiler, and neither has a backward."
        ),
        op="linear_compress",
        table=BATCH_SIZES,
        columns=[
            Column("published, H100"),
            Column("published speed-up"),
            Column("earlier, H200"),
            Column("here", "forward_ms"),
            Column("speed-up here", "forward_ms", over=INPUT_REPLICATED),
            Column("% of floor", "forward_floor_percent"),
            Column("forward + backward", "forward_backward_ms"),
        ],
        rows=[
            Row(
                "baseline: one GEMM, input already replicated",
                "B=1024",
                INPUT_REPLICATED,
                cells=["1.944", "1", "1.975"],
            ),
            Row("the same with the replication", "B=1024", "replicated", cells=["", "", "2.689"]),
            Row("1 decomposed", "B=1024", "decomposed", cells=["1.389", "1.40", "1.224"]),
            Row("2 padded to multiples of 8", "B=1024", "padded", cells=["0.798", "2.44", "0.568"]),
            Row(
                "3 sum fused into the candidates' GEMM: the published kernel",
                "B=1024",
                "FBGEMM ikbo (Triton)",
                cells=["0.580", "3.35", "0.567"],
            ),
            Row("3 the same: this project's portable kernel", "B=1024", PORTABLE),
            Row(
                "4 one persistent, warp-specialised launch: the published kernel",
                cells=["0.482", "4.03", "0.494"],
                instead=FORK,
            ),
            Row("4 the same: this project, by default", "B=1024", OURS),
        ],
    ),
    Headline(
        key="lce_sweep",
        title="Linear compression: batch sizes and candidates per user",
        source="the same, Fig. 9",
        published=(
            "About 4 times as fast as the baseline at every batch size and ratio; the figure has no"
            " numbers. ms, forward."
        ),
        caveat="FBGEMM's Triton and Meta's TLX kernel on an H200 are of another, earlier run.",
        op="linear_compress",
        table="candidates per user, B=1024",
        columns=[
            Column("FBGEMM / TLX, earlier"),
            Column("baseline", "forward_ms", INPUT_REPLICATED),
            Column("replicated", "forward_ms", "replicated"),
            Column("padded", "forward_ms", "padded"),
            Column("portable", "forward_ms", PORTABLE),
            Column("this project", "forward_ms", OURS),
            Column("over the baseline", "forward_ms", OURS, over=INPUT_REPLICATED),
            Column("over padded", "forward_ms", OURS, over="padded"),
            Column("forward + backward over padded", "forward_backward_ms", OURS, over="padded"),
        ],
        rows=[
            *(
                Row(f"B={n}, 70 a user", f"B={n}", table=BATCH_SIZES, cells=cells)
                for n, cells in {
                    512: (),
                    1024: [".567 / .494"],
                    2048: ["1.198 / 1.077"],
                    3072: ["1.822 / 1.880"],
                }.items()
            ),
            *(
                Row(f"B=1024, {n} a user", f"{n} per user", cells=cells)
                for n, cells in {
                    2: (),
                    5: (),
                    10: [".646 / .555"],
                    50: (),
                    100: (),
                    1000: [".570 / .498"],
                }.items()
            ),
        ],
    ),
    Headline(
        key="ikbo_table_2",
        title="Target attention with shared users: IKBO's Table 2",
        source=(
            "In-Kernel Broadcast Optimization (PyTorch blog), Table 2: 2048 candidates of 32 users,"
            " 64 query rows each, history 1024, H=2, D=128"
        ),
        published=(
            "Forward. 2.4 times the throughput of FA4 on replicated K and V, 6.4 times with the"
            " replication."
        ),
        caveat=(
            "The published kernels take histories of one length and 64 (or 32) query rows, and have"
            ' no backward; TLX needs a forked compiler. "Folded": a user\'s candidates are one'
            " query sequence, for cuDNN only if all users have as many."
        ),
        op="attention",
        table="target attention",
        columns=[
            Column("published TFLOP/s, H100"),
            Column("published ms"),
            Column("earlier TFLOP/s, H200"),
            Column("TFLOP/s here", "forward_tflops"),
            Column("ms here", "forward_ms"),
            Column("% of floor", "forward_floor_percent"),
            Column("forward + backward TFLOP/s", "forward_backward_tflops"),
        ],
        rows=[
            Row(
                "Triton, in-kernel broadcast (FBGEMM)",
                "history 1024",
                "FBGEMM ikbo (Triton)",
                cells=["425", "0.321", "415"],
            ),
            Row(
                "TLX FA3, K and V replicated",
                cells=["245", "0.561 + 0.912 to replicate"],
                instead=FORK,
            ),
            Row(
                "FA4 (CuTe DSL), K and V replicated",
                cells=["250", "0.550 + 0.912 to replicate", "197"],
            ),
            Row(
                "TLX FA3, persistent, in-kernel broadcast",
                cells=["594", "0.230", "558"],
                instead=FORK,
            ),
            Row("cuDNN, K and V already replicated", "history 1024", "SDPA cuDNN, replicated"),
            Row("replicate, then cuDNN", "history 1024", "replicate + SDPA cuDNN"),
            Row("FA2 (varlen_attn), folded", "history 1024", "varlen_attn (FA2), folded"),
            Row("FA3, folded", "history 1024", "FlashAttention-3, folded"),
            Row("FA4, folded", "history 1024", "FlashAttention-4, folded", cells=["", "", "542"]),
            Row("cuDNN, folded", "history 1024", "SDPA cuDNN, folded", cells=["", "", "574"]),
            Row("this project, portable", "history 1024", PORTABLE),
            Row("this project, by default", "history 1024", OURS),
        ],
    ),
    Headline(
        key="ikbo_fig_12",
        title="Target attention against the history's length: IKBO's Fig. 12",
        source="the same, Fig. 12 and section 3.3",
        published=(
            "TFLOP/s, forward. The figure names its largest value only, 621. The value at 1024 is"
            " from Table 2; those at 512 and 2048 are from section 3.3, for two kernels, self- and"
            " target attention."
        ),
        caveat=(
            "The published generalised kernel takes odd candidate counts, but histories of one"
            " length only. FBGEMM's and Meta's kernels on an H200 are of another, earlier run."
        ),
        op="attention",
        table="target attention",
        columns=[
            Column("published TLX, H100"),
            Column("FBGEMM / TLX, earlier, H200"),
            Column("FA2, folded", "forward_tflops", "varlen_attn (FA2), folded"),
            Column("FA4, folded", "forward_tflops", "FlashAttention-4, folded"),
            Column("cuDNN, folded", "forward_tflops", "SDPA cuDNN, folded"),
            Column("FBGEMM here", "forward_tflops", "FBGEMM ikbo (Triton)"),
            Column("portable", "forward_tflops", PORTABLE),
            Column("this project", "forward_tflops", OURS),
            Column("over portable", "forward_ms", OURS, over=PORTABLE),
        ],
        rows=[
            *rows_of(
                {
                    "history 512": ["482 with self-attention", "391 / 536"],
                    "history 1024": ["594", "415 / 558"],
                    "history 2048": ["610 with self-attention", "426 / 580"],
                    "history 4096": ["", "439 / 590"],
                    "history 8192": (),
                    "history 16384": (),
                }
            ),
            *(
                Row(
                    f"histories of mean 0.7 · {n}, odd counts",
                    f"history {n * 2 // 5}..{n}",
                    table=JAGGED,
                    cells=NO_PEERS,
                )
                for n in (512, 1024, 2048, 4096)
            ),
        ],
    ),
    Headline(
        key="self_attention",
        title="Jagged self-attention against torch and other peers",
        source=(
            "no published table; peers that were measured earlier on an H200 have their own columns"
        ),
        published="ms, forward / forward + backward, lengths uniform to N, bf16.",
        caveat=(
            "Padded flash and cuDNN get padded inputs and no mask: right for full segments only."
        ),
        op="attention",
        table="jagged self-attention",
        columns=[
            Column("FA4, earlier"),
            Column("FBGEMM sll, earlier"),
            Column("padded plain", MS, DENSE),
            Column("padded flash", MS, DENSE_FLASH),
            Column("padded cuDNN", MS, "SDPA cuDNN, padded"),
            Column("FA2 varlen", MS, "varlen_attn (FA2)"),
            Column("FA4 here", MS, "FlashAttention-4"),
            Column("FBGEMM sll here", MS, "FBGEMM sll"),
            Column("portable", MS, PORTABLE),
            Column("this project", MS, OURS),
        ],
        rows=rows_of(
            {
                "B128 N1024 H4 D64": [".160 / .496", ".644 / 2.59"],
                "B64 N2048 H4 D64": [".230 / .791", "1.051 / 4.25"],
                "B64 N2048 H4 D128": [".332 / 1.318", "1.758 / 8.33"],
                "B1024 N256 H4 D128": [".461 / 1.406", ".586 / 2.81"],
            }
        ),
    ),
    Headline(
        key="gdpa",
        title="GDPA: Figs. 8 to 10",
        source=(
            "Generalized Dot-Product Attention (PyTorch blog), Figs. 8 (self-attention forward), 9"
            " (its backward), 10 (cross-attention, 256 keys); B=1152, H=4, D=128, bf16, lengths"
            " full or uniform to L (sparsity 0.5)"
        ),
        published=(
            "TFLOP/s, forward / backward. On a B200, over Meta's Triton kernel: jagged 1.7 times"
            " forward and 1.3 times backward on average; dense backward up to 1.6 times, 702"
            " TFLOP/s; cross-attention nearly 2 times and up to 1.6 times, and 3.5 and 1.6 times"
            " FA4. The figures have no numbers."
        ),
        caveat=(
            "The published kernel needs a B200. Its fast GELU is a Taylor polynomial without a"
            " guard, 2.5e-2 off at 1.5 and 4.0 at 3, and usable only behind QK-norm; here it is"
            " tanh-GELU. Meta's Triton kernel on an H200 is of another, earlier run. FA2 computes"
            " softmax, another function."
        ),
        op="gdpa",
        table="GDPA (gelu_tanh)",
        columns=[
            Column("Meta's Triton, earlier, H200"),
            Column("Meta's Triton here", TFLOPS, "Meta gdpa (Triton)"),
            Column("FA2, softmax", TFLOPS, "varlen_attn (FA2), softmax"),
            Column("portable", TFLOPS, PORTABLE),
            Column("this project", TFLOPS, OURS),
            Column("over portable", BOTH_MS, OURS, over=PORTABLE),
            Column("% of floor", FLOORS, OURS),
        ],
        rows=rows_of(
            {
                "q and kv full L=2048": ["453 / 345"],
                "q and kv full L=1024": ["407 / 328"],
                "q and kv full L=512": ["345 / 279"],
                "q and kv full L=256": ["242 / 243"],
                "q and kv jagged L=2048": (),
                "q and kv jagged L=1024": ["339 / 283"],
                "q and kv jagged L=512": ["203 / 218"],
                "q and kv jagged L=256": (),
                "q jagged, kv full L=1024": ["360 / 286"],
                "q jagged, kv full L=512": ["265 / 240"],
                "cross, q=512 kv=256 full": ["241 / 268"],
                "cross, q=1024 kv=256 full": (),
                "cross, q=2048 kv=256 full": ["267 / 280"],
            }
        ),
    ),
    Headline(
        key="block_table_5",
        title="Block attention: Table 5",
        source=(
            "TLX Block Attention (blog), Table 5: B=1152, H=4, D=128, lengths to 2000 at sparsity"
            " 0.7, blocks of 64, bf16"
        ),
        published="ms, forward / backward, on a B200.",
        caveat=(
            "The published kernel needs a B200 and a forked compiler, and its scheduler miscounts"
            " empty sequences and leaves output rows unwritten. A B200 has 1.7 times an H200's"
            " bandwidth, which bounds both."
        ),
        op="block_attention",
        table="block attention, B=1152 H=4 D=128, blocks of 64",
        columns=[
            Column("published, B200"),
            Column("published speed-up"),
            Column("here", BOTH_MS),
            Column("speed-up here", "forward_speedup/backward_speedup"),
            Column("% of floor", FLOORS),
        ],
        rows=[
            Row(
                "FA2, a segment per block",
                "1609731 rows",
                FA2_BLOCKS,
                cells=["1.81 / 5.89", "1 / 1"],
            ),
            Row("TLX block attention", cells=["0.98 / 2.36", "1.85 / 2.50"], instead=FORK),
            Row("flex_attention, compiled", "1609731 rows", "flex_attention"),
            Row("this project, portable", "1609731 rows", PORTABLE),
            Row("this project, by default", "1609731 rows", OURS),
        ],
    ),
    Headline(
        key="block_table_6",
        title="Block attention: Table 6",
        source="the same, Table 6: lengths and sparsities",
        published=(
            'The source has a picture without numbers: "speedups are consistent regardless of'
            ' distribution shape". ms, forward / backward.'
        ),
        caveat="About 400,000 rows in every case here; published B=1152, and 768 above 7000.",
        op="block_attention",
        table="lengths, about 400000 rows, blocks of 64",
        columns=[
            Column("FA2", BOTH_MS, FA2_BLOCKS),
            Column("portable", BOTH_MS, PORTABLE),
            Column("this project", BOTH_MS, OURS),
            Column("over FA2", BOTH_MS, OURS, over=FA2_BLOCKS),
            Column("% of floor", FLOORS, OURS),
        ],
        rows=rows_of(
            {
                "D=128, N=2048, mean 0.3 N, B=651": (),
                "D=128, N=2048, mean 0.5 N, B=391": (),
                "D=128, N=2048, mean 0.7 N, B=279": (),
                "D=128, N=2048, mean 1.0 N, B=195": (),
                "D=128, N=512, mean 0.5 N, B=1562": (),
                "D=128, N=1024, mean 0.5 N, B=781": (),
                "D=128, N=4096, mean 0.5 N, B=195": (),
                "D=128, N=7168, mean 0.5 N, B=112": (),
                "D=64, N=512, mean 0.5 N, B=1562": (),
                "D=64, N=2048, mean 0.5 N, B=391": (),
                "D=64, N=7168, mean 0.5 N, B=112": (),
            }
        ),
    ),
    Headline(
        key="block_table_7",
        title="Block attention: Table 7, fused rotary's backward",
        source="the same, Table 7: 1,735,537 rows, H=3, D=128, B=1152; q, k and v rotated",
        published="ms, backward, on a B200.",
        caveat=(
            "The published work fuses rotary's backward only, here the forward too. Its separate"
            " rotary takes three times its attention; here the separate one is compiled by torch,"
            " and cos and sin of each row are gathered beforehand."
        ),
        op="block_attention",
        table="backward of rotary, B=1152 H=3 D=128, blocks of 64",
        columns=[
            Column("published, B200"),
            Column("here", "backward_ms"),
            Column("forward here", "forward_ms"),
            Column("% of floor", "backward_floor_percent"),
        ],
        rows=[
            Row("attention's backward alone", "1735537 rows, no rotary", OURS, cells=["1.556"]),
            Row("separate rotary's backward", cells=["4.880"]),
            Row(
                "separate: both",
                "1735537 rows, qkv",
                "separate rotary + jagged_modules",
                cells=["6.436"],
            ),
            Row(
                "separate rotary, FA2",
                "1735537 rows, qkv",
                "separate rotary + varlen_attn (FA2), a segment per block",
            ),
            Row("fused", "1735537 rows, qkv", OURS, cells=["1.819"]),
            Row("fused, portable", "1735537 rows, qkv", PORTABLE),
            Row("fused, `Rotary.precise`", "1735537 rows, qkv", PRECISE),
        ],
    ),
    Headline(
        key="block_table_8",
        title="Block attention: Table 8, accuracy of the gradients",
        source="the same, Table 8",
        published="Absolute errors; q, k and v rotated.",
        caveat=(
            "The published inputs are not stated: compare the ratio (0.47 of the separate one's"
            " largest error of dq), not the errors. Here all rows of 64 segments up to 512 rows,"
            " standard normal, against float64."
        ),
        op="block_attention",
        table="absolute errors in bf16",
        columns=[
            Column("published max dq"),
            Column("published max dk"),
            Column("published max dv"),
            Column("published mean dq"),
            Column("max dq here", "max dq"),
            Column("max dk here", "max dk"),
            Column("max dv here", "max dv"),
            Column("mean dq here", "mean dq"),
            Column(
                "separate one's dq over it",
                "max dq",
                over="separate rotary in bf16 + varlen_attn (FA2), a segment per block",
            ),
        ],
        rows=[
            Row(
                "separate rotary in bf16, FA2",
                "qkv",
                "separate rotary in bf16 + varlen_attn (FA2), a segment per block",
                cells=["0.2559", "0.1689", "0.0112", "0.000309"],
            ),
            Row(
                "separate rotary in fp32 arithmetic, FA2",
                "qkv",
                "separate rotary + varlen_attn (FA2), a segment per block",
            ),
            Row(
                "TLX block attention",
                cells=["0.1201", "0.1689", "0.0112", "0.000220"],
                instead=FORK,
            ),
            Row("this project", "qkv", OURS),
            Row("this project, `Rotary.precise`", "qkv", PRECISE),
        ],
    ),
    Headline(
        key="jagged_table_1",
        title="Jagged operators: Table 1",
        source="Jagged Feature Interaction (paper), Table 1: B=1024, N≤200, D=256, T=8, fp32",
        published=(
            "Padded torch to Triton: latency in µs, and how many times less time, memory and FLOPs."
        ),
        caveat=(
            "The paper states neither the GPU nor what its memory counts; here memory is what a"
            " forward call allocates, inputs not counted. Its FLOPs of jagged_softmax are those of"
            " 8 columns. The published operators leave rows past the maximum length uninitialised"
            " (jagged_softmax), give wrong gradients for longer segments (array_jagged_bmm) and, in"
            " one variant, divide a softmax by the maximum length."
        ),
        op="jagged_ops",
        table="Table 1 of the paper: B=1024, N≤200, D=256, T=8",
        columns=[
            Column("published µs"),
            Column("published: time"),
            Column("memory"),
            Column("FLOPs"),
            Column("padded, µs here", "forward_us", PADDED),
            Column("FBGEMM, Triton, µs", "forward_us", "FBGEMM sll"),
            Column("CUDA, µs", "forward_us", "FBGEMM sll, CUDA"),
            Column("this project, µs", "forward_us", OURS),
            Column("here: time", "forward_ms", OURS, over=PADDED),
            Column("forward + backward", "forward_backward_ms", OURS, over=PADDED),
            Column("memory here", "forward_peak_bytes", OURS, over=PADDED),
            Column("FLOPs here", "mflop", OURS, over=PADDED),
            Column("% of floor", "forward_floor_percent", OURS),
        ],
        rows=[
            Row(
                "jagged_dense_bmm",
                "jagged_dense_bmm B1024 N≤200 D256 T8",
                cells=["166.6 / 99.3", "1.67", "2.83", "1.98"],
            ),
            Row(
                "jagged_jagged_bmm",
                "jagged_jagged_bmm B1024 N≤200 D256 T8",
                cells=["199.4 / 79.1", "2.52", "1.98", "1.98"],
            ),
            Row(
                "jagged_softmax",
                "jagged_softmax B1024 N≤200 H8",
                cells=["24.9 / 18", "1.38", "1.98", "1.98", *NO_FLOPS],
            ),
            Row(
                "the same, 256 columns",
                "jagged_softmax B1024 N≤200 H256",
                cells=[*[""] * 4, *NO_FLOPS],
            ),
            Row(
                "jagged_jagged_bmm_jagged_out",
                "jagged_jagged_bmm_jagged_out, x with another B1024 N≤200 D256",
                cells=["671 / 293", "2.29", "3.11", "2.91", *NO_CUDA],
            ),
            Row(
                "array_jagged_bmm_jagged_out",
                "array_jagged_bmm_jagged_out B1024 N≤200 D256",
                cells=["755 / 585", "1.29", "2.18", "2.91", *NO_CUDA],
            ),
            Row(
                "jagged2_softmax",
                "jagged2_softmax B1024 N≤200",
                cells=["2162 / 707", "3.06", "2.94", "2.91", *NO_CUDA, *NO_FLOPS[3:]],
            ),
        ],
    ),
    Headline(
        key="jagged_operators",
        title="Jagged operators in other shapes",
        source="no published table; FBGEMM's Triton operators measured earlier on an H200",
        published="µs, forward, fp32 with tf32 GEMMs.",
        caveat="FBGEMM has three of these in CUDA too, and takes those by default.",
        op="jagged_ops",
        table="operators",
        columns=[
            Column("FBGEMM, Triton, earlier"),
            Column("FBGEMM, Triton, here", "forward_us", "FBGEMM sll"),
            Column("CUDA, here", "forward_us", "FBGEMM sll, CUDA"),
            Column("padded", "forward_us", PADDED),
            Column("this project", "forward_us", OURS),
            Column("forward + backward", "forward_backward_us", OURS),
            Column("% of floor", "forward_floor_percent", OURS),
        ],
        rows=rows_of(
            {
                "jagged_dense_bmm B1024 N≤100 D64 T64": ["36.1"],
                "jagged_dense_bmm B1024 N≤200 D128 T128": ["195.8"],
                "jagged_jagged_bmm B1024 N≤100 D64 T64": ["22.6"],
                "jagged_jagged_bmm B1024 N≤200 D128 T128": ["201.5"],
                "jagged_jagged_bmm_jagged_out, x with itself B1024 N≤100 D1024": ["137.3", "", "–"],
                "array_jagged_bmm_jagged_out B1024 N≤100 D1024": ["289.8", "", "–"],
                "jagged_softmax B1024 N≤100 H64": ["78.0"],
                "jagged2_softmax B1024 N≤100": ["72.9", "", "–"],
            }
        ),
    ),
    Headline(
        key="jagged_fig_2",
        title="Jagged flash attention: Fig. 2",
        source="Jagged Feature Interaction (paper), Fig. 2, bf16",
        published="Forward: speed-up, and how many times less memory.",
        caveat=(
            "The paper states the largest ratios only, not its shapes or GPU. Here: one head,"
            " B=256, D=128, lengths uniform to N."
        ),
        op="attention",
        table="ladder: dense, jagged, each unfused and fused",
        columns=[
            Column("jagged: faster than dense", "forward_ms", UNFUSED, over=DENSE),
            Column("jagged flash: faster than dense", "forward_ms", OURS, over=DENSE),
            Column("than dense flash", "forward_ms", OURS, over=DENSE_FLASH),
            Column("jagged: less memory than dense", "forward_peak_bytes", UNFUSED, over=DENSE),
            Column("jagged flash: less than dense", "forward_peak_bytes", OURS, over=DENSE),
            Column("than dense flash, memory", "forward_peak_bytes", OURS, over=DENSE_FLASH),
            Column("dense, ms", "forward_ms", DENSE),
            Column("this project, ms", "forward_ms", OURS),
        ],
        rows=[
            Row("published, up to", cells=["2", "9", "3", "3.5", "22", "2.1 (53 % less)"]),
            Row("N=128", "B256 N128 H1 D128"),
            Row("N=256", "B256 N256 H1 D128"),
            Row("N=512", "B256 N512 H1 D128"),
            Row("N=1024", "B256 N1024 H1 D128"),
        ],
    ),
]
