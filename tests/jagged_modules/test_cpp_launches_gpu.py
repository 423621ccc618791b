"""On a GPU, exported layers compute by launches from C++ what they compute by themselves."""

import pytest
import torch

from jagged_modules import cpp_library

from .test_cpp_launches import LAYERS, Layer

pytestmark = pytest.mark.gpu
WIDTH = 64


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    out = tmp_path_factory.mktemp("library") / "libjagged_modules.so"
    cpp_library.main(["--out", str(out)])
    torch.ops.load_library(str(out))


def inputs(users, events, candidates):
    lengths, counts = (torch.randint(n + 1, (users,)) for n in (events, candidates))
    offsets = [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (lengths, counts)]
    rows, targets = (torch.randn(int(x[-1]), WIDTH) for x in offsets)
    return tuple(x.cuda() for x in (rows, offsets[0], targets, offsets[1]))


@pytest.mark.parametrize("name", LAYERS)
def test_an_exported_layer(library, name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAGGED_CUBINS", str(tmp_path))
    model = Layer(LAYERS[name]()).eval().cuda()
    events, users, count = (torch.export.Dim(x) for x in ("events", "users", "count"))
    shapes = {0: events}, {0: users + 1}, {0: count}, {0: users + 1}
    program = cpp_library.export_for_cuda(model, inputs(5, 60, 9), tmp_path, dynamic_shapes=shapes)
    call = program.module()
    with torch.no_grad():
        for sizes in (2, 3, 1), (9, 200, 30), (64, 30, 20), (3, 2000, 300):
            batch = inputs(*sizes)
            torch.testing.assert_close(call(*batch), model(*batch))
