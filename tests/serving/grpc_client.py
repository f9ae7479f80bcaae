"""A client of `sharp.v1` for tests."""

import grpc
import pytest

from sharp.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc


class Client:
    def __init__(self, address, options=()):
        self.address = address
        self.channel = grpc.insecure_channel(address, options)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)

    def stream(self, text="a", *, max_tokens=8, timeout=20, **fields):
        fields.setdefault("sampling", inference_pb2.Sampling(temperature=0))
        stopping = fields.pop("stopping", {"max_tokens": max_tokens})
        prompt = {} if "token_ids" in fields else {"text": text}
        return self.inference.Generate(
            inference_pb2.GenerateRequest(**prompt, stopping=stopping, **fields), timeout=timeout
        )

    def generate(self, *args, **fields):
        """Read a whole stream, and return its text and its `finished` message."""
        messages = list(self.stream(*args, **fields))
        assert messages[0].HasField("prompt_info")
        assert messages[-1].HasField("finished")
        return "".join(message.delta.text for message in messages[1:-1]), messages[-1].finished

    def info(self):
        return self.control.GetServerInfo(control_pb2.GetServerInfoRequest())


def status(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()
