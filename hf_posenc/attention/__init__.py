"""The attention implementation of methods that depend on the query's position, exact with a KV cache."""
