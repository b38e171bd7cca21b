"""``GET /docs``: the OpenAPI page for people, as one HTML page without scripts.

FastAPI's own pages load scripts and styles from another host and run them with this server's origin. Control of that
host would give access to the API with the reader's rights. This page loads nothing, and its policy tells the browser
so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse

from ..endpoint import endpoint
from .openapi import beside_the_loop

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem; }
code { font: 0.9em ui-monospace, monospace; overflow-wrap: anywhere; }
h2 { border-top: 1px solid #ccc; font-size: 1.1rem; margin: 2rem 0 0.5rem; padding-top: 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0; width: 100%; }
td, th { border-bottom: 1px solid #ddd; padding: 0.25rem 0.75rem 0.25rem 0; text-align: left; vertical-align: top; }
td:first-child { white-space: nowrap; width: 1%; }
nav { column-width: 17rem; }
nav a { display: block; }
.method { display: inline-block; margin-right: 0.5rem; min-width: 4.5rem; font-weight: bold; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } a { color: #8bf; } }
"""
LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} items",
    "maxItems": "≤ {} items",
}
"""How each limit of a schema is shown."""
ALTERNATIVES = ("anyOf", "oneOf")
Schema = Mapping[str, Any]


@endpoint()
async def docs_page(request: Request) -> HTMLResponse:
    """Show an HTML page of every endpoint with the fields of its body and its answers."""
    return HTMLResponse(await beside_the_loop(request, render), headers=HEADERS)


def render(page: Schema) -> str:
    """Render an OpenAPI document as an HTML page."""
    title = f"{page['info']['title']} {page['info']['version']}"
    operations = [
        (method, path, operation) for path, methods in page["paths"].items() for method, operation in methods.items()
    ]
    schemas = sorted(page["components"]["schemas"].items())
    links = "".join(f'<a href="#{_anchor(m, p)}">{_method(m)}<code>{escape(p)}</code></a>' for m, p, _ in operations)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>. Every answer that is no 200 is an '
        '<a href="#ErrorAnswer">ErrorAnswer</a>.</p>'
        f"<nav>{links}</nav>"
        + "".join(_operation(*operation) for operation in operations)
        + "<h1>Objects</h1>"
        + "".join(_object(name, schema) for name, schema in schemas)
        + "</body></html>\n"
    )


def _operation(method: str, path: str, operation: Schema) -> str:
    parameters = [
        _row(f"{one['name']} ({one['in']})", one["schema"], required=one["required"])
        for one in operation.get("parameters", ())
    ]
    body = operation.get("requestBody")
    taken = f"<p>Body: {_contents(body['content'])}{'' if body['required'] else ', or none'}</p>" if body else ""
    answer = _contents(operation["responses"]["200"]["content"])
    return (
        f'<h2 id="{_anchor(method, path)}">{_method(method)}<code>{escape(path)}</code></h2>'
        f"{_text(operation.get('description', ''))}{_table(parameters)}{taken}<p>Answer: {answer}</p>"
    )


def _object(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [_row(field, kind, required=field in required) for field, kind in schema.get("properties", {}).items()]
    shown = "" if "properties" in schema else f"<p>{_type(schema)}</p>"
    return f'<h2 id="{escape(name)}">{escape(name)}</h2>{_text(schema.get("description", ""))}{shown}{_table(rows)}'


def _row(name: str, schema: Schema, *, required: bool) -> str:
    notes = _text(schema.get("description", ""))
    if required:
        notes = f"required{notes}"
    elif schema.get("default") is not None:
        notes = f"default <code>{escape(orjson.dumps(schema['default']).decode())}</code>{notes}"
    return f"<tr><td><code>{escape(name)}</code></td><td>{_type(schema)}</td><td>{notes}</td></tr>"


def _table(rows: list[str]) -> str:
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _contents(content: Schema) -> str:
    return " or ".join(f"{_type(one['schema'])} (<code>{escape(kind)}</code>)" for kind, one in content.items())


def _type(schema: Schema) -> str:
    """Describe a JSON schema in a few words of HTML, with links to the objects that it refers to."""
    if reference := schema.get("$ref"):
        name = escape(reference.rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    for key in ALTERNATIVES:
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if "contentSchema" in schema:
        return f"{_type(schema['contentSchema'])} as text"
    if values := schema.get("enum", [schema["const"]] if "const" in schema else ()):
        return " or ".join(f"<code>{escape(orjson.dumps(value).decode())}</code>" for value in values)
    limits = [words.format(schema[name]) for name, words in LIMITS.items() if name in schema]
    return _plain(schema) + (escape(f" ({', '.join(limits)})") if limits else "")


def _plain(schema: Schema) -> str:
    kind = escape(str(schema.get("type", "anything")))
    if "items" in schema:
        return f"array of [{_type(schema['items'])}]"
    if fields := schema.get("properties"):
        return "{ " + ", ".join(f"<code>{escape(name)}</code>: {_type(kind)}" for name, kind in fields.items()) + " }"
    if isinstance(of := schema.get("additionalProperties"), Mapping):
        return f"object of [{_type(of)}]"
    return kind


def _text(text: str) -> str:
    """Render prose as HTML; text in backquotes becomes ``code``."""
    marked = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text))
    return f"<div>{marked}</div>" if text else ""


def _method(method: str) -> str:
    return f'<span class="method">{escape(method.upper())}</span>'


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}-{path.strip('/')}")
