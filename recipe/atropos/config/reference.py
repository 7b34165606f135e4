"""``docs/configuration.md``: every documented key, from the schema and the shipped defaults.

python -m recipe.atropos.config.reference > docs/configuration.md
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from recipe.atropos.config.compose import compose_config
from recipe.atropos.config.schema import documented

_HEAD = """\
# Configuration

Made by `python -m recipe.atropos.config.reference`; a test fails where it is not current.

Each key can be given as `KEY=VALUE` on the command line of `recipe.atropos.launch_services` and `recipe.atropos.main`,
or in a YAML file (`--config FILE`) over [`trainer.yaml`](../recipe/atropos/config/trainer.yaml) and a preset, in this
order of precedence: command line, file, preset, `trainer.yaml`, verl's `ppo_trainer`. Keys, values, the model, SGLang's
interpreter and the environment's class and flags are checked before anything is started. A key that does not exist is
an error that names the nearest one, with or without `+`; so is a key of verl's that has no effect here
([`unsupported.py`](../recipe/atropos/config/unsupported.py)), which names what to set instead. `environment.args={}`
empties a mapping; a preset's `environment.args` are left out where you name another `environment.target`.

Keys of verl's that are not listed keep verl's meaning.
"""


def reference() -> str:
    """Return the whole page, in Markdown."""
    defaults = compose_config([])
    sections: dict[str, list[str]] = {}
    for key, field in documented().items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        cells = (f"`{key}`", _kind(field), _default(key, defaults), field.description or "")
        row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
        sections.setdefault(key.rpartition(".")[0], []).append(row)
    tables = (
        f"\n## {name or 'At the top'}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{''.join(rows)}"
        for name, rows in sections.items()
    )
    return _HEAD + "".join(tables)


def _kind(field: FieldInfo) -> str:
    annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    config = ConfigDict(arbitrary_types_allowed=True)
    own = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    schema = TypeAdapter(annotation, config=None if own else config).json_schema()
    return _named(schema, schema.get("$defs", {}))


def _named(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _named(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_named(choice, definitions) for choice in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_named(schema.get('items', {}), definitions)}"
    words = {"integer": "integer", "number": "number", "boolean": "true, false", "object": "mapping"}
    name = words.get(schema.get("type", ""), schema.get("type", "any"))
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join([name, *(f"{sign} {schema[limit]:g}" for limit, sign in limits.items() if limit in schema)])


def _default(key: str, defaults: DictConfig) -> str:
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(defaults, parent) if parent else defaults
    if section is None or name not in section:
        return ""
    value = OmegaConf.to_container(section, resolve=False)[name]  # type: ignore[index]
    if isinstance(value, str) and (followed := re.fullmatch(r"\$\{([\w.]+)\}", value)):
        return f"follows `{followed.group(1)}`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    print(reference(), end="")
