"""`expertmesh data lohelp`: makes parallel text from Debian's packages of LibreOffice's help."""

from expertmesh.cli.flags import OptionParser
from expertmesh.config.base import expanded, user_cache_dir


def run(argv: list[str]) -> int:
    """Writes the files and says what they are; returns 0.

    Args:
        argv: words after `data`.

    Raises:
        ConfigError: the packages are missing or damaged.
    """
    from expertmesh.data.lohelp import INSTALLED, extract, extract_headings

    parser = OptionParser(
        prog="expertmesh data",
        description="Makes data for training. lohelp: LibreOffice's help, parallel in all languages whose packages there are.",
        epilog="get them: apt-get download libreoffice-help-en-us libreoffice-help-de libreoffice-help-fr",
    )
    parser.add_argument("name", choices=["lohelp"], help="what to make")
    parser.add_argument(
        "--packages",
        default=str(INSTALLED),
        metavar="DIR",
        help=f"folder with libreoffice-help-*.deb, or with the help itself ({INSTALLED})",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="where the files go (a folder where recipes look for lohelp)",
    )
    parser.add_argument(
        "--headings",
        action="store_true",
        help="instead of lines: pages' headings, and what is below them as languages LANG_body",
    )
    options = parser.parse_args(argv)
    usual = user_cache_dir() / ("lohelp-headings" if options.headings else "lohelp")
    output = usual if options.output is None else expanded(options.output)
    found = (extract_headings if options.headings else extract)(expanded(options.packages), output)
    counts = ", ".join(f"{count:,} {split}" for split, count in found.num_lines.items())
    print(f"{found.folder}: {counts} lines in {' '.join(found.languages)}")
    return 0
