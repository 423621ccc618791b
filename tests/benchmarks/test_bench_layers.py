"""The benchmark of layers: each is computed as a user would write it, and HSTU as Meta's layer, for
which a package with the layer's definition stands in."""

import importlib
import re
import sys
import textwrap

import bench_layers
import pytest
import runner
import stu
import torch

CASES = bench_layers.make_cases("cpu", True) + bench_layers.make_cases("cpu", True, widths=True)
PROTOCOL = runner.Protocol("cpu", rounds=0)
OPERATOR = "generative_recommenders/ops/triton/triton_hstu_preprocess_and_attention.py"
ATTENTION = "generative_recommenders/ops/triton/triton_hstu_attention.py"
PACKAGE = {
    "generative_recommenders/common.py": """
        import enum

        HammerKernel = enum.Enum("HammerKernel", ["TRITON", "PYTORCH"])
        static = []

        def set_static_max_seq_lens(lengths):
            static[:] = lengths
    """,
    OPERATOR: "_should_enable_tma = lambda: True",
    ATTENTION: """
        from types import SimpleNamespace

        LEGAL = dict(BLOCK_M=32, BLOCK_N=128, SEQUENCE_PARALLEL=True, UNROLL=4)
        configs = [
            SimpleNamespace(num_warps=8, num_stages=2, kwargs=LEGAL | dict(SEQUENCE_PARALLEL=x))
            for x in (True, False)
        ]
        _hstu_attn_bwd = SimpleNamespace(configs=configs)
    """,
    "generative_recommenders/modules/stu.py": """
        import dataclasses
        import torch
        from torch.nn import Module, Parameter, functional as F
        from generative_recommenders import common
        from generative_recommenders.ops.triton import triton_hstu_preprocess_and_attention as op

        @dataclasses.dataclass
        class STULayerConfig:
            embedding_dim: int
            num_heads: int
            hidden_dim: int
            attention_dim: int
            output_dropout_ratio: float
            target_aware: bool
            recompute_normed_x: bool
            recompute_uvqk: bool
            recompute_y: bool

        class STULayer(Module):
            factor = 1

            def __init__(self, config):
                super().__init__()
                self.config, width = config, config.num_heads * config.hidden_dim
                qk = config.num_heads * config.attention_dim
                sizes = dict(
                    _uvqk_weight=(config.embedding_dim, 2 * width + 2 * qk),
                    _uvqk_beta=(2 * width + 2 * qk,),
                    _input_norm_weight=(config.embedding_dim,),
                    _input_norm_bias=(config.embedding_dim,),
                    _output_norm_weight=(width,),
                    _output_norm_bias=(width,),
                    _output_weight=(3 * width, config.embedding_dim),
                )
                for name, size in sizes.items():
                    self.register_parameter(name, Parameter(torch.empty(size)))

            def set_hammer_kernel(self, kernel):
                self.kernel = kernel

            def forward(self, x, x_lengths, x_offsets, max_seq_len, num_targets):
                assert not op._should_enable_tma() and not self.training
                assert self.kernel is common.HammerKernel.TRITON and common.static == [max_seq_len]
                assert x.dtype == torch.bfloat16 and num_targets is None
                config, p = self.config, {k: v.to(x.dtype) for k, v in self.named_parameters()}
                normed = F.layer_norm(
                    x, x.shape[1:], p["_input_norm_weight"], p["_input_norm_bias"], 1e-6
                )
                uvqk = torch.addmm(p["_uvqk_beta"], normed, p["_uvqk_weight"])
                u, v, q, k = uvqk.unflatten(1, (4, config.num_heads, -1)).unbind(1)
                outs = []
                for q, k, v in zip(*(y.split(x_lengths.tolist()) for y in (q, k, v))):
                    scores = torch.einsum("qhd,khd->hqk", q, k) * config.attention_dim**-0.5
                    weights = (F.silu(scores) / max_seq_len).tril()
                    outs.append(torch.einsum("hqk,khd->qhd", weights, v))
                a, u = torch.cat(outs).flatten(1).float(), F.silu(u.flatten(1)).float()
                y = self.factor * u * F.layer_norm(
                    a, a.shape[1:], self._output_norm_weight, self._output_norm_bias, 1e-6
                )
                return torch.addmm(x, torch.cat([u, a, y], 1).to(x.dtype), p["_output_weight"])
    """,
}


def statuses(case: runner.Case, pattern: str) -> dict[str, str]:
    rows = runner.run_case(case, PROTOCOL, re.compile(pattern))
    return {row["implementation"]: row["status"] for row in rows}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.table}: {case.name}")
def test_a_users_layer(case, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    names = [bench_layers.MODULES, bench_layers.OURS, bench_layers.COMPILED]
    if not case.name.startswith(("JaggedSelfTargetAttention", "LinearCompressEmbedding")):
        names.append(bench_layers.USER)
    if case.name.startswith("JaggedEncoderLayer"):
        names += [bench_layers.PADDED, bench_layers.NESTED]
    pattern = "|".join(f"^{re.escape(name)}$" for name in [*names, bench_layers.FLOOR])
    assert statuses(case, pattern) == dict.fromkeys([*names, bench_layers.FLOOR], "ok")


def test_blocks_are_segments_of_their_own():
    layer = bench_layers.jm.BlockDiagonalSelfAttention(32, 2, 16, None)
    blocks = bench_layers.UserBlockAttention(layer).blocks(torch.tensor([20, 0, 16, 35]))
    assert blocks.tolist() == [0, 16, 20, 36, 52, 68, 71]


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "generative_recommenders"]:
        del sys.modules[name]


def test_metas_layer(package):
    case = CASES[0]
    assert statuses(case, re.escape(stu.STU)) == dict.fromkeys(stu.RECOMPUTES, "ok")
    attention = importlib.import_module("generative_recommenders.ops.triton.triton_hstu_attention")
    assert [config.kwargs for config in attention._hstu_attn_bwd.configs] == [attention.LEGAL]
    module = importlib.import_module("generative_recommenders.modules.stu")
    module.STULayer.factor = 1.1
    (status, _) = statuses(case, re.escape(stu.STU)).values()
    assert status.startswith("wrong: forward: out/all has relative error")
    assert status.endswith(f"bound {stu.BOUND:.2e}")


def test_metas_layer_is_unavailable():
    (status, _) = statuses(CASES[0], re.escape(stu.STU)).values()
    assert status == "unavailable: ModuleNotFoundError: No module named 'generative_recommenders'"
