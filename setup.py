"""The packages and where they lie, and the metadata that names the repository. The rest and
tool settings are in pyproject.toml."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

# The only place that says where the project is published. Workflows set these variables. Without
# them, the metadata have no addresses.
REPOSITORY, REF = os.environ.get("GITHUB_REPOSITORY"), os.environ.get("GITHUB_REF_NAME", "main")
ADDRESS = REPOSITORY and f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{REPOSITORY}"


def readme() -> str:
    """README.md. A package index shows it without the files that it links to, so the links lead to
    the repository if that is known."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not ADDRESS:
        return text

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}({ADDRESS}/{kind}/{REF}/{link[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", absolute, text)


def project_urls() -> dict[str, str]:
    """The links beside the README on a package index."""
    urls = {
        "Repository": ADDRESS,
        "Documentation": os.environ.get("DOCS_URL") or f"{ADDRESS}/blob/{REF}/docs/index.md",
        "Changelog": f"{ADDRESS}/blob/{REF}/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
    }
    return urls if ADDRESS else {}


EXAMPLES = "jagged_modules.examples"

setup(
    packages=[
        *find_packages(".", include=["jagged_modules*"]),
        *find_packages("kernels", include=["jagged_kernels*"]),
        *(EXAMPLES, f"{EXAMPLES}.data", f"{EXAMPLES}.models"),
    ],
    package_dir={"jagged_kernels": "kernels/jagged_kernels", EXAMPLES: "examples"},
    package_data={
        "jagged_modules": ["py.typed", "cpp/*.cpp", "cpp/*.h"],
        EXAMPLES: ["*.html", "*.mplstyle", "Caddyfile"],
        "jagged_kernels": ["py.typed"],
    },
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
)
