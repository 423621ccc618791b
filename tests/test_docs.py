"""The API reference has every public name, and each name's docstring gives shapes and errors."""

import contextvars
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import jagged_modules as jm
from jagged_modules import flops, transforms
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS

ROOT = Path(__file__).parents[1]
NAMES = {
    **{name: getattr(jm, name) for name in jm.__all__},
    **{f"functional.{name}": getattr(F, name) for name in F.__all__},
    **{f"transforms.{name}": getattr(transforms, name) for name in transforms.__all__},
}
FUNCTIONS = {name: value for name, value in NAMES.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in NAMES.items() if inspect.isclass(value)}
LAYERS = {
    name: value for name, value in CLASSES.items() if issubclass(value, jm.JaggedMLP.__base__)
}
# by classmethods, functions or errors
MADE_BY_OTHERS = {"CacheFull", "CacheStatistics", "CandidateIndex", "TileSchedule"}
MADE_BY_OTHERS |= {
    "Pages",
    "PaddedComparison",
    "functional.ScorePlan",
    "transforms.OperatorSizes",
    "transforms.Ranges",
    "transforms.Report",
    "transforms.Site",
    "transforms.Times",
}
MADE_BY_OTHERS |= {
    name for name, value in CLASSES.items() if value.__module__.endswith("containers.history_cache")
}
CONSTRUCTED = {name: value for name, value in CLASSES.items() if name not in MADE_BY_OTHERS}
WITHOUT_TENSORS = {
    "GDPAConfig",
    "HSTUConfig",
    "backward_workspace",
    "batch_invariant",
    "debug_checks",
    "graphed",
    "precompiled",
    "zigzag_schedule",
}


def sections(value: object) -> set[str]:
    return set(re.findall(r"^(\w+):$", inspect.getdoc(value) or "", re.MULTILINE))


def methods(cls: type) -> dict[str, object]:
    """The public methods and properties that the class defines, or another module that it is."""
    functions = {
        name: getattr(value, "__func__", value)
        for base in reversed(cls.__mro__)
        if base is cls or (issubclass(base, nn.Module) and base.__module__.startswith("jagged_"))
        for name, value in vars(base).items()
        if not name.startswith("_")
    }
    return {
        name: value
        for name, value in functions.items()
        if inspect.isfunction(value) or isinstance(value, property)
    }


METHODS = {
    f"{name}.{method}": value
    for name, cls in CLASSES.items()
    for method, value in methods(cls).items()
}
METHODS = {
    name: value
    for name, value in METHODS.items()
    if inspect.isfunction(value) and not name.endswith("extra_repr")
}
DOCUMENTED = FUNCTIONS | METHODS | {name: cls.__init__ for name, cls in CONSTRUCTED.items()}


def test_the_reference_has_each_public_name():
    text = "\n".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
    )
    listed = re.findall(r"^\.\. auto\w+:: jagged_modules\.([\w.]+)", text, re.MULTILINE)
    assert len(listed) == len(set(listed)) and set(listed) == {*NAMES, "flops"}


@pytest.mark.parametrize("name", CLASSES)
def test_the_reference_has_each_public_method(name):
    """Methods that users call, and properties."""
    text = "\n".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
    )
    listed = (
        re.search(
            rf"autoclass:: jagged_modules\.{re.escape(name)}(?:\(.*\))?\n(?:   :members: (.*))?",
            text,
        )[1]
        or ""
    )
    public = methods(CLASSES[name]).keys() - {"extra_repr"}
    assert public == set(listed.split(", ")) - {""}


def test_tests_that_pages_name_exist():
    """For example those of each fault in docs/serving.md."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    pages = [
        ROOT / "CONTRIBUTING.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
    ]
    named = {
        name
        for page in pages
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert named <= set(re.findall(r"def (test_\w+)\(", code))


def test_private_names_that_pages_give_exist():
    """These pages explain the code by names of its functions, which change more often than public
    ones."""
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("jagged_modules", "kernels")
        for path in (ROOT / folder).rglob("*.py")
    )
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md"]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")]
    named = {
        name for page in pages for name in re.findall(r"`(_\w+)`", page.read_text(encoding="utf-8"))
    }
    assert named
    assert {name for name in named if not re.search(rf"\b{name}\b", code)} == set()


def entries(docstring: str, section: str) -> list[str]:
    """The first line of each entry of a section. Further lines of an entry have a greater indent,
    which the site needs too."""
    lines = re.search(rf"^{section}:\n((?: .*\n|\n(?= ))*)", docstring + "\n", re.MULTILINE)
    return re.findall(r"^    (\S.*)", lines[1], re.MULTILINE) if lines else []


def described(docstring: str) -> list[str]:
    """The arguments with an entry of their own, or one that they share: "k, v: text"."""
    return [
        name
        for line in entries(docstring, "Args")
        for name in re.match(r"[\w, ]*", line)[0].split(", ")
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_an_entry_for_each_argument(name):
    assert set(described(inspect.getdoc(FUNCTIONS[name]))) == set(
        inspect.signature(FUNCTIONS[name]).parameters
    )


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_name_each_argument_and_error(name):
    """An argument has an entry, or the text of a short docstring names it. Each line of Raises is
    one entry."""
    docstring = inspect.getdoc(NAMES.get(name, DOCUMENTED[name]))
    arguments = inspect.signature(DOCUMENTED[name]).parameters.keys() - {
        "self",
        "cls",
        "args",
        "kwargs",
    }
    assert {
        argument for argument in arguments if not re.search(rf"\b{argument}\b", docstring)
    } == set()
    assert set(described(docstring)) <= arguments
    errors = r"\w+(, \w+)*: (?!.*\. \w*Error: )"
    assert [line for line in entries(docstring, "Raises") if not re.match(errors, line)] == []
    # would be a type
    assert [
        line for line in entries(docstring, "Returns") if re.match(r"[A-Z][^`:]*[a-z]: ", line)
    ] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_document_arguments_shapes_and_errors(name):
    assert sections(FUNCTIONS[name]) >= {"Args", "Returns", "Raises"} - (
        {"Returns"} if name in ("graphed", "precompiled") else set()
    )
    assert name in WITHOUT_TENSORS or "`[" in FUNCTIONS[name].__doc__


def test_attention_documents_each_activation():
    documented = re.search(r"activation: (.*?)\n {8}\w+:", F.jagged_attention.__doc__, re.DOTALL)[1]
    assert set(re.findall(r'"(\w+)"', documented)) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_classes_document_arguments_and_errors(name):
    assert sections(CONSTRUCTED[name]) >= {"Args", "Raises"}
    arguments = set(inspect.signature(CONSTRUCTED[name].__init__).parameters) - {
        "self",
        "args",
        "kwargs",
    }
    assert [
        argument
        for argument in arguments
        if not re.search(rf"\b{argument}\b", CONSTRUCTED[name].__doc__)
    ] == []


@pytest.mark.parametrize("name", LAYERS)
def test_layers_document_shapes_and_errors_of_forward(name):
    assert sections(LAYERS[name].forward) >= {"Args", "Returns", "Raises"}
    assert "`[" in LAYERS[name].forward.__doc__ and "Example::" in LAYERS[name].__doc__


@pytest.mark.parametrize("name", CLASSES)
def test_methods_have_docstrings(name):
    assert "__doc__" in vars(CLASSES[name]) and CLASSES[name].__doc__
    assert [
        method
        for method, value in methods(CLASSES[name]).items()
        if not value.__doc__ and method != "extra_repr"
    ] == []


EXAMPLES = {
    name: inspect.getdoc(value) for name, value in (NAMES | METHODS | {"flops": flops}).items()
}
EXAMPLES = {
    name: re.findall(r"^Example::\n\n((?:    .*\n|\n)+)", f"{text}\n", re.MULTILINE)
    for name, text in EXAMPLES.items()
}


@pytest.mark.parametrize("name", [name for name, found in EXAMPLES.items() if found])
def test_examples_run(name):
    """Each by itself, and the settings that it changes are forgotten. Longer lines must be scrolled
    on the site."""
    (code,) = (textwrap.dedent(code) for code in EXAMPLES[name])
    assert [line for line in code.splitlines() if len(line) > 100] == []
    contextvars.copy_context().run(
        exec, compile(code, name, "exec"), {"torch": torch, "jm": jm, "F": F}
    )
