"""Runs a program of this folder by its name, as python -m jagged_modules.examples train_hstu --help
does with an installed package, where the folder has that name. Without a name, lists them."""

import ast
import re
import runpy
import sys
from pathlib import Path


def programs() -> dict[str, Path]:
    files = sorted(Path(__file__).parent.glob("[!_]*.py"))
    return {
        file.stem: file for file in files if '__name__ == "__main__"' in file.read_text("utf-8")
    }


def main(arguments: list[str]) -> None:
    found = programs()
    if not arguments or arguments[0] in ("-h", "--help"):
        for name, file in found.items():
            docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
            sentence = re.split(r"[.:;](?: |$)", " ".join(docstring.split()))[0]
            print(f"{name:20}{sentence}")
    elif arguments[0] not in found:
        sys.exit(f"there is no program {arguments[0]!r}; choose from {', '.join(found)}")
    else:
        program = str(found[arguments[0]])
        # as a file, whose folder Python then searches for the modules beside it
        sys.argv, sys.path[0] = [program, *arguments[1:]], str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")


main(sys.argv[1:])
