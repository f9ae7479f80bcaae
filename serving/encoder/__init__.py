"""Encoders: texts become embeddings or scores, in batches that several requests share."""
