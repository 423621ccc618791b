"""Packages and their optional extras. Tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="jagged-modules",
    version="0.1.0",
    description="PyTorch layers for variable-length recommendation inputs: no padding, no replicated user data.",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(".", include=["jagged_modules*"]), *find_packages("kernels", include=["jagged_kernels*"])],
    package_dir={"jagged_kernels": "kernels/jagged_kernels"},
    install_requires=["torch>=2.11"],
    extras_require={
        # torchrec names the CUDA fbgemm-gpu; the Makefile shows the installation for a machine without a GPU.
        "torchrec": ["torchrec>=1.6"],
        # CUDA builds of torch bring their own triton, so this changes nothing there.
        "triton": ["triton>=3.6"],
        "notebooks": ["nbclient", "ipykernel", "matplotlib", "tqdm"],
        # numpy: triton 3.6's interpreter, which the kernel tests run in, fails with 2.4 and newer.
        "dev": ["pytest>=8", "pytest-xdist", "hypothesis", "expecttest", "numpy<2.4", "ruff", "setuptools>=77", "wheel"],
    },
)
