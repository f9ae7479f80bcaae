"""The messages and services of gRPC package `sharp.v1`, generated from `sharp/v1/*.proto` at build time."""

from sharp.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

__all__ = ["control_pb2", "control_pb2_grpc", "inference_pb2", "inference_pb2_grpc"]
