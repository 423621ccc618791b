from functools import partial

import pytest
import torch
from generated_log import generate_log
from sequence_data import make_datasets
from sequence_model import (
    ENCODERS,
    SCORES,
    SASRecBlock,
    SequenceModel,
    generalised_bce,
    make_logits,
    sampled_softmax,
)
from torch import nn
from torch.nn import functional
from torchrec import JaggedTensor

NUM_ITEMS, MAX_HISTORY, TEMPERATURE = 60, 9, 0.15
PICKED = [3, 0, 11, 4, 30]


@pytest.fixture(scope="module")
def dataset():
    log = generate_log(num_users=20, num_items=NUM_ITEMS, num_clusters=4, mean_length=30, seed=0)
    assert log.num_items == NUM_ITEMS
    return make_datasets(log, MAX_HISTORY, intervals=True)["train"]


def make_model(encoder="sasrec", **options):
    return SequenceModel(
        NUM_ITEMS,
        encoder,
        embedding_dim=16,
        num_heads=2,
        max_history=MAX_HISTORY,
        intervals=True,
        **options,
    ).eval()


@pytest.fixture(params=ENCODERS)
def model(request):
    return make_model(request.param)


def with_rivals(dataset, picked=PICKED, num_rivals=NUM_ITEMS):
    return dataset[picked].add_rivals(torch.arange(num_rivals))


def test_every_parameter_learns(dataset, model):
    batch = with_rivals(dataset, num_rivals=20)
    sampled_softmax(
        make_logits(model(batch), batch.targets, batch.rivals, TEMPERATURE)
    ).mean().backward()
    idle = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert idle == []


def test_sequences_do_not_mix_and_no_query_sees_a_later_item(dataset, model):
    batch = with_rivals(dataset)
    queries = model(batch).queries
    alone = torch.cat([model(with_rivals(dataset, [index])).queries for index in PICKED])
    torch.testing.assert_close(alone, queries, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(queries.norm(dim=1), torch.ones(len(queries)))

    last = batch.last_inputs()  # the items come first among the ids
    batch.ids.values()[last] = (batch.ids.values()[last] + 1) % NUM_ITEMS
    changed = (model(batch).queries != queries).any(dim=1)
    assert changed.nonzero().flatten().tolist() == last.tolist()


def test_vectors_of_items_are_normalised_embeddings(dataset, model):
    batch = with_rivals(dataset)
    vectors = model(batch)
    table = functional.normalize(dict(model.embeddings.embeddings.items())["item"].weight, dim=1)
    torch.testing.assert_close(vectors.rivals, table)
    torch.testing.assert_close(vectors.targets, table[batch.targets])


def test_dot_products_are_of_embeddings_as_they_are_and_queries_after_a_layer_norm(dataset):
    batch = with_rivals(dataset)
    vectors = (model := make_model(scores="dot"))(batch)
    table = dict(model.embeddings.embeddings.items())["item"].weight
    torch.testing.assert_close(vectors.rivals, table)
    torch.testing.assert_close(vectors.targets, table[batch.targets])
    torch.testing.assert_close(
        vectors.queries.square().mean(dim=1), torch.ones(len(batch)), rtol=1e-3, atol=0
    )


def test_queries_depend_on_the_intervals(dataset, model):
    batch = with_rivals(dataset)
    queries = model(batch).queries
    batch.ids["interval"].values().add_(1)
    assert (model(batch).queries != queries).any(dim=1).all()


BIASES = dict(relative_position=True, relative_time=32)


@pytest.fixture(scope="module")
def timed():
    log = generate_log(num_users=20, num_items=NUM_ITEMS, num_clusters=4, mean_length=30, seed=0)
    return make_datasets(log, MAX_HISTORY, intervals=True, timestamps=True)["train"]


def test_every_parameter_of_a_biased_hstu_learns(timed):
    model, batch = make_model("hstu", **BIASES), with_rivals(timed, num_rivals=20)
    sampled_softmax(
        make_logits(model(batch), batch.targets, batch.rivals, TEMPERATURE)
    ).mean().backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []
    assert {
        f"encoder.encoder.layers.{i}.{table}_bias"
        for i in range(2)
        for table in ("position", "time")
    } < model.state_dict().keys()


def test_a_query_knows_the_times_of_its_target_and_the_earlier_inputs_only(timed):
    model, batch = make_model("hstu", **BIASES), with_rivals(timed)
    queries, last = model(batch).queries, batch.last_inputs()
    for times, changed in ((batch.next_timestamps, last), (batch.timestamps, last)):
        times[last] += 10**9
        different = (model(batch).queries != queries).any(dim=1).nonzero().flatten().tolist()
        assert different == changed.tolist()
        times[last] -= 10**9
    alone = torch.cat([model(with_rivals(timed, [index])).queries for index in PICKED])
    torch.testing.assert_close(alone, queries, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [dict(relative_position=True), dict(relative_time=32)], ids=str)
def test_only_hstu_has_biases(options):
    with pytest.raises(
        ValueError,
        match="only the encoder 'hstu' has relative_position and relative_time, not 'sasrec'",
    ):
        make_model("sasrec", **options)


def softmax_loss(target, rivals):
    return torch.cat([target[None], rivals]).logsumexp(dim=0) - target


def gbce_loss(target, rivals, num_rivals, calibration):
    """Equations 8 and 12 of the paper, term by term, where the rivals equal to the target count in
    the number of rivals alone."""
    alpha = num_rivals / (NUM_ITEMS - 1)
    beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
    return -(target.sigmoid().pow(beta).log() + (1 - rivals.sigmoid()).log().sum()) / (
        num_rivals + 1
    )


LOSSES = {
    "softmax": (sampled_softmax, softmax_loss),
    "gbce": (
        partial(generalised_bce, num_items=NUM_ITEMS, calibration=0.75),
        partial(gbce_loss, num_rivals=40, calibration=0.75),
    ),
    "bce": (
        partial(generalised_bce, num_items=NUM_ITEMS, calibration=0.0),
        partial(gbce_loss, num_rivals=40, calibration=0.0),
    ),
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_compare_the_target_with_the_rivals_but_the_target(dataset, loss, scores):
    batch = dataset[PICKED].add_rivals(torch.randint(NUM_ITEMS, (40,)))
    # so that leaving the target out of the rivals counts
    assert set(batch.rivals.tolist()) & set(batch.targets.tolist())
    vectors = (model := make_model(scores=scores))(batch)
    items = model.embeddings.embeddings["item"].weight
    logits = (
        vectors.queries
        @ (functional.normalize(items, dim=1) if scores == "cosine" else items).T
        / TEMPERATURE
    )
    actual, expected = LOSSES[loss]
    rows = zip(logits, batch.targets, strict=True)
    losses = torch.stack(
        [expected(row[target], row[batch.rivals[batch.rivals != target]]) for row, target in rows]
    )
    torch.testing.assert_close(
        actual(make_logits(vectors, batch.targets, batch.rivals, TEMPERATURE)),
        losses,
        rtol=1e-5,
        atol=1e-6,
    )


def test_fully_calibrated_gbce_weighs_the_target_by_the_sampling_rate(dataset):
    batch = with_rivals(dataset, num_rivals=20)
    logits = make_logits(make_model()(batch), batch.targets, batch.rivals, TEMPERATURE)
    plain, calibrated = (
        generalised_bce(logits, NUM_ITEMS, calibration) for calibration in (0.0, 1.0)
    )
    target = functional.softplus(-logits.target) / 21
    torch.testing.assert_close(plain - calibrated, target * (1 - 20 / (NUM_ITEMS - 1)))


def test_autocast_gives_nearly_the_same(dataset, model):
    batch = with_rivals(dataset)
    scores = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            vectors = model(batch)
            scores.append((vectors.queries @ vectors.rivals.T).float())
    # bf16 keeps 8 bits: 2**-8 relative per rounding, a few roundings of terms of size about 1.
    torch.testing.assert_close(*scores, rtol=0, atol=0.05)


def test_sasrec_block_computes_what_a_causal_transformer_layer_computes():
    block = SASRecBlock(16, num_heads=2, dropout=0.0)
    layer = nn.TransformerEncoderLayer(
        16, 2, dim_feedforward=16, dropout=0.0, batch_first=True, norm_first=True
    )
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(
            torch.cat([block.attention.q_proj.weight, block.attention.kv_proj.weight])
        )
        layer.self_attn.in_proj_bias.copy_(
            torch.cat([block.attention.q_proj.bias, block.attention.kv_proj.bias])
        )
        layer.self_attn.out_proj.load_state_dict(block.attention.out_proj.state_dict())
        linear = (layer.linear1, layer.linear2)
        for ours, theirs in (
            (block.feed_forward[0], linear[0]),
            (block.feed_forward[3], linear[1]),
        ):
            theirs.load_state_dict(ours.state_dict())
    x = JaggedTensor(values=torch.randn(9, 16), lengths=torch.tensor([5, 1, 3]))
    expected = [
        layer(
            rows[None], nn.Transformer.generate_square_subsequent_mask(len(rows)), is_causal=True
        )[0]
        for rows in x.to_dense()
    ]
    torch.testing.assert_close(block(x).values(), torch.cat(expected))


def test_unknown_names():
    with pytest.raises(ValueError, match=r"scores must be one of .*'dot'.*, not 'euclid'"):
        SequenceModel(NUM_ITEMS, "hstu", scores="euclid")
    with pytest.raises(ValueError, match=r"encoder must be one of .*'hstu'.*, not 'gru'"):
        SequenceModel(NUM_ITEMS, "gru")
