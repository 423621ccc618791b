"""The two packages and where they lie. Metadata and tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(".", include=["jagged_modules*"]), *find_packages("kernels", include=["jagged_kernels*"])],
    package_dir={"jagged_kernels": "kernels/jagged_kernels"},
    package_data={"jagged_modules": ["py.typed"], "jagged_kernels": ["py.typed"]},
)
