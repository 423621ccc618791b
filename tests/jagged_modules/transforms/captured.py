"""Captures and placements for tests of single steps."""

from jagged_modules.transforms.capture import Example, captured_from, export


def capture(model, args, kwargs, dynamic_shapes=None, replicated=()):
    """Capture the model: see `export`."""
    example = Example(model, args, kwargs)
    return captured_from(export(example, dynamic_shapes, replicated), example)


def everything(analysis, costs, read_in_place=frozenset()):
    """Moves all operators that can be moved, whatever that costs."""
    return set(analysis.moves) | set(analysis.sources)
