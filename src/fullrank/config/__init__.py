"""Typed configuration: `schema` (dataclasses), `registry` (names of stages), `load` (YAML in, YAML out), `recipe` (tables)."""
