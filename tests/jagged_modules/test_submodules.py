"""The walk over a module's parts."""

import torch
from torch import nn

from jagged_modules.submodules import Members


def test_all_modules_are_found_now():
    shared = nn.Linear(2, 2)
    module = nn.Sequential(nn.Sequential(shared, nn.ModuleList()), nn.ReLU(), shared)
    module.register_module("nothing", None)
    members = Members(module)
    assert set(members.refresh().modules) == set(module.modules())
    module[0][0] = nn.Linear(3, 3)
    assert set(members.refresh().modules) == set(module.modules())


def test_all_tensors_are_found_now():
    module = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.Linear(2, 2, bias=False)})
    module.a.register_buffer("none", None)
    members, seen = Members(module), set()

    def check():
        found = members.refresh()
        for x, expected in zip(
            (found.parameters, found.buffers), (module.parameters(), module.buffers()), strict=True
        ):
            assert [*map(id, x)] == [*map(id, expected)]
        assert found.ids not in seen and found.ids == members.refresh().ids
        seen.add(found.ids)

    check()
    module.b.weight = nn.Parameter(torch.ones(2, 2))
    check()
    module.b.bias = nn.Parameter(torch.ones(2))
    check()
    module.b.register_parameter("third", module.a._parameters.pop("bias"))  # the order stays
    check()
    module.a.running_mean = torch.zeros(3)
    check()
    module.b.__dict__["_parameters"] = {"weight": nn.Parameter(torch.ones(4))}
    check()
    module.a.none = torch.ones(1)
    check()
