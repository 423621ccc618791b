import pytest
import torch
from generated_log import generate_log
from ranking_data import RankingDataset, add_popularity, make_chunks, split_by_time
from ranking_model import INTERACTIONS, RankingModel, make_interaction
from torchrec import JaggedTensor

EMBEDDING_DIM, NUM_HEADS = 16, 2


@pytest.fixture(scope="module")
def dataset():
    log = generate_log(num_users=20, num_items=60, num_clusters=4, mean_length=30, seed=0)
    train = split_by_time(log) == 0
    return RankingDataset(add_popularity(log, train), make_chunks(log, train, chunk_size=4, max_history=12))


def jagged(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return JaggedTensor(values=torch.randn(sum(lengths), EMBEDDING_DIM, generator=generator), lengths=torch.tensor(lengths))


def test_padded_baseline_computes_what_the_jagged_layer_computes():
    """The two differ in time and memory only. The batch has a user without history and one without candidates."""
    ours, padded = (make_interaction(name, EMBEDDING_DIM, NUM_HEADS) for name in ("attention", "padded"))
    with torch.no_grad():
        padded.attention.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.kv_proj.weight]))
        padded.attention.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.kv_proj.bias]))
        padded.attention.out_proj.load_state_dict(ours.out_proj.state_dict())
    targets, history = jagged([2, 1, 0, 3, 1], seed=0), jagged([5, 0, 2, 1, 9], seed=1)
    results = []
    for module in (ours, padded):
        inputs = [JaggedTensor(values=each.values().clone().requires_grad_(), lengths=each.lengths()) for each in (targets, history)]
        output = module(*inputs)
        assert torch.equal(output.lengths(), targets.lengths())
        results.append([output.values(), *torch.autograd.grad(output.values().sin().sum(), [each.values() for each in inputs])])
    for name, expected, actual in zip(("output", "targets", "history"), *results, strict=True):
        # fp32 sums of at most 16 terms of size about 1, in another order.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert sum(parameter.numel() for parameter in ours.parameters()) == sum(parameter.numel() for parameter in padded.parameters())


def test_mean_pooling_is_the_projected_mean():
    module = make_interaction("mean", EMBEDDING_DIM, NUM_HEADS).double()
    history = JaggedTensor(values=jagged([3, 0, 2], seed=1).values().double(), lengths=torch.tensor([3, 0, 2]))
    output = module(jagged([1, 2, 1], seed=0), history).values()
    means = torch.stack([history.values()[:3].mean(dim=0), history.values()[3:].mean(dim=0)])
    expected = module.out_proj(module.v_proj(means))
    torch.testing.assert_close(output[[0, 3]], expected)
    torch.testing.assert_close(output[[1, 2]], module.out_proj.bias.expand(2, -1))


@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_every_parameter_learns_and_rows_do_not_mix(dataset, interaction):
    torch.manual_seed(0)
    model = RankingModel(dataset, interaction, EMBEDDING_DIM, NUM_HEADS, dropout=0.0)
    batch = dataset[list(range(len(dataset)))]
    logits = model(batch)
    assert logits.shape == batch.labels.shape
    logits.square().sum().backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []
    alone = torch.cat([model(dataset[[index]]) for index in range(len(dataset))])
    torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_autocast_gives_nearly_the_same(dataset, interaction):
    torch.manual_seed(0)
    model = RankingModel(dataset, interaction, EMBEDDING_DIM, NUM_HEADS).eval()
    batch = dataset[[0, 5, 9]]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    # bf16 keeps 8 bits: 2**-8 relative per rounding, a few roundings of terms of size about 1.
    torch.testing.assert_close(logits.float(), model(batch), rtol=0, atol=0.05)


def test_unknown_interaction(dataset):
    with pytest.raises(ValueError, match="interaction must be one of .*'attention'.*, not 'sum'"):
        RankingModel(dataset, "sum")
