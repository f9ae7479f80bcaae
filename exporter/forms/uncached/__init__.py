"""`--cache none`: whole sequences or sets at once."""
