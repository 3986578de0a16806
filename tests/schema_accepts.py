"""The part of JSON schema that our schema uses."""


def accepts(schema, value, root):
    """True if `schema`, a part of `root`, accepts `value`."""
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema:
        return any(accepts(choice, value, root) for choice in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    number = isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {
        "object": isinstance(value, dict), "array": isinstance(value, list), "string": isinstance(value, str),
        "null": value is None, "boolean": isinstance(value, bool), "number": number, "integer": number and value == int(value),
    }  # fmt: skip
    if "type" in schema and not kinds[schema["type"]]:
        return False
    if isinstance(value, dict) and "properties" in schema:
        properties = schema["properties"]
        if schema.get("additionalProperties") is False and set(value) - set(properties):
            return False
        return all(accepts(properties[key], value[key], root) for key in value if key in properties)
    return True
