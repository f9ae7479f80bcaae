"""The contiguous form (`--cache contiguous`), with past and present tensors per layer, which other tools read."""
