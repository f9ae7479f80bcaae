"""Bytes that are no message of the expected type are refused."""

import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from sharp.v1 import control_pb2

MALFORMED = b"\x0a\xff\xff\xff\xff\x0f"  # announces a text of 4 GB that does not come


@pytest.mark.parametrize(
    "method",
    [
        "/sharp.v1.InferenceService/Generate",
        "/sharp.v1.InferenceService/Tokenize",
        "/sharp.v1.ControlService/GetServerInfo",
        "/inference.GRPCInferenceService/ModelInfer",
        "/inference.GRPCInferenceService/ModelStreamInfer",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_a_message_that_cannot_be_read_is_the_clients_error(client, method: str, caplog: pytest.LogCaptureFixture):
    """A message that cannot be read is the client's error.

    Once the status was INTERNAL, and the log had a traceback for each such message.
    """
    caplog.set_level(logging.INFO)
    call = client.channel.stream_stream(method, lambda content: content, lambda content: content)
    with pytest.raises(grpc.RpcError) as caught:
        list(call(iter([MALFORMED]), timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message cannot be read as protobuf of its type" in caught.value.details()
    assert "Traceback" not in caplog.text


def test_messages_that_can_be_read_get_their_responses(client):
    info = client.channel.unary_unary(
        "/sharp.v1.ControlService/GetServerInfo",
        control_pb2.GetServerInfoRequest.SerializeToString,
        control_pb2.GetServerInfoResponse.FromString,
    )
    assert info(control_pb2.GetServerInfoRequest()).models == ["counting"]
    watch = client.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    watching = watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()
    reflect = client.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    (found,) = reflect(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
    assert len(found.list_services_response.service) > 3
