"""The attention door: position rules that depend on where the query stands, exact with a KV cache."""
