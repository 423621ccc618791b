"""What a training step with new offsets costs the host: calls of the library's Python functions,
and the functions between a layer's forward and its launch. On a GPU, small models wait for these.
"""

import sys

import pytest
import torch

pytest.importorskip("triton")

from jagged_kernels.precompile.recorder import recorded_launches

import jagged_modules as jm

USERS, CANDIDATES, WIDTH = 6, 3, 64
LENGTHS = torch.tensor([40, 0, 17, 1, 30, 12])
PACKAGES, RECORDER = ("jagged_modules.", "jagged_kernels."), "jagged_kernels.precompile.recorder"


def history(rows):
    return rows, torch.cat([LENGTHS.new_zeros(1), LENGTHS.cumsum(0)])


def jagged_tensor(rows):
    return pytest.importorskip("torchrec").JaggedTensor(rows, lengths=LENGTHS.clone())


def candidates():
    return torch.arange(USERS).repeat(CANDIDATES)


def offsets_of_candidates():
    return torch.arange(USERS + 1) * CANDIDATES


# A layer, its call with new index tensors, and the most calls of a step: as many as there are with
# Python 3.11. Lower them with the calls.
STEPS = {
    "target, a map": (
        lambda: jm.JaggedTargetAttention(WIDTH, 2),
        lambda layer, x, t: layer(t[:, None], history(x), candidates()),
        474,
    ),
    "target, sorted": (
        lambda: jm.JaggedTargetAttention(WIDTH, 2),
        lambda layer, x, t: layer(
            t[:, None], history(x), jm.CandidateIndex.from_offsets(offsets_of_candidates())
        ),
        533,
    ),
    "target, a pair": (
        lambda: jm.JaggedTargetAttention(WIDTH, 2),
        lambda layer, x, t: layer((t, offsets_of_candidates()), history(x))[0],
        582,
    ),
    "target, a JaggedTensor": (
        lambda: jm.JaggedTargetAttention(WIDTH, 2),
        lambda layer, x, t: layer(t[:, None], jagged_tensor(x), candidates()),
        476,
    ),
    "self and target": (
        lambda: jm.JaggedSelfTargetAttention(WIDTH, 2),
        lambda layer, x, t: layer(history(x), t[:, None], candidates())[1],
        491,
    ),
    "GDPA": (lambda: jm.JaggedGDPA(WIDTH, 2), lambda layer, x, t: layer(history(x))[0], 504),
    "blocks": (
        lambda: jm.BlockDiagonalSelfAttention(WIDTH, 2),
        lambda layer, x, t: layer(history(x))[0],
        340,
    ),
    "HSTU": (
        lambda: jm.HSTULayer(WIDTH, 2, config=jm.HSTUConfig(scaling_seqlen=100)),
        lambda layer, x, t: layer(history(x))[0],
        660,
    ),
    "encoder": (
        lambda: jm.JaggedEncoderLayer(WIDTH, 2, WIDTH),
        lambda layer, x, t: layer(history(x))[0],
        718,
    ),
}


def is_ours(frame):
    """Whether the library's code runs in it."""
    module = frame.f_globals.get("__name__", "")
    is_test = frame.f_code.co_filename == __file__  # which pytest may give a module's name
    return module.startswith(PACKAGES) and module != RECORDER and not is_test


def called_code(function):
    """The code of each call of a function of the library while this one runs."""
    found, before = [], sys.getprofile()

    def note(frame, event, _):
        if event == "call" and is_ours(frame):
            found.append(frame.f_code)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("name", STEPS)
def test_calls_of_a_step(name):
    make, call, most = STEPS[name]
    layer = make()
    x, t = (torch.randn(n, WIDTH, requires_grad=True) for n in (100, USERS * CANDIDATES))
    with recorded_launches():

        def step():
            call(layer, x, t).sum().backward()

        step()
        found = called_code(step)
    assert len(found) <= most


def test_a_schedule_is_kept_where_another_call_may_find_it():
    """Not that of a map, whose index no other call has. But a map takes none of those that were
    prepared, so there is a warning."""
    layer, (x, t) = jm.JaggedTargetAttention(WIDTH, 2), torch.randn(2, 100, WIDTH)
    t, prepared = t[: USERS * CANDIDATES, None], jm.Jagged(*history(x))
    prepared.prepare(num_heads=2, head_dim=WIDTH // 2, queries=CANDIDATES)
    with recorded_launches():
        kept = jm.Jagged(*history(x))
        layer(t, kept, candidates())
        assert not kept.segmentation.schedules
        index = jm.CandidateIndex.from_map(candidates(), USERS)
        for _ in range(2):
            layer(t, kept, index)
        assert len(kept.segmentation.schedules) == 1
        with pytest.warns(UserWarning, match="no schedule that Jagged.prepare built fits"):
            layer(t, prepared, candidates())


def test_functions_between_a_layer_and_its_launch(monkeypatch):
    """From the layer's forward to the function that launches the kernel, without the functions of
    decorators, which are called "call" and "launch"."""
    from jagged_kernels.attention import op

    frames, launched = [], op.triton_forward

    def note(*arguments):
        frame = sys._getframe()
        while frame := frame.f_back:
            frames.append(frame)
        launched(*arguments)

    monkeypatch.setattr(op, "triton_forward", note)
    make, call, _ = STEPS["target, a map"]
    with recorded_launches():
        call(make(), torch.randn(100, WIDTH), torch.randn(USERS * CANDIDATES, WIDTH))
    ours = [x.f_code.co_name for x in frames if is_ours(x)]
    names = ["triton_forward", *(x for x in ours if x not in ("call", "launch"))]
    assert len(names) <= 8, names
