"""Serving of encoders, which turn texts into embeddings or scores in batches shared by several requests."""
