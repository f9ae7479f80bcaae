"""What every attention head of a model does with a text: `sharp inspect`."""
