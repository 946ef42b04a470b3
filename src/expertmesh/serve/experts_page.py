"""The page at `/`: one file without anything from elsewhere."""

from importlib.resources import files

PAGE = files("expertmesh.serve").joinpath("page.html").read_text(encoding="utf-8")
