"""`sharp compare`: compares a model folder with another reader of its model that shares no code with the export."""
