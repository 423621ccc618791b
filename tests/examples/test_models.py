"""The published models of examples/models, and their padded forms."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from generated_log import generate_log
from models import MODELS, PADDED
from models.head import ages, histories_of
from ranking_data import RankingDataset, add_popularity, make_chunks, split_by_time
from ranking_model import Inputs, RankingModel

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules import segments
from jagged_modules.functional import reductions
from jagged_modules.functional import rows as jagged_rows

from .ranking_batches import BATCHES, CONFIG, TABLES, make_batch

CONFIG = dataclasses.replace(CONFIG, parts=())


def make_model(head, device=None, tables=TABLES):
    torch.manual_seed(0)
    return RankingModel(tables, CONFIG, device=device, head=head)


@functools.cache
@torch.no_grad()
def inputs(lengths):
    """The embeddings of a batch of `BATCHES`, in float64."""
    model, batch = make_model(MODELS["din"]), make_batch(*BATCHES[lengths])
    found = model.unpack(
        model.sequences(batch.ids), model.user_bags(batch.users), model.item_bags(batch.items)
    )
    return found.to(torch.float64)


def outcome(head, x, training):
    """Results, gradients of the parameters and of the embeddings, and buffers."""
    x = Inputs(*(part.detach().requires_grad_() if is_embedding(part) else part for part in x))
    head.double().train(training)
    torch.manual_seed(1)  # of TransAct's window
    logits = head(x)
    logits.sin().sum().backward()
    parts = {name: part.grad for name, part in x._asdict().items() if is_embedding(part)}
    gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
    return {"logits": logits, **parts, **gradients, **dict(head.named_buffers())}


def is_embedding(x):
    return x is not None and x.is_floating_point()


def test_each_model_has_a_padded_form():
    assert MODELS.keys() == PADDED.keys()
    for name, model in MODELS.items():
        assert issubclass(PADDED[name], model)


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_padded_form_computes_the_same(name, lengths, training):
    x = inputs(lengths)
    jagged, padded = (outcome(make_model(of[name]).head, x, training) for of in (MODELS, PADDED))
    assert jagged.keys() == padded.keys()
    for at, expected in jagged.items():
        actual = padded[at]
        if expected is None or actual is None:  # not read: the batch has no such rows
            expected, actual = (torch.zeros(()) if y is None else y for y in (expected, actual))
            assert not expected.any() and not actual.any(), at
            continue
        rtol = 1e-7 if "running" in at else 1e-10  # the layer rounds the momentum to fp32
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=1e-10, msg=lambda text, at=at: f"{at}: {text}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_lengths_that_the_host_does_not_know(monkeypatch, name):
    """As on a device: selections of rows then have others behind their last segment."""
    x = inputs(next(iter(BATCHES)))
    expected = outcome(make_model(MODELS[name]).head, x, False)
    for module in (reductions, jagged_rows, segments):
        monkeypatch.setattr(module, "values_are_checkable", lambda x: False)
    found = outcome(make_model(MODELS[name]).head, x, False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# the last block of OneTrans updates no event, so the part of these that events read is idle
IDLE = {
    "onetrans": {
        f"blocks.1.{x}.shared.{y}" for x in ("out", "up", "down") for y in ("weight", "bias")
    }
}


@pytest.fixture(scope="module")
def dataset():
    log = generate_log(num_users=20, num_items=60, num_clusters=4, mean_length=30, seed=0)
    train = split_by_time(log) == 0
    log = add_popularity(log, train)
    return RankingDataset(log, make_chunks(log, train, chunk_size=4, max_history=12))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns_and_rows_do_not_mix(dataset, name):
    model = make_model(MODELS[name], tables=dataset.tables).eval()
    picked = list(range(0, len(dataset), 6))
    batch = dataset[picked]
    logits = model(batch)
    assert logits.shape == batch.labels.shape
    logits.square().sum().backward()
    idle = {at for at, x in model.head.named_parameters() if x.grad is None or not x.grad.any()} - {
        "attention.units.0.slope",
        "attention.units.1.slope",
    }
    assert idle == IDLE.get(name, set())
    alone = torch.cat([model(dataset[[index]]) for index in picked])
    torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("forms", [MODELS, PADDED], ids=["jagged", "padded"])
def test_built_on_meta_and_initialised_module_by_module(name, forms):
    """As DistributedModelParallel does it: `reset_parameters` of each module that owns
    parameters."""
    head = make_model(forms[name], torch.device("meta")).head
    assert {parameter.device.type for parameter in head.parameters()} == {"meta"}
    head.to_empty(device="cpu")
    for module in head.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()
    for buffer in head.buffers():
        assert buffer.isfinite().all()
    assert head(inputs("of all lengths").to(torch.float32)).isfinite().all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("forms", [MODELS, PADDED], ids=["jagged", "padded"])
def test_autocast_gives_nearly_the_same(name, forms):
    head, x = make_model(forms[name]).eval().head, inputs("of all lengths").to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(x)
    # bf16 keeps 8 bits: 2**-8 relative per rounding, a few roundings of terms of size about 1.
    torch.testing.assert_close(logits.float(), head(x), rtol=0, atol=0.05)
    logits.sum().backward()


def test_bst_is_that_of_a_sequence_for_each_candidate():
    """As published: events see the candidate too."""
    model, x = make_model(MODELS["bst"]).double().eval().head, inputs("of all lengths")
    history, targets = model.history(x), model.targets(x)
    candidates = jm.CandidateIndex.from_offsets(x.item_offsets)
    own = histories_of(candidates, history, len(targets))
    ends = torch.arange(len(targets) + 1)
    rows, offsets = F.jagged_concat([own.values, targets], [own.offsets, ends])
    encoded, _ = model.layer((rows, offsets))
    expected, _ = F.jagged_last(encoded, offsets)
    torch.testing.assert_close(model.interest(history, targets, candidates), expected)


def test_transact_hides_some_of_the_newest_events_in_training():
    model = make_model(MODELS["transact"]).head
    history = jm.Jagged(torch.arange(40.0)[:, None], torch.tensor([0, 30, 30, 33, 40]), 30)
    hidden = [model.hide_newest(history) for _ in range(50)]
    counts = torch.stack([history.offsets.diff() - x.offsets.diff() for x in hidden])
    assert counts[:, 0].unique().tolist() == list(range(model.window + 1))
    assert counts[:, 2].unique().tolist() == [0, 1, 2, 3]
    for x in hidden:
        lengths = x.offsets.diff().tolist()
        expected = [
            torch.arange(start, start + n)
            for start, n in zip((0, 30, 30, 33), lengths, strict=True)
        ]
        assert torch.equal(x.values[:, 0], torch.cat(expected).float())


def test_ages_count_from_the_newest_event():
    history = jm.Jagged(torch.zeros(5, 1), torch.tensor([0, 3, 3, 5]))
    assert ages(history).tolist() == [2, 1, 0, 1, 0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_short(name):
    path = Path(__file__).parents[2] / "examples" / "models" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 120
