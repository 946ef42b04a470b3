"""Web page at `/`, a self-contained HTML file."""

from importlib.resources import files

PAGE = files("expertmesh.serve").joinpath("page.html").read_text(encoding="utf-8")
