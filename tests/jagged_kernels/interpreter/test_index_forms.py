"""Every tensor of indices in every form gives the plain form's results and gradients, with the
kernels run by the interpreter."""

import pytest
from index_calls import FUNCTIONS, JOINT, arguments_of, check_function, check_joint_forms
from space import OPERATORS

NAMES = [
    name for name, (function, _, _) in FUNCTIONS.items() if OPERATORS[function].implementations
]


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name in NAMES for argument in arguments_of(name)]
)
def test_an_argument(name, argument):
    check_function(name, argument, "interpreter")


@pytest.mark.parametrize("name", NAMES)
def test_all_arguments(name):
    check_joint_forms(name, "interpreter", "eager", JOINT)
