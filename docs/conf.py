"""The book: `make book` builds it with Sphinx (docs/adr/0014-the-book.md)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import latex2mathml.converter
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from fullrank.config.schema import json_schema

project = "fullrank"
author = copyright = "The fullrank authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results/claims"]
html_theme = "furo"
html_title = "fullrank"
html_static_path = ["book"]
html_css_files = ["book.css"]
html_copy_source = html_show_sourcelink = False
html_math_renderer = "mathml"
highlight_language = "text"
default_role = "code"

myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page of results begins with a comment

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
python_maximum_signature_line_length = 100

linkcheck_timeout = 20
linkcheck_retries = 2


def mathml(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write an equation as MathML, which browsers show without a script."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    self.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise nodes.SkipNode


def escape(line: str) -> str:
    """Escape what reStructuredText would read as markup."""
    return re.sub(r"([\\*|])|_(?=\W|$)", lambda match: "\\" + match[0], line)


def convert_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Make reStructuredText of our docstrings, plain text with indented equations. A configuration lists its keys.

    Sections such as `Args` are lists of fields already, which begin with a colon.
    """
    source = list(lines)
    lines.clear()
    literal = False
    in_item = False
    if isinstance(thing, type) and dataclasses.is_dataclass(thing):
        described = [
            (field.name, field.metadata["description"]) for field in dataclasses.fields(thing) if field.metadata
        ]
        source += ["", *(f"- `{key}`: {words}" for key, words in described)]
    for line in source:
        before = next((earlier for earlier in reversed(lines) if earlier.strip()), "")
        if line.startswith(" ") and not literal and lines and not lines[-1].strip():
            literal = True
            lines.extend([] if before.endswith("::") else ["::", ""])
        literal = literal and (not line.strip() or line.startswith(" "))
        in_item = line.startswith(("-", ":")) or (in_item and line.startswith(" "))
        # any other indented line goes on with its paragraph
        lines.append(line if literal else escape(line if in_item else line.strip()))


def allowed(schema: dict[str, Any]) -> str:
    """Describe the values that a key of a JSON schema may have."""
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(allowed(choice) for choice in schema["anyOf"]))
    words = {
        "integer": "whole number",
        "boolean": "`true`, `false`",
        "string": "text",
        "object": "mapping",
        "array": "list",
    }
    return words.get(schema.get("type", ""), str(schema.get("type", "any")))


def tables_of(name: str, section: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of a section of a JSON schema and of all sections in it, each under a heading."""
    yield f"\n## {name}\n\n| key | default | values | meaning |\n| --- | --- | --- | --- |\n"
    inner: dict[str, dict[str, Any]] = {}
    for key, schema in section["properties"].items():
        reference = re.search(r'"#/\$defs/(\w+)"', json.dumps(schema))
        if reference is not None and definitions[reference[1]] is not section:
            inner[f"{name}.{key}{'[]' if 'array' in json.dumps(schema) else ''}"] = definitions[reference[1]]
            continue
        default = f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
        cells = [f"`{key}`", default, allowed(schema), schema.get("description", "")]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"
    for path, deeper in inner.items():
        yield from tables_of(path, deeper, definitions)


def add_keys(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the tables of all keys into the page about them, from the schema that `config schema` prints."""
    if page == "keys":
        schema = json_schema()
        for name, section in schema["properties"].items():
            definition = schema["$defs"][section["$ref"].rpartition("/")[2]]
            source[0] += "".join(tables_of(name, definition, schema["$defs"]))


def setup(app: Sphinx) -> None:
    """Connect the functions of this file to Sphinx."""
    app.connect("source-read", add_keys)
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("autodoc-process-docstring", convert_docstring)
