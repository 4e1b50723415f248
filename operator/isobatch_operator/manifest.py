"""Decides whether a text is one InferenceService manifest, and says precisely what is wrong."""

import difflib
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml
from isobatch_contracts.resource import InferenceService
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class InvalidManifest:
    """Why a text is refused: one line per problem, each with the path of its field."""

    problems: tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's booleans: `standard: Off` is the word, not false; a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  # yaml's signature
        """A mapping, unless a key stands twice in it."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")


def parse_manifest(text: str) -> InferenceService | InvalidManifest:
    """The service that the YAML (or JSON) `text` describes."""
    try:
        documents = [d for d in yaml.load_all(text, _Loader) if d is not None]  # a SafeLoader
    except yaml.YAMLError as exc:
        return InvalidManifest((_yaml_problem(exc),))
    if len(documents) != 1:
        return InvalidManifest(
            (f"expected one document of kind InferenceService, found {len(documents)} documents",)
        )
    document = documents[0]
    if not isinstance(document, dict):
        kind = type(document).__name__
        return InvalidManifest((f"expected an InferenceService (a mapping), found a {kind}",))
    try:
        return InferenceService.model_validate(document)
    except ValidationError as exc:
        return InvalidManifest(tuple(_problem(error) for error in exc.errors()))


def _yaml_problem(exc: yaml.YAMLError) -> str:
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark is not None:
        mark = exc.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {exc.problem}"
    return f"not YAML: {exc}"


def _problem(error: ErrorDetails) -> str:
    path = _path(error["loc"]) or "the manifest"
    match error["type"]:
        case "missing":
            return f"{path}: is required and absent"
        case "extra_forbidden":
            return f"{path}: there is no such field{_known_fields(error['loc'])}"
        case "value_error":
            return f"{path}: {error['msg'].removeprefix('Value error, ')}"
        case _:
            shown = repr(error["input"])
            shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
            return f"{path}: {_expectation(error['msg'])}, found {shown}"


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def _expectation(message: str) -> str:
    message = message.removeprefix("Input should be ").removeprefix("String should ")
    return f"expected {message}" if not message.startswith("match") else f"must {message}"


def _known_fields(location: tuple[int | str, ...]) -> str:
    """The closest field that the place of an unknown one does have, or all of them."""
    *parents, unknown = location
    model: Any = InferenceService
    for part in parents:
        model = _member(model, part)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return ""
    names = [field.alias or name for name, field in model.model_fields.items()]
    close = difflib.get_close_matches(str(unknown), names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(names)}"


def _member(model: Any, part: int | str) -> Any:
    """The model class behind one part of a path, looked for inside Optional, tuple and dict."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            if part in (name, field.alias):
                return _innermost(field.annotation)
    return model


def _innermost(annotation: Any) -> Any:
    arguments = [a for a in getattr(annotation, "__args__", ()) if a not in (type(None), ...)]
    return _innermost(arguments[-1]) if arguments else annotation
