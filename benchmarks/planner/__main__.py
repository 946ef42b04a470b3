"""`python -m benchmarks.planner`: errors of the planner's models on published measurements; `--claims`: claimed
speed-ups."""

import argparse
import sys

from benchmarks.planner.tables import claims_text, validation_text
from benchmarks.planner.validation import validate

from expertmesh.errors import ConfigError
from expertmesh.planner.own import own_points


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 2 for a file of measurements that breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--claims",
        action="store_true",
        help="speed-ups that Tutel and DeepSpeed claim, beside the model's, and what they assume",
    )
    which.add_argument("--measured", metavar="FILE", help="your own measurements (TOML), added to the fit")
    options = parser.parse_args(argv)
    try:
        own = () if options.measured is None else own_points(options.measured)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(claims_text() if options.claims else validation_text(validate(own)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
