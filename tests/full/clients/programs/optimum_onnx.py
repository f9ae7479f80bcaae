"""optimum-onnx: ORTModelForCausalLM with its cache generates what the model generates without a cache."""

import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
import numpy as np
import torch
from optimum.onnxruntime import ORTModelForCausalLM

model = ORTModelForCausalLM.from_pretrained(sys.argv[1], use_io_binding=False)
prompt = torch.tensor([[5, 17, 30, 44, 8]])
generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
expected = prompt
while expected.shape[1] < generated.shape[1]:
    with torch.no_grad():
        logits = model(input_ids=expected, attention_mask=torch.ones_like(expected), use_cache=True).logits
    expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
np.testing.assert_array_equal(generated, expected)
assert generated.shape[1] == prompt.shape[1] + 8
