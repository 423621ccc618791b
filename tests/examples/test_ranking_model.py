import dataclasses

import pytest
import torch
from generated_log import generate_log
from jagged_baseline import BASELINE, CLASSES
from padded_layers import PADDED
from ranking_data import RankingBatch, RankingDataset, add_popularity, make_chunks, split_by_time
from ranking_model import INTERACTIONS, PARTS, RankingModel, make_interaction
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.train_pipeline.tracing import Tracer

import jagged_modules as jm

from .ranking_batches import BATCHES, CONFIG, EMBEDDING_DIM, NUM_HEADS, TABLES, make_batch

# The whole model, each part left out, the other interactions, and the model without any part.
VARIANTS = {
    "whole": {},
    "two layers": {"num_layers": 2},
    **{f"no-{part}": {"parts": tuple(other for other in PARTS if other != part)} for part in PARTS},
    **{name: {"interaction": name} for name in INTERACTIONS if name != "attention"},
    "no-parts": {"parts": ()},
}


@pytest.fixture(scope="module")
def dataset():
    log = generate_log(num_users=20, num_items=60, num_clusters=4, mean_length=30, seed=0)
    train = split_by_time(log) == 0
    return RankingDataset(
        add_popularity(log, train),
        make_chunks(log, train, chunk_size=4, max_history=12),
        max_stream=50,
    )


def make_model(tables=TABLES, layers=None, device=None, **changes):
    torch.manual_seed(0)
    return RankingModel(tables, dataclasses.replace(CONFIG, **changes), layers, device)


def jagged(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return JaggedTensor(
        values=torch.randn(sum(lengths), EMBEDDING_DIM, generator=generator),
        lengths=torch.tensor(lengths),
    )


def test_padded_baseline_computes_what_the_jagged_layer_computes():
    """The two differ in time and memory only. The batch has a user without history and one without
    candidates."""
    ours, padded = (
        make_interaction(name, EMBEDDING_DIM, NUM_HEADS) for name in ("attention", "padded")
    )
    with torch.no_grad():
        padded.attention.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.kv_proj.weight]))
        padded.attention.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.kv_proj.bias]))
        padded.attention.out_proj.load_state_dict(ours.out_proj.state_dict())
    targets, history = jagged([2, 1, 0, 3, 1], seed=0), jagged([5, 0, 2, 1, 9], seed=1)
    results = []
    for module in (ours, padded):
        inputs = [
            JaggedTensor(values=each.values().clone().requires_grad_(), lengths=each.lengths())
            for each in (targets, history)
        ]
        output = module(*inputs)
        assert torch.equal(output.lengths(), targets.lengths())
        results.append(
            [
                output.values(),
                *torch.autograd.grad(
                    output.values().sin().sum(), [each.values() for each in inputs]
                ),
            ]
        )
    for name, expected, actual in zip(("output", "targets", "history"), *results, strict=True):
        # fp32 sums of at most 16 terms of size about 1, in another order.
        torch.testing.assert_close(
            actual, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert sum(parameter.numel() for parameter in ours.parameters()) == sum(
        parameter.numel() for parameter in padded.parameters()
    )


def test_padded_histories_that_are_not_repeated():
    """For more candidates than users, fewer, and users without a history or candidates."""
    padded, fused = (make_interaction("padded", EMBEDDING_DIM, NUM_HEADS).eval() for _ in range(2))
    fused.load_state_dict(padded.state_dict())
    fused.fuse_broadcasts()
    assert fused.state_dict().keys() == padded.state_dict().keys()
    for candidates, history in (
        ([2, 1, 0, 3, 9], [5, 0, 2, 1, 9]),
        ([0, 1, 0], [3, 3, 0]),
        ([40], [0]),
        ([7], [1]),
    ):
        inputs = jagged(candidates, seed=0), jagged(history, seed=1)
        with torch.no_grad():
            torch.testing.assert_close(fused(*inputs).values(), padded(*inputs).values())


def test_mean_pooling_is_the_projected_mean():
    module = make_interaction("mean", EMBEDDING_DIM, NUM_HEADS).double()
    history = JaggedTensor(
        values=jagged([3, 0, 2], seed=1).values().double(), lengths=torch.tensor([3, 0, 2])
    )
    output = module(jagged([1, 2, 1], seed=0), history).values()
    means = torch.stack([history.values()[:3].mean(dim=0), history.values()[3:].mean(dim=0)])
    expected = module.out_proj(module.v_proj(means))
    torch.testing.assert_close(output[[0, 3]], expected)
    torch.testing.assert_close(output[[1, 2]], module.out_proj.bias.expand(2, -1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns_and_rows_do_not_mix(dataset, variant):
    model = make_model(dataset.tables, **VARIANTS[variant])
    batch = dataset[list(range(0, len(dataset), 3))]
    logits = model(batch)
    assert logits.shape == batch.labels.shape
    logits.square().sum().backward()
    idle = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert idle == []
    alone = torch.cat([model(dataset[[index]]) for index in range(0, len(dataset), 3)])
    torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [PADDED, BASELINE], ids=["padded", "baseline"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_model_by_hand_computes_the_same(lengths, layers):
    """So that the benchmark compares time and memory alone. Gradients of all parameters agree
    too."""
    batch, results = make_batch(*lengths), []
    ours, by_hand = make_model(), make_model(layers=layers)
    by_hand.load_state_dict(ours.state_dict())
    for model in (ours, by_hand):
        logits = model(batch)
        logits.sin().sum().backward()
        results.append(
            {"logits": logits}
            | {name: parameter.grad for name, parameter in model.named_parameters()}
        )
    for name, expected in results[0].items():
        # fp32 sums of up to some hundred terms, in another order: relative to the largest element,
        # because terms cancel.
        scale = max(expected.abs().flatten().tolist(), default=0.0)
        torch.testing.assert_close(
            results[1][name],
            expected,
            rtol=0,
            atol=2e-5 * max(scale, 1e-3),
            msg=lambda text, at=name: f"{at}: {text}",
        )


def test_baseline_has_none_of_the_layers_that_it_replaces():
    kinds = {type(module) for module in make_model(layers=BASELINE).modules()}
    assert kinds >= {*CLASSES.values()} and not kinds & {*CLASSES}


def test_parts_are_those_of_the_config():
    for part in PARTS:
        assert getattr(make_model(parts=(part,)).head, part) is not None
        assert getattr(make_model(**VARIANTS[f"no-{part}"]).head, part) is None
    features = make_model(**VARIANTS["no-stream"]).sequences.embedding_configs()[0].feature_names
    assert features == ["history_item", "target_item"]


def test_kunlun_in_place_of_interformer():
    model, batch = make_model(kunlun=True), make_batch(*BATCHES["of all lengths"])
    assert type(model.head.interformer) is jm.JaggedKunlun
    model(batch).sum().backward()
    assert all(x.grad is not None for x in model.head.parameters())
    with pytest.raises(ValueError, match="kunlun must be False with other layers than JAGGED"):
        make_model(layers=PADDED, kunlun=True)


def test_vectors_of_users_are_not_repeated_per_candidate():
    model, widths = make_model(), []
    model.head.compress.register_forward_pre_hook(
        lambda module, inputs: widths.extend(len(x) for x in inputs[:2])
    )
    model(make_batch([3, 2], [5, 4], [4, 3]))
    assert widths == [7, 2]


@pytest.mark.parametrize("variant", ["whole", "no-parts"])
def test_features_in_another_order(variant):
    """A sharded collection returns features in the order of its plan, and a loader may give them in
    any order."""
    model, batch = make_model(**VARIANTS[variant]).eval(), make_batch(*BATCHES["of all lengths"])
    expected = model(batch)

    def reversed_features(_, inputs, bags):
        keys = bags.keys()[::-1]
        return KeyedTensor(
            keys, [EMBEDDING_DIM] * len(keys), torch.cat([bags[key] for key in keys], dim=1)
        )

    for collection in (model.user_bags, model.item_bags):
        collection.register_forward_hook(reversed_features)
    model.sequences.register_forward_hook(
        lambda _, inputs, features: dict(reversed(features.items()))
    )
    order = {
        name: list(range(len(getattr(batch, name).keys())))[::-1]
        for name in ("ids", "users", "items")
    }
    permuted = {name: getattr(batch, name).permute(indices) for name, indices in order.items()}
    assert (
        isinstance(permuted["ids"], KeyedJaggedTensor)
        and permuted["ids"].keys() == batch.ids.keys()[::-1]
    )
    torch.testing.assert_close(
        model(RankingBatch(**permuted, labels=batch.labels)), expected, rtol=0, atol=1e-6
    )


def test_tracer_of_the_pipelines_sees_the_collections_and_their_inputs():
    model = make_model()
    graph = Tracer(leaf_modules=["sequences", "user_bags", "item_bags", "unpack", "head"]).trace(
        model
    )
    calls = {node.target: node for node in graph.nodes if node.op == "call_module"}
    assert list(calls) == ["sequences", "user_bags", "item_bags", "unpack", "head"]
    inputs = {name: calls[name].args[0] for name in ("sequences", "user_bags", "item_bags")}
    assert {name: node.args[1] for name, node in inputs.items()} == {
        "sequences": "ids",
        "user_bags": "users",
        "item_bags": "items",
    }


@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_built_on_meta_and_initialised_module_by_module(interaction):
    """As DistributedModelParallel does it: `reset_parameters` of each module that owns
    parameters."""
    model = make_model(device=torch.device("meta"), interaction=interaction)
    batch = make_batch(*BATCHES["of all lengths"])
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)) and not isinstance(
            module, nn.Embedding | nn.EmbeddingBag
        ):
            module.reset_parameters()
    for table in model.tables():
        nn.init.normal_(table, std=0.05)
    assert model(batch).isfinite().all()


@pytest.mark.parametrize("variant", ["whole", "mean", "padded"])
def test_autocast_gives_nearly_the_same(dataset, variant):
    model = make_model(dataset.tables, **VARIANTS[variant]).eval()
    batch = dataset[[0, 5, 9]]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    # bf16 keeps 8 bits: 2**-8 relative per rounding, a few roundings of terms of size about 1.
    torch.testing.assert_close(logits.float(), model(batch), rtol=0, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, PADDED, BASELINE], ids=["jagged", "padded", "baseline"])
def test_dense_part_compiles_without_graph_breaks(layers):
    model, batch = make_model(layers=layers), make_batch(*BATCHES["of all lengths"])
    expected = model(batch)
    model.head.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(batch), expected)
    other = make_batch([4, 2, 9], [14, 2, 44], [3, 3, 1], seed=1)
    model(other).sum().backward()
    assert all(parameter.grad is not None for parameter in model.head.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interaction": "sum"}, "interaction must be one of .*'attention'.*, not 'sum'"),
        ({"parts": ("stream", "tower")}, r"parts must be of .*'stream'.*, not \['tower'\]"),
    ],
)
def test_unknown_parts(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(**options)


def test_layers_by_hand_have_no_other_interaction():
    with pytest.raises(
        ValueError, match="interaction must be 'attention' with padded layers, not 'mean'"
    ):
        make_model(layers=PADDED, interaction="mean")
