"""`sharp evaluate`, which measures what a language model finds in a document, by the length of the document."""
