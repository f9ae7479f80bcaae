"""`--cache contiguous`: past and present tensors per layer, as other tools read them."""
