"""Web page at `/`: one file of HTML with its styles and scripts, and the policy that lets the browser run no others."""

import base64
import hashlib
from importlib.resources import files


def _part(*names: str) -> str:
    place = files("expertmesh.serve")
    return "".join(place.joinpath(name).read_text(encoding="utf-8") for name in names)


def _source(text: str) -> str:
    """Source expression of an inline style or script, for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE, _CODE = _part("page.css"), _part("page.js", "page_requests.js")
PAGE = _part("page.html").replace("<!--STYLE-->", _STYLE, 1).replace("<!--CODE-->", _CODE, 1)
PAGE_HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source(_STYLE)}",
            f"script-src {_source(_CODE)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "x-content-type-options": "nosniff",
}
