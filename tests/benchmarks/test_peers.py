"""Peers: FBGEMM's own operators on the CPU. Packages that compute the definition stand in for peers
that need a GPU."""

import importlib
import re
import sys
import textwrap

import bench_attention
import bench_gdpa
import bench_jagged_ops
import bench_linear_compress
import peers
import pytest
import runner
import torch

from jagged_modules import functional as F

PROTOCOL = runner.Protocol("cpu", rounds=0)
FLASH = """
    from jagged_modules import functional as F

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None):
        out = F.jagged_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k)
        return out, None
"""  # noqa: E501
PACKAGES = {
    "flash_attn_interface.py": FLASH,
    "flash_attn/cute.py": FLASH,
    "ikbo/ops/triton_ikbo_fa.py": (
        """
        import torch

        class Config:
            def __init__(self, rows, warps):
                self.kwargs, self.num_warps, self.num_stages = {"BLOCK_M": rows, "BLOCK_N": 64}, warps, 2

        class _attn_fwd_tma:
            configs = [Config(rows, warps) for rows in (16, 64) for warps in (4, 16)]

        def triton_flash_attn_ikbo_tma(query, key, value, cand_to_user_mapping, q_seq_len, max_seq_len, scale=None):
            assert cand_to_user_mapping.dtype == torch.int32
            q = query.unflatten(0, (-1, q_seq_len)).transpose(1, 2)
            k, v = (x.unflatten(0, (-1, max_seq_len))[cand_to_user_mapping].transpose(1, 2) for x in (key, value))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    """  # noqa: E501
    ),
    "ikbo/ops/triton_ikbo_lce.py": (
        """
        class Config:
            def __init__(self, rows, stages):
                self.kwargs, self.num_warps, self.num_stages = {"BM": rows, "BN": 128, "BK": 64}, 4, stages

        class triton_ikbo_lce_kernel:
            configs = [Config(rows, stages) for rows in (64, 128) for stages in (3, 4, 5, 6)]

        def triton_ikbo_lce(compression_w_cand, compression_w_user, embeddings_cand, embeddings_user, cand_to_user_index):
            return compression_w_cand @ embeddings_cand + (compression_w_user @ embeddings_user)[cand_to_user_index]
    """  # noqa: E501
    ),
    "ads_mkl/ops/oss/gdpa/triton/triton_generalized_dot_product_attention.py": (
        """
        import os

        from jagged_modules import functional as F

        AUTOTUNE_CONFIG_SET = os.environ["GDPA_AUTOTUNE_CONFIG_SET"]

        def generalized_dot_product_attention(
            query, key, value, query_offset, key_offset, max_seq_len_q, max_seq_len_kv, qk_scale=None, output_offset=None, activation="raw"
        ):
            assert activation == "fast_gelu" and qk_scale == 1 and output_offset is query_offset
            return F.jagged_attention(query, key, value, query_offset, key_offset, activation="gelu_tanh", scale=1.0)
    """  # noqa: E501
    ),
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    for name, text in PACKAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] in {path.split("/")[0].removesuffix(".py") for path in PACKAGES}
    ]:
        del sys.modules[name]


def statuses(setup: runner.Setup, pattern: str) -> dict[str, str]:
    rows = runner.run_case(runner.Case("", "", lambda: setup), PROTOCOL, re.compile(pattern))
    return {row["implementation"]: row["status"] for row in rows}


def self_attention() -> runner.Setup:
    return bench_attention.self_attention(
        "cpu", torch.float32, torch.tensor([4, 9, 3]), num_heads=2, head_dim=8
    )


def target_attention() -> runner.Setup:
    counts, histories = torch.tensor([3, 3]), torch.tensor([6, 6])
    return bench_attention.target_attention(
        "cpu", torch.float32, counts, histories, num_queries=5, num_heads=2, head_dim=8
    )


def test_flash_attention_and_ikbo(packages):
    names = set(peers.FLASH_ATTENTION)
    assert statuses(self_attention(), "^Flash") == dict.fromkeys(names, "ok")
    folded = {f"{name}, folded" for name in names}
    assert statuses(target_attention(), "^Flash|ikbo") == dict.fromkeys(folded | {peers.IKBO}, "ok")
    tried = importlib.import_module("ikbo.ops.triton_ikbo_fa")._attn_fwd_tma.configs
    assert [(x.kwargs["BLOCK_M"], x.num_warps) for x in tried] == [(64, 4)]


def test_ikbo_linear_compression(packages):
    problem = bench_linear_compress.Problem("cpu", torch.float32, bench_linear_compress.TINY, 20, 7)
    work = problem.setup("")
    work.implementations[peers.IKBO] = problem.ikbo
    assert statuses(work, "ikbo") == {peers.IKBO: "ok"}
    tried = importlib.import_module("ikbo.ops.triton_ikbo_lce").triton_ikbo_lce_kernel.configs
    assert [(x.kwargs["BM"], x.num_stages) for x in tried] == [(128, 3), (128, 4)]


@pytest.mark.parametrize("configurations", [None, "default"])
def test_meta_gdpa(packages, monkeypatch, configurations):
    monkeypatch.setenv("GDPA_AUTOTUNE_CONFIG_SET", configurations or "")
    if configurations is None:
        monkeypatch.delenv("GDPA_AUTOTUNE_CONFIG_SET")
    lengths = torch.tensor([4, 9, 1])
    problem = bench_gdpa.Problem("cpu", torch.float32, lengths, lengths, num_heads=2, head_dim=8)
    setup = problem.setup(
        (bench_gdpa.GELU,),
        {peers.META_GDPA: lambda: problem.by_offsets(bench_gdpa.GELU, peers.meta_gdpa())},
    )
    assert statuses(setup, "") == {peers.META_GDPA: "ok"}
    module = importlib.import_module(
        "ads_mkl.ops.oss.gdpa.triton.triton_generalized_dot_product_attention"
    )
    assert module.AUTOTUNE_CONFIG_SET == (configurations or "omnifm_v2")


def test_fbgemm_sll_attention_gets_heads_first_and_scaled(monkeypatch):
    """Its function, softmax(q kᵀ) v / max_seqlen, is what its kernels give in Triton's
    interpreter."""

    def attention(q, k, v, offsets, max_seqlen):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return (
            F.jagged_attention(q, k, v, offsets, max_seqlen_q=max_seqlen, scale=1.0).transpose(0, 1)
            / max_seqlen
        )

    monkeypatch.setattr(peers, "sll", {"multi_head_jagged_flash_attention": attention}.__getitem__)
    assert statuses(self_attention(), peers.SLL) == {peers.SLL: "ok"}


@pytest.mark.parametrize("operator", bench_jagged_ops.OPERATORS)
def test_fbgemm_sll_itself(operator):
    pytest.importorskip("fbgemm_gpu.sll")
    problem = bench_jagged_ops.Problem("cpu", torch.tensor([2, 7, 1, 4]), operator, 8, 16)
    work = problem.setup()
    work.implementations.update(problem.sll())
    in_cuda_too = operator in ("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax")
    assert statuses(work, peers.SLL) == dict.fromkeys(
        [peers.SLL, peers.SLL_CUDA] if in_cuda_too else [peers.SLL], "ok"
    )


def test_what_is_not_installed_is_reported(monkeypatch):
    for name in ("ikbo", "flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    found = statuses(target_attention(), "^Flash|ikbo")
    assert len(found) == 3 and all(
        re.match("unavailable: (ImportError|ModuleNotFoundError)", status)
        for status in found.values()
    )
