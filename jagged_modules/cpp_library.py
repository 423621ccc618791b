"""Compiles the operators that exported models call, for programs without Python.

    python -m jagged_modules.cpp_library --out libjagged_modules.so

A program loads the library with dlopen or LD_PRELOAD, then packages of AOTInductor. It needs g++,
and torch's headers and libraries, which this Python has. The library runs with torch 2.11 and
newer.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

SOURCES = Path(__file__).with_name("cpp")
OLDEST_TORCH = 0x020B000000000000  # 2.11, as torch/headeronly/version.h writes it


def command(out: Path, march: str = "native") -> list[str]:
    """The compiler's. march: g++'s option, the processors that the library is for."""
    torch_folder = Path(torch.__file__).parent
    return [
        *("g++", "-std=c++17", "-O3", f"-march={march}", "-shared", "-fPIC", "-fvisibility=hidden"),
        *("-Wall", "-DTORCH_STABLE_ONLY", f"-DTORCH_TARGET_VERSION={OLDEST_TORCH:#018x}"),
        f"-I{torch_folder / 'include'}",
        *map(str, sorted(SOURCES.glob("*.cpp"))),
        f"-L{torch_folder / 'lib'}",
        *("-Wl,--as-needed", "-ltorch_cpu", "-o", str(out)),
    ]


def export_for_cuda(
    model: nn.Module,
    args: tuple[Any, ...],
    kernels: str | Path,
    capability: tuple[int, int] | None = None,
    **options: Any,
) -> torch.export.ExportedProgram:
    """As `torch.export.export`, of a model on CUDA, with our operators as launches of compiled
    kernels, which the library makes without Python. No gradients.

    Args:
        kernels: the folder that gets the cubins. A program finds it by the environment variable
            JAGGED_CUBINS. Several models may share one.
        capability: compute capability of the GPUs that will run the model; None: this one's.
        options: of `torch.export.export`, such as dynamic_shapes.
    """
    from jagged_kernels.precompile.traced import traced_launches

    capability = capability or torch.cuda.get_device_capability()
    folder, forward = Path(kernels), model.forward
    folder.mkdir(parents=True, exist_ok=True)

    @functools.wraps(forward)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with traced_launches(folder, capability):
            return forward(*args, **kwargs)

    with torch.no_grad(), mock.patch.object(model, "forward", traced):
        return torch.export.export(model, args, strict=False, **options)


def package(program: torch.export.ExportedProgram, path: str | Path, **options: Any) -> str:
    """As `torch._inductor.aoti_compile_and_package`, of a package in which an operator's error
    ends the call: those of torch 2.11 go on with what the operator left.

    Args:
        options: such as inductor_configs.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    write, ignored = PythonWrapperCodegen.writeline, "aoti_torch_proxy_executor_call_function("

    def checked(wrapper: PythonWrapperCodegen, line: Any) -> None:
        if isinstance(line, str) and line.startswith(ignored):
            line = f"AOTI_TORCH_ERROR_CODE_CHECK({line.removesuffix(';')});"
        write(wrapper, line)

    with mock.patch.object(PythonWrapperCodegen, "writeline", checked):
        return torch._inductor.aoti_compile_and_package(program, package_path=str(path), **options)


def main(argv: Iterable[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="the library to write")
    parser.add_argument("--march", default="native", help="of g++ (default: this machine)")
    options = parser.parse_args(argv if argv is None else list(argv))
    subprocess.run(command(options.out, options.march), check=True)


if __name__ == "__main__":
    main()
