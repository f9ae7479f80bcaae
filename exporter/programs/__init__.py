"""Models of any kind, as programs of torch.export: attention is found in their graph and becomes the op."""
