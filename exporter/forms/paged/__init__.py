"""`--cache paged`: what the server runs."""
