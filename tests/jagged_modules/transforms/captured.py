"""Captures and placements for tests of single steps."""

from jagged_modules.transforms.capture import captured_from, export


def capture(model, args, kwargs, dynamic_shapes=None, replicated=()):
    """Capture the model: see `export`."""
    exported = export(model, args, kwargs, dynamic_shapes, replicated)
    return captured_from(exported, model, args, kwargs)


def everything(analysis, costs, read_in_place=frozenset()):
    """Moves all operators that can be moved, whatever that costs."""
    return set(analysis.moves) | set(analysis.sources)
