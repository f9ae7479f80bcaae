"""`sharp inspect`, which shows what every attention head of a model does with a text."""
