"""JSON schemas of our files, with the string below each field as its description.

Pydantic can pick up these strings itself, but then reads every class's source on import, which is
most of the cost of importing a model. Here the source is read when a schema is requested.
"""

import ast
import inspect
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema


def of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of the file that a model validates."""
    return model.model_json_schema(by_alias=True, schema_generator=_Described)


class _Described(GenerateJsonSchema):
    def model_schema(self, schema: Any) -> dict[str, Any]:
        made = super().model_schema(schema)
        model: type[BaseModel] = schema["cls"]
        for kind in reversed(model.__mro__):
            if not (issubclass(kind, BaseModel) and kind is not BaseModel):
                continue
            for name, text in _strings(kind).items():
                key = model.model_fields[name].alias or name
                made["properties"][key]["description"] = text
        return made


def _strings(kind: type) -> dict[str, str]:
    """The string below each field of a class, by field name."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    docs = {}
    for field, below in zip(found.body, found.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = inspect.cleandoc(str(below.value.value))
    return docs
