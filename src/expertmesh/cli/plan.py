"""`expertmesh plan`: what a mixture costs on a cluster before anyone pays for it. Never imports torch."""

from expertmesh.cli.flags import OptionParser

_EXAMPLES = """\
examples:
  expertmesh plan --validate
"""


def run(argv: list[str]) -> int:
    """Runs the verb; returns 0.

    Args:
        argv: words after `plan`.

    Raises:
        ConfigError: a word breaks a rule.
    """
    options = _parser().parse_args(argv)
    if options.validate:
        return _validate()
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="expertmesh plan",
        description="Says what a model costs on a cluster: memory, time, days and price, with error bars.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="fit the model's constants again, and compare all published rows",
    )
    return parser


def _validate() -> int:
    from expertmesh.planner.table import validation_text
    from expertmesh.planner.validation import validate

    print(validation_text(validate()))
    return 0
