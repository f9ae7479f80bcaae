"""What a request, a completion and an error are, whatever protocol they come by."""
