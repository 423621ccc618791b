"""The flat arguments of attention's operators, and the named fields that they are packed into."""

import pytest
from jagged_kernels.attention.params import AttentionParams

from jagged_modules.cpu.attention import attention_cpu, attention_cpu_backward


def _names(operator) -> list[str]:
    return [
        argument.name for argument in getattr(operator, "_opoverload", operator)._schema.arguments
    ]


def test_the_cpus_operators_end_with_the_parameters():
    for operator in (attention_cpu, attention_cpu_backward):
        assert _names(operator)[-len(AttentionParams._fields) :] == list(AttentionParams._fields)


def test_the_gpus_operators_end_with_the_parameters():
    op = pytest.importorskip("jagged_kernels.attention.op")
    forward, backward = _names(op.triton_attention), _names(op.triton_attention_backward)
    assert forward[op._PARAMS] == list(AttentionParams._fields) and forward[op._PARAMS.stop :] == [
        "clear_tail"
    ]
    assert backward == ["do", "out", "lse", *forward], "autograd passes the forward's arguments on"
    types = [str(argument.type) for argument in op.triton_attention._schema.arguments][
        : op._PARAMS.stop
    ]
    options = types[op._OPTIONS]
    assert "Tensor" not in "".join(options) and len(options) + sum(
        "Tensor" in x for x in types
    ) == len(types), "autograd saves the others"
