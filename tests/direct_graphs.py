"""jm.graphed without a GPU: the padded buffers run through the module where a GPU would replay a
graph."""


class Direct:
    """Runs a step's calls anew each time: what a graph does, without one."""

    pool = None

    def __init__(self, forward, backward, *_):
        self._forward, self._backward, self._outputs = forward, backward, []

    def forward(self):
        self._outputs = self._forward()
        return [x.detach() for x in self._outputs]

    def backward(self):
        outputs, self._outputs = self._outputs, []
        return self._backward(outputs)


def poison(graph, value=float("nan")):
    """Overwrite all buffers but the pages of caches, as if other batches had been there."""
    for step in graph._steps.values():
        buffers = [x for x, kind in zip(step.buffers, step._kinds) if kind != "storage"]
        for x in (*buffers, *(x for x in step.gradients if x is not None)):
            x.data.fill_(value if x.is_floating_point() else -(2**30))
        step._buffers._on_host.fill_(255)
