"""Docstrings as `make docs` reads them: `Example:` of this project is the section that griffe calls `Examples:`."""

import re

import griffe

EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Names the section before it is parsed, so that its code is shown as code."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub("Examples:", obj.docstring.value)
