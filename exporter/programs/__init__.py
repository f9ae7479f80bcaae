"""Models of any kind as programs of torch.export, in whose graph attention is found and replaced by the op."""
