"""Makes one page of the viewer's files: markup, style, scripts and what the scripts would ask the server for."""

import base64
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

STATIC = Path(__file__).parents[1] / "static"
_ASKED = re.compile(r" *<(link|script) .*\n")
_FROM = re.compile(r'\bfrom\s*"\./(?:vendor/)?([^"]+)"')
_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src data:; base-uri 'none';"
    " form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def one_page(saved: Mapping[str, str]) -> str:
    """Makes the page as one text of HTML that needs no server.

    `saved` has an answer of the server, compressed by gzip and as base64, by its address below /api/. Scripts and style
    are allowed by a number that is drawn for this file, which no text of a run can have known.
    """
    nonce = secrets.token_urlsafe(16)
    files = [*STATIC.glob("*.js"), *STATIC.glob("vendor/*.js")]
    # A module at a data: address has no folder: its imports are by name.
    modules = {file.name: _data("text/javascript", _FROM.sub(r'from "\1"', file.read_text())) for file in files}
    style = "\n".join(_read(name) for name in ("vendor/uplot.css", "app.css"))
    licences = "\n".join(file.read_text() for file in sorted((STATIC / "vendor").glob("*.LICENSE")))
    head = f"""  <meta http-equiv="Content-Security-Policy" content="{_POLICY.format(nonce)}">
    <link rel="icon" href="{_data("image/svg+xml", _read("icon.svg"))}">
    <style nonce="{nonce}">{style}</style>
    <script type="importmap" nonce="{nonce}">{json.dumps({"imports": modules})}</script>
    <script type="application/json" id="saved">{json.dumps(saved)}</script>
    <script type="module" nonce="{nonce}">import "main.js";</script>
    <!-- Licences of the code of others in this page:
{licences.replace("--", "- -")} -->
  </head>"""
    return _ASKED.sub("", _read("index.html")).replace("</head>", head)


def _data(kind: str, content: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content.encode()).decode()}"


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
