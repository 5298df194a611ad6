"""Makes one page of the viewer's files: markup, style, scripts and what the scripts would ask the server for."""

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import\s*(?:(\w+)\s+)?(?:\{([^}]*)\}\s*)?from\s*"([^"]+)";?', re.MULTILINE)
_FORWARD = re.compile(r'^export\s*\{([^}]*)\}\s*from\s*"([^"]+)";?', re.MULTILINE)
_LIST = re.compile(r"\bexport\s*\{([^}]*)\};?")
_NAMED = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_DEFAULT = "export default "
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; base-uri 'none';"
    " form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def one_page(saved: Mapping[str, str]) -> str:
    """Makes the page as one text of HTML that needs no server.

    `saved` has an answer of the server, compressed by gzip and as base64, by its address below /api/.
    """
    script, style = bundle("main.js"), "\n".join(_read(name) for name in ("vendor/uplot.css", "app.css"))
    icon = base64.b64encode(_read("icon.svg").encode()).decode()
    policy = _POLICY.format(script=_hash(script), style=_hash(style))
    licences = "\n".join(file.read_text() for file in sorted((STATIC / "vendor").glob("*.LICENSE")))
    return f"""<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta http-equiv="Content-Security-Policy" content="{policy}">
    <title>SplitPPO</title>
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <link rel="icon" href="data:image/svg+xml;base64,{icon}">
    <style>{style}</style>
  </head>
  <body>
    <div id="app"></div>
    <noscript>This page needs JavaScript.</noscript>
    <script type="application/json" id="saved">{json.dumps(saved)}</script>
    <script type="module">{script}</script>
    <!-- Licences of the code of others in this page:
{licences.replace("--", "- -")} -->
  </body>
</html>
"""


def bundle(name: str) -> str:
    """Joins a module of the pages with all that it imports into one script; every module becomes a function's value."""
    made: dict[str, str] = {}
    _add(name, made)
    script = "\n".join(made.values())
    if re.search(r"</script|<!--", script, re.IGNORECASE):
        raise ValueError("a script has a text that ends a script")
    return script


def _add(name: str, made: dict[str, str]) -> None:
    """Adds a module after those that it imports."""
    source = _read(name)
    imported = [found[3] for found in _IMPORT.finditer(source)] + [found[2] for found in _FORWARD.finditer(source)]
    for other in imported:
        if _path(name, other) not in made:
            _add(_path(name, other), made)
    exported: list[str] = []

    def bound(found: re.Match[str]) -> str:
        default, names, other = found.groups()
        parts = [f"default: {default}"] if default else []
        parts += [part.replace(" as ", ": ") for part in (names or "").split(",") if part.strip()]
        return f"const {{ {', '.join(parts)} }} = {_variable(_path(name, other))};"

    def forwarded(found: re.Match[str]) -> str:
        names, other = found[1].split(","), _variable(_path(name, found[2]))
        exported.extend(f"{one.strip()}: {other}.{one.strip()}" for one in names if one.strip())
        return ""

    def listed(found: re.Match[str]) -> str:
        for part in filter(str.strip, found[1].split(",")):
            inner, _, outer = part.strip().partition(" as ")
            exported.append(f"{outer or inner}: {inner}")
        return ""

    def named(found: re.Match[str]) -> str:
        exported.append(found[2])
        return f"{found[1]} {found[2]}"

    for pattern, change in ((_IMPORT, bound), (_FORWARD, forwarded), (_LIST, listed), (_NAMED, named)):
        source = pattern.sub(change, source)
    if _DEFAULT in source:
        source = source.replace(_DEFAULT, "const exportedByDefault = ")
        exported.append("default: exportedByDefault")
    made[name] = f"const {_variable(name)} = (() => {{\n{source}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _path(name: str, other: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), other))


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
