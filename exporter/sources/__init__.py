"""A model in PyTorch and its facts. Readers of every format return them; lowering and verification take them."""
