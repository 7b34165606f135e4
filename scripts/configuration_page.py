"""``docs/configuration.md``: every documented key, from the schema and the shipped defaults.

python scripts/configuration_page.py > docs/configuration.md
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of this checkout, whichever is installed
from recipe.atropos.config.compose import compose_config  # noqa: E402
from recipe.atropos.config.schema import documented  # noqa: E402
from recipe.atropos.watchdog.alarms import Name as AlarmName  # noqa: E402

_HEAD = """\
# Configuration

Made by `python scripts/configuration_page.py`.

Give a key as `KEY=VALUE` to `recipe.atropos.launch_services` or `recipe.atropos.main`, or in YAML
(`--config FILE`). Precedence: command line, file, preset,
[`trainer.yaml`](../recipe/atropos/config/trainer.yaml), verl's `ppo_trainer`. Everything is checked before anything
starts. An unknown key, with or without `+`, is an error that names the nearest; so is a key of verl's without effect
here ([`unsupported.py`](../recipe/atropos/config/unsupported.py)), with what to set instead; verl's other keys keep
their meaning. `environment.args={}` empties a mapping; another `environment.target` leaves out a preset's
`environment.args`. A key whose default is `null` may be `null`, except the model's path.
"""


def reference() -> str:
    """Return the whole page, in Markdown."""
    defaults = compose_config([])
    sections: dict[str, dict[str, tuple[str, ...]]] = {}
    for key, field in documented().items():
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        if is_section or key.startswith("environments.NAME."):
            continue
        section, _, name = key.rpartition(".")
        default = _default(key, defaults)
        kind = _kind(field).removesuffix(" or null") if default == "`null`" else _kind(field)
        sections.setdefault(section, {})[name] = (kind, field.description or "", default)
    pages: dict[str, list[str]] = {}
    for section in sections:
        pages.setdefault(".".join(section.split(".")[:2]), []).append(section)
    return _HEAD + "".join(f"\n## {name or 'At the top'}\n\n{_body(pages[name], sections)}" for name in pages)


def _body(page: Sequence[str], sections: Mapping[str, Mapping[str, tuple[str, ...]]]) -> str:
    """One table of the keys of these sections, and a sentence for each that repeats the keys of an earlier one."""
    repeated = {section: sentence for section in page if (sentence := _repetition(section, sections))}
    rows = [_rows(section, sections[section]) for section in page if section not in repeated]
    table = "| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    return "\n".join([table, *repeated.values()])


def _repetition(section: str, sections: Mapping[str, Mapping[str, tuple[str, ...]]]) -> str | None:
    """Of a section that has the keys of an earlier one: which, those that it lacks, and the defaults that differ."""
    keys = sections[section]
    for other in list(sections)[: list(sections).index(section)]:
        if {(name, *row[:2]) for name, row in keys.items()} <= {
            (name, *row[:2]) for name, row in sections[other].items()
        }:
            lacking = [f"no `{name}`" for name in sections[other] if name not in keys]
            differ = [f"`{name}`: {keys[name][2]}" for name in keys if keys[name] != sections[other][name]]
            but = f", but {', '.join(lacking + differ)}" if lacking + differ else ""
            return f"`{section}` has the keys of `{other}`, with the same defaults{but}.\n"
    return None


def _rows(section: str, keys: Mapping[str, tuple[str, ...]]) -> str:
    prefix = f"{section}." if section else ""
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{prefix}{name}`", kind, default, meaning)) + " |\n"
        for name, (kind, meaning, default) in keys.items()
    )


def _kind(field: FieldInfo) -> str:
    if field.annotation == list[AlarmName]:
        return "list of [alarms](alarms.md)"
    annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    schema = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).json_schema()
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
    words = {"integer": "integer", "number": "number", "boolean": "boolean", "object": "mapping"}
    name = words.get(schema.get("type", ""), schema.get("type", "any"))
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join([name, *(f"{sign} {schema[limit]:.10g}" for limit, sign in limits.items() if limit in schema)])


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
