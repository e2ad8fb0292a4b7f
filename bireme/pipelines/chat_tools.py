"""What a request lets its answer be: calls of tools, and text, of a given form or any."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from bireme.config import Limits
from bireme.errors import RequestError
from bireme.pipelines.extensions import RequestOptions
from bireme.pipelines.json_body import check_plain

ToolMode = Literal["none", "auto", "required"]
_FORMAT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # the most that one of the APIs allows


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(NamedTuple):
    """A request's tool_choice."""

    mode: ToolMode = "auto"
    names: Sequence[str] = ()  # of the only functions that are offered; empty: all are
    where: str = ""  # the field of the names


class ChatFormat(NamedTuple):
    """The form that a request asks its answer to have."""

    where: str
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None  # of type json_schema; None: any object
    schema_in: str = ""  # the field that has the schema, and its name
    name: str | None = None  # of the schema; None: the API has none
    missing: str = ""  # the field of the schema, where it has to be sent and is not


class ChatTools(NamedTuple):
    """What is offered."""

    functions: list[dict[str, Any]]  # as templates and parsers know them; empty with tool_choice none
    mode: ToolMode
    guide: dict[str, Any] | None  # of the content


@dataclass(frozen=True, slots=True)
class ToolRules:
    """The rules of every API that asks for chats; all methods raise RequestError, with the API's names of fields."""

    format: str
    tool: str = "function"
    parameters: str = "parameters"
    not_offered: str = "no such function in tools"

    def guide(self, form: ChatFormat | None, options: RequestOptions) -> dict[str, Any] | None:
        """Return the guide of the answer's content, from its form or a field beyond the API's."""
        if form is None or form.type == "text":
            return options.guide
        if options.guide is not None:
            raise RequestError(f"{options.guide_name}: not together with {form.where}; send one of them")
        if form.type == "json_object":
            return {"json_object": True}
        if form.missing:
            raise RequestError(f"{form.missing}: missing; send it, or type json_object")
        if form.name is not None and not _FORMAT_NAME.fullmatch(form.name):
            raise RequestError(f"{form.schema_in}.name: send 1 to 64 letters, digits, underscores or hyphens")
        if form.schema is None:
            return {"json_object": True}
        check_plain(form.schema, f"{form.schema_in}.schema")
        return {"json": form.schema}

    def functions(self, definitions: Mapping[str, FunctionDefinition], limits: Limits) -> list[dict[str, Any]]:
        """Return the functions, each given with its place, as templates and parsers know them."""
        check_num_tools(len(definitions), limits)
        shown = [self._shown(one, where) for where, one in definitions.items()]
        if len({function["name"] for function in shown}) < len(shown):
            raise RequestError(f"tools: two {self.tool}s have the same name; give each its own")
        return shown

    def _shown(self, function: FunctionDefinition, where: str) -> dict[str, Any]:
        if not _FUNCTION_NAME.fullmatch(function.name):
            raise RequestError(f"{where}.name: send 1 to 128 letters, digits, underscores, dots or hyphens")
        check_plain(function.parameters, f"{where}.{self.parameters}")
        fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
        shown = {name: value for name, value in fields.items() if value is not None}
        return {**shown, "strict": True} if function.strict else shown

    def offered(self, functions: list[dict[str, Any]], choice: ToolChoice, guide: dict[str, Any] | None) -> ChatTools:
        """Return which of the functions are offered, and whether one must be called."""
        if not functions and (choice.mode == "required" or choice.names):
            raise RequestError("tool_choice: without tools; send tools, or remove it")
        if not functions or choice.mode == "none":
            return ChatTools([], "none", guide)
        if choice.names:
            functions = self._named(functions, choice)
        if guide is not None:
            raise RequestError(f"{self.format}: not together with tools; send tool_choice none, or no tools")
        return ChatTools(functions, choice.mode, None)

    def _named(self, functions: list[dict[str, Any]], choice: ToolChoice) -> list[dict[str, Any]]:
        known = {function["name"]: function for function in functions}
        if unknown := [name for name in choice.names if name not in known]:
            raise RequestError(f"{choice.where}: {unknown[0][:64]}; {self.not_offered}")
        return [known[name] for name in dict.fromkeys(choice.names)]


def check_num_tools(num_tools: int, limits: Limits) -> None:
    """Raises RequestError."""
    if num_tools > limits.max_tools:
        raise RequestError(f"tools: {num_tools}; limits.max_tools is {limits.max_tools}, send fewer")
