"""Decides the one shape of our documents: camelCase outside, snake_case inside, frozen, closed."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

RULES = "x-kubernetes-validations"


def cel(rule: str, message: str) -> dict[str, Any]:
    """What a schema says so that an API server refuses what our validator refuses.

    `rule` is in the Common Expression Language, over `self`, the place that the schema describes.
    """
    return {RULES: [{"rule": rule, "message": message}]}


class Document(BaseModel):
    """Base of every model that crosses a process; unknown fields are refused in both directions."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        serialize_by_alias=True,
        validate_by_name=True,
        validate_by_alias=True,
    )
