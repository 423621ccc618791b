"""Sphinx's configuration. The source folder is the root of the repository, so that links between
all Markdown files work as they stand."""

import html
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import jagged_modules as jm  # noqa: E402

project = "jagged-modules"
author = "The jagged-modules authors"
copyright = author
version = release = re.search(
    r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
)[1]

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/**/**.md",
    "notebooks/*.ipynb",
    "kernels/README.md",
    "kernels/benchmarks/results/*/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "docs/_build", "build", "dist", "runs", "**/runs"]
html_theme = "furo"
html_title = f"jagged-modules {release}"
html_static_path, html_css_files, html_js_files = ["static"], ["site.css"], ["copy.js"]
html_baseurl = os.environ.get("DOCS_URL", "").rstrip("/")  # where a workflow publishes the site
if os.environ.get("GITHUB_REPOSITORY"):  # as in setup.py: workflows set it
    html_theme_options = {
        "source_repository": f"https://github.com/{os.environ['GITHUB_REPOSITORY']}/",
        "source_branch": "main",
        "source_directory": "",
    }
# A server shows 404.html in place of a page in any folder, so its links are absolute.
templates_path = ["templates"]
html_additional_pages = {"404": "404.html"}
html_context = {"html_baseurl": html_baseurl}
html_extra_path = ["site"]  # index.html: the first page is docs/index.html
html_copy_source = False

linkcheck_retries = 3
nb_execution_mode = "off"  # the notebooks' stored outputs are shown; the tests execute them
nb_merge_streams = True
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
TORCH_PAGES = {
    "torch.Tensor": "tensors.html",
    "torch.dtype": "tensor_attributes.html",
    "torch.device": "tensor_attributes.html",
}
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def to_rst(app, what, name, obj, options, lines):
    """Docstrings are Markdown with Google's sections: turn code, tables and indented formulas into
    reStructuredText."""
    text = re.sub(
        r"(?<!`)`([^`]+)`(?!`)(\w?)",
        lambda code: _code(code[1]) + (f"\\ {code[2]}" if code[2] else ""),
        "\n".join(lines),
    )
    text = re.sub(r"(?:^\|.*\|\n?)+", lambda table: _list_table(table[0]), text, flags=re.MULTILINE)
    # A paragraph, an empty line and an indented one: the indented lines are a formula.
    text = re.sub(r"^(\S.*[^:\n]:?)\n\n(?=    \S)", r"\1\n\n::\n\n", text, flags=re.MULTILINE)
    # Fields of a dataclass, "name: text" with indented further lines, become a list.
    text = re.sub(r"^([a-z_]+): (\S.*(?:\n    \S.*)*)", _list_item, text, flags=re.MULTILINE)
    # |x| is an absolute value, and in reStructuredText a substitution.
    lines[:] = [
        re.sub(r"\|(\w[^|`]*)\|", r"\\|\1\\|", line) if _is_prose(line) else line
        for line in text.split("\n")
    ]


def _code(text):
    """A public name becomes a link."""
    module = next((module for module in (jm, jm.functional) if text in module.__all__), None)
    return f":py:obj:`{text} <{module.__name__}.{text}>`" if module else f"``{text}``"


def _is_prose(line):
    """Not a line of a formula or of code, which have no sentence."""
    return re.search(r"[a-z]{2,} [a-z]+ ", line) is not None


def _list_item(field):
    return f"- ``{field[1]}``: " + re.sub(r"\n +", " ", field[2])


def _list_table(table):
    rows = [
        [cell.strip() for cell in row.strip().strip("|").split("|")]
        for row in table.strip().split("\n")
    ]
    rows = [row for row in rows if not re.fullmatch(r"[\s:-]+", "".join(row))]
    out = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        out += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
    return "\n".join([*out, "", ""])


def add_description(app, pagename, templatename, context, doctree):
    """A page's first paragraph is what search engines show of it."""
    texts = (
        (paragraph.astext() for paragraph in doctree.findall(nodes.paragraph)) if doctree else ()
    )
    text = " ".join(next((text for text in texts if len(text) > 40), "").split())
    if text:
        short = text if len(text) <= 160 else text[:157].rsplit(" ", 1)[0] + " ..."
        context["metatags"] += f'<meta name="description" content="{html.escape(short)}">'


def link_to_torch(app, env, node, text):
    """Links to torch's types, without its inventory: to build the site needs no internet."""
    name = re.sub(r"\.modules\.\w+\.", ".", node.get("reftarget", ""))  # where torch defines it
    page = TORCH_PAGES.get(name, f"generated/{name}.html" if name.startswith("torch.nn.") else None)
    if page:
        address = f"https://docs.pytorch.org/docs/stable/{page}#{name}"
        return nodes.reference("", "", text, internal=False, refuri=address)


def put_forward_first(app, doctree):
    """Before the other methods of a layer. Each has a node with its index entry before its own."""
    for body in doctree.findall(addnodes.desc_content):
        methods = [child for child in body if isinstance(child, addnodes.desc)]
        for method in methods[1:]:
            if method[0].get("fullname", "").endswith(".forward"):
                at = body.index(method) - 1
                pair = body[at : at + 2]
                del body[at : at + 2]
                start = body.index(methods[0]) - 1
                body[start:start] = pair


def setup(app):
    app.connect("html-page-context", add_description)
    app.connect("missing-reference", link_to_torch)
    app.connect("doctree-read", put_forward_first)
    app.connect("autodoc-process-docstring", to_rst, priority=100)  # before napoleon
