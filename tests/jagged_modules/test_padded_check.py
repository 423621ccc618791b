"""What explains a difference between a padded model and its jagged form."""

import pytest
import torch
from torch import nn

import jagged_modules as jm
from jagged_modules import functional as F

LENGTHS, WIDTH = torch.tensor([3, 1, 5]), 16
X = torch.randn(3, 6, WIDTH, dtype=torch.float64)


def encoder(norm_first=False):
    model = nn.TransformerEncoderLayer(
        WIDTH, 2, 32, batch_first=True, norm_first=norm_first, dtype=torch.float64
    ).eval()
    return model, jm.JaggedEncoderLayer.from_torch(model)


@pytest.mark.parametrize("side", ["right", "left"])
def test_equal_models(side):
    model, layer = encoder()
    found = jm.compare_padded(
        lambda x, real: model(x, src_key_padding_mask=~real), layer, X, LENGTHS, side
    )
    assert found.error < 1e-12 * found.size and found.reasons() == []
    assert str(found).startswith("largest difference") and "\n" not in str(found)


def mean(x, real):
    return (x * real[..., None]).sum(1) / x.shape[1]


def last(x, real):
    return x[:, -1]


def with_positions(x, real):
    return x + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]


def numbered(rows):
    starts = rows.offsets[:-1].repeat_interleave(rows.offsets.diff())
    return rows.with_values(rows.values + (torch.arange(rows.num_rows) - starts)[:, None])


@pytest.mark.parametrize(
    "padded, jagged, side, reasons",
    [
        (lambda x, real: x.sum(1), lambda x: F.jagged_sum(x.values, x.offsets), "right", ["reads"]),
        (mean, lambda x: F.jagged_mean(x.values, x.offsets), "right", ["number of padded rows"]),
        (last, lambda x: F.jagged_last(x.values, x.offsets)[0], "right", ["reads", "side"]),
        (with_positions, numbered, "left", ["number of padded rows", "side"]),
    ],
    ids=["sum", "mean", "last", "positions"],
)
def test_each_reason(padded, jagged, side, reasons):
    lengths = LENGTHS
    found = jm.compare_padded(padded, jagged, X, lengths, side)
    assert len(found.reasons()) == len(reasons), str(found)
    for reason, expected in zip(found.reasons(), reasons):
        assert expected in reason and reason in str(found)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_missing_mask_explains_the_error(norm_first):
    """A norm that comes first hides rows of equal numbers."""
    model, layer = encoder(norm_first)
    found = jm.compare_padded(lambda x, real: model(x), layer, X, LENGTHS)
    assert found.error > 1e-3 * found.size and "reads" in found.reasons()[0]


def test_padded_rows_that_see_no_key():
    """Behind the first layer their NaN reaches real rows, as 0 · NaN."""
    model = nn.TransformerEncoder(encoder()[0], 2, enable_nested_tensor=False).eval()
    layers = jm.JaggedEncoder.from_torch(model, jm.AttentionMask(causal=True))

    def padded(x, real, itself):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        hidden = (later | ~real[:, None]) & ~(itself & torch.eye(x.shape[1], dtype=torch.bool))
        return model(x, mask=hidden.repeat_interleave(2, 0))

    found = jm.compare_padded(lambda x, real: padded(x, real, False), layers, X, LENGTHS, "left")
    assert "let each row see itself" in str(found) and len(found.reasons()) == 1
    found = jm.compare_padded(lambda x, real: padded(x, real, True), layers, X, LENGTHS, "left")
    assert found.error < 1e-12 * found.size and found.reasons() == []


def test_a_mask_that_one_model_alone_has():
    model, _ = encoder()
    layer = jm.JaggedEncoderLayer.from_torch(model, jm.AttentionMask(causal=True))
    found = jm.compare_padded(
        lambda x, real: model(x, src_key_padding_mask=~real), layer, X, LENGTHS
    )
    assert found.reasons() == [] and "compare masks" in str(found)


@pytest.mark.parametrize("name", ["padded", "jagged"])
def test_dropout_is_no_reason(name):
    model, layer = encoder()
    {"padded": model, "jagged": layer}[name].train()
    with pytest.raises(ValueError, match=f"^{name} must give the same results twice, got .* eval"):
        jm.compare_padded(lambda x, real: model(x), layer, X, LENGTHS)


def test_a_table_of_too_few_positions():
    table = nn.Embedding(X.shape[1], WIDTH, dtype=X.dtype)

    def padded(x, real):
        return x + table(torch.arange(x.shape[1]))

    with pytest.raises(ValueError, match="one row more than x's N = 6, got index out of range"):
        jm.compare_padded(padded, lambda x: x, X, LENGTHS)


def test_results_of_other_shapes():
    with pytest.raises(ValueError, match="results of one shape"):
        jm.compare_padded(lambda x, real: x, lambda x: x.values[:2], X, LENGTHS)
    with pytest.raises(ValueError, match="side must be one of"):
        jm.compare_padded(lambda x, real: x, lambda x: x, X, LENGTHS, "top")
