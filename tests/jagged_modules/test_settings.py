"""Settings of the calling thread or task: what a switch, a block, a thread, a task and a backward
see of them."""

import asyncio
import contextvars
import threading

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules import settings

from ..marks import PATIENCE

VALUES = {
    jm.debug_checks: (True, False),
    jm.batch_invariant: (True, False),
    jm.backward_workspace: (2**20, 0),
}


@pytest.fixture(params=VALUES, ids=lambda setting: setting.__name__)
def setting(request):
    return request.param


@pytest.fixture
def values(setting):
    """Two values, and the default."""
    return *VALUES[setting], setting.current()


def in_a_new_context(function):
    """Decorator: a test's switches end with the test."""

    def test(setting, values):
        contextvars.copy_context().run(function, setting, *values)

    return test


@in_a_new_context
def test_a_switch_holds_from_its_construction_on(setting, first, second, default):
    setting(first)
    assert setting.current() == first
    setting(second)
    assert setting.current() == second


@in_a_new_context
def test_a_block_restores_what_was_before(setting, first, second, default):
    with setting(first):
        assert setting.current() == first
        with setting(second):
            assert setting.current() == second
        assert setting.current() == first
    assert setting.current() == default


@in_a_new_context
def test_an_exception_restores_the_value(setting, first, second, default):
    with pytest.raises(KeyError), setting(first), setting(second):
        raise KeyError
    assert setting.current() == default


@in_a_new_context
def test_the_end_of_a_block_undoes_switches_inside(setting, first, second, default):
    with setting(first):
        setting(second)
        assert setting.current() == second
    assert setting.current() == default


@in_a_new_context
def test_a_block_can_be_entered_again_and_nested(setting, first, second, default):
    block = setting(first)
    with block:
        pass
    assert setting.current() == default
    setting(second)
    with block:
        assert setting.current() == first
        with block:
            assert setting.current() == first
        assert setting.current() == first
    assert setting.current() == second


@in_a_new_context
def test_a_block_restores_a_switch_after_its_construction(setting, first, second, default):
    block = setting(first)
    setting(second)
    with block:
        assert setting.current() == first
    assert setting.current() == second


@in_a_new_context
def test_a_decorated_function_runs_with_the_value_and_restores_the_old_one(
    setting, first, second, default
):
    @setting(first)
    def decorated(x):
        """Documentation."""
        assert setting.current() == first
        setting(second)
        return x

    assert setting.current() == default and decorated.__doc__ == "Documentation."
    for _ in range(2):
        assert decorated(3) == 3 and setting.current() == default
    with setting(second):
        assert decorated(x=4) == 4 and setting.current() == second


@in_a_new_context
def test_bad_values_change_nothing(setting, first, second, default):
    if setting is jm.backward_workspace:
        with pytest.raises(TypeError, match="num_bytes must be an int, got float"):
            setting(1e9)
        with pytest.raises(ValueError, match="num_bytes must be at least 0, got -1"):
            setting(-1)
    else:
        for wrong in ("off", 1, None):
            with pytest.raises(
                TypeError, match=f"enabled must be a bool, got {type(wrong).__name__}"
            ):
                setting(wrong)
    assert setting.current() == default


@in_a_new_context
def test_a_generator_that_ends_inside_of_a_later_block(setting, first, second, default):
    def generate():
        with setting(first):
            yield setting.current()

    generator = generate()
    assert next(generator) == first
    with setting(second):
        assert list(generator) == []  # leaves its block, which is not the innermost
        assert setting.current() == second
    assert setting.current() == default


@in_a_new_context
def test_a_generator_that_another_context_ends(setting, first, second, default):
    def generate():
        with setting(first):
            yield

    generator = contextvars.copy_context().run(lambda: (g := generate(), next(g))[0])
    setting(second)
    generator.close()  # nothing was entered here
    assert setting.current() == second


@in_a_new_context
def test_switching_at_every_step_stores_nothing(setting, first, second, default):
    for _ in range(100):
        setting(first)
        setting(second)
    state = setting._state()
    assert state.entered == () and state.switched[1] == first


@in_a_new_context
def test_threads_have_their_own(setting, first, second, default):
    entered, seen = threading.Barrier(2, timeout=PATIENCE), {}

    def work(name, value):
        seen[name, "new"] = setting.current()
        with setting(value):
            entered.wait()
            seen[name, "inside"] = setting.current()
            entered.wait()
        seen[name, "after"] = setting.current()

    setting(first)
    threads = [
        threading.Thread(target=work, args=arguments) for arguments in (("a", first), ("b", second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == {
        **{
            ("a", when): value
            for when, value in (("new", default), ("inside", first), ("after", default))
        },
        **{
            ("b", when): value
            for when, value in (("new", default), ("inside", second), ("after", default))
        },
    }
    assert setting.current() == first


@in_a_new_context
def test_one_object_in_several_threads(setting, first, second, default):
    block, entered, seen = setting(first), threading.Barrier(3, timeout=PATIENCE), []

    def work():
        with block:
            entered.wait()
            entered.wait()
        seen.append(setting.current())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    with block:
        entered.wait()
        assert setting.current() == first
        entered.wait()
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == [default, default] and setting.current() == default


@in_a_new_context
def test_tasks_have_a_copy(setting, first, second, default):
    async def task(value):
        assert setting.current() == first
        with setting(value):
            await asyncio.sleep(0)
            assert setting.current() == value
            await asyncio.sleep(0)
        assert setting.current() == first
        setting(value)  # ends with the task

    async def main():
        with setting(first):
            await asyncio.gather(task(second), task(first), task(second))
            assert setting.current() == first

    asyncio.run(main())
    assert setting.current() == default


@pytest.mark.parametrize("forward_mode", [True, False])
def test_a_backward_takes_the_mode_of_its_forward(monkeypatch, forward_mode):
    """On a GPU it runs in a thread of autograd's, which has the defaults; here in one of ours, and
    inside of the other mode."""
    from jagged_modules.cpu import attention as cpu

    seen, gradients = [], cpu._gradients
    monkeypatch.setattr(
        cpu, "_gradients", lambda *args: seen.append(args[2].params) or gradients(*args)
    )
    q, offsets = torch.randn(7, 2, 8, requires_grad=True), torch.tensor([0, 3, 7])
    with jm.batch_invariant(forward_mode):
        out = F.jagged_attention(q, q, q, offsets)

    def backward():
        with jm.batch_invariant(not forward_mode):
            out.sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(PATIENCE)
    assert [params.batch_invariant for params in seen] == [forward_mode] and q.grad is not None


def test_a_graph_takes_the_mode_in_which_it_is_traced():
    def traced(mode):
        torch._dynamo.reset()
        calls = []

        def backend(module, _):
            calls.extend(
                node
                for node in module.graph.nodes
                if node.op == "call_function" and "batched_matmul_cpu" in str(node.target)
            )
            return module.forward

        with jm.batch_invariant(mode):
            torch.compile(
                lambda x: F.jagged_linear(x, torch.ones(3, 4)), backend=backend, fullgraph=True
            )(torch.ones(2, 4))
        return len(calls)

    assert traced(False) == 0 and traced(True) == 1


def test_what_the_mode_does_not_cover_is_an_error():
    x, offsets = torch.ones(3, 2, 8), torch.tensor([0, 3])
    with jm.batch_invariant(True):
        with pytest.raises(
            ValueError,
            match=r"one that jm.batch_invariant\(True\) covers, such as 'auto', got 'reference'",
        ):
            F.jagged_attention(x, x, x, offsets, implementation="reference")
        with pytest.raises(ValueError, match="got 'reference'"):
            F.linear_compress(x[0], x.mT.contiguous(), implementation="reference")
    assert not settings.is_batch_invariant("reference")
