"""The certificate: a fused model is compared with its original on rows of the example, and on no
others."""

import copy
import math
import re

import pytest
import torch
from torch import nn

from jagged_modules.transforms import certificate, fuse_broadcasts
from jagged_modules.transforms.capture import Example

from .test_inputs import MODEL, Model, inputs


@pytest.fixture(scope="module")
def fused():
    return fuse_broadcasts(MODEL, inputs(), request_only=["profile"])


class Reads(Model):
    """A function of the user's numbers first."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, profile, item):
        return super().forward(self.read(profile), item)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("rows", [1, 2, 32])
def test_the_model_gets_rows_of_the_example_only(rows, dtype):
    """Other numbers may be out of its range, in floating point too: ids, counts, probabilities,
    normalised values, masks."""
    profile, item = (torch.arange(4 * rows).view(rows, 4) % 3).to(dtype), torch.randn(rows, 4)
    model, seen = Reads(torch.Tensor.float).eval(), []
    model.register_forward_pre_hook(
        lambda module, args: seen.append(args[0]) if type(args[0]) is torch.Tensor else None
    )
    fuse_broadcasts(model, (profile, item), request_only=["profile"])
    assert len(seen) == (1 if rows == 1 else 2)
    for x in seen:
        assert (x[:, None] == profile).all(2).any(1).all()


IN_RANGE = {
    "ids": lambda x: nn.functional.embedding(x[:, 0].long(), torch.ones(40, 4)),
    "counts": lambda x: nn.functional.one_hot(x[:, 0].long() // 8, 5)[:, 1:].float(),
}


@pytest.mark.parametrize("kind", IN_RANGE)
def test_floats_that_have_a_range(kind):
    example = torch.arange(8.0, 40)[:, None].expand(-1, 4), torch.randn(32, 4)
    report = fuse_broadcasts(Reads(IN_RANGE[kind]).eval(), example, request_only=["profile"]).report
    assert report.certificate.startswith("results equal for 32 candidates of 16 users")


@pytest.mark.parametrize("rows", [1, 32])
def test_an_example_of_one_user(rows):
    """There are no rows to replace its rows by, which the certificate tells."""
    profile = torch.randn(1, 4).expand(rows, -1)
    report = fuse_broadcasts(
        MODEL, (profile, torch.randn(rows, 4)), request_only=["profile"]
    ).report
    assert report.certificate.endswith(
        "example_inputs have the rows of one user only, so no others were tried"
    )


def test_an_example_whose_first_rows_are_of_one_user():
    """The others are tried instead."""
    profile = torch.cat([torch.ones(20, 4), torch.zeros(1, 4), torch.ones(11, 4)])
    report = fuse_broadcasts(MODEL, (profile, torch.randn(32, 4)), request_only=["profile"]).report
    assert (
        "other rows of one user change 3 of its 3 candidates and 0 of 29 others"
        in report.certificate
    )


def test_the_certificate_finds_a_wrong_result():
    wrong = fuse_broadcasts(MODEL, inputs(), request_only=["profile"])
    (relu,) = [node for node in wrong.graph.nodes if node.target is torch.ops.aten.relu.default]
    relu.target = torch.ops.aten.sigmoid.default
    wrong.recompile()
    with pytest.raises(
        ValueError, match="output 0 of the fused model must equal the model's within"
    ):
        certificate.certify(Example(MODEL, inputs(), {}), wrong, ("profile",))


def test_a_result_that_cancels_is_compared_by_the_terms_of_its_sum():
    """One unit in the last place of a term may be a hundred percent of the result."""
    model, example = copy.deepcopy(MODEL), inputs(1)
    with torch.no_grad():
        model.over.bias -= model(*example)[0]
    fused = copy.deepcopy(fuse_broadcasts(model, example, request_only=["profile"]))
    given = Example(model, example, {})
    (bias,) = [x for x in fused.parameters() if x.shape == (1,)]
    exact = bias.detach().clone()

    def errors(*biases):
        for x in biases:
            with torch.no_grad():
                bias.copy_(x)
            sentence = certificate.certify(given, fused, ("profile",))
            yield float(re.search("difference (.*?);", sentence)[1])

    up, down = (exact.nextafter(exact.new_tensor([x])) for x in (math.inf, -math.inf))
    assert max(errors(up, down)) > 0.01
    for wrong in exact - 1e-5, exact + 1e-5:
        with pytest.raises(ValueError, match="got a difference of"):
            list(errors(wrong))


def test_the_certificate_allows_the_rounding_of_the_dtypes_inside():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).bfloat16()
            self.both = nn.Linear(128, 1).bfloat16()

        def forward(self, profile, item):
            return self.both(torch.cat([self.user(profile.bfloat16()), item.bfloat16()], 1)).float()

    torch.manual_seed(0)
    fused = fuse_broadcasts(
        Head().eval(), (torch.randn(512, 64), torch.randn(512, 64)), request_only=["profile"]
    )
    assert any(site.decision == "moved" for site in fused.report.sites)


def test_the_certificate_finds_a_wrong_result_of_a_deep_model_in_bf16():
    torch.manual_seed(0)
    parts = [part for _ in range(12) for part in (nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())]
    model = nn.Sequential(*parts, nn.LayerNorm(16)).bfloat16().eval()
    wrong, example = copy.deepcopy(model), (torch.randn(32, 16, dtype=torch.bfloat16),)
    wrong[-1].weight.data.mul_(0.5)
    fused = torch.export.export(wrong, example).module()
    with pytest.raises(
        ValueError,
        match=(
            "output 0 of the fused model must equal the model's within 3.8e-01, got a difference"
            " of 5"
        ),
    ):
        certificate.certify(Example(model, example, {}), fused, (), torch.finfo(torch.bfloat16).eps)


def test_the_certificate_tells_which_candidates_a_user_changes(fused):
    assert "other rows of one user change 3 of its 3 candidates and 0 of 29 others" in str(
        fused.report
    )

    class Mixes(Model):
        def forward(self, profile, item):
            return super().forward(profile, item) + profile.sum()

    report = fuse_broadcasts(Mixes().eval(), inputs(), request_only=["profile"]).report
    assert "other rows of one user change 3 of its 3 candidates and 29 of 29 others" in str(report)


def test_the_certificate_changes_identifiers():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.users = nn.Embedding(50, 8)

        def forward(self, user, item):
            return (self.users(user) * item).sum(1)

    fused = fuse_broadcasts(
        Towers().eval(), (torch.arange(32), torch.randn(32, 8)), request_only=["user"]
    )
    assert "change 3 of its 3 candidates and 0 of 29 others" in fused.report.certificate
