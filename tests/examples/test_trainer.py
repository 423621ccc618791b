import pytest
import torch
from torch import nn
from trainer import WeightAverage


@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_average_of_weights(decay):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 4.0)
    average = WeightAverage(model, decay)
    nn.init.constant_(model.weight, 8.0)
    average.update()
    expected = decay * 4 + (1 - decay) * 8
    with average.in_model(average.average):
        assert model.weight.item() == expected
    assert model.weight.item() == 8

    average.keep_as_best()
    nn.init.constant_(model.weight, 16.0)
    average.update()
    with average.in_model(average.best):
        assert model.weight.item() == expected
    assert model.weight.item() == 16 and average.best["weight"].item() == expected
    assert average.average["weight"].item() == decay * expected + (1 - decay) * 16


def test_weights_are_restored_after_an_error():
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    average = WeightAverage(model, 0.5)
    with torch.no_grad():
        average.best["weight"].zero_()
    with pytest.raises(ZeroDivisionError), average.in_model(average.best):
        1 / 0  # noqa: B018
    assert torch.equal(model.weight, before)
