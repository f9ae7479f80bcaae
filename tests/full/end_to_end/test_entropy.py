"""The entropy on `/metrics` is the entropy that PyTorch computes for the same tokens."""

from collections import defaultdict

import grpc
import pytest
import torch

from sharp.exporter.checkpoints.own_model import with_norm
from sharp.models.attention import EagerAttention
from sharp.models.checkpoint import load_checkpoint
from sharp.plugins.op.torch_normalizers import entropy
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.end_to_end.commands import CHECKPOINT, serve

PROMPT = "The package manager installs a program together with everything that it needs to run."


@pytest.mark.parametrize("norm", ["ssa", "adaptive-temperature"])
def test_entropy_of_every_head_equals_pytorch(export, norm):
    with serve(export(CHECKPOINT, norm), "--attention-interval", "1") as server:
        with grpc.insecure_channel(server.grpc) as channel:
            request = inference_pb2.GenerateRequest(
                text=PROMPT,
                sampling=inference_pb2.Sampling(temperature=0),
                stopping=inference_pb2.Stopping(max_tokens=24, ignore_eos=True),
            )
            messages = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60))
        samples = server.samples()
    served: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for sample in samples:
        if sample.name in ("sharp_attention_entropy_nats_sum", "sharp_attention_entropy_nats_count"):
            served[sample.name][int(sample.labels["layer"]), int(sample.labels["head"])] = sample.value

    generated = [token for message in messages for token in message.delta.token_ids]
    tokens = list(PROMPT.encode()) + generated[:-1]  # the last token is never computed, so it attends to nothing
    model = load_checkpoint(CHECKPOINT).eval()
    if norm != "ssa":
        model = with_norm(model, norm, CHECKPOINT).eval()
    attention = EagerAttention(model.config, record=True)
    with torch.no_grad():
        model.hidden_states(torch.tensor([tokens]), attention=attention)
    for layer, weights in enumerate(attention.weights):
        sums = entropy(weights)[0].sum(-1)  # [q_heads]
        for head, want in enumerate(sums.tolist()):
            assert served["sharp_attention_entropy_nats_count"][layer, head] == len(tokens)
            got = served["sharp_attention_entropy_nats_sum"][layer, head]
            assert got == pytest.approx(want, abs=1e-3 * len(tokens), rel=1e-5)
    assert len(served["sharp_attention_entropy_nats_sum"]) == model.config.layers * model.config.q_heads
