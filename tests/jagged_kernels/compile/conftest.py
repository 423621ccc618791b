"""The option --each-kernel-once, for versions of Triton beside the one that all tests run with."""

import random

import pytest


def pytest_collection_modifyitems(config, items):
    """Each version of Triton gets other configurations."""
    if config.getoption("--each-kernel-once"):
        import triton

        random.Random(triton.__version__).shuffle(items)


@pytest.fixture(scope="session", autouse=True)
def each_kernel_once(pytestconfig):
    """A test is skipped where it would compile a kernel that was compiled before."""
    if not pytestconfig.getoption("--each-kernel-once"):
        yield
        return
    from . import ahead_of_time

    compile_kernel, compiled = ahead_of_time.compile_kernel, set()

    def compile_once(source, *args):
        if source.fn.__name__ in compiled:
            pytest.skip(f"{source.fn.__name__} was compiled before")
        compiled.add(source.fn.__name__)
        return compile_kernel(source, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead_of_time, "compile_kernel", compile_once)
        yield
