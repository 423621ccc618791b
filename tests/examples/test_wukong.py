import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wukong
from generated_log import generate_log
from ranking_data import RankingDataset, add_popularity, make_chunks, split_by_time

from jagged_modules import CandidateIndex

from ..marks import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dataset():
    log = generate_log(num_users=20, num_items=60, num_clusters=4, mean_length=30, seed=0)
    train = split_by_time(log) == 0
    return RankingDataset(
        add_popularity(log, train), make_chunks(log, train, chunk_size=4, max_history=12)
    )


@pytest.mark.slow
def test_runs_as_a_program_from_anywhere_and_learns(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [
        sys.executable,
        str(ROOT / "examples" / "wukong.py"),
        "--device",
        "cpu",
        "--users",
        "200",
        "--batch-size",
        "16",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(loss) for loss in re.findall(r"^epoch \d+  loss (\S+)$", done.stdout, re.MULTILINE)
    ]
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0]
    model, baseline = (
        float(auc) for auc in re.findall(r"^held-out AUC (\S+) ", done.stdout, re.MULTILINE)
    )
    assert model > 0.65 > baseline > 0.5
    assert list(tmp_path.iterdir()) == []


def test_every_parameter_learns_and_rows_do_not_mix(dataset):
    torch.manual_seed(0)
    model = wukong.Wukong(dataset).eval()
    batch = dataset[list(range(len(dataset)))]
    logits = model(batch)
    assert logits.shape == batch.labels.shape
    logits.square().sum().backward()
    assert [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ] == []
    alone = torch.cat([model(dataset[[index]]) for index in range(len(dataset))])
    torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-5)


def test_the_first_layer_does_not_replicate_users(tensor_sizes):
    users, candidates, size, width = 3, 400, 500, 8
    layer = wukong.WukongLayer(16, width, num_candidate_embeddings=2, num_user_embeddings=size)
    inputs = (
        torch.randn(candidates, 2, width, requires_grad=True),
        torch.randn(users, size, width, requires_grad=True),
    )
    with tensor_sizes() as sizes:
        layer(
            *inputs, CandidateIndex.from_counts(torch.tensor([100, 0, 300]))
        ).square().sum().backward()
    assert max(sizes.made) < candidates * size * width / 10
    assert all(x.grad.any() for x in inputs)


def test_a_later_layer_is_the_formula():
    layer, x = wukong.WukongLayer(16, 8), torch.randn(5, 16, 8)
    (w_compress,), (y_transposed,) = layer.compress.weights, layer.project.weights
    interacted = layer.mlp(x @ x.mT @ y_transposed.T)
    torch.testing.assert_close(
        layer(x), layer.norm(torch.cat([interacted, w_compress @ x], dim=1) + x)
    )


@pytest.mark.parametrize(("arguments", "message"), [
    (["--users", "0"], "--users must be at least 1, not 0"),
    (["--batch-size", "-2"], "--batch-size must be at least 1, not -2"),
    (["--device", "tpu"], "wukong: device must be auto, cpu, .*not 'tpu'"),
])  # fmt: skip
def test_bad_options_end_with_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        wukong.main(arguments)
    assert re.search(message, f"{stopped.value} {capsys.readouterr().err}")
