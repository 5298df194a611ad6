"""A client of gRPC reflection, of either version, which calls methods by their path."""

from __future__ import annotations

from typing import Any

from grpc_reflection.v1alpha import reflection_pb2

REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def ask(channel: Any, service: str, **request: str) -> reflection_pb2.ServerReflectionResponse:
    """Returns the answer to one request; `service` is an entry of REFLECTION."""
    info = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    [answer] = info(iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=20)
    return answer


def list_services(channel: Any, service: str) -> set[str]:
    """Returns the full names of the services that the server lists."""
    return {entry.name for entry in ask(channel, service, list_services="").list_services_response.service}
