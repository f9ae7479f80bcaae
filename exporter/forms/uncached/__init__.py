"""The form without a cache (`--cache none`), which computes whole sequences or sets at once."""
