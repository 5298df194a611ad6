"""Reflection of both versions, as clients ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from graphlib import TopologicalSorter
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from services.runtime.rpc.reflection import add_reflection
from tests.support.reflection import REFLECTION, ask, list_services


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_reflection(["splitppo.v1.WorkerService"], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def in_thread(address: str, call: Any, *arguments: Any, **options: Any) -> Any:
    def run() -> Any:
        with grpc.insecure_channel(address) as channel:
            return call(channel, *arguments, **options)

    return await asyncio.to_thread(run)


@pytest.mark.promise("any client can call")
@pytest.mark.parametrize("version", REFLECTION)
async def test_services_are_listed_among_them_both_versions(address: str, version: str) -> None:
    listed = await in_thread(address, list_services, version)
    assert listed == {"splitppo.v1.WorkerService", *REFLECTION}


@pytest.mark.promise("any client can call")
@pytest.mark.parametrize("version", REFLECTION)
async def test_every_service_that_is_listed_can_be_described_from_the_answer_alone(address: str, version: str) -> None:
    for service in await in_thread(address, list_services, version):
        answer = await in_thread(address, ask, version, file_containing_symbol=service)
        pool: Any = descriptor_pool.DescriptorPool()  # type: ignore[no-untyped-call]
        files = {
            file.name: file
            for file in map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
        }
        needs = {name: file.dependency for name, file in files.items()}
        for name in TopologicalSorter(needs).static_order():
            pool.Add(files[name])
        assert pool.FindServiceByName(service).methods


async def test_v1_is_v1alpha_under_its_own_names(address: str) -> None:
    files = {}
    for service in REFLECTION:
        answer = await in_thread(address, ask, REFLECTION[0], file_containing_symbol=service)
        [file] = map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
        files[file.package] = file
    v1, alpha = files["grpc.reflection.v1"], files["grpc.reflection.v1alpha"]
    assert (v1.name, v1.options.deprecated) == ("grpc/reflection/v1/reflection.proto", False)
    for field in ("message_type", "service"):
        assert str(getattr(v1, field)) == str(getattr(alpha, field)).replace("v1alpha", "v1")


@pytest.mark.parametrize("version", REFLECTION)
async def test_an_unknown_symbol_is_not_found(address: str, version: str) -> None:
    answer = await in_thread(address, ask, version, file_containing_symbol="nobody.Knows")
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
