"""Downloads a published data set: python examples/fetch_data.py ml-100k --to data

The folder data/ml-100k is then a log for --data of the training programs.
"""

import argparse
import sys
from pathlib import Path

from data.datasets import DATASETS, fetch
from training import HelpFormatter


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument("name", choices=DATASETS, help="the data set")
    parser.add_argument("--to", type=Path, default=Path("data"), help="folder for data sets")
    parser.add_argument(
        "--archive", help="path or address of the archive; the data set's own if not given"
    )
    options = parser.parse_args(arguments)
    published = DATASETS[options.name]
    print(f"{options.name}: {published.page}\nlicence: {published.licence}")
    try:
        print(f"written to {fetch(options.name, options.to, options.archive)}")
    except (ValueError, OSError) as error:
        sys.exit(f"fetch_data: {error}")


if __name__ == "__main__":
    main()
