"""The walk over a module's parts."""

from torch import nn

from jagged_modules.submodules import submodules


def test_all_modules_are_found_now():
    shared = nn.Linear(2, 2)
    module = nn.Sequential(nn.Sequential(shared, nn.ModuleList()), nn.ReLU(), shared)
    module.register_module("nothing", None)
    assert set(submodules(module)) == set(module.modules())
    module[0][0] = nn.Linear(3, 3)
    assert set(submodules(module)) == set(module.modules())
