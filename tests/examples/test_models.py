"""The published models of examples/models beside their padded forms."""

import dataclasses
import functools

import pytest
import torch
from models import MODELS, PADDED
from ranking_model import Inputs, RankingModel

from .ranking_batches import BATCHES, CONFIG, TABLES, make_batch

CONFIG = dataclasses.replace(CONFIG, parts=())


def make_model(head, device=None):
    torch.manual_seed(0)
    return RankingModel(TABLES, CONFIG, device=device, head=head)


@functools.cache
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
