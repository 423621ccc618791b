"""Forms of index tensors have the values that were given, and show what reads beside them or writes
to them."""

import dataclasses

import forms
import pytest
import torch
from calls import build, evaluate
from cases import legal, simplest_case
from index_calls import function_case
from space import OPERATORS, index_options


@pytest.mark.parametrize("form", forms.all_forms())
@pytest.mark.parametrize("values", [[0, 2, 2, 9], [4, 4, 4], []], ids=str)
def test_values_of_a_form(form, values):
    x = forms.in_form(torch.tensor(values, dtype=torch.int64), form)
    assert x.tolist() == values and x.dtype == (torch.int32 if "int32" in form else torch.int64)
    whole, expanded = forms._whole(x), "expanded" in form and len(set(values)) == 1
    assert set(whole.tolist()) <= {*values, forms.POISON}
    if values and any(word in form for word in ("column", "other", "view", "expanded")):
        assert expanded == (x.stride() == (0,)) and (expanded or forms.POISON in whole)


def test_an_unknown_word_is_an_error():
    with pytest.raises(ValueError, match="got int16"):
        forms.in_form(torch.tensor([0]), "int16")


@pytest.mark.parametrize("form", ["", "column", "read-only"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_write_is_seen(form, place):
    """To the values and to the elements between them."""
    x = forms.in_form(torch.tensor([0, 2, 5]), form)
    with forms.unchanged(x):
        x.sum()
    with pytest.raises(AssertionError, match="was written to"), forms.unchanged(x):
        forms._whole(x)[place] = 1


def test_defaults_are_restored():
    with pytest.raises(ZeroDivisionError), forms.defaults("meta", "bfloat16"):
        assert torch.zeros(1).is_meta and torch.zeros(1).dtype == torch.bfloat16
        raise ZeroDivisionError
    assert torch.zeros(1).is_cpu and torch.zeros(1).dtype == torch.float32


def evaluate_with_rows_behind(function):
    """A softmax over segments with two rows behind the last one, which the function computes from x
    and the number of real rows."""
    case = function_case("jagged_softmax", "cpu")
    case = dataclasses.replace(case, options=case.options | dict(behind=2))
    call, rows = build(case), sum(case.lengths[0])
    return rows, evaluate(
        dataclasses.replace(call, function=lambda x: dict(out=function(x, rows))), case
    )


def padded(x, rows):
    return torch.nn.functional.pad(x[:rows] * 2, (0, 0, 0, len(x) - rows))


def test_rows_behind_the_last_segment_are_left_out():
    rows, (inputs, gradients, actual) = evaluate_with_rows_behind(padded)
    for x in (*inputs.values(), *gradients.values(), *actual.values()):
        assert len(x) == rows and not x.isnan().any()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, rows: x * 2,
        lambda x, rows: padded(x, rows) + 1,
        lambda x, rows: padded(x, rows) + 0 * x,
    ],
    ids=["rows", "a number", "NaN"],
)
def test_rows_behind_the_last_segment_must_be_zero(wrong):
    with pytest.raises(AssertionError, match="of rows behind the last segment is not 0"):
        evaluate_with_rows_behind(wrong)


@pytest.mark.parametrize("function", sorted(OPERATORS.keys() - {"apply_rotary", "jagged_between"}))
def test_operands_stay_on_their_device(function):
    """With all indices on the host, results are on another device. Left out are functions that take
    tables on the operands' device, or read an operand's values."""
    options = {}
    for name, allowed in OPERATORS[function].indices.items():
        options |= index_options(name, "host") if "host" in allowed else {}
    case = simplest_case(function, "cpu", "float32", **options)
    call = build(legal(dataclasses.replace(case, lengths=[[1, 2]] * len(case.lengths))))
    results = call.function(**{name: x.to("meta") for name, x in call.inputs.items()})
    assert all(x.is_meta for x in results.values())
