"""KServe's gRPC messages, as far as worker clients need them, described here instead of generated.

Generated code binds protobuf's version, and an engine's environment, in which stubs may run, has its engine's. Protobuf
passes over fields that are not described here. The pool is an own one, beside those of other clients in this process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

_FILE = "bireme/kserve.proto"
_PACKAGE = "inference"
# For each message its fields: name, number, type or the message's name, and whether there are many.
_MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    "ModelReadyRequest": [("name", 1, "STRING", False)],
    "ModelReadyResponse": [("ready", 1, "BOOL", False)],
    "Tensor": [("name", 1, "STRING", False), ("datatype", 2, "STRING", False), ("shape", 3, "INT64", True)],
    "ModelInferRequest": [
        ("model_name", 1, "STRING", False),
        ("inputs", 5, "Tensor", True),
        ("raw_input_contents", 7, "BYTES", True),
    ],
    "ModelInferResponse": [("outputs", 5, "Tensor", True), ("raw_output_contents", 6, "BYTES", True)],
    "ModelStreamInferResponse": [
        ("error_message", 1, "STRING", False),
        ("infer_response", 2, "ModelInferResponse", False),
    ],
}


def _describe() -> FileDescriptorProto:
    file = FileDescriptorProto(name=_FILE, package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, is_repeated in fields:
            described = message.field.add(name=field, number=number)
            described.label = (
                FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
            )
            if kind in _MESSAGES:
                described.type, described.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                described.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind}")
    return file


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


_POOL = DescriptorPool()
_POOL.AddSerializedFile(_describe().SerializeToString())
ModelReadyRequest = _message("ModelReadyRequest")
ModelReadyResponse = _message("ModelReadyResponse")
ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
ModelStreamInferResponse = _message("ModelStreamInferResponse")
