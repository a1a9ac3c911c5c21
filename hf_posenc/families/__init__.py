"""The conventions of model families, and their exceptions."""
