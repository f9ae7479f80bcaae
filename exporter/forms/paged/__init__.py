"""The paged form (`--cache paged`), which the server runs."""
