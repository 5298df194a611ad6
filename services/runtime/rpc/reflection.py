"""Adds gRPC server reflection, v1 and v1alpha: clients without our proto files can list and describe the services.

grpcio-reflection serves grpc.reflection.v1alpha only. grpc.reflection.v1 has the same messages in another package. The
package is not on the wire, so one servicer answers both.
"""

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
_V1_FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(names: Iterable[str], server: grpc.aio.Server) -> None:
    """Adds reflection (v1 and v1alpha) to a gRPC server for the services with these full names, and for itself."""
    _describe_v1()
    names = [*names, reflection.SERVICE_NAME, V1]
    reflection.enable_server_reflection(names, server)
    answers = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,  # type: ignore[attr-defined]
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": answers}),))


def _describe_v1() -> None:
    """Adds grpc.reflection.v1 to the default descriptor pool: a copy of v1alpha with the package renamed."""
    pool = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    try:
        pool.FindFileContainingSymbol(V1)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        text = text_format.MessageToString(file).replace(file.package, V1.rpartition(".")[0])
        file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
        file.name = _V1_FILE
        file.ClearField("options")  # v1 is not deprecated
        pool.AddSerializedFile(file.SerializeToString())
