"""The page of a run's config, made from the model itself: `docs/config.md` (a test keeps the file true)."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl360.config.run import RunConfig

HEAD = """# A run's config

Every field of `rl360 run start -s SECTION.FIELD=VALUE`, of a `--config` file and of the form in the Prefect UI. Unknown
keys are refused. Once a run has started its config is frozen, except for fields marked *operational*.
"""


def page() -> str:
    """The Markdown page: a table a section, top-level fields first."""
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    nested = {name: kind for name, kind in sections.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    top = {name: field for name, field in RunConfig.model_fields.items() if name not in nested}
    parts = [HEAD, _table("", top)]
    for name, section in nested.items():
        parts.append(f"## {name}\n\n{(section.__doc__ or '').strip()}\n")
        parts.append(_table(f"{name}.", section.model_fields))
    return "\n".join(parts)


def _table(prefix: str, fields: dict[str, FieldInfo]) -> str:
    rows = ["| field | values | default | |", "|---|---|---|---|"]
    for name, field in fields.items():
        extra = field.json_schema_extra
        notes = [field.description or ""]
        notes += ["*operational*"] if isinstance(extra, dict) and extra.get("operational") else []
        told = "; ".join(note for note in notes if note)
        rows.append(f"| `{prefix}{name}` | {_values(field)} | `{_shown(field.default)}` | {told} |")
    return "\n".join(rows) + "\n"


def _values(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{sign} {getattr(m, name)}" for m in field.metadata for name, sign in signs.items() if hasattr(m, name)]
    patterns = [f"`{m.pattern}`".replace("|", r"\|") for m in field.metadata if getattr(m, "pattern", None)]
    return ", ".join([_kind(field.annotation), *bounds, *patterns])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join("null" if kind is type(None) else _kind(kind) for kind in get_args(annotation))
    return getattr(annotation, "__name__", str(annotation))


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


if __name__ == "__main__":
    print(page(), end="")
